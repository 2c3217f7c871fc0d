"""The rows family of CUDA kernels in the emulator: what it serves, and its special shapes.

Other files test what every backend must do. This file tests the edges of tiles, the kinds of launches, and the calls
that the general kernels serve.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from capsfast import backend as choice
from capsfast.ops import define

from .emulator import backend as emulator
from .support.accuracy import check
from .support.backends import ALL_DTYPES, Backend, Shape
from .support.problems import QUIET, QUIET_CASES, Case, PassCase, make, relayout, run

ROOT = Path(__file__).parent.parent
BACKEND = Backend(emulator.NAME, "cpu", ALL_DTYPES, fused=True, max_work=20_000, prefix=emulator.PREFIX)
# Each of them alone sends a call to another family.
OPTIONS = (
    Case(),
    Case(softmax="in", coupling=False),
    Case(leaky=True, coupling=False),
    Case(logits="IJ", coupling=False),
    Case(mask=True, coupling=False),
    Case(out_mask=True, coupling=False),
)
# Each size that kernels are compiled for: padded and full in J, D and K. Full and partial tiles of samples; several
# tiles in a block, in a cluster and one after the other; fewer input capsules than blocks.
SHAPES = (
    Shape(1, 5, 10, 16, 8),
    Shape(17, 3, 5, 8, 4),
    Shape(33, 3, 3, 16, 16),
    Shape(16, 9, 6, 16, 8),
    Shape(32, 2, 7, 13, 3),
    Shape(3, 17, 2, 15, 1),
    Shape(2, 3, 12, 16, 8),
    Shape(20, 2, 11, 9, 7),
    Shape(20, 2, 8, 9, 14),
    Shape(70, 2, 1, 1, 11),
    Shape(150, 1, 10, 16, 8),
)

# A device that runs all blocks of these small shapes at the same time.
LARGE: dict[str, Any] = {"multiprocessors": 6, "shared_bytes": 227 * 1024}


def assert_together(case: Case, ran: dict[str, int]) -> None:
    """One launch for the whole forward, and one for the backward without its gradient pass."""
    iterates = case.num_iterations > 1 and case.gradient == "full"
    assert (
        sum(count for name, count in ran.items() if re.fullmatch("rows::AccumulateArgs.* cooperative", name))
        == 1 + iterates
    )
    assert ran.get("UpdateArgs", 0) == (not iterates)
    assert sum(count for name, count in ran.items() if name.startswith("rows::GradientArgs")) == 1
    assert not {"rows::AccumulateArgs", "AccumulateArgs", "GradientArgs"} & set(ran)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    emulator.install()


def launches(shape: Shape, case: Case, op: str = "dynamic_routing", dtype: torch.dtype = torch.float32) -> set[str]:
    emulator.take_launches()
    run(make(shape, case, op, dtype), emulator.NAME)
    return set(emulator.take_launches())


@pytest.mark.parametrize("case", QUIET_CASES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: Shape, case: Case) -> None:
    emulator.take_launches()
    with emulator.device(**LARGE):
        check(make(shape, case, dtype=torch.float32), BACKEND)
    assert_together(case, emulator.take_launches(ways=True))


@pytest.mark.rows(4)
@pytest.mark.parametrize("case", [QUIET, Case(shared=True, coupling=False)], ids=str)
@pytest.mark.parametrize(
    ("shape", "device"),
    [
        # Clusters whose blocks share the input capsules of a unit, or have none.
        (Shape(100, 40, 3, 4, 2), {"multiprocessors": 4, "shared_bytes": 227 * 1024}),
        (Shape(1024, 2, 2, 1, 1), {"multiprocessors": 2, "shared_bytes_together": 200 * 1024}),
        # Units that begin and end within a group, units with several groups, and more units than groups.
        (Shape(300, 7, 3, 4, 2), {"multiprocessors": 5}),
        (Shape(300, 5, 2, 4, 2), {"multiprocessors": 1, "clusters": False}),
        (Shape(40, 9, 3, 4, 2), {"multiprocessors": 7, "clusters": False}),
        # Blocks with less shared memory than the largest shape needs.
        (Shape(33, 6, 10, 16, 16), {"multiprocessors": 2, "shared_bytes": 80 * 1024}),
    ],
    ids=lambda value: str(value) if isinstance(value, Shape) else "",
)
def test_ways_to_cut_the_work(shape: Shape, device: dict[str, Any], case: Case) -> None:
    emulator.take_launches()
    with emulator.device(**device):
        check(make(shape, case, dtype=torch.float32), BACKEND)
    clusters = {name: count for name, count in emulator.take_launches(ways=True).items() if " cluster4" in name}
    # The forward, and the backward without its gradient pass.
    assert clusters == ({"rows::AccumulateArgs cluster4 cooperative": 2} if shape.B in (100, 1024) else {})


@pytest.mark.rows((2, 6))
@pytest.mark.parametrize(
    "refusal",
    [{"cooperative": False}, {"crowded": True}, {"capturing": True}],
    ids=["no-device", "crowded", "graph"],
)
@pytest.mark.parametrize("case", QUIET_CASES[:3], ids=str)
@pytest.mark.parametrize("shape", [Shape(33, 60, 3, 16, 8), Shape(2, 90, 10, 8, 4)], ids=str)
def test_one_launch_or_many(shape: Shape, case: Case, refusal: dict[str, Any]) -> None:
    """If the device does not run all blocks of a launch together, or a graph is captured, every step is a launch."""
    problem = make(shape, case, dtype=torch.float32)
    emulator.take_launches()
    with emulator.device(**(LARGE | refusal)):
        apart = check(problem, BACKEND)
    ran = emulator.take_launches(ways=True)
    backward = case.num_iterations - 1 if case.gradient == "full" else 0
    passes = sum(count for name, count in ran.items() if name.startswith("rows::AccumulateArgs"))
    assert passes == case.num_iterations + backward
    assert ran["UpdateArgs"] == case.num_iterations + 1 + backward
    with emulator.device(**LARGE):
        together = run(problem, emulator.NAME)
    assert any(name.endswith(" cooperative") for name in emulator.take_launches(ways=True))
    for name, value in together.items():  # the same sums in the same order
        assert torch.equal(value, apart[name]), name


# Prints the launches of a call, how many tensors it asked for, and its results bit by bit.
ALONE = """
import hashlib

