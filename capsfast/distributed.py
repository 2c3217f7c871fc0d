"""Routing whose input capsules are split over the ranks of a process group, and the sharding rules for DTensor.

Each rank passes its own input capsules, with their rows of weight, logits, activation and mask. Tensors of output
capsules (query, bias, out_mask, the moments, the result) are the same on every rank, and so are their gradients: every
rank computes the same loss from the result. Then every gradient equals the gradient in a single process. (torch's own
differentiable all-reduce sums the losses of all ranks instead: its gradients are larger by the number of ranks.)
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from . import functional, passes
from .calls import arguments, checks, keywords
from .calls.arguments import RoutingParameters
from .calls.options import Options
from .calls.precision import wide_dtype
from .functional import CoupledKeywords, RoutingKeywords
from .ops import sharding
from .passes import PassKeywords
from .reference.dynamic_routing import agree
from .reference.routing_pass import Moments

if not dist.is_available():
    raise ImportError("capsfast.distributed: this torch was built without torch.distributed; install one that has it")

import torch.distributed._functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["dynamic_routing", "register_sharding", "routing_pass", "votes_pass"]

Group = dist.ProcessGroup | DeviceMesh | None


def register_sharding() -> None:
    """Registers the sharding rules of all ops with DTensor. Imports torch.distributed.tensor.

    Needed only before calls of ``torch.ops.capsfast``: the public functions register the rules at their first DTensor.
    Every op can be split along the batch. If no softmax runs over the output capsules and no votes are given, it can be
    split along the output capsules. A pass without a softmax over the input capsules can be split along them; its
    moments are then partial sums. DTensor gathers all other placements first.
    """
    sharding.register()


@overload
def dynamic_routing(
    u: Tensor,
    weight: Tensor,
    num_iterations: int = 3,
    *,
    group: Group = None,
    shared_weight: bool = False,
    return_coupling: Literal[False] = ...,
    **options: Unpack[RoutingKeywords],
) -> Tensor: ...


@overload
def dynamic_routing(
    u: Tensor,
    weight: Tensor,
    num_iterations: int = 3,
    *,
    group: Group = None,
    shared_weight: bool = False,
    return_coupling: Literal[True],
    **options: Unpack[RoutingKeywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def dynamic_routing(
    u: Tensor,
    weight: Tensor,
    num_iterations: int = 3,
    *,
    group: Group = None,
    shared_weight: bool = False,
    return_coupling: bool,
    **options: Unpack[RoutingKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...


@keywords.with_keywords_of(functional.dynamic_routing)
def dynamic_routing(
    u: Tensor,
    weight: Tensor,
    num_iterations: int = 3,
    *,
    group: Group = None,
    shared_weight: bool = False,
    **options: Unpack[CoupledKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`capsfast.dynamic_routing` over the input capsules of all ranks (Sabour, Frosst, Hinton 2017, procedure 1).

    Each iteration runs a routing pass over the rank's own input capsules and one sum over the ranks of B x J x D
    numbers; the backward repeats the sum for all iterations but the last. ``softmax="in"`` adds 2 x B x J numbers to
    the sum, and a maximum over the ranks of B x J. ``gradient="last"`` stores the agreement of the rank, B x I x J.

    Args:
        u: the rank's input capsules ``[B, I, K]``; ranks may differ in I. float32, float64, bfloat16 or float16.
        weight: transformation matrices of these capsules, ``[I, J, D, K]``; ``[1, J, D, K]`` with ``shared_weight``.
        num_iterations: how many weighted sums are formed, at least 1.
        group: the ranks that hold the input capsules: a process group, or a device mesh of one dimension such as
            ``mesh["inputs"]``; default all.
        shared_weight: the weight has one row for the input capsules of all ranks. Its gradient is summed over ranks.
        logits: logits of the rank's input capsules, ``[I, J]`` or ``[B, I, J]``.
        bias: ``[J, D]``, the same on every rank.
        mask: mask of the rank's input capsules, ``[B, I]`` bool.
        out_mask: ``[B, J]`` bool, the same on every rank.
        backend: backend of the passes, a name in :func:`capsfast.backends`; default: the first that serves the passes.

    The other arguments are as in :func:`capsfast.dynamic_routing`.

    Returns:
        ``v [B, J, D]`` in the dtype of ``u``, the same on every rank; with ``return_coupling`` the pair of ``v`` and
        the rank's own ``c [B, I, J]``.

    Raises:
        ValueError: a shape, a value or a device does not fit, or B, J, D or the dtype differ between the ranks (seen at
            the first call with them); this rank is not in the group.
        TypeError: not a dense floating-point tensor, dtypes that differ, or a DTensor.
        RuntimeError: there is no process group, or the demanded backend cannot serve the passes.
    """
    op = "capsfast.distributed.dynamic_routing"
    keywords.check(dynamic_routing, options, CoupledKeywords, op)
    parameters = RoutingParameters(*(options.get(name) for name in RoutingParameters._fields))  # type: ignore[arg-type]
    named = {name: options[name] for name in Options._fields[1:] if name in options}  # type: ignore[literal-required]
    o = Options(num_iterations, **named).checked(op)
    return_coupling = options.get("return_coupling", False)
    checks.boolean(op, "return_coupling", return_coupling)
    ranks = _Ranks(op, group, "u", checks.tensor(op, "u", u, "[B, I, K]"))
    weight = _own_weight(op, ranks, u, weight, shared_weight)
    call, _ = arguments.check(op, u, weight, parameters, o)
    # Tells the passes J, which may be 1, if the weight does not.
    prior = u.new_zeros(u.shape[0], call.J) if weight.shape[1] == 1 else None
    common: PassKeywords = {
        "mask": parameters.mask,
        "out_mask": parameters.out_mask,
        "prior": prior,
        "backend": options.get("backend"),
    }

    def moments(**more: Any) -> Moments:
        return _combined(op, ranks, partial(passes.routing_pass, u, weight), {**common, **more})  # type: ignore[typeddict-item]

    def agreement(query: Tensor) -> Tensor | None:
        """The agreement of the rank's own votes, not rounded to 16 bits."""
        wide = wide_dtype(u.dtype)
        asked: PassKeywords = {**common, "query": query, "normalize": "none", "return_weights": True}
        return passes.routing_pass(u.to(wide), weight.to(wide), **asked).weights

    logits, bias, _, out_mask = parameters
    v, last = agree(
        moments, o, logits=logits, bias=bias, out_mask=out_mask, agreement=agreement, return_weights=return_coupling
    )
    v = v.to(u.dtype)
    return v if last.weights is None else (v, last.weights)


