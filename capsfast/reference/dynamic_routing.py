"""Votes ``W_ij u_i`` (Sabour, Frosst, Hinton 2017, eq. 2), then routing by agreement."""

import torch
from torch import Tensor

from ..options import Options
from .route_votes import route_votes


def votes(u: Tensor, weight: Tensor) -> Tensor:
    """``u [B, I, P K]``, ``weight [I or 1, J, R, K]`` to the votes ``[B, I, J, P R]``; P is 1 but for pose matrices."""
    K = weight.shape[3]
    if u.shape[2] != K:
        weight = weight.expand(u.shape[1], *weight.shape[1:])
        return torch.einsum("ijrk,bipk->bijpr", weight, u.unflatten(2, (-1, K))).flatten(3)
    if weight.shape[0] == 1:
        return torch.einsum("jdk,bik->bijd", weight[0], u)
    return torch.einsum("ijdk,bik->bijd", weight, u)


def dynamic_routing(
    u: Tensor,
    weight: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    out_mask: Tensor | None,
    options: Options,
    share_batch_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """``u [B, I, P K]`` to output capsules ``v [B, J, D]`` and the last coupling ``[B, I, J]``."""
    if mask is not None:
        # Before the product: what a masked capsule holds (NaN, say) must not reach dW either.
        u = u.masked_fill(~mask[:, :, None], 0.0)
    return route_votes(votes(u, weight), logits, bias, mask, out_mask, options, share_batch_logits)
