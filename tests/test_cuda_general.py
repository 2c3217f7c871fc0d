"""The general CUDA kernels in the emulator: votes given, passes, the edges of their tiles, and what they refuse.

test_routing.py and test_routing_edges.py test what every backend must do.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from .emulator import backend as emulator
from .support.accuracy import check
from .support.backends import EMULATED, Shape
from .support.passes import (
    LINEAR,
    LINEAR_WAYS,
    PASS_OPS,
    SMALL,
    PassCase,
    PassOp,
    make,
    normalized,
)
from .support.problems import LOADED as ROUTED_IN
from .support.problems import LOADED_OUT, PLAIN, Case, run
from .support.problems import make as make_routing


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    emulator.install()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case", [PLAIN, LOADED_OUT, ROUTED_IN, Case(num_iterations=5, gradient="last", logits="BIJ", mask=True)], ids=str
)
@pytest.mark.parametrize(
    "shape",
    [Shape(2, 7, 10, 16, 1), Shape(9, 41, 3, 32, 1), Shape(2, 70, 1, 16, 1), Shape(1, 2, 66, 8, 1)],
    ids=str,
)
def test_votes(shape: Shape, case: Case, dtype: torch.dtype) -> None:
    problem = make_routing(shape, case, "route_votes", dtype)
    votes = problem.inputs["votes"]
    off = torch.full((votes.numel() + 1,), torch.nan, dtype=dtype)  # votes may begin at any address
    problem.inputs["votes"] = off[1:].view_as(votes).copy_(votes)
    check(problem, EMULATED)


@pytest.mark.parametrize("dtype", EMULATED.dtypes, ids=str)
@pytest.mark.parametrize("case", [PLAIN, ROUTED_IN], ids=str)
def test_a_gpu_before_tensor_cores_of_tf32(case: Case, dtype: torch.dtype) -> None:
    with emulator.device(architecture=75, shared_bytes=63 * 1024, clusters=False):
        emulator.take_launches()
        check(make_routing(Shape(5, 9, 3, 16, 8), case, dtype=dtype), EMULATED)
        check(PASS_OPS[0].make(Shape(5, 9, 3, 16, 8), LINEAR, dtype), EMULATED)
    assert not any(name.startswith("rows::") for name in emulator.take_launches())


def test_a_block_may_have_shared_memory_that_no_plan_asked_for() -> None:
    shape = Shape(33, 2, 10, 16, 16)

    def plans(kib: int, fixed: int) -> list[dict[str, int]]:
        with emulator.device(shared_bytes=kib * 1024, fixed_shared_bytes=fixed):
            return [emulator.rows_plan(*shape, backward) for backward in (False, True)]

    # Devices on which the largest plan would fit if the block had nothing else.
    narrow = [kib for kib in range(80, 229) if plans(kib, 0) != plans(kib, 1024)]
    assert narrow
    for kib in narrow:
        with emulator.device(shared_bytes=kib * 1024, fixed_shared_bytes=1024):
            run(make_routing(shape, Case(coupling=False), dtype=torch.float32), emulator.NAME)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", [*LINEAR_WAYS, PassCase(query=True, logits="IJ", prior=True)], ids=str)
@pytest.mark.parametrize("op", PASS_OPS, ids=str)
@pytest.mark.parametrize(
    "shape",
    # More output capsules than a tile in float64, or in both types, with short or long poses; vectors and poses longer
    # than a tile; several tiles of samples.
    [
        Shape(2, 3, 70, 2, 2),
        Shape(2, 9, 20, 14, 1),
        Shape(2, 3, 33, 16, 72),
        Shape(1, 2, 2, 516, 9),
        Shape(2, 3, 2, 3, 130),
        Shape(19, 5, 33, 3, 2),
    ],
    ids=str,
)
def test_more_than_a_tile(shape: Shape, op: PassOp, case: PassCase, dtype: torch.dtype) -> None:
    check(op.make(shape, case, dtype), EMULATED)


@pytest.mark.parametrize("case", [PassCase(), PassCase(leaky=True, mask=True, out_mask=True), *LINEAR_WAYS], ids=str)
@pytest.mark.parametrize("op", PASS_OPS, ids=str)
# More tiles than are summed in float: of input capsules in an accumulating pass, of samples in the gradient pass.
@pytest.mark.parametrize("shape", [Shape(33, 90, 3, 4, 2), Shape(70, 24, 3, 4, 2)], ids=str)
def test_splits_longer_than_a_tile(shape: Shape, op: PassOp, case: PassCase) -> None:
    with emulator.device(multiprocessors=1):
        for how in ("out", "in"):
            check(op.make(shape, normalized(case, how), torch.float32), EMULATED)


@pytest.mark.parametrize("leaky", [False, True])
def test_a_maximum_that_rises_along_the_input_capsules(leaky: bool) -> None:
    # Logits that go up or down in one split, farther than exp() can hold: sums, masses and totals are rescaled often.
    case = PassCase(query=True, logits="BIJ", normalize="in", leaky=leaky, lse=True)
    problem = make((33, 90, 4, 5, 2), case, dtype=torch.float32)
    problem.inputs["logits"] += torch.linspace(-55, 55, 90)[None, :, None] * torch.tensor([1.0, -1.0]).repeat(2)
    problem.inputs["logits"][0, :7] = -torch.inf
    with emulator.device(multiprocessors=1):
        found = check(problem, EMULATED, slack=4)
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("op", PASS_OPS, ids=str)
@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"precision": True}, "it serves linear passes, without precision"),
        ({"center": True}, "it serves linear passes, without center"),
        ({"activation": True}, "it serves linear passes, without activation"),
        ({"second": True}, "it serves linear passes, without second"),
        ({"precision": True, "center": True, "second": True}, "without precision, center, second"),
        ({"normalize": "sigmoid"}, "it serves normalize 'out' and 'in', got 'sigmoid'"),
        ({"normalize": "none"}, "it serves normalize 'out' and 'in', got 'none'"),
        ({"normalize": "lse"}, "it serves normalize 'out' and 'in', got 'lse'"),
        ({"shared": "J"}, "it does not serve votes that all output capsules share"),
    ],
    ids=str,
)
def test_what_is_not_served_is_named(op: PassOp, asked: dict[str, Any], named: str) -> None:
    problem = make(op.fit(SMALL), replace(LINEAR, **asked), op.name, torch.float32)
    with pytest.raises(
        RuntimeError, match=rf"capsfast.{op.name}: backend 'emulated' cannot serve this call: .*{named}"
    ):
        run(problem, emulator.NAME)


@pytest.mark.parametrize(("op", "more"), [(PASS_OPS[0], {"poses": 2}), (PASS_OPS[1], {"spatial": (2, 3)})], ids=str)
def test_pose_matrices_and_positions_are_named(op: PassOp, more: dict[str, Any]) -> None:
    problem = make(op.fit(Shape(2, 3, 4, 6, 5)), replace(LINEAR, **more), op.name, torch.float32)
    with pytest.raises(RuntimeError, match="it does not serve pose matrices, nor votes with axes of positions"):
        run(problem, emulator.NAME)
