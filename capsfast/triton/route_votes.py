"""The kernels of ``capsfast::triton_route_votes``; the contract is in ops/route_votes.py."""

from typing import Any

from torch import Tensor

from ..options import Options
from ..positions import as_positions, as_samples, to_samples
from . import routing
from .launch import Call
from .replay import replayed


def _call(votes: Tensor, logits: Tensor | None, bias: Tensor | None, *rest: Any) -> Call:
    mask, out_mask, J, *options = rest
    mask, out_mask = (as_samples(given, votes.shape[4:]) for given in (mask, out_mask))
    return Call(votes, None, logits, bias, mask, out_mask, Options.from_op(*options), outputs=J)


@replayed
def forward(votes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *given, return_coupling = rest
    v, coupling, s, norm = routing.forward(_call(votes, *given), return_coupling)
    if votes.dim() == 5:
        s, norm = s.new_empty(0), norm.new_empty(0)
    return as_positions(v, votes.shape[0], votes.shape[4:]), coupling, s, norm


@replayed
def backward(dv: Tensor, dcoupling: Tensor | None, votes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    # Four parameters, three saved outputs, J and the options, three needs.
    given, (coupling, s, norm), options = rest[:4], rest[4:7], rest[7:-3]
    need_votes, need_logits, need_bias = rest[-3:]
    call = _call(votes, *given, *options)
    if votes.dim() == 5:
        # Not kept from the forward.
        _, _, s, norm = routing.forward(call, False)
        dv = to_samples(dv)
    needed = (need_votes, False, need_logits, need_bias)
    dvotes, _, dlogits, dbias = routing.backward(call, dv, dcoupling, coupling, s, norm, needed)
    return dvotes, dlogits, dbias
