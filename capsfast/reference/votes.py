"""Votes ``W_ij u_i`` (Sabour, Frosst, Hinton 2017, eq. 2)."""

import torch
from torch import Tensor

from ..calls.arguments import Call


def product(u: Tensor, weight: Tensor) -> Tensor:
    """The votes ``[B, I, J, P R]`` of ``u [B, I, P K]`` and ``weight [I or 1, J, R, K]``. P > 1: pose matrices."""
    K = weight.shape[3]
    if u.shape[2] != K:
        weight = weight.expand(u.shape[1], *weight.shape[1:])
        return torch.einsum("ijrk,bipk->bijpr", weight, u.unflatten(2, (-1, K))).flatten(3)
    if weight.shape[0] == 1:
        return torch.einsum("jdk,bik->bijd", weight[0], u)
    return torch.einsum("ijdk,bik->bijd", weight, u)


def votes(call: Call) -> Tensor:
    """``[B, I, J or 1, D]``, 0 for masked input capsules.

    Their values, such as NaN, must not reach any gradient, including dW; values of their weight must not reach a sum.
    """
    u, mask = _without(call.u, call.parameters.mask), call.parameters.mask
    return u if call.weight is None else _without(product(u, call.weight), mask)


def _without(value: Tensor, mask: Tensor | None) -> Tensor:
    return value if mask is None else value.masked_fill(~mask.reshape(*mask.shape, *(1,) * (value.dim() - 2)), 0.0)