import torch
from tests.emulator import backend as emulator
from tests.support.backends import Shape
from tests.support.problems import Case, make, run

emulator.install()
with emulator.device(multiprocessors=6, shared_bytes_together=228 * 1024), torch.profiler.profile() as profile:
    results = run(make(Shape(33, 130, 3, 16, 8), Case(coupling=False), dtype=torch.float32), emulator.NAME)
print(*sorted(emulator.take_launches(ways=True)), sep="|")
print(sum(event.count for event in profile.key_averages() if event.key == "aten::new_empty"))
print({name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in results.items()})
"""


@pytest.mark.slow
def test_the_environment_forbids_cooperative_launches_and_cuts_the_scratch_memory() -> None:
    found = []
    for names in ((), ("CAPSFAST_COOPERATIVE", "CAPSFAST_SCRATCH_APART")):
        environment = os.environ | dict(zip(names, "01", strict=False))
        command = [sys.executable, "-c", ALONE]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert ran.returncode == 0, ran.stderr
        found.append(ran.stdout.splitlines())
    (together, tensors, results), (apart, more_tensors, same_results) = found
    assert "rows::AccumulateArgs cluster4 cooperative" in together.split("|")
    assert "rows::AccumulateArgs cluster4" in apart.split("|") and "cooperative" not in apart
    assert int(more_tensors) > int(tensors) and same_results == results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", QUIET_CASES[:2], ids=str)
@pytest.mark.parametrize("shape", [Shape(5, 9, 10, 16, 8), Shape(18, 3, 4, 8, 16), Shape(2, 3, 12, 7, 5)], ids=str)
def test_sixteen_bits(shape: Shape, case: Case, dtype: torch.dtype) -> None:
    check(make(shape, case, dtype=dtype), BACKEND)
    assert "rows::AccumulateArgs" in launches(shape, case, dtype=dtype)


def test_any_number_of_iterations() -> None:
    shape, case = Shape(2, 3, 10, 16, 8), Case(num_iterations=12, coupling=False)
    check(make(shape, case, dtype=torch.float32), BACKEND, slack=4)  # saturated: an ulp of a logit decides
    assert "GradientArgs" not in launches(shape, case)


def test_a_batch_is_cut_evenly_for_every_multiprocessor() -> None:
    """From B = 128 on a launch has work for all blocks of an H100, cut evenly."""
    # The emulator knows nothing of registers, which leave a GPU room for one block. This much memory does so, too.
    with emulator.device(multiprocessors=132, shared_bytes=200 * 1024):
        for B in range(128, 4097, 64):
            for backward in (False, True):
                plan = emulator.rows_plan(B, 1152, 10, 16, 8, backward)
                tiles = -(-B // 16)
                padded = plan["groups"] * plan["tiles"]
                assert tiles / padded > 0.85 and plan["units"] * plan["cluster"] / 132 > 0.85, (B, plan)
                pairs = plan["groups"] * 1152
                assert pairs // plan["units"] >= 8  # so one unit more or less matters little
            plan = emulator.rows_plan(B, 1152, 10, 16, 8, True)
            chunks, groups = -(-1152 // plan["gradient_chunk"]), -(-tiles // plan["gradient_tiles"])
            rounds = -(-chunks // plan["splits"]) * -(-groups // plan["parts"])
            assert plan["parts"] * plan["splits"] <= 132
            assert chunks * groups / 132 / rounds > 0.85, (B, plan)


@pytest.mark.parametrize(
    ("shape", "case", "op", "dtype"),
    [
        (Shape(2, 3, 4, 16, 8), QUIET, "dynamic_routing", torch.float64),
        (Shape(2, 3, 4, 16, 17), QUIET, "dynamic_routing", torch.float32),
        (Shape(2, 3, 4, 17, 8), QUIET, "dynamic_routing", torch.float32),
        (Shape(2, 2, 13, 8, 4), QUIET, "dynamic_routing", torch.float32),
        (Shape(2, 2, 11, 8, 9), QUIET, "dynamic_routing", torch.float32),
        (Shape(2, 3, 4, 6, 1), QUIET, "route_votes", torch.float32),
        *((Shape(2, 3, 4, 16, 8), option, "dynamic_routing", torch.float32) for option in OPTIONS),
    ],
    ids=str,
)
def test_what_the_family_does_not_serve_goes_to_another(shape: Shape, case: Case, op: str, dtype: torch.dtype) -> None:
    assert "rows::AccumulateArgs" not in launches(shape, case, op, dtype)


def test_a_weight_that_is_not_contiguous_goes_to_another_family() -> None:
    problem = make(Shape(2, 3, 4, 16, 8), QUIET, dtype=torch.float32)
    problem.inputs["weight"] = problem.inputs["weight"].transpose(1, 2).contiguous().transpose(1, 2)
    emulator.take_launches()
    check(problem, BACKEND)
    assert "rows::AccumulateArgs" not in emulator.take_launches()


# The same weight in other memory: J and D exchanged, the rows of input capsules apart, numbers apart.
MOVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda weight: weight,
    "transposed": lambda weight: weight.transpose(1, 2).contiguous().transpose(1, 2),
    "spread": lambda weight: torch.stack([weight, weight], 1)[:, 0],
    "sliced": partial(relayout, kind="sliced"),
}


# Sizes on both sides of each limit, empty calls, options.
LIMITS = (
    *((Shape(2, 2, J, D, K), QUIET) for J in (10, 11, 12, 13) for D in (16, 17) for K in (8, 9, 16, 17)),
    *((Shape(*(0 if axis == empty else 2 for axis in range(5))), QUIET) for empty in range(5)),
    *((Shape(2, 3, 4, 5, 6), case) for case in (*QUIET_CASES, *OPTIONS)),
)


@pytest.mark.rows(99)
@pytest.mark.parametrize(
    ("shape", "case", "op", "dtype", "moved"),
    [
        *((shape, case, "dynamic_routing", torch.float32, "") for shape, case in LIMITS),
        *((Shape(2, 3, 4, 5, 6), QUIET, "dynamic_routing", dtype, "") for dtype in ALL_DTYPES),
        *((Shape(2, 3, 4, 5, 6), QUIET, "dynamic_routing", torch.float32, moved) for moved in ("transposed", "spread")),
        (Shape(2, 3, 1, 5, 6), QUIET, "dynamic_routing", torch.float32, "transposed"),
        (Shape(2, 3, 4, 5, 1), QUIET, "dynamic_routing", torch.float32, "sliced"),
        (Shape(2, 3, 4, 6, 1), QUIET, "route_votes", torch.float32, ""),
        (Shape(2, 3, 4, 5, 6), PassCase(query=True), "routing_pass", torch.float32, ""),
        (Shape(2, 3, 4, 5, 1), PassCase(query=True), "votes_pass", torch.float32, ""),
    ],
    ids=str,
)
def test_the_choice_of_a_backend_knows_what_the_family_serves(
    shape: Shape, case: Any, op: str, dtype: torch.dtype, moved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """capsfast.backend and why_not() of rows/kernels.h have the same limits."""
    served = []

    def choose(call: Any, name: str | None, with_coupling: bool = False) -> str:
        served.append(choice._served_by_rows(call, with_coupling))
        return choice.choose(call, name, with_coupling)

    monkeypatch.setattr(define, "choose", choose)
    problem = make(shape, case, op, dtype)
    if "weight" in problem.inputs:
        problem.inputs["weight"] = MOVED[moved](problem.inputs["weight"])
    emulator.take_launches()
    run(problem, emulator.NAME)
    ran = emulator.take_launches()
    assert served == ["rows::AccumulateArgs" in ran] == ["rows::GradientArgs" in ran]
    if served[0]:
        assert not {"AccumulateArgs", "GradientArgs"} & set(ran)
