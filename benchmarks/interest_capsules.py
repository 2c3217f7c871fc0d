"""InterestCapsules against its einsum form, eager and under torch.compile: the table in docs/recommenders.md.

The einsum form makes the votes once, [B, I, D], as published code does. "fused votes" is capsfast.route_votes on the
same votes.
"""

from typing import Any

import torch
from torch import Tensor

import capsfast
from benchmarks.common import compare, keep, options

SHAPES = ((2048, 50, 4), (4096, 200, 8))
D, ITERATIONS = 64, 3


def einsum(u: Tensor, W: Tensor, logits: Tensor) -> Tensor:
    """MIND, algorithm 1: ``u [B, I, K]``, ``W [1, 1, D, K]``, ``logits [I, J]``."""
    votes = torch.einsum("dk,bik->bid", W[0, 0], u)
    b = logits.to(u.dtype).expand(u.shape[0], -1, -1)
    for t in range(ITERATIONS):
        s = torch.einsum("bij,bid->bjd", b.softmax(2), votes)
        n = s.square().sum(-1, keepdim=True)
        v = n / (1 + n) * s / torch.sqrt(n + 1e-8)
        if t < ITERATIONS - 1:
            b = b + torch.einsum("bid,bjd->bij", votes, v)
    return v


def measure(B: int, I: int, J: int, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    layer = capsfast.nn.InterestCapsules(J, D, D, ITERATIONS, max_length=I)
    logits = layer.logits
    assert logits is not None
    compiled = torch.compile(einsum, fullgraph=True, dynamic=False)

    def fused_votes(u: Tensor, W: Tensor) -> Tensor:
        votes = torch.nn.functional.linear(u, W[0, 0])[:, :, None]
        return capsfast.route_votes(votes, ITERATIONS, logits=logits)  # type: ignore[return-value]

    functions = {
        "InterestCapsules": lambda u, W: layer(u).vectors,
        "torch.compile einsum": lambda u, W: compiled(u, W, logits),
        "eager einsum": lambda u, W: einsum(u, W, logits),
        "fused votes": fused_votes,
    }
    print(f"B={B} I={I} J={J}")
    leaves = (torch.randn(B, I, D, requires_grad=True), layer.W)
    found = compare(functions, functions["eager einsum"], leaves, torch.randn(B, J, D), seconds)
    return {"B": B, "I": I, "J": J, "D": D, "K": D, "r": ITERATIONS, **found}


def main() -> None:
    given = options("interest_capsules", __doc__, 10.0)
    keep(given, "interest_capsules", measured=[measure(*shape, given.seconds) for shape in SHAPES])


if __name__ == "__main__":
    main()
