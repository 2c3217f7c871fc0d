"""Votes ``W_ij u_i`` (Sabour, Frosst, Hinton 2017, eq. 2)."""

import torch
from torch import Tensor

from ..arguments import Call


def product(u: Tensor, weight: Tensor) -> Tensor:
    """``u [B, I, P K]``, ``weight [I or 1, J, R, K]`` to the votes ``[B, I, J, P R]``; P is 1 but for pose matrices."""
    K = weight.shape[3]
    if u.shape[2] != K:
        weight = weight.expand(u.shape[1], *weight.shape[1:])
        return torch.einsum("ijrk,bipk->bijpr", weight, u.unflatten(2, (-1, K))).flatten(3)
    if weight.shape[0] == 1:
        return torch.einsum("jdk,bik->bijd", weight[0], u)
    return torch.einsum("ijdk,bik->bijd", weight, u)


def votes(call: Call) -> Tensor:
    """``[B, I, J or 1, D]``, 0 for masked input capsules: what these hold (NaN, say) must reach no gradient, dW's too."""
    u, mask = call.u, call.parameters.mask
    if mask is not None:
        u = u.masked_fill(~mask.reshape(*mask.shape, *(1,) * (u.dim() - 2)), 0.0)
    return u if call.weight is None else product(u, call.weight)
