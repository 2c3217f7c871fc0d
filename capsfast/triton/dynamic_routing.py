"""The kernels of ``capsfast::triton_dynamic_routing``; the contract is in ops/dynamic_routing.py."""

from typing import Any

from torch import Tensor

from ..options import Options
from . import routing
from .launch import Call
from .replay import replayed


@replayed
def forward(u: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    logits, bias, mask, out_mask, *options, tf32, return_coupling = rest
    call = Call(u, weight, logits, bias, mask, out_mask, Options.from_op(*options), tf32)
    return routing.forward(call, return_coupling)


@replayed
def backward(dv: Tensor, dcoupling: Tensor | None, u: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    logits, bias, mask, out_mask, coupling, s, norm, *options, tf32 = rest[:-4]
    call = Call(u, weight, logits, bias, mask, out_mask, Options.from_op(*options), tf32)
    return routing.backward(call, dv, dcoupling, coupling, s, norm, rest[-4:])
