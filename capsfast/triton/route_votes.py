"""The kernels of ``capsfast::triton_route_votes``; the contract is in ops/route_votes.py."""

from typing import Any

from torch import Tensor

from ..options import Options
from . import routing
from .launch import Call


def forward(votes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    logits, bias, mask, out_mask, J, *options, return_coupling = rest
    call = Call(votes, None, logits, bias, mask, out_mask, Options(*options), outputs=J)
    return routing.forward(call, return_coupling)


def backward(dv: Tensor, dcoupling: Tensor | None, votes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    logits, bias, mask, out_mask, coupling, s, norm, J, *options = rest[:-3]
    call = Call(votes, None, logits, bias, mask, out_mask, Options(*options), outputs=J)
    need_votes, need_logits, need_bias = rest[-3:]
    dvotes, _, dlogits, dbias = routing.backward(
        call, dv, dcoupling, coupling, s, norm, (need_votes, False, need_logits, need_bias)
    )
    return dvotes, dlogits, dbias
