"""Helpers for problems on a GPU: draw, capture and compare them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from capsfast.bench.check import captured

from .accuracy import relative_l2, ulps
from .backends import Shape
from .problems import Case, Problem, run


def assert_same_bits(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        assert torch.equal(value, wanted[name]), name


def drawn(shape: Shape, dtype: torch.dtype = torch.float32, op: str = "dynamic_routing") -> Problem:
    """A problem drawn on the GPU, for sizes that take long to draw on the CPU. s is of order one."""
    B, I, J, D, K = shape
    where = {"device": "cuda", "dtype": dtype}
    if op == "dynamic_routing":
        inputs = {
            "u": torch.randn(B, I, K, **where),
            "weight": torch.empty(I, J, D, K, **where).normal_(0, 2 * J / (I * K) ** 0.5),
        }
    else:
        inputs = {"votes": torch.empty(B, I, J, D, **where).normal_(0, 2 * J / I**0.5)}
    return Problem(op, Case(coupling=False), inputs, {}, {"v": torch.randn(B, J, D, **where)})


def assert_as_accurate_as_einsum(problem: Problem, name: str) -> None:
    """Compares relative L2 errors against float64, all on the GPU."""
    got, plain = run(problem, name), run(problem, "reference")
    truth = run(problem.to(torch.float64, "cuda"), "reference")
    for key, value in got.items():
        assert bool(value.isfinite().all()), key
        allowed = 2 * relative_l2(plain[key].double(), truth[key]) + ulps(value.dtype)
        assert relative_l2(value.double(), truth[key]) <= allowed, key


def assert_replays(problems: list[Problem], name: str, need: Sequence[str] | None = None) -> None:
    """A graph of backend ``name`` that captured the first problem gives every problem's bits. need: as in run()."""
    wanted = [run(problem, name, need) for problem in problems]
    static = problems[0].copied()
    replay = captured(lambda: run(static, name, need))
    for problem, want in zip(problems[::-1], wanted[::-1], strict=True):
        static.overwrite(problem)
        assert_same_bits(replay(), want)
