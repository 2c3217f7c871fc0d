"""Routing by agreement (Sabour, Frosst, Hinton 2017, procedure 1)."""

import torch
from torch import Tensor

from ..arguments import Call
from ..positions import from_samples
from .coupling import coupling_coefficients, valid_pairs
from .squash import squash
from .votes import votes


def dynamic_routing(call: Call) -> tuple[Tensor, Tensor]:
    """Output capsules ``v [B, J, D]`` and the last coupling ``[B, I, J]``."""
    if call.weight is None and call.u.dim() == 5:
        B, S = call.u.shape[0], call.u.shape[4]
        v, c = dynamic_routing(call.as_samples())
        return from_samples(v, B, S), from_samples(c, B, S)
    o = call.options
    logits, bias, mask, out_mask = call.parameters
    x = votes(call)
    pairs = (*x.shape[:2], call.J)
    constant = x.detach() if o.gradient == "last" else x
    prior = x.new_zeros(pairs) if logits is None else logits.expand(pairs)

    valid = valid_pairs(mask, out_mask)
    agreement: Tensor | float = 0.0
    for t in range(o.num_iterations):
        c = coupling_coefficients(prior + agreement, valid, o.softmax, o.leaky)
        s = torch.einsum("bij,bijd->bjd", c, x)
        if bias is not None:
            s = s + bias
        last = t + 1 == o.num_iterations
        v = squash(s, -1, o.eps, o.squash) if o.squash_last or not last else s
        if out_mask is not None:
            v = v.masked_fill(~out_mask[:, :, None], 0.0)
        if not last:
            fixed = v.detach() if o.gradient == "last" else v
            agreement = agreement + torch.einsum("bijd,bjd->bij", constant, fixed)
    return v, c
