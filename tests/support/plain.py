"""Routing by agreement in a few lines of torch, to test layers and models, with gradients."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from .backends import EMULATED, available

# Tests of layers in float64 on the CPU. Not for emulated backends and for other devices.
on_cpu = pytest.mark.parametrize(
    "by", [b for b in available() if b.device == "cpu" and torch.float64 in b.dtypes and b != EMULATED], ids=str
)


def squash(s: Tensor, kind: str = "paper") -> Tensor:
    n = s.square().sum(-1, keepdim=True)
    if kind == "exp":
        return (1 - torch.exp(-torch.sqrt(n + 1e-8))) / torch.sqrt(n + 1e-8) * s
    assert kind == "paper"
    return n / (1 + n) / torch.sqrt(n + 1e-8) * s


def couple(b: Tensor, softmax: str = "out") -> Tensor:
    """Softmax of ``b [B, I, J]``; 0 if no logit is finite."""
    dim = 2 if softmax == "out" else 1
    e = (b - b.amax(dim, keepdim=True).nan_to_num(neginf=0.0)).exp()
    total = e.sum(dim, keepdim=True)
    return e / torch.where(total > 0, total, 1)


def route(
    votes: Tensor,
    num_iterations: int = 3,
    logits: Tensor | None = None,
    bias: Tensor | None = None,
    softmax: str = "out",
    kind: str = "paper",
) -> tuple[Tensor, Tensor]:
    """``votes [B, I, J, D]`` to ``(v, c)``. A logit of -inf masks the pair."""
    b = torch.zeros_like(votes[..., 0]) if logits is None else logits.expand(votes.shape[:3])
    for _ in range(num_iterations):
        c = couple(b, softmax)
        s = (c[..., None] * votes).sum(1)
        v = squash(s if bias is None else s + bias, kind)
        b = b + (votes * v[:, None]).sum(-1)
    return v, c


def votes(u: Tensor, weight: Tensor) -> Tensor:
    """``u [B, I, K]``, ``weight [I or 1, J, D, K]`` to ``[B, I, J, D]``."""
    return (weight * u[:, :, None, None, :]).sum(-1)


def assert_same(got: object, wanted: object, tolerance: float = 1e-9) -> None:
    """Compares float64 results of two ways to compute the same."""
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def gradients(found: Tensor | Sequence[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """For the same random gradients of the results in every call with results of these shapes."""
    found = (found,) if isinstance(found, Tensor) else tuple(found)
    torch.manual_seed(2)
    seeds = [torch.randn(each.shape, dtype=each.dtype) for each in found]  # contiguous, whatever the strides of outputs
    return list(torch.autograd.grad(found, leaves, seeds, allow_unused=True, materialize_grads=True))


def assert_alike(
    got: Tensor | Sequence[Tensor], wanted: Tensor | Sequence[Tensor], leaves: list[Tensor], tolerance: float = 1e-9
) -> None:
    """Compares float64 results and their gradients."""
    one, other = ((each,) if isinstance(each, Tensor) else tuple(each) for each in (got, wanted))
    assert_same(one, other, tolerance)
    assert_same(gradients(one, leaves), gradients(other, leaves), tolerance)