@keywords.with_keywords_of(passes.routing_pass)
def routing_pass(
    u: Tensor, weight: Tensor, *, group: Group = None, shared_weight: bool = False, **options: Unpack[PassKeywords]
) -> Moments:
    """:func:`capsfast.routing_pass` over the input capsules of all ranks.

    Args:
        u, weight, logits, activation, mask, lse: tensors of the rank's own input capsules; their number may differ
            between ranks.
        query, precision, center, prior, out_mask: the same on every rank. Gradients of the first four are summed over
            the ranks.
        group, shared_weight: as in :func:`dynamic_routing`.

    The other arguments, shapes and dtypes are as in :func:`capsfast.routing_pass`.

    Returns:
        :class:`capsfast.Moments` over the input capsules of all ranks, the same on every rank. ``weights``, and ``lse``
        for ``normalize="out"``, cover the rank's own input capsules.

    Raises:
        The errors of :func:`capsfast.routing_pass` and :func:`dynamic_routing`.
    """
    op = "capsfast.distributed.routing_pass"
    keywords.check(routing_pass, options, PassKeywords, op)
    ranks = _Ranks(op, group, "u", checks.tensor(op, "u", u, "[B, I, K]"))
    weight = _own_weight(op, ranks, u, weight, shared_weight)
    return _combined(op, ranks, partial(passes.routing_pass, u, weight), options)


