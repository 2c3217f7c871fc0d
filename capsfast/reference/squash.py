"""Squash non-linearities ``v = f(n) s`` with ``n = |s|^2``."""

from collections.abc import Callable

import torch
from torch import Tensor


def _norm(n: Tensor) -> Tensor:
    """``sqrt(n)`` with derivative 0 at 0 instead of infinity."""
    positive = n > 0
    return torch.where(positive, torch.sqrt(torch.where(positive, n, 1.0)), 0.0)


def _exp(n: Tensor, eps: float) -> Tensor:
    norm = torch.sqrt(n + eps)
    return -torch.expm1(-norm) / norm


# The radial factor f(n), by kind. csrc/math/squash.h holds the same table with derivatives.
RADIAL: dict[str, Callable[[Tensor, float], Tensor]] = {
    "paper": lambda n, eps: n / (1 + n) / torch.sqrt(n + eps),
    "half": lambda n, eps: n / (0.5 + n) / torch.sqrt(n + eps),
    "eps_outside": lambda n, eps: n / (1 + n) / (_norm(n) + eps),
    "exp": _exp,
    "unit": lambda n, eps: 1 / torch.sqrt(n + eps),
    "identity": lambda n, eps: torch.ones_like(n),
}


def squash(s: Tensor, dim: int = -1, eps: float = 1e-8, kind: str = "paper") -> Tensor:
    # float16 and bfloat16 can't hold eps and |s|^2, so the factor is computed in float32.
    wide = s.float() if s.dtype in (torch.float16, torch.bfloat16) else s
    n = (wide * wide).sum(dim, keepdim=True)
    return (RADIAL[kind](n, eps) * wide).to(s.dtype)
