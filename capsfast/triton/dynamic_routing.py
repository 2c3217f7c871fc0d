"""The kernels of ``capsfast::triton_dynamic_routing``; the contract is in ops/dynamic_routing.py."""

import math
from typing import Any

import torch
from torch import Tensor

from ..calls.arguments import PassParameters
from ..calls.options import RoutingOptions
from ..calls.positions import as_positions, as_samples, to_samples
from . import routing
from .launch import KernelCall, cdiv
from .plan import Plan, Slot, planned

# In a backward, the coefficients c and db may always take this many bytes, even if the votes are smaller.
MOST_COEFFICIENTS = 64 * 1024**2
# A part of the batch has a multiple of this many samples, so that tiles are full.
FULL = 32
# The axis of samples of the arguments of a backward, up to norm.
SAMPLES = (0, 0, 0, None, 0, None, 0, 0, 0, 1, 2)


def _call(u: Slot, weight: Slot | None, *rest: Any) -> KernelCall:
    logits, bias, mask, out_mask, J, *kept, tf32 = rest
    options = RoutingOptions(*kept)
    if logits is not None and not options.accumulate:
        raise RuntimeError("capsfast: logits must accumulate")
    mask, out_mask = (u.plan.compute(as_samples, keep, u.shape[4:]) for keep in (mask, out_mask))
    parameters: Any = PassParameters(logits=logits, mask=mask, out_mask=out_mask)
    return KernelCall(u, weight, parameters, options, tf32, J, bias)


@planned
def forward(plan: Plan, u: Slot, weight: Slot | None, *rest: Any) -> tuple[Slot, ...]:
    *arguments, return_coupling = rest
    v, coupling, s, norm = routing.forward(_call(u, weight, *arguments), return_coupling)
    if u.dim() == 5:
        s, norm = plan.new(0), plan.new(0)
    return plan.compute(as_positions, v, u.shape[0], u.shape[4:]), coupling, s, norm


@planned
def backward(plan: Plan, *args: Any) -> tuple[Slot, ...]:
    """Takes the batch in parts if the coefficients of all samples would take too much memory."""
    # args: dv, dcoupling, u, weight, four parameters, three saved outputs, J, the options, and the gradients needed.
    tensors, rest = args[:11], args[11:]
    (u, weight, logits, bias), s, needed = tensors[2:6], tensors[9], rest[-1]
    J, D = (u if u.dim() == 5 else s).shape[2:4]
    options = RoutingOptions(*rest[1:-2])
    step = samples_at_once(u, J, D, options.num_iterations - routing.first_iterations(options, logits)[1])
    if step >= u.shape[0] or not any(needed[:3]):
        return _backward(*tensors, *rest)
    # Each part writes into the whole dx, because dvotes are as large as the votes and a join would copy them.
    whole = needed[0] and (weight is not None or u.shape[2] == J)
    dx = plan.new(*u.shape, dtype=u.dtype) if whole else None
    of_parts = []
    for lo in range(0, u.shape[0], step):
        b = slice(lo, lo + step)
        part = (_part(tensor, axis, b) for tensor, axis in zip(tensors, SAMPLES, strict=True))
        of_parts.append(_backward(*part, *rest, dtype=torch.float32, dx=None if dx is None else dx[b]))
    joins = (joined, added, added if logits is not None and logits.dim() == 2 else joined, added)
    columns = [*zip(joins, (u, weight, logits, bias), zip(*of_parts, strict=True), strict=True)][whole:]
    whole_batch = (plan.compute(join, (u if like is None else like).dtype, *parts) for join, like, parts in columns)
    return (*whole_batch,) if dx is None else (dx, *whole_batch)


def samples_at_once(u: Slot, J: int, D: int, kept: float) -> int:
    """How many samples of the batch have coefficients at the same time. The coefficients of ``kept`` iterations take at
    most half the size of the float32 votes, or MOST_COEFFICIENTS if that is more."""
    B, I, *_ = u.shape
    pairs = B * I * J * math.prod(u.shape[4:])
    step = cdiv(B, max(cdiv(int(8 * kept * pairs), max(2 * D * pairs, MOST_COEFFICIENTS)), 1))
    return step if u.dim() == 5 else cdiv(step, FULL) * FULL


def _part(value: Any, axis: int | None, b: slice) -> Any:
    """Samples b of an argument. Logits [I, J] and tensors that were not kept have no axis of samples."""
    if value is None or axis is None or value.dim() < 3 - (value.dtype == torch.bool):
        return value
    return value[(slice(None),) * axis + (b,)]


def added(dtype: torch.dtype, *parts: Tensor) -> Tensor:
    return torch.stack(parts).sum(0).to(dtype)


def joined(dtype: torch.dtype, *parts: Tensor) -> Tensor:
    return torch.cat(parts).to(dtype)


def _backward(
    dv: Slot | None,
    dcoupling: Slot | None,
    u: Slot,
    *rest: Any,
    dtype: torch.dtype | None = None,
    dx: Slot | None = None,
) -> tuple[Slot, ...]:
    """As backward(), for one part of the batch. dtype and dx: as in passes.gradients()."""
    parameters, (coupling, s, norm), (*options, needed) = rest[:5], rest[5:8], rest[8:]
    call = _call(u, *parameters, *options)
    if u.dim() == 5:
        # With positions the forward keeps neither s nor norm.
        _, _, s, norm = routing.forward(call, False)
        dv = call.compute(to_samples, dv) if dv is not None else None
    dv = call.zeros(*s.shape[1:]) if dv is None else dv
    return routing.backward(call, dv, dcoupling, coupling, s, norm, needed, dtype, dx)
