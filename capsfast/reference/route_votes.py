"""Routing by agreement over votes that exist (Sabour, Frosst, Hinton 2017, procedure 1)."""

import torch
from torch import Tensor

from ..options import Options
from ..positions import from_samples, to_samples
from .coupling import coupling_coefficients, valid_pairs
from .squash import squash


def route_votes(
    votes: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    out_mask: Tensor | None,
    options: Options,
    share_batch_logits: bool = False,
    J: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``votes [B, I, J or 1, D]`` to output capsules ``v [B, J, D]`` and the last coupling ``[B, I, J]``.

    J: how many output capsules there are; default that of the votes. Votes ``[B, I, J, D, S]`` have S positions, and so
    has all that has an axis B.
    """
    if votes.dim() == 5:
        B, S = votes.shape[0], votes.shape[4]
        if logits is not None and logits.dim() > 2:
            logits = to_samples(logits)
        mask, out_mask = (None if given is None else to_samples(given) for given in (mask, out_mask))
        v, c = route_votes(to_samples(votes), logits, bias, mask, out_mask, options, share_batch_logits, J)
        return from_samples(v, B, S), from_samples(c, B, S)
    dtype = votes.dtype
    B, I, given, _ = votes.shape
    pairs = (B, I, given if J is None else J)
    if mask is not None:
        votes = votes.masked_fill(~mask[:, :, None, None], 0.0)
    constant = votes.detach() if options.gradient == "last" else votes
    prior = votes.new_zeros(pairs) if logits is None else logits.to(dtype).expand(pairs)

    valid = valid_pairs(mask, out_mask)
    agreement: Tensor | float = 0.0
    for t in range(options.num_iterations):
        b = prior + agreement
        if share_batch_logits:
            b = b.mean(0, keepdim=True).expand_as(b)
        c = coupling_coefficients(b, valid, options.softmax, options.leaky)
        s = torch.einsum("bij,bijd->bjd", c, votes)
        if bias is not None:
            s = s + bias.to(dtype)
        last = t + 1 == options.num_iterations
        v = squash(s, -1, options.eps, options.squash) if options.squash_last or not last else s
        if out_mask is not None:
            v = v.masked_fill(~out_mask[:, :, None], 0.0)
        if not last:
            fixed = v.detach() if options.gradient == "last" else v
            agreement = agreement + torch.einsum("bijd,bjd->bij", constant, fixed)
    return v, c
