"""Routing whose input capsules are split over the ranks of a process group, and the sharding rules for DTensor.

Each rank passes its own input capsules, with their rows of weight, logits, activation and mask. What belongs to output
capsules (query, bias, out_mask, the moments, the result) is the same on every rank, and so is its gradient: every rank
computes the same loss of the result. Then every gradient is the one that a single process would have found. (torch's
own differentiable all-reduce adds up the losses of all ranks instead: its gradients are larger by their number.)
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from . import _keywords, arguments, checks, functional, passes
from .agreement import Moments, agree
from .arguments import RoutingParameters
from .functional import RoutingKeywords
from .ops import sharding
from .options import Options
from .passes import PassKeywords
from .precision import wide_dtype

if not dist.is_available():
    raise ImportError("capsfast.distributed: this torch was built without torch.distributed; install one that has it")

import torch.distributed._functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["dynamic_routing", "register_sharding", "routing_pass", "votes_pass"]

Group = dist.ProcessGroup | DeviceMesh | None


def register_sharding() -> None:
    """Registers the sharding rules of all ops with DTensor, as the first call of a capsfast function on a DTensor does.

    Only for those who call ``torch.ops.capsfast`` themselves. It imports torch.distributed.tensor. The rules: an op
    splits along the batch; along the output capsules, where no softmax is over them (but not with given votes); a pass
    without a softmax over the input capsules also along these, its moments then being partial sums. Anything else is
    brought together first.
    """
    sharding.register()


@_keywords.with_keywords_of(functional.dynamic_routing)
def dynamic_routing(
    u: Tensor,
    weight: Tensor,
    num_iterations: int = 3,
    *,
    group: Group = None,
    shared_weight: bool = False,
    **options: Unpack[RoutingKeywords],
) -> Any:
    """:func:`capsfast.dynamic_routing` over the input capsules of all ranks (Sabour, Frosst, Hinton 2017, procedure 1).

    Each iteration is a routing pass over the rank's own input capsules and one sum over the ranks of B x J x D numbers,
    in the backward again for all iterations but the last. With ``softmax="in"`` there are 2 x B x J more numbers, and a
    maximum over the ranks of B x J. ``gradient="last"`` keeps the agreement of the rank's pairs, B x I x J numbers.

    Args:
        u: the rank's input capsules ``[B, I, K]``; ranks may differ in I. float32, float64, bfloat16 or float16.
        weight: their transformation matrices ``[I, J, D, K]``, or ``[1, J, D, K]`` with ``shared_weight``.
        num_iterations: how many weighted sums are formed, at least 1.
        group: the ranks that hold the input capsules: a process group, or a device mesh of one dimension such as
            ``mesh["inputs"]``; default all.
        shared_weight: the weight has one row for the input capsules of all ranks. Its gradient is summed over them.
        logits: of the rank's input capsules, ``[I, J]`` or ``[B, I, J]``.
        bias: ``[J, D]``, the same on every rank.
        mask: of the rank's input capsules, ``[B, I]`` bool.
        out_mask: ``[B, J]`` bool, the same on every rank.
        backend: of the passes, a name in :func:`capsfast.backends`; default the fastest that serves them.

    The other arguments are those of :func:`capsfast.dynamic_routing`.

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
    _keywords.check(dynamic_routing, options, RoutingKeywords, op)
    given = RoutingParameters(*(options.get(name) for name in RoutingParameters._fields))  # type: ignore[arg-type]
    o = Options(num_iterations, **{name: options[name] for name in Options._fields[1:] if name in options})  # type: ignore[literal-required]
    o.check(op)
    return_coupling = options.get("return_coupling", False)
    checks.boolean(op, "return_coupling", return_coupling)
    ranks = _Ranks(op, group, "u", checks.tensor(op, "u", u, "[B, I, K]"))
    weight = _own_weight(op, ranks, u, weight, shared_weight)
    call, _ = arguments.check(op, u, weight, given, o)
    # Says what J is where the weight does not.
    prior = u.new_zeros(u.shape[0], call.J) if call.shared_outputs else None
    common: PassKeywords = {
        "mask": given.mask,
        "out_mask": given.out_mask,
        "prior": prior,
        "backend": options.get("backend"),
    }

    def moments(**more: Any) -> Moments:
        return _combined(op, ranks, partial(passes.routing_pass, u, weight), {**common, **more})  # type: ignore[typeddict-item]

    def agreement(query: Tensor) -> Tensor:
        """The rank's own, not rounded to 16 bits."""
        wide = wide_dtype(u.dtype)
        asked: PassKeywords = {**common, "query": query, "normalize": "none", "return_weights": True}
        found = passes.routing_pass(u.to(wide), weight.to(wide), **asked)
        assert found.weights is not None
        return found.weights

    v, last = agree(moments, agreement, o, logits=given.logits, bias=given.bias, return_weights=return_coupling)
    if given.out_mask is not None:
        v = v.masked_fill(~given.out_mask[:, :, None], 0.0)
    v = v.to(u.dtype)
    return (v, last.weights) if return_coupling else v


