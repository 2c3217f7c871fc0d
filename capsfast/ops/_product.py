"""Sizes of the product that makes votes.

Pose matrices come as ``u [B, I, P K]`` and ``weight [I or 1, J, R, K]``: P poses that share the weight, and votes of
D = P R numbers, those of one pose after the other. Else P is 1.
"""

import torch
from torch import Tensor


def poses(u: Tensor, weight: Tensor) -> int:
    """P."""
    K = weight.shape[3]
    return 1 if K == 0 else u.shape[2] // K


def width(u: Tensor, weight: Tensor) -> int:
    """D."""
    return poses(u, weight) * weight.shape[2]


def fake_sizes(u: Tensor, weight: Tensor) -> tuple[int, int, int, int]:
    """(B, I, J, D), after a look whether u and weight fit."""
    torch._check(u.dim() == 3 and weight.dim() == 4, lambda: "u must be [B, I, P K], weight [I, J, R, K]")
    torch._check(u.dtype == weight.dtype, lambda: "u and weight must have one dtype")
    B, I, numbers = u.shape
    rows, J, _, K = weight.shape
    torch._check(numbers == poses(u, weight) * K, lambda: "u and weight must agree in K")
    if rows != 1:
        torch._check(rows == I, lambda: "weight must have 1 or I rows")
    return B, I, J, width(u, weight)
