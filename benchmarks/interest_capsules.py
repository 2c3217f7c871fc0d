"""InterestCapsules against its einsum form, eager and under torch.compile.

    python benchmarks/interest_capsules.py --out docs/records/interest-capsules.json

All take turns, so that a drift of the machine meets all of them. The einsum form makes the votes once, ``[B, I, D]``,
as published code does; "fused votes" is capsfast.route_votes over the same votes. Outputs and gradients are compared
first.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import capsfast
from capsfast.bench.checkout import why_not_this_one
from capsfast.bench.record import environment
from capsfast.bench.timing import Timing
from capsfast.files import write_text

CPU = torch.device("cpu")
SHAPES = ((2048, 50, 4), (4096, 200, 8))
OURS, COMPILED, EAGER, VOTES = "InterestCapsules", "torch.compile einsum", "eager einsum", "fused votes"


def squash(s: Tensor) -> Tensor:
    n = s.square().sum(-1, keepdim=True)
    return n / (1 + n) * s / torch.sqrt(n + 1e-8)


def einsum(u: Tensor, W: Tensor, logits: Tensor, num_iterations: int) -> Tensor:
    """MIND, algorithm 1: ``u [B, I, K]``, ``W [1, 1, D, K]``, ``logits [I, J]``."""
    votes = torch.einsum("dk,bik->bid", W[0, 0], u)
    b = logits.expand(u.shape[0], -1, -1)
    for t in range(num_iterations):
        v = squash(torch.einsum("bij,bid->bjd", b.softmax(2), votes))
        if t < num_iterations - 1:
            b = b + torch.einsum("bid,bjd->bij", votes, v)
    return v


def contenders(layer: capsfast.nn.InterestCapsules, r: int) -> dict[str, Callable[[Tensor], Tensor]]:
    assert layer.logits is not None
    W, logits = layer.W, layer.logits
    compiled = torch.compile(einsum, fullgraph=True, dynamic=False)
    return {
        OURS: lambda u: layer(u).vectors,
        COMPILED: lambda u: compiled(u, W, logits, r),
        EAGER: lambda u: einsum(u, W, logits, r),
        VOTES: lambda u: capsfast.route_votes(torch.nn.functional.linear(u, W[0, 0])[:, :, None], r, logits=logits),
    }


def timed(step: Callable[[], Any], clock: Callable[[], float]) -> float:
    begin = clock()
    step()
    return clock() - begin


def measure(B: int, I: int, J: int, D: int, r: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    torch.manual_seed(0)
    layer = capsfast.nn.InterestCapsules(J, D, D, r, max_length=I)
    u, dv = torch.randn(B, I, D, requires_grad=True), torch.randn(B, J, D)
    functions = contenders(layer, r)

    def both(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        v = function(u)
        return (v, *torch.autograd.grad(v, (u, layer.W), dv))

    def forward(function: Callable[[Tensor], Tensor]) -> None:
        with torch.no_grad():
            function(u)

    few = u.detach()[:64].double().requires_grad_()
    W = layer.W.detach().double().requires_grad_()
    wide = einsum(few, W, layer.logits.double(), r)  # type: ignore[union-attr]
    truth = (wide.detach(), *torch.autograd.grad(wide, (few,), dv[:64].double()))
    found: dict[str, Any] = {"B": B, "I": I, "J": J, "D": D, "K": D, "r": r, "errors": {}, "forward": {}, "both": {}}
    weight_gradients = {}
    for name, function in functions.items():
        v, du, weight_gradients[name] = both(function)
        errors = [
            float((got[:64] - right).norm() / right.norm()) for got, right in zip((v.detach(), du), truth, strict=True)
        ]
        errors.append(float((weight_gradients[name] - weight_gradients[OURS]).norm() / weight_gradients[OURS].norm()))
        if max(errors) > 1e-4:
            raise SystemExit(f"interest_capsules: {name} is wrong by {errors}")
        found["errors"][name] = dict(zip(("v", "du", "dW against InterestCapsules"), errors, strict=True))
    for kind, step in (("forward", forward), ("both", both)):
        seconds: dict[str, list[float]] = {name: [] for name in functions}
        for n in range(rounds + 2):
            for name, function in functions.items():
                passed = timed(lambda step=step, function=function: step(function), clock)
                if n >= 2:  # the first ones warm up
                    seconds[name].append(passed)
        for name, values in seconds.items():
            # Of one round: a neighbour on the machine meets both.
            ratio = statistics.median(value / ours for value, ours in zip(values, seconds[OURS], strict=True))
            found[kind][name] = {**asdict(Timing.of(values)), "times_ours": ratio}
            print(f"B={B} I={I} J={J} {kind}: {name} {1e3 * statistics.median(values):.1f} ms, {ratio:.2f}x ours")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="time of the processor, not of the clock, with one thread: on a busy machine",
    )
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes, from the smallest on")
    given = parser.parse_args()
    hides = why_not_this_one("benchmarks/interest_capsules.py")
    if hides:
        parser.error(hides)
    threads, clock = (1, time.thread_time) if given.cpu_time else (given.threads, time.perf_counter)
    torch.set_num_threads(threads)
    record = {
        "command": f"python benchmarks/interest_capsules.py {' '.join(sys.argv[1:])}".strip(),
        "environment": environment(CPU),
        "clock": "processor" if given.cpu_time else "wall",
        "measured": [measure(B, I, J, 64, 3, given.rounds, clock) for B, I, J in SHAPES[: given.shapes]],
    }
    if given.out is not None:
        write_text(given.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
