"""Interest capsules: several vectors for the interests of a user, from the items that the user has clicked."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..calls import arguments, checks
from ..calls.arguments import RoutingParameters, unchecked
from ..calls.options import Backend, Gradient, Softmax, Squash, routing_options
from ..calls.precision import as_under_autocast, wide_dtype
from ..environment.private_torch import result
from ..functional import factored
from . import _arguments
from ._arguments import FactoryKwargs
from ._histories import Count, interests_of, of_lengths, padded, sized, within
from ._layer import Layer
from .routing.votes import PassVotes


@result
class Interests(NamedTuple):
    """vectors ``[B, J, D]``; mask ``[B, J]``, bool: True for the interests that the user has. The other vectors are 0.

    A user without behaviours has no interest.
    """

    vectors: Tensor
    mask: Tensor


class InterestCapsules(Layer):
    """Routes the behaviours of a user to interests (MIND, Li et al. 2019; ComiRec, Cen et al. 2020).

    Behaviours are the embeddings of clicked items. The defaults are the paper's B2I routing (MIND, algorithm 1) without
    its number of interests, which ``count="floor"`` gives: one matrix for all pairs, logits that start as a fixed
    normal draw, softmax over the interests, agreement that accumulates.

    With one matrix for all pairs no votes are formed: each iteration multiplies J vectors by the matrix, not I. So
    rounding differs from code that forms votes.

    Parameters: ``W [1, 1, D, K]``, ``[1, J, D, K]`` or ``[I, J, D, K]``; ``projection``, an ``nn.Linear(D, D)``, on
    request. Buffer: ``logits [max_length, J]`` with ``initial_logits="fixed"``; it is in checkpoints, and
    DistributedDataParallel makes it the same on every rank.

    Args:
        num_interests: J, the largest number of interests of a user.
        in_dim, out_dim: sizes K of a behaviour and D of an interest.
        num_iterations: number of weighted sums, at least 1.
        max_length: I, the largest number of behaviours of a user. ``initial_logits="fixed"`` and ``weight="position"``
            need it. Jagged histories are padded to it; without it to the longest, except under ``torch.jit.trace``.
        weight: ``"shared"``, one matrix for all pairs; ``"output"``, one for each interest; ``"position"``, one for
            each position and interest.
        initial_logits: ``"fixed"``, one normal draw, made with the layer; ``"random"``, a draw at each call for all
            users; ``"random_per_user"``, a draw at each call for each user; ``"zero"``, with which a shared weight
            makes all interests of a user equal.
        logits_std: deviation of the draw.
        update: logits: ``"accumulate"``: the initial logits plus all agreements; ``"overwrite"``: the last agreement.
        softmax: ``"out"``, over the interests; ``"in"``, over the behaviours.
        squash, eps: see :func:`capsfast.squash`.
        gradient: ``"full"``, or ``"last"``: the agreement counts as constant.
        count: the number of interests of a user with behaviours: None: J; ``"floor"`` or ``"ceil"`` of
            ``max(1, min(J, log2(length)))`` (MIND).
        projection: ``"linear"``: a linear map after the routing; ``"relu"``: the same followed by a ReLU.
        init_std: W starts as a normal distribution with this deviation (default ``K**-0.5``), truncated at two.
        backend: see :func:`capsfast.dynamic_routing`.
        device, dtype: device and dtype of the parameters.

    Shapes: behaviours ``[B, I, K]`` to :class:`Interests`, whose vectors have the dtype of the behaviours, or
    autocast's. Sums are formed in float32 for 16-bit inputs.

    Raises:
        ValueError, TypeError: a size or an option that does not fit.
    """

    logits: Tensor | None

    def __init__(
        self,
        num_interests: int,
        in_dim: int,
        out_dim: int,
        num_iterations: int = 3,
        *,
        max_length: int | None = None,
        weight: Literal["shared", "output", "position"] = "shared",
        initial_logits: Literal["zero", "fixed", "random", "random_per_user"] = "fixed",
        logits_std: float = 1.0,
        update: Literal["accumulate", "overwrite"] = "accumulate",
        softmax: Softmax = "out",
        squash: Squash = "paper",
        eps: float = 1e-8,
        gradient: Gradient = "full",
        count: Count | None = None,
        projection: Literal["linear", "relu"] | None = None,
        init_std: float | None = None,
        backend: Backend | None = None,
        **factory_kwargs: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        op = self._op
        for name, option, needing in (("initial_logits", initial_logits, "fixed"), ("weight", weight, "position")):
            if max_length is None and option == needing:
                raise ValueError(f"{op}: {name}={option!r} needs max_length, the most behaviours of a user, got None")
        self.num_interests, self.in_dim, self.out_dim = num_interests, in_dim, out_dim
        self.max_length, self.weight = max_length, weight
        self.initial_logits, self.logits_std = initial_logits, logits_std
        self.count, self.backend, self.init_std = count, backend, init_std
        self.num_iterations, self.softmax, self.gradient, self.update = num_iterations, softmax, gradient, update
        self.squash, self.eps = squash, eps
        rows = max_length if weight == "position" and max_length is not None else 1
        columns = 1 if weight == "shared" else num_interests
        self.W = nn.Parameter(torch.empty(rows, columns, out_dim, in_dim, **factory_kwargs))
        drawn = None
        if initial_logits == "fixed" and max_length is not None:
            drawn = torch.empty(max_length, num_interests, **factory_kwargs)
        self.register_buffer("logits", drawn)
        self.relu = projection == "relu"
        self.projection = None if projection is None else nn.Linear(out_dim, out_dim, **factory_kwargs)
        self._initialise()

    def _initialise(self) -> None:
        std = self.in_dim**-0.5 if self.init_std is None else self.init_std
        nn.init.trunc_normal_(self.W, std=std, a=-2 * std, b=2 * std)
        if self.logits is not None:
            nn.init.normal_(self.logits, std=self.logits_std)

    def forward(
        self,
        behaviours: Tensor,
        lengths: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        offsets: Tensor | None = None,
        interests: Tensor | None = None,
        logits: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Interests:
        """The interests of the users.

        Give at most one of lengths, mask and offsets; without them all behaviours count. A user without behaviours has
        no interest, whatever ``count`` and interests say: vectors 0, and False in the mask. Numbers out of range
        raise an error only on the CPU and outside traces, where reading them is cheap.

        Args:
            behaviours: ``[B, I, K]``, with offsets ``[N, K]``.
            lengths: ``[B]``, integers: number of behaviours that count, from the first on.
            mask: bool ``[B, I]``, False for a behaviour that does not count.
            offsets: ``[B + 1]``, integers: user b has the rows ``offsets[b]`` to ``offsets[b + 1] - 1``.
            interests: ``[B]``, integers from 1 to J: number of interests of each user, instead of ``count``.
            logits: ``[I, J]`` or ``[B, I, J]``, instead of the initial logits.
            generator: generator of a random draw; default torch's own, which differs between ranks.

        Raises:
            ValueError, TypeError: a shape, a value, a dtype or a device that does not fit.
        """
        op = self._op
        if sum(value is not None for value in (lengths, mask, offsets)) > 1:
            raise ValueError(f"{op}: at most one of lengths, mask and offsets must be given, got several")
        _arguments.floats(op, "behaviours", behaviours, "[B, I, K]" if offsets is None else "[N, K]")
        if behaviours.shape[-1] != self.in_dim:
            raise ValueError(f"{op}: behaviours must end in in_dim={self.in_dim}, got {checks.shape_of(behaviours)}")
        checks.same_device(op, "behaviours", behaviours, "W", self.W)
        checks.same_dtype(op, "behaviours", behaviours, "W", self.W)
        if offsets is not None:
            behaviours, mask = padded(op, behaviours, offsets, self.max_length)
        elif lengths is not None:
            mask = of_lengths(op, lengths, behaviours)
        B, I, _ = behaviours.shape
        J = self.num_interests
        if self.max_length is not None and self.max_length < I:
            raise ValueError(f"{op}: behaviours must be at most max_length={self.max_length}, got {I}")
        arguments.check_parameters(
            op, "behaviours", behaviours, (B, I, J, self.out_dim), {"mask": mask, "logits": logits}
        )
        number = behaviours.new_full((B,), I, dtype=torch.int64) if mask is None else mask.sum(1)
        there = self._there(op, number, interests, behaviours) & (number > 0)[:, None]
        start = self._start(behaviours, B, I, generator) if logits is None else logits
        W = self.W[:I] if self.weight == "position" else self.W
        # If every user has all interests, the kernels need no mask.
        whole = self.count is None and interests is None
        v = self._routed(behaviours, W, start, mask, None if whole else there)
        if self.projection is not None:
            v = self.projection(v)
            v = v.relu() if self.relu else v
            v = v.masked_fill(~there[..., None], 0.0)
        return Interests(v, there)

    def _routed(
        self, u: Tensor, weight: Tensor, logits: Tensor | None, mask: Tensor | None, out_mask: Tensor | None
    ) -> Tensor:
        """``u [B, I, K]`` and ``weight [1 or I, 1 or J, D, K]`` to interests ``[B, J, D]`` in the dtype of u.

        Under autocast the result has autocast's dtype, as with the ops; computations between passes are not cast.
        """
        if logits is not None and checks.autocast_dtype(u.device) is not None:
            logits = logits.to(wide_dtype(u.dtype))
        (u, weight), no_autocast = as_under_autocast(u, weight)
        names = ("num_iterations", "softmax", "gradient", "squash", "eps")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        options |= {} if self.update == "accumulate" else {"accumulate": False}
        with no_autocast:
            if self.weight == "shared":
                parameters = RoutingParameters(logits, None, mask, out_mask)
                fused = routing_options(self._op, **options)
                call = unchecked(u, weight, parameters, fused, self.num_interests, self._op)
                v = factored(call, self.backend)
                if v is not None:
                    return v
            J, backend = self.num_interests, self.backend
            votes = PassVotes(self._op, u, weight, J=J, mask=mask, out_mask=out_mask, backend=backend)
            return votes.agree(**options, logits=logits)  # type: ignore[no-any-return]

    def _there(self, op: str, number: Tensor, interests: Tensor | None, behaviours: Tensor) -> Tensor:
        J = self.num_interests
        if interests is not None:
            counts = sized(op, "interests", interests, number.shape[0], behaviours)
            within(op, "interests", counts, 1, J, "num_interests")
            return torch.arange(J, device=counts.device) < counts[:, None]
        if self.count is None:
            return number.new_ones(number.shape[0], J, dtype=torch.bool)
        return interests_of(number, J, self.count)

    def _start(self, behaviours: Tensor, B: int, I: int, generator: torch.Generator | None) -> Tensor | None:
        if self.initial_logits == "zero":
            return None
        if self.initial_logits == "fixed":
            assert self.logits is not None
            return self.logits[:I]
        size = (B, I, self.num_interests) if self.initial_logits == "random_per_user" else (I, self.num_interests)
        drawn = torch.randn(size, device=behaviours.device, dtype=behaviours.dtype, generator=generator)
        return self.logits_std * drawn

    def extra_repr(self) -> str:
        of_projection = "" if self.projection is None else f", projection={'relu' if self.relu else 'linear'!r}"
        return super().extra_repr() + of_projection