@keywords.with_keywords_of(passes.votes_pass)
def votes_pass(votes: Tensor, *, group: Group = None, **options: Unpack[PassKeywords]) -> Moments:
    """:func:`capsfast.votes_pass` over the input capsules of all ranks.

    Args:
        votes: votes of the rank's own input capsules, ``[B, I, J, D]`` or ``[B, I, 1, D]``.

    All other arguments, the result and the errors are as in :func:`routing_pass`.
    """
    op = "capsfast.distributed.votes_pass"
    keywords.check(votes_pass, options, PassKeywords, op)
    ranks = _Ranks(op, group, "votes", checks.tensor(op, "votes", votes, "[B, I, J, D]"))
    return _combined(op, ranks, partial(passes.votes_pass, votes), options)


# The tensors of a pass that are the same on all ranks.
SHARED = ("query", "precision", "center", "prior")


def _combined(op: str, ranks: "_Ranks", local: Callable[..., Moments], options: PassKeywords) -> Moments:
    """A pass over the rank's own input capsules; its moments are combined over all ranks."""
    leaky, return_lse = options.get("leaky", False), options.get("return_lse", False)
    checks.boolean(op, "leaky", leaky)
    shared: dict[str, Any] = {name: options[name] for name in SHARED if options.get(name) is not None}  # type: ignore[literal-required]
    alike = dict(zip(shared, ranks.alike(*shared.values()), strict=True))
    inward = options.get("normalize") == "in"
    # The leak counts once in all, not once per rank.
    moments_here = local(**{**options, **alike, "leaky": leaky and not inward, "return_lse": return_lse or inward})
    ranks.agree(op, moments_here.first)
    moments = (
        [moments_here.mass, moments_here.first]
        if moments_here.second is None
        else [moments_here.mass, moments_here.first, moments_here.second]
    )
    if not inward:
        return moments_here._replace(**dict(zip(("mass", "first", "second"), ranks.total(*moments), strict=False)))

    assert moments_here.lse is not None
    largest = ranks.largest(moments_here.lse)
    largest = largest.clamp_min(0.0) if leaky else largest.masked_fill(torch.isneginf(largest), 0.0)
    # This rank's share of the softmax over all input capsules, up to a factor that is the same on all ranks.
    share = torch.exp(moments_here.lse - largest)
    total, *moments = ranks.total(share, share * moments[0], *(share[:, :, None] * moment for moment in moments[1:]))
    if leaky:
        total = total + torch.exp(-largest)
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    mass, first, *rest = (moment / total.reshape(total.shape + (1,) * (moment.dim() - 2)) for moment in moments)
    weights = moments_here.weights
    if weights is not None:
        (divisor,) = ranks.alike(total)
        weights = (weights * (share / divisor)[:, None]).to(weights.dtype)
    lse = (largest + torch.log(total)).masked_fill(nothing, -torch.inf) if return_lse else None
    return Moments(mass, first, rest[0] if rest else None, weights, lse)


def _own_weight(op: str, ranks: "_Ranks", u: Tensor, weight: Tensor, shared: bool) -> Tensor:
    checks.boolean(op, "shared_weight", shared)
    checks.tensor(op, "weight", weight, "[I, J, D, K]")
    arguments.product(op, u, weight)
    rows, I = weight.shape[0], u.shape[1]
    if shared and rows != 1:
        raise ValueError(f"{op}: with shared_weight the weight must have 1 row, got {rows}")
    if not shared and rows != I:
        raise ValueError(
            f"{op}: weight must have I={I} rows, one for each of this rank's input capsules, got 1; "
            "if that is for the input capsules of all ranks, pass shared_weight=True"
        )
    return ranks.alike(weight)[0] if shared else weight


