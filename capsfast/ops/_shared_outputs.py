"""Votes that all output capsules share: a product of matrices, which torch's own do best."""

import torch
from torch import Tensor


def votes(u: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    """``u [B, I, K]``, ``weight [I or 1, 1, D, K]``, ``mask [B, I]`` to the votes ``[B, I, 1, D]``."""
    if mask is not None:
        # What a masked capsule holds must not reach the gradient of the weight.
        u = u.masked_fill(~mask[:, :, None], 0.0)
    if weight.shape[0] == 1:
        return torch.nn.functional.linear(u, weight[0, 0]).unsqueeze(2)
    return torch.bmm(u.transpose(0, 1), weight[:, 0].transpose(1, 2)).transpose(0, 1).unsqueeze(2)
