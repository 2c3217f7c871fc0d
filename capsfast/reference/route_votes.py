"""Routing by agreement over votes that exist (Sabour, Frosst, Hinton 2017, procedure 1)."""

import torch
from torch import Tensor

from ..options import Options
from .squash import squash


def coupling_coefficients(b: Tensor, mask: Tensor | None, out_mask: Tensor | None, softmax: str, leaky: bool) -> Tensor:
    """Softmax of the routing logits ``b [B, I, J]`` over the valid pairs; 0 for all others.

    Where no logit is finite, the coupling is 0.
    """
    dim = 2 if softmax == "out" else 1
    valid = None
    if mask is not None:
        valid = mask[:, :, None]
    if out_mask is not None:
        valid = out_mask[:, None, :] if valid is None else valid & out_mask[:, None, :]
    if valid is not None:
        b = b.masked_fill(~valid, -torch.inf)
    # A softmax without any finite logit is 0/0; its coupling is 0 by definition, and so is its gradient.
    nothing = torch.isneginf(b).all(dim, keepdim=True)
    b = b.masked_fill(nothing, 0.0)
    if leaky:
        shape = list(b.shape)
        shape[dim] = 1
        c = torch.softmax(torch.cat([b, b.new_zeros(shape)], dim), dim).narrow(dim, 0, b.shape[dim])
    else:
        c = torch.softmax(b, dim)
    return c.masked_fill(nothing, 0.0)


def route_votes(
    votes: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    out_mask: Tensor | None,
    options: Options,
    share_batch_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """``votes [B, I, J, D]`` to output capsules ``v [B, J, D]`` and the last coupling ``[B, I, J]``."""
    dtype = votes.dtype
    if mask is not None:
        votes = votes.masked_fill(~mask[:, :, None, None], 0.0)
    constant = votes.detach() if options.gradient == "last" else votes
    prior = votes.new_zeros(votes.shape[:3]) if logits is None else logits.to(dtype).expand(votes.shape[:3])

    agreement: Tensor | float = 0.0
    for t in range(options.num_iterations):
        b = prior + agreement
        if share_batch_logits:
            b = b.mean(0, keepdim=True).expand_as(b)
        c = coupling_coefficients(b, mask, out_mask, options.softmax, options.leaky)
        s = torch.einsum("bij,bijd->bjd", c, votes)
        if bias is not None:
            s = s + bias.to(dtype)
        v = squash(s, -1, options.eps, options.squash)
        if out_mask is not None:
            v = v.masked_fill(~out_mask[:, :, None], 0.0)
        if t + 1 < options.num_iterations:
            fixed = v.detach() if options.gradient == "last" else v
            agreement = agreement + torch.einsum("bijd,bjd->bij", constant, fixed)
    return v, c
