"""The kernels of ``capsfast::triton_routing_pass``; the contract is in ops/routing_pass.py."""

import functools
from collections.abc import Sequence
from typing import Any

from ..calls.arguments import PassParameters
from ..calls.options import PassOptions
from ..calls.positions import as_positions, as_samples
from . import moments
from .launch import KernelCall
from .plan import Plan, Slot, planned

# Kernels read and write these as they are, with positions as the last axis where there are positions.
IN_PLACE = ("u", "weight", "logits", "weights", "norm")
OUTPUTS = ("mass", "first", "second", "weights", "lse", "norm")
GRADIENTS = ("u", "weight", *PassParameters._fields[:-2])


def _samples(names: Sequence[str], values: Sequence[Slot | None], u: Slot) -> tuple[Any, ...]:
    """The values; all but IN_PLACE get a row for every position."""
    moved = functools.partial(u.plan.compute, as_samples)
    pairs = zip(names, values, strict=True)
    return tuple(value if name in IN_PLACE else moved(value, u.shape[4:]) for name, value in pairs)


def _positions(names: Sequence[str], values: Sequence[Slot], u: Slot) -> tuple[Slot, ...]:
    """The inverse of _samples()."""
    moved = functools.partial(u.plan.compute, as_positions)
    pairs = zip(names, values, strict=True)
    return tuple(value if name in IN_PLACE else moved(value, u.shape[0], u.shape[4:]) for name, value in pairs)


@planned
def forward(plan: Plan, u: Slot, weight: Slot | None, *rest: Any) -> tuple[Slot, ...]:
    J, *options, tf32, return_weights, return_lse = rest[9:]
    parameters: Any = PassParameters(*_samples(PassParameters._fields, rest[:9], u))
    call = KernelCall(u, weight, parameters, PassOptions(*options), tf32, J)
    return _positions(OUTPUTS, moments.forward(call, return_weights, return_lse), u)


@planned
def backward(plan: Plan, *args: Any) -> tuple[Slot, ...]:
    # args: five gradients of outputs, u, weight, nine parameters, six saved outputs, J, options, the gradients needed.
    (u, weight), (J, *options, tf32, needed) = args[5:7], args[22:]
    douts = _samples(OUTPUTS[:5], args[:5], u)
    parameters: Any = PassParameters(*_samples(PassParameters._fields, args[7:16], u))
    saved: Any = _samples(OUTPUTS, args[16:22], u)
    call = KernelCall(u, weight, parameters, PassOptions(*options), tf32, J)
    return _positions(GRADIENTS, moments.backward(call, parameters, douts, saved, needed), u)