@_keywords.with_keywords_of(passes.routing_pass)
def routing_pass(
    u: Tensor, weight: Tensor, *, group: Group = None, shared_weight: bool = False, **options: Unpack[PassKeywords]
) -> Moments:
    """:func:`capsfast.routing_pass` over the input capsules of all ranks.

    Args:
        u, weight, logits, activation, mask, lse: of the rank's own input capsules, of which ranks may have different
            numbers.
        query, precision, center, prior, out_mask: the same on every rank. Gradients of the first four are summed over
            the ranks.
        group, shared_weight: as in :func:`dynamic_routing`.

    The other arguments, shapes and dtypes are those of :func:`capsfast.routing_pass`.

    Returns:
        :class:`capsfast.Moments` over the input capsules of all ranks, the same on every rank. ``weights``, and the
        ``lse`` of ``normalize="out"``, are of the rank's own input capsules.

    Raises:
        The errors of :func:`capsfast.routing_pass` and those of :func:`dynamic_routing`.
    """
    op = "capsfast.distributed.routing_pass"
    _keywords.check(routing_pass, options, PassKeywords, op)
    ranks = _Ranks(op, group, "u", checks.tensor(op, "u", u, "[B, I, K]"))
    weight = _own_weight(op, ranks, u, weight, shared_weight)
    return _combined(op, ranks, partial(passes.routing_pass, u, weight), options)


@_keywords.with_keywords_of(passes.votes_pass)
def votes_pass(votes: Tensor, *, group: Group = None, **options: Unpack[PassKeywords]) -> Moments:
    """:func:`capsfast.votes_pass` over the input capsules of all ranks.

    Args:
        votes: those of the rank's own input capsules, ``[B, I, J, D]`` or ``[B, I, 1, D]``.

    All other arguments, the result and the errors are those of :func:`routing_pass`.
    """
    op = "capsfast.distributed.votes_pass"
    _keywords.check(votes_pass, options, PassKeywords, op)
    ranks = _Ranks(op, group, "votes", checks.tensor(op, "votes", votes, "[B, I, J, D]"))
    return _combined(op, ranks, partial(passes.votes_pass, votes), options)


# What all ranks have, in a pass.
SHARED = ("query", "precision", "center", "prior")