class _Ranks:
    """The ranks that hold the input capsules, as this one sees them."""

    def __init__(self, op: str, group: Group, name: str, anchor: Tensor) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                f"{op}: there must be a process group, got none; call torch.distributed.init_process_group() first"
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                names = f"mesh[{group.mesh_dim_names[-1]!r}]" if group.mesh_dim_names else 'mesh["name"]'
                raise ValueError(f"{op}: a device mesh must have 1 dimension, got {group.ndim}; pick one with {names}")
            group = group.get_group()
        if group is None:
            group = dist.group.WORLD
        # new_group() returns this to the ranks outside the group, although its annotation says otherwise.
        if group == dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
            raise ValueError(f"{op}: this rank ({dist.get_rank()}) must be in the group, got a group without it")
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"{op}: group must be a process group or a device mesh, got {type(group).__name__}")
        # A DTensor, recognised without importing its module.
        if hasattr(anchor, "to_local"):
            raise TypeError(f"{op}: {name} must be this rank's own tensor, got a DTensor; pass {name}.to_local()")
        self.group, self.name = group, str(group.group_name)
        if not torch.compiler.is_compiling():
            serves = sorted({device.type for device in group._device_types})
            if serves and anchor.device.type not in serves:
                raise ValueError(
                    f"{op}: {name} must be on a device of the group ({', '.join(serves)}), got {anchor.device}; "
                    "move it with .to(), or make the group with another backend"
                )

    def total(self, *parts: Tensor) -> list[Tensor]:
        """The sums over all ranks, in one collective."""
        return _together(_Total, self.name, parts)

    def alike(self, *values: Tensor) -> list[Tensor]:
        """Values that are the same on all ranks, for use with this rank's input capsules: gradients are summed."""
        return _together(_Alike, self.name, values)

    def largest(self, value: Tensor) -> Tensor:
        """The maximum over all ranks, as a constant."""
        return _all_reduce(value.detach(), "max", self.name)

    def agree(self, op: str, first: Tensor) -> None:
        """Raises an error on every rank if the shapes or dtypes of the moments differ between the ranks."""
        if torch.compiler.is_compiling():
            return
        call = (self.name, tuple(first.shape), first.dtype)
        if call in _agreed:
            return
        mine = torch.tensor([*first.shape, checks.FLOATING.index(first.dtype)], device=first.device)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(every, mine, group=self.group)
        told = [message.tolist() for message in every]
        if any(message != told[0] for message in told):
            shown = "; ".join(
                f"rank {rank}: [{B}, {J}, {D}] {str(checks.FLOATING[dtype]).removeprefix('torch.')}"
                for rank, (B, J, D, dtype) in enumerate(told)
            )
            raise ValueError(
                f"{op}: the moments [B, J, D] must have one shape and dtype on all ranks, which split the input "
                f"capsules alone, got {shown}"
            )
        _agreed.add(call)


# Shapes and dtypes on which the ranks of a group agree: each is checked once.
_agreed: set[tuple[Any, ...]] = set()


def _all_reduce(value: Tensor, how: str, group: Any) -> Tensor:
    """group: its name, because torch.compile can't keep a group in a Function's context."""
    reduced = collectives.all_reduce(value.contiguous(), how, group)
    return reduced.wait() if isinstance(reduced, collectives.AsyncCollectiveTensor) else reduced


class _Total(torch.autograd.Function):
    """A sum over the ranks. The gradient of each summand is the gradient of the sum, the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, group: str, part: Tensor) -> Tensor:
        ctx.group = group
        return _all_reduce(part, "sum", group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, _Alike.apply(ctx.group, gradient)


class _Alike(torch.autograd.Function):
    """A value that is the same on all ranks. Its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, group: str, value: Tensor) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, _Total.apply(ctx.group, gradient)


def _together(function: type[torch.autograd.Function], group: str, values: tuple[Tensor, ...]) -> list[Tensor]:
    """Applies the function to all values with a single collective."""
    if len(values) < 2:
        return [function.apply(group, value) for value in values]
    flat = function.apply(group, torch.cat([value.reshape(-1) for value in values]))
    parts = flat.split([value.numel() for value in values])
    return [part.view(value.shape).to(value.dtype) for part, value in zip(parts, values, strict=True)]
