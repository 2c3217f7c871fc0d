"""Votes that all output capsules share: a product of matrices, which torch's own do best."""

import torch
from torch import Tensor

from ._product import poses, width


def votes(u: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    """``u [B, I, P K]``, ``weight [I or 1, 1, R, K]``, ``mask [B, I]`` to the votes ``[B, I, 1, P R]``."""
    if mask is not None:
        # What a masked capsule holds must not reach the gradient of the weight.
        u = u.masked_fill(~mask[:, :, None], 0.0)
    # Nothing is inferred from a number of elements: of an empty batch that is 0.
    P, K = poses(u, weight), weight.shape[3]
    if weight.shape[0] == 1:
        x = torch.nn.functional.linear(u if P == 1 else u.unflatten(2, (P, K)), weight[0, 0])
        return x.flatten(2).unsqueeze(2)
    if P > 1:
        B, I, _ = u.shape
        x = u.reshape(B, I, P, K).transpose(0, 1).flatten(1, 2)  # [I, B P, K]
        x = torch.bmm(x, weight[:, 0].transpose(1, 2))
        return x.reshape(I, B, 1, width(u, weight)).transpose(0, 1)
    return torch.bmm(u.transpose(0, 1), weight[:, 0].transpose(1, 2)).transpose(0, 1).unsqueeze(2)
