"""The kernels of ``capsfast::triton_dynamic_routing``; the contract is in ops/dynamic_routing.py."""

from typing import Any

from torch import Tensor

from ..options import Options
from ..positions import as_positions, as_samples, to_samples
from . import routing
from .launch import Call
from .replay import replayed


def _call(u: Tensor, weight: Tensor | None, *rest: Any) -> Call:
    logits, bias, mask, out_mask, J, *options, tf32 = rest
    spatial = u.shape[4:]
    mask, out_mask = as_samples(mask, spatial), as_samples(out_mask, spatial)
    return Call(u, weight, logits, bias, mask, out_mask, Options(*options), tf32, outputs=J)


@replayed
def forward(u: Tensor, weight: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    *given, return_coupling = rest
    v, coupling, s, norm = routing.forward(_call(u, weight, *given), return_coupling)
    if u.dim() == 5:
        s, norm = s.new_empty(0), norm.new_empty(0)
    return as_positions(v, u.shape[0], u.shape[4:]), coupling, s, norm


@replayed
def backward(dv: Tensor | None, dcoupling: Tensor | None, u: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    # The weight, four parameters, three saved outputs, J and the options, what is needed.
    given, (coupling, s, norm), (*options, needed) = rest[:5], rest[5:8], rest[8:]
    call = _call(u, *given, *options)
    if u.dim() == 5:
        # Not kept from the forward.
        _, _, s, norm = routing.forward(call, False)
        dv = None if dv is None else to_samples(dv)
    if dv is None:
        dv = call.zeros(*s.shape[1:])
    return routing.backward(call, dv, dcoupling, coupling, s, norm, needed)
