"""Weights that all input capsules share, against the same mathematics in torch.

Measures the tables in docs/cpu-kernels.md, against torch code that forms no votes either, and in docs/recommenders.md,
InterestCapsules against its einsum form, which makes the votes [B, I, D] once, as published code does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import capsfast
from benchmarks.common import compare, keep, options

# Three iterations of dynamic routing, or one pass that scores with a query: B, I, J, D, K.
ROWS = [
    ("routing", 16, 2048, 32, 32, 32),
    ("routing", 256, 50, 8, 64, 64),
    ("routing", 64, 1152, 10, 16, 8),
    ("routing", 32, 2048, 20, 32, 16),
    ("routing", 256, 50, 4, 64, 64),
    ("pass", 32, 1024, 16, 32, 32),
]
# InterestCapsules: B, I, J for D = K = 64.
INTERESTS = [(2048, 50, 4), (4096, 200, 8)]
ITERATIONS = 3
Function = Callable[[Tensor, Tensor], Tensor]


def compiled(function: Function) -> Function:
    # Each row compiles anew; torch.compile refuses more than a few compilations of one function.
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, dynamic=False)


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
    for _ in range(ITERATIONS - 1):
        v = capsfast.squash(factored_pass(u, weight, total))
        total = total + v
    return v


def row(kind: str, B: int, I: int, J: int, D: int, K: int, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    leaves = (torch.randn(B, I, K, requires_grad=True), (torch.randn(J, D, K) / K**0.5).requires_grad_())
    query = torch.randn(B, J, D)

    def fused(u: Tensor, weight: Tensor) -> Tensor:
        if kind == "pass":
            return capsfast.routing_pass(u, weight[None], query=query).first
        return capsfast.dynamic_routing(u, weight[None], ITERATIONS)  # type: ignore[return-value]

    plain = (lambda u, weight: factored_pass(u, weight, query)) if kind == "pass" else factored_routing
    functions = {"capsfast": fused, "factored torch": plain, "factored torch.compile": compiled(plain)}
    sizes = {"kind": kind, "B": B, "I": I, "J": J, "D": D, "K": K}
    return {**sizes, **compare(functions, plain, leaves, torch.randn(B, J, D), seconds)}


def interest(B: int, I: int, J: int, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    D = 64
    layer = capsfast.nn.InterestCapsules(J, D, D, ITERATIONS, max_length=I)
    logits = layer.logits
    assert logits is not None

    def einsum(u: Tensor, W: Tensor) -> Tensor:
        """MIND, algorithm 1: ``u [B, I, K]``, ``W [1, 1, D, K]``."""
        votes = torch.einsum("dk,bik->bid", W[0, 0], u)
        b = logits.to(u.dtype).expand(u.shape[0], -1, -1)
        for t in range(ITERATIONS):
            s = torch.einsum("bij,bid->bjd", b.softmax(2), votes)
            n = s.square().sum(-1, keepdim=True)
            v = n / (1 + n) * s / torch.sqrt(n + 1e-8)
            if t < ITERATIONS - 1:
                b = b + torch.einsum("bid,bjd->bij", votes, v)
        return v

    def fused_votes(u: Tensor, W: Tensor) -> Tensor:
        votes = torch.nn.functional.linear(u, W[0, 0])[:, :, None]
        return capsfast.route_votes(votes, ITERATIONS, logits=logits)  # type: ignore[return-value]

    functions = {
        "InterestCapsules": lambda u, W: layer(u).vectors,
        "torch.compile einsum": compiled(einsum),
        "eager einsum": einsum,
        "fused votes": fused_votes,
    }
    leaves = (torch.randn(B, I, D, requires_grad=True), layer.W)
    sizes = {"B": B, "I": I, "J": J, "D": D, "K": D, "r": ITERATIONS}
    return {**sizes, **compare(functions, einsum, leaves, torch.randn(B, J, D), seconds)}


def main() -> None:
    arguments = options("shared_weights", __doc__, 10.0)
    record: dict[str, list[dict[str, Any]]] = {"rows": [], "measured": []}
    for sizes in ROWS:
        print(*sizes)
        record["rows"].append(row(*sizes, arguments.seconds))
    for shape in INTERESTS:
        print("InterestCapsules", *shape)
        record["measured"].append(interest(*shape, arguments.seconds))
    keep(arguments, "shared_weights", **record)


if __name__ == "__main__":
    main()