def _combined(op: str, ranks: "_Ranks", local: Callable[..., Moments], options: PassKeywords) -> Moments:
    """A pass over the rank's own input capsules, and what all ranks have together."""
    leaky, return_lse = options.get("leaky", False), options.get("return_lse", False)
    checks.boolean(op, "leaky", leaky)
    given: dict[str, Any] = {name: options[name] for name in SHARED if options.get(name) is not None}  # type: ignore[literal-required]
    alike = dict(zip(given, ranks.alike(*given.values()), strict=True))
    inward = options.get("normalize") == "in"
    # There is one leak, not one a rank.
    found = local(**{**options, **alike, "leaky": leaky and not inward, "return_lse": return_lse or inward})
    ranks.agree(op, found.first)
    moments = [found.mass, found.first] if found.second is None else [found.mass, found.first, found.second]
    if not inward:
        return found._replace(**dict(zip(("mass", "first", "second"), ranks.total(*moments), strict=False)))

    assert found.lse is not None
    largest = ranks.largest(found.lse)
    largest = largest.clamp_min(0.0) if leaky else largest.masked_fill(torch.isneginf(largest), 0.0)
    # Of a softmax over all input capsules, what this rank's have, times a number that is the same on all ranks.
    share = torch.exp(found.lse - largest)
    total, *moments = ranks.total(share, share * moments[0], *(share[:, :, None] * each for each in moments[1:]))
    if leaky:
        total = total + torch.exp(-largest)
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    mass, first, *rest = (each / total.reshape(total.shape + (1,) * (each.dim() - 2)) for each in moments)
    weights = found.weights
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
        # What new_group() returns to the ranks that it leaves out, whatever its annotation says.
        if group == dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
            raise ValueError(f"{op}: this rank ({dist.get_rank()}) must be in the group, got a group without it")
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"{op}: group must be a process group or a device mesh, got {type(group).__name__}")
        # A DTensor without importing what defines it.
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
        """The values, which all ranks have, for use with this rank's input capsules."""
        return _together(_Alike, self.name, values)

    def largest(self, value: Tensor) -> Tensor:
        """The maximum over all ranks, as a constant."""
        return _all_reduce(value.detach(), "max", self.name)

    def agree(self, op: str, first: Tensor) -> None:
        """Raises an error on every rank if the ranks differ in what they are about to add up."""
        if torch.compiler.is_compiling():
            return
        call = (self.name, tuple(first.shape), first.dtype)
        if call in _agreed:
            return
        mine = torch.tensor([*first.shape, checks.FLOATING.index(first.dtype)], device=first.device)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(every, mine, group=self.group)
        told = [each.tolist() for each in every]
        if any(each != told[0] for each in told):
            shown = "; ".join(
                f"rank {rank}: [{B}, {J}, {D}] {str(checks.FLOATING[dtype]).removeprefix('torch.')}"
                for rank, (B, J, D, dtype) in enumerate(told)
            )
            raise ValueError(
                f"{op}: the moments [B, J, D] must have one shape and dtype on all ranks, which split the input "
                f"capsules alone, got {shown}"
            )
        _agreed.add(call)


# What the ranks of a group have agreed on: they are asked once.
_agreed: set[tuple[Any, ...]] = set()


def _all_reduce(value: Tensor, how: str, group: Any) -> Tensor:
    """group: by its name, as torch.compile keeps no group in a Function's context."""
    found = collectives.all_reduce(value.contiguous(), how, group)
    return found.wait() if isinstance(found, collectives.AsyncCollectiveTensor) else found


class _Total(torch.autograd.Function):
    """A sum over the ranks. Its gradient, the same on all of them, is that of every summand."""

    @staticmethod
    def forward(ctx: Any, group: str, part: Tensor) -> Tensor:
        ctx.group = group
        return _all_reduce(part, "sum", group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, _Alike.apply(ctx.group, gradient)


class _Alike(torch.autograd.Function):
    """What all ranks have, each with a gradient from its own input capsules: the gradient is the sum of these."""

    @staticmethod
    def forward(ctx: Any, group: str, value: Tensor) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, _Total.apply(ctx.group, gradient)


def _together(function: type[torch.autograd.Function], group: str, values: tuple[Tensor, ...]) -> list[Tensor]:
    """The function of all values, with one collective for them."""
    if len(values) < 2:
        return [function.apply(group, value) for value in values]
    found = function.apply(group, torch.cat([value.reshape(-1) for value in values]))
    parts = found.split([value.numel() for value in values])
    return [part.view(value.shape).to(value.dtype) for part, value in zip(parts, values, strict=True)]
