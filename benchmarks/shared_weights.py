"""Weights that all input capsules share, against the same mathematics in torch, also without votes.

Measures the rows of the table in docs/cpu-kernels.md.
"""

from typing import Any

import torch
from torch import Tensor

import capsfast
from benchmarks.common import compare, keep, options

# B, I, J, D, K, for three iterations of dynamic routing, or for one pass that scores with a query.
ROWS = [
    ("routing", 16, 2048, 32, 32, 32),
    ("routing", 256, 50, 8, 64, 64),
    ("routing", 64, 1152, 10, 16, 8),
    ("routing", 32, 2048, 20, 32, 16),
    ("routing", 256, 50, 4, 64, 64),
    ("pass", 32, 1024, 16, 32, 32),
]


def factored_pass(u: Tensor, weight: Tensor, query: Tensor | None) -> Tensor:
    """The weighted sum ``[B, J, D]`` of one pass over ``u [B, I, K]`` with ``weight [J, D, K]``."""
    if query is None:
        sums = u.mean(1, keepdim=True).expand(-1, len(weight), -1) * (u.shape[1] / len(weight))
    else:
        scores = u @ torch.einsum("jdk,bjd->bkj", weight, query.to(u.dtype))
        sums = scores.softmax(2).transpose(1, 2) @ u
    return torch.einsum("jdk,bjk->bjd", weight, sums)


def factored_routing(u: Tensor, weight: Tensor) -> Tensor:
    total = v = capsfast.squash(factored_pass(u, weight, None))
    for _ in range(2):
        v = capsfast.squash(factored_pass(u, weight, total))
        total = total + v
    return v


def measured(kind: str, B: int, I: int, J: int, D: int, K: int, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    leaves = (torch.randn(B, I, K, requires_grad=True), (torch.randn(J, D, K) / K**0.5).requires_grad_())
    query = torch.randn(B, J, D)

    def plain(u: Tensor, weight: Tensor) -> Tensor:
        return factored_pass(u, weight, query) if kind == "pass" else factored_routing(u, weight)

    def fused(u: Tensor, weight: Tensor) -> Tensor:
        if kind == "pass":
            return capsfast.routing_pass(u, weight[None], query=query).first
        return capsfast.dynamic_routing(u, weight[None])  # type: ignore[return-value]

    compiled = torch.compile(plain, dynamic=False)
    functions = {"capsfast": fused, "factored torch": plain, "factored torch.compile": compiled}
    sizes = {"kind": kind, "B": B, "I": I, "J": J, "D": D, "K": K}
    print(sizes)
    return {**sizes, **compare(functions, plain, leaves, torch.randn(B, J, D), seconds)}


def main() -> None:
    given = options("shared_weights", __doc__, 10.0)
    keep(given, "shared_weights", rows=[measured(*row, given.seconds) for row in ROWS])


if __name__ == "__main__":
    main()
