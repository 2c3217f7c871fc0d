"""Turns routing logits into coupling coefficients, for every ``normalize``."""

import torch
from torch import Tensor


def valid_pairs(mask: Tensor | None, out_mask: Tensor | None) -> Tensor | None:
    """Combines ``mask [B, I]`` and ``out_mask [B, J]`` so that they broadcast to ``[B, I, J]``; None without masks."""
    if mask is None:
        return None if out_mask is None else out_mask[:, None, :]
    return mask[:, :, None] if out_mask is None else mask[:, :, None] & out_mask[:, None, :]


def coupling_coefficients(
    b: Tensor, valid: Tensor | None, normalize: str, leaky: bool = False, lse: Tensor | None = None
) -> Tensor:
    """Routing logits ``b [B, I, J]`` to coupling coefficients; 0 for pairs that are not valid.

    ``lse [B, I]`` is for "lse". A softmax without a finite logit gives 0, and so does an lse of -inf.
    """
    if normalize == "none":
        return b if valid is None else b.masked_fill(~valid, 0.0)
    if valid is not None:
        b = b.masked_fill(~valid, -torch.inf)
    if normalize == "sigmoid":
        return torch.sigmoid(b)
    if normalize == "lse":
        assert lse is not None
        nothing = torch.isneginf(lse)[:, :, None]
        return torch.exp(b - lse[:, :, None].masked_fill(nothing, 0.0)).masked_fill(nothing, 0.0)
    dim = _summed(normalize)
    # A softmax without a finite logit is 0/0; its coupling and its gradient are 0 by definition.
    nothing = torch.isneginf(b).all(dim, keepdim=True)
    b = b.masked_fill(nothing, 0.0)
    c = torch.softmax(_with_leak(b, dim, leaky), dim).narrow(dim, 0, b.shape[dim])
    return c.masked_fill(nothing, 0.0)


def log_sum_exp(b: Tensor, valid: Tensor | None, normalize: str, leaky: bool) -> Tensor:
    """The logarithm of the divisor in the softmax of ``b [B, I, J]``: ``[B, I]`` for "out", ``[B, J]`` for "in"."""
    dim = _summed(normalize)
    if valid is not None:
        b = b.masked_fill(~valid, -torch.inf)
    b = _with_leak(b, dim, leaky)
    # For a row of -inf only, the derivative is 0 by definition.
    nothing = torch.isneginf(b).all(dim)
    return torch.logsumexp(b.masked_fill(nothing.unsqueeze(dim), 0.0), dim).masked_fill(nothing, -torch.inf)


def _summed(normalize: str) -> int:
    return 2 if normalize == "out" else 1


def _with_leak(b: Tensor, dim: int, leaky: bool) -> Tensor:
    if not leaky:
        return b
    shape = list(b.shape)
    shape[dim] = 1
    return torch.cat([b, b.new_zeros(shape)], dim)
