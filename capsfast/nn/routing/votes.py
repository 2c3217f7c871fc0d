"""Votes, which a routing reads by passes, wherever they come from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from ... import passes
from ...calls import arguments, checks, positions
from ...calls.arguments import GIVEN, Call, PassParameters, RoutingParameters
from ...calls.axes import AXES, axes_of
from ...calls.options import (
    STEPS,
    Backend,
    EMOptions,
    Normalize,
    Options,
    PassOptions,
    Squash,
    routing_options,
)
from ...functional import ROUTING, VOTES, agree, dynamic_routing, route_votes, routed
from ...passes import Moments, routing_pass, votes_pass
from ...reference.dynamic_routing import agree as agree_by_passes
from ...reference.em_update import inverse

OP = "capsfast.dynamic_routing"  # which errors about options name
# The cosine of a shorter vote goes to 0 with its length.
LEAST_LENGTH = 1e-8

# With many input capsules, every STRIDE-th input capsule estimates where the votes lie. If these input capsules have a
# share f of the mass, their mean is within f^-1/2 deviations of the mean of all input capsules, and float32 loses
# log2(1/f) bits: f must be at least LEAST_SHARE.
STRIDE = 17
LEAST_SHARE = 1e-2


class Votes(ABC):
    """Votes ``[B, I, J, D]``, which a routing reads only by passes.

    A routing calls :meth:`moments` one or more times and computes with the results ``[B, J]`` and ``[B, J, D]``. So the
    same routing works whether the votes are made in the kernels or stored, belong to positions of an image, or compete
    across windows.

    Attributes:
        B, I, J, D: sizes; positions of an image count as samples, in B.
        dtype, device: dtype and device of the votes.
        u: the input capsules ``[B, I, K]`` (pose matrices ``[B, I, P, Q]``) of the votes, None if votes were given.
        mask: bool ``[B, I]``, False for input capsules that are taken out; None without a mask.
        out_mask: bool ``[B, J]``, False for output capsules that are taken out; None without a mask.
        backend: backend of the passes, see :func:`capsfast.routing_pass`, and of computations between them.
            Subclasses set it; the default "reference" uses torch only.
        groups: number of groups; each group of input capsules votes only for its group of output capsules.
    """

    B: int
    I: int
    J: int
    D: int
    dtype: torch.dtype
    device: torch.device
    u: Tensor | None = None
    mask: Tensor | None = None
    out_mask: Tensor | None = None
    backend: Backend | None = "reference"
    groups: int = 1

    @abstractmethod
    def moments(
        self,
        *,
        query: Tensor | None = None,
        precision: Tensor | None = None,
        center: Tensor | None = None,
        prior: Tensor | None = None,
        logits: Tensor | None = None,
        activation: Tensor | None = None,
        normalize: Normalize = "out",
        lse: Tensor | None = None,
        leaky: bool = False,
        second: bool = False,
        return_weights: bool = False,
        return_lse: bool = False,
    ) -> Moments:
        """A pass over the votes, as :func:`capsfast.routing_pass`, without masked capsules."""

    def agree(
        self,
        num_iterations: int,
        *,
        logits: Tensor | None = None,
        bias: Tensor | None = None,
        squash: Squash | Callable[[Tensor], Tensor] = "paper",
        return_coupling: bool = False,
        **options: Any,
    ) -> Any:
        """Dynamic routing (Sabour, Frosst, Hinton 2017, procedure 1), ``v [B, J, D]``; see
        :func:`capsfast.dynamic_routing`. With groups, the coupling is ``[B, I, J / groups]``.

        Only single passes take a function as ``squash``; the fused op takes a name.

        Args:
            options: softmax and so on, as keywords, and what ``RoutingOptions`` in capsfast/calls/options.py adds.
        """
        kind, shrink = (squash, None) if isinstance(squash, str) else ("paper", partial(_squashed_by, squash))
        checked = routing_options(OP, num_iterations, squash=kind, **options)
        v, last = agree_by_passes(
            self.moments,
            checked,
            logits=logits,
            bias=bias,
            shrink=shrink,
            return_weights=return_coupling,
        )
        if not checked.wide:
            cast = checks.autocast_dtype(self.device)  # the dtype of the fused op's result
            v = v.to(self.dtype if cast is None or self.dtype == torch.float64 else cast)
        return (v, last.weights) if return_coupling else v

    def _attended(self, scale: float) -> Tensor:
        """``sum_i c_ij vote_ij`` with ``c_ij = softmax_j(scale * vote_ij . sum_k vote_kj)``, ``[B, J, D]``."""
        ones = torch.ones(self.B, self.J, dtype=self.dtype, device=self.device)
        total = self.moments(prior=ones, normalize="none").first
        return self.moments(query=total * scale).first

    def _gaussians(
        self,
        activation: Tensor | None,
        betas: tuple[Tensor, Tensor],
        updates: Sequence[EMOptions],
        leaky: bool,
    ) -> tuple[Tensor, Tensor] | None:
        """EM routing as one op, ``(poses, activations)``; None if it needs single passes.

        updates: the options of the update after the pass of each iteration.
        """
        return None

    def cosines(self, query: Tensor) -> Tensor:
        """Cosines ``[B, I, J]`` of the votes and ``query [B, J, D]`` of length 1.

        Raises:
            ValueError: the votes are not in memory, and a pass can't divide by their lengths.
        """
        raise ValueError("capsfast.nn.Votes: cosines need votes in memory, got (u, weight); give the votes")

    def origin(self, activation: Tensor | None) -> Tensor:
        """A center of the votes, ``[B, J, D]``, without a gradient: roughly the mean vote at equal coupling.

        As ``center`` of a pass it keeps ``second / mass - (first / mass)^2`` from cancelling. With many input capsules,
        every STRIDE-th is used, if these are known to have enough of the mass of every sample.
        """
        with torch.no_grad():
            moments = self._some(self._stride(activation), activation)
            return moments.first * inverse(moments.mass)[..., None]

    def _stride(self, activation: Tensor | None) -> int:
        """The step between the input capsules that the origin is computed from."""
        return STRIDE if self.I >= STRIDE**2 and self._stand_for_all(activation) else 1

    def _stand_for_all(self, activation: Tensor | None) -> bool:
        """Whether the input capsules at step STRIDE have enough of the mass; False if the mass is expensive to read."""
        if activation is None and self.mask is None:
            return True
        mass = activation if self.mask is None else self.mask if activation is None else activation * self.mask
        assert mass is not None
        if not checks.can_be_looked_at(mass):
            return False
        mass = mass.detach().float()
        return bool((mass[:, ::STRIDE].sum(1) >= LEAST_SHARE * mass.sum(1)).all())

    def _some(self, step: int, activation: Tensor | None) -> Moments:
        """A pass over every ``step``-th input capsule, or over all."""
        return self.moments(activation=activation)

    def samples(self, name: str, value: Tensor | None) -> Tensor | None:
        """An argument of a pass, with axes of positions joined to the batch."""
        return value

    def check_activation(self, op: str, activation: Tensor) -> None:
        """
        Raises:
            ValueError, TypeError: the activation does not fit these votes.
        """
        wanted = [self.B, self.I]
        if list(activation.shape) != wanted:
            raise ValueError(f"{op}: activation must be [B, I] = {wanted}, got {checks.shape_of(activation)}")

    def restore(self, value: Tensor) -> Tensor:
        """The inverse of :meth:`samples` for a result ``[B, J]`` or ``[B, J, D]``."""
        return value


class PassVotes(Votes):
    """Votes that a single pass reads: the kernels make them, or they are in memory, with or without axes of positions.

    Args:
        op: the function that errors name.
        u, weight: the first arguments of a pass, or votes and GIVEN. They and the masks are checked here, once.
        J: the number of output capsules if they share the votes.
        mask, out_mask: bool ``[B, I]`` and ``[B, J]``, with or without the axes of positions.
        backend: backend of all passes.
    """

    def __init__(
        self,
        op: str,
        u: Tensor,
        weight: Tensor,
        *,
        J: int | None = None,
        mask: Tensor | None = None,
        out_mask: Tensor | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.backend = backend
        self.spatial: tuple[int, ...] = ()
        self.tensors: tuple[Tensor, ...]  # the first arguments of public functions
        call: Call | None
        if weight is GIVEN:
            _, self.spatial = arguments.votes(op, u)
            self.tensors, call = (u,), None if self.spatial else arguments.unchecked(u, None, None, None)
            self.batch, self.I, columns, self.D = u.shape[:4]
        else:
            self.tensors, call = (u, weight), arguments.of_product(op, u, weight)
            (self.batch, self.I), columns, self.D = u.shape[:2], call.J, call.D
            self.u = u
        # Checked tensors for the ops; None if calls need another check, for positions or for arguments that give J.
        self.call = None if columns == 1 else call
        self.dtype, self.device = u.dtype, u.device
        self.places = 1
        for size in self.spatial:
            self.places *= size
        self.B = self.batch * self.places
        self.J = columns if columns != 1 or J is None else J
        masks = {"mask": mask, "out_mask": out_mask}
        if mask is not None or out_mask is not None:
            self._check(op, masks)
        if columns == 1 and out_mask is None:  # tells the passes J
            masks["out_mask"] = torch.ones(self.batch, self.J, dtype=torch.bool, device=self.device)
        self.given: dict[str, Any] = {**masks, "backend": backend}
        self.mask, self.out_mask = mask, out_mask
        if self.spatial:
            self.mask, self.out_mask = self.samples("mask", mask), self.samples("out_mask", out_mask)

    def _check(self, op: str, given: dict[str, Tensor | None]) -> None:
        sizes = (self.batch, self.I, self.J, self.D)
        anchor = "votes" if len(self.tensors) == 1 else "u"
        arguments.check_parameters(op, anchor, self.tensors[0], sizes, given, self.spatial)

    def check_activation(self, op: str, activation: Tensor) -> None:
        self._check(op, {"activation": activation})

    def moments(self, **arguments: Any) -> Moments:
        by_pass: Callable[..., Moments] = votes_pass if len(self.tensors) == 1 else routing_pass
        if not self.spatial:
            return by_pass(*self.tensors, **arguments, **self.given)
        for name, value in arguments.items():
            if isinstance(value, Tensor) and name in AXES and axes_of(name, value)[0] == "B":
                if value.shape[:1] != (self.B,):
                    raise ValueError(
                        f"capsfast.nn.Votes: {name} must have votes.B={self.B} rows, got {checks.shape_of(value)}; "
                        f"every position of an image is a sample"
                    )
                arguments[name] = self.restore(value)
        at_places = by_pass(*self.tensors, **arguments, **self.given)
        return Moments(*(None if value is None else self._sampled(value) for value in at_places))  # type: ignore[arg-type]

    def _stride(self, activation: Tensor | None) -> int:
        return 1 if self.spatial else super()._stride(activation)

    def _some(self, step: int, activation: Tensor | None) -> Moments:
        if self.spatial:
            return super()._some(step, activation)
        common = {**self.given, "mask": _every(step, self.given["mask"])}
        common["activation"] = _every(step, activation)
        u, *weights = self.tensors
        if not weights:
            return votes_pass(u[:, ::step], **common)
        (weight,) = weights
        return routing_pass(u[:, ::step], weight if weight.shape[0] == 1 else weight[::step], **common)

    def agree(
        self,
        num_iterations: int,
        *,
        logits: Tensor | None = None,
        bias: Tensor | None = None,
        return_coupling: bool = False,
        **options: Any,
    ) -> Any:
        keywords: Any = {"logits": logits, "bias": bias, "return_coupling": return_coupling}
        if logits is not None and not options.get("accumulate", True):  # the fused op scores every iteration with them
            return super().agree(num_iterations, **keywords, **options)
        call, public = self.call, STEPS.isdisjoint(options)
        parameters = RoutingParameters(logits, bias, self.given["mask"], self.given["out_mask"])
        if call is not None and not has_torch_function((*self.tensors, *parameters)):
            op, anchor = (VOTES, "votes") if call.weight is None else (ROUTING, "u")
            if public:
                checked = Options(num_iterations, **options).checked(op)
            else:
                checked = routing_options(OP, num_iterations, **options)
            if logits is not None or bias is not None:
                sizes = (self.B, self.I, self.J, self.D)
                arguments.check_parameters(op, anchor, call.u, sizes, {"logits": logits, "bias": bias})
            v, c = routed(call, checked, parameters, return_coupling, self.backend)
            return (v, c) if return_coupling else v
        keywords |= self.given
        if public:
            by_op: Callable[..., Any] = route_votes if len(self.tensors) == 1 else dynamic_routing
            results = by_op(*self.tensors, num_iterations, **options, **keywords)
        else:
            u, weight = (*self.tensors, None)[:2]
            results = agree(u, weight, routing_options(OP, num_iterations, **options), **keywords)  # type: ignore[arg-type]
        return tuple(map(self._sampled, results)) if isinstance(results, tuple) else self._sampled(results)

    def _attended(self, scale: float) -> Tensor:
        # With a mask, equal coupling differs between samples. Under torch.jit.trace, J is a tensor.
        if self.out_mask is not None or isinstance(self.J, Tensor):
            return super()._attended(scale)
        # Equal coupling forms the mean over the output capsules instead of the sum.
        return self.agree(  # type: ignore[no-any-return]
            2, squash="identity", sharpness=scale * self.J, accumulate=False, wide=True
        )

    def _gaussians(
        self,
        activation: Tensor | None,
        betas: tuple[Tensor, Tensor],
        updates: Sequence[EMOptions],
        leaky: bool,
    ) -> tuple[Tensor, Tensor] | None:
        mask, out_mask = self.given["mask"], self.given["out_mask"]
        kind = type(self)
        if kind._gaussians is PassVotes._gaussians and kind.moments is not PassVotes.moments:
            return None  # a subclass that overrides moments() gets single passes
        # The op takes a temperature for each iteration, but one value of every other option. Tensors that override
        # functions of torch get single passes.
        alike = len({update[:-2] for update in updates}) == 1
        if not alike or has_torch_function((*self.tensors, activation, mask, out_mask)):
            return None
        at_positions = None if activation is None else self.restore(activation)
        parameters = PassParameters(activation=at_positions, mask=mask, out_mask=out_mask)
        options = PassOptions("out", leaky, True)
        op = passes.VOTES if len(self.tensors) == 1 else passes.ROUTING  # as the passes say
        restore = None
        if self.call is None:
            u, weight = (*self.tensors, GIVEN)[:2]
            call, restore = arguments.check(op, u, weight, parameters, options, J_needed=True)
        else:
            call = replace(self.call, op=op, parameters=parameters, options=options)
        temperatures = tuple([update.inverse_temperature for update in updates])
        stride = partial(self._stride, activation)
        capsules = passes.gaussians(call, betas, temperatures, updates[0], stride, self.backend)
        if capsules is None or restore is None:
            return capsules
        poses, activations = map(restore, capsules)
        return self._sampled(poses), self._sampled(activations)

    def samples(self, name: str, value: Tensor | None) -> Tensor | None:
        if value is None or not self.spatial:
            return value
        axes = axes_of(name, value)
        if value.dim() == len(axes):  # applies to every position
            return value.repeat_interleave(self.places, 0)
        return positions.to_samples(value.flatten(len(axes)))

    def restore(self, value: Tensor) -> Tensor:
        return positions.from_samples(value, self.batch, *self.spatial) if self.spatial else value

    def _sampled(self, value: Tensor) -> Tensor:
        if not self.spatial:
            return value
        return positions.to_samples(value.flatten(value.dim() - len(self.spatial)))

    def cosines(self, query: Tensor) -> Tensor:
        votes, *weights = self.tensors
        if weights:
            return super().cosines(query)
        for name, axes in (("mask", (2, 3)), ("out_mask", (1, 3))):
            mask = self.given[name]
            if mask is not None:  # masked values such as NaN must not reach a gradient
                mask = mask.reshape(*mask.shape, *(1,) * (len(self.spatial) + 2 - mask.dim()))
                for axis in axes:
                    mask = mask.unsqueeze(axis)
                votes = votes.masked_fill(~mask, 0.0)
        query = self.restore(query).to(votes.dtype)
        lengths = torch.linalg.vector_norm(votes, dim=3).clamp_min(LEAST_LENGTH)
        return self._sampled(torch.einsum("bijd...,bjd...->bij...", votes, query) / lengths)


class VotesAround(Votes):
    """Wraps ``votes``; subclasses override some of its methods."""

    def __init__(self, votes: Votes) -> None:
        self.votes = votes
        self.B, self.I, self.J, self.D = votes.B, votes.I, votes.J, votes.D
        self.dtype, self.device, self.u = votes.dtype, votes.device, votes.u
        self.mask, self.out_mask, self.backend, self.groups = votes.mask, votes.out_mask, votes.backend, votes.groups

    def moments(self, **arguments: Any) -> Moments:
        return self.votes.moments(**arguments)

    def cosines(self, query: Tensor) -> Tensor:
        return self.votes.cosines(query)

    def check_activation(self, op: str, activation: Tensor) -> None:
        self.votes.check_activation(op, activation)

    def samples(self, name: str, value: Tensor | None) -> Tensor | None:
        return self.votes.samples(name, value)

    def restore(self, value: Tensor) -> Tensor:
        return self.votes.restore(value)


class RecordedVotes(VotesAround):
    """Votes that keep the coupling coefficients of every pass in ``weights``, a list of ``[B, I, J / groups]``.

    Passes with given coefficients (``normalize="none"``) are not recorded.

    Coefficients have no gradient. With ``last``, the coefficients of the last pass have a gradient, and a fused op may
    omit the coefficients of earlier passes.
    """

    def __init__(self, votes: Votes, last: bool = False) -> None:
        super().__init__(votes)
        self.last = last
        self.weights: list[Tensor] = []

    def agree(self, num_iterations: int, **options: Any) -> Any:
        if not self.last:
            return super().agree(num_iterations, **options)
        v, c = self.votes.agree(num_iterations, **options, return_coupling=True)
        self.weights.append(c)
        return v

    def moments(self, **arguments: Any) -> Moments:
        if arguments.get("normalize") == "none":
            return self.votes.moments(**arguments)
        moments_of_pass = self.votes.moments(**{**arguments, "return_weights": True})
        assert moments_of_pass.weights is not None
        self.weights.append(moments_of_pass.weights if self.last else moments_of_pass.weights.detach())
        return moments_of_pass


class GroupedVotes(Votes):
    """Votes of groups: each group of input capsules votes only for its group of output capsules.

    In weights and logits, the axis of output capsules has the length of a group. Logits may also have all J output
    capsules; entries for other groups are ignored.

    Args:
        parts: the votes of each group.
        mask, out_mask: masks of all input and output capsules.
    """

    def __init__(self, parts: Sequence[Votes], mask: Tensor | None, out_mask: Tensor | None) -> None:
        first = parts[0]
        self.parts, self.groups = parts, len(parts)
        self.B, self.I, self.J, self.D = first.B, self.groups * first.I, self.groups * first.J, first.D
        self.dtype, self.device, self.backend = first.dtype, first.device, first.backend
        self.mask, self.out_mask = mask, out_mask

    def moments(self, **arguments: Any) -> Moments:
        of_groups = [part.moments(**of_group) for part, of_group in zip(self.parts, self._cut(arguments), strict=True)]
        fields = zip(*of_groups, strict=True)
        return Moments(*(None if field[0] is None else torch.cat(field, 1) for field in fields))  # type: ignore[arg-type]

    def agree(self, num_iterations: int, **options: Any) -> Any:
        """Routes each group by the fused op."""
        of_groups = [
            part.agree(num_iterations, **of_group)
            for part, of_group in zip(self.parts, self._cut(options), strict=True)
        ]
        if options.get("return_coupling"):
            return tuple(torch.cat(field, 1) for field in zip(*of_groups, strict=True))
        return torch.cat(of_groups, 1)

    def _cut(self, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """The arguments of each group."""
        cut: list[dict[str, Any]] = [{**arguments} for _ in self.parts]
        for name, value in arguments.items():
            if not isinstance(value, Tensor) or name not in AXES:
                continue
            axes = axes_of(name, value)
            runs = value.chunk(self.groups, axes.find("I" if "I" in axes else "J"))
            for group, run in enumerate(runs):
                whole = name == "logits" and run.shape[-1] == self.J
                cut[group][name] = run.chunk(self.groups, -1)[group] if whole else run
        return cut


def _squashed_by(squash: Callable[[Tensor], Tensor], s: Tensor, kind: str) -> Tensor:
    return s if kind == "identity" else squash(s)


def _every(step: int, value: Tensor | None) -> Tensor | None:
    return None if value is None else value[:, ::step]


def votes_of(
    op: str,
    value: object,
    *,
    J: int | None = None,
    mask: Tensor | None = None,
    out_mask: Tensor | None = None,
    backend: Backend | None = None,
) -> Votes:
    """Votes from a tensor or from a pair ``(u, weight)``; :class:`Votes` are returned as they are.

    Raises:
        TypeError: anything else.
        ValueError: a shape that does not fit, or a mask for :class:`Votes`, which have their own.
    """
    options: dict[str, Any] = {"J": J, "mask": mask, "out_mask": out_mask, "backend": backend}
    if isinstance(value, Votes):
        if mask is not None or out_mask is not None:
            raise ValueError(f"{op}: mask and out_mask belong to the Votes; give them where these are made")
        return value
    if isinstance(value, Tensor):
        return PassVotes(op, value, GIVEN, **options)
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return PassVotes(op, *value, **options)
    raise TypeError(f"{op}: votes must be a torch.Tensor, a pair (u, weight) or Votes, got {type(value).__name__}")
