"""The kernels of ``capsfast::triton_dynamic_routing``; the contract is in ops/dynamic_routing.py."""

from typing import Any

from ..options import Options
from ..positions import as_positions, as_samples, to_samples
from . import routing
from .launch import Call
from .plan import Plan, Slot, planned


def _call(u: Slot, weight: Slot | None, *rest: Any) -> Call:
    logits, bias, mask, out_mask, J, *options, tf32 = rest
    spatial = u.shape[4:]
    mask, out_mask = (u.plan.compute(as_samples, each, spatial) for each in (mask, out_mask))
    return Call(u, weight, logits, bias, mask, out_mask, Options(*options), tf32, outputs=J)


@planned
def forward(plan: Plan, u: Slot, weight: Slot | None, *rest: Any) -> tuple[Slot, ...]:
    *given, return_coupling = rest
    v, coupling, s, norm = routing.forward(_call(u, weight, *given), return_coupling)
    if u.dim() == 5:
        s, norm = plan.new(0), plan.new(0)
    return plan.compute(as_positions, v, u.shape[0], u.shape[4:]), coupling, s, norm


@planned
def backward(plan: Plan, dv: Slot | None, dcoupling: Slot | None, u: Slot, *rest: Any) -> tuple[Slot, ...]:
    # rest: the weight, four parameters, three saved outputs, J and the options, and which gradients are needed.
    given, (coupling, s, norm), (*options, needed) = rest[:5], rest[5:8], rest[8:]
    call = _call(u, *given, *options)
    if u.dim() == 5:
        # With positions the forward keeps neither s nor norm.
        _, _, s, norm = routing.forward(call, False)
        dv = None if dv is None else plan.compute(to_samples, dv)
    if dv is None:
        dv = call.zeros(*s.shape[1:])
    return routing.backward(call, dv, dcoupling, coupling, s, norm, needed)
