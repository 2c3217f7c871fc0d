"""The columns family of CUDA kernels in the emulator, and what it has in common with the rows family: tensor cores.

Other files test what every backend must do. This file tests the edges of strips, column warps, steps and stages, the
ways to cut a call, and launches that start early. The device takes the columns family also for calls that the rows
family serves.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import capsfast

from .emulator import backend as emulator
from .support.accuracy import check, relative_l2
from .support.backends import ALL_DTYPES, Backend, Shape
from .support.problems import QUIET, QUIET_CASES, Case, Problem, call, make, relayout, run

ROOT = Path(__file__).parent.parent
BACKEND = Backend(emulator.NAME, "cpu", ALL_DTYPES, fused=True, max_work=20_000, prefix=emulator.PREFIX)
# Small shapes take several blocks of threads.
DEVICE: dict[str, Any] = {"multiprocessors": 6, "shared_bytes": 227 * 1024, "columns_first": True}
ALL_OPTIONS = Case(leaky=True, logits="BIJ", mask=True, out_mask=True, bias=True)
OPTIONS = (
    Case(),
    Case(leaky=True, coupling=False),
    Case(logits="IJ", coupling=False),
    Case(logits="BIJ", gradient="last", bias=True, coupling=False),
    Case(mask=True, coupling=False),
    Case(out_mask=True, coupling=False),
    ALL_OPTIONS,
)
CASES = (*QUIET_CASES, ALL_OPTIONS)
# 1 to 8 column warps of 10 and of 8 tiles, and more than a block has; D padded to 16, 32 and 64; K in one, two and four
# steps; full and partial strips.
SHAPES = (
    Shape(1, 5, 4, 16, 8),
    Shape(17, 3, 5, 8, 4),
    Shape(33, 3, 10, 16, 8),
    Shape(16, 9, 12, 16, 8),
    Shape(3, 7, 14, 13, 3),
    Shape(2, 3, 32, 16, 8),
    Shape(18, 2, 40, 9, 2),
    Shape(5, 2, 43, 4, 3),
    Shape(3, 4, 100, 3, 1),
    Shape(20, 3, 10, 9, 14),
    Shape(2, 9, 8, 16, 16),
    Shape(5, 4, 7, 20, 30),
    Shape(3, 3, 10, 32, 32),
    Shape(20, 3, 3, 50, 9),
    Shape(2, 3, 9, 64, 32),
)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    emulator.install()


@pytest.fixture(autouse=True, params=[pytest.param(True, id="columns")])
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    with emulator.device(**(DEVICE | {"columns_first": request.param})):
        yield


# For tests of what both families do on tensor cores.
both_families = pytest.mark.parametrize("_device", [False, True], indirect=True, ids=["rows", "columns"])


def launches(ways: bool = False) -> dict[str, int]:
    return emulator.take_launches(ways)


def assert_columns(case: Case, sections: int, ran: dict[str, int]) -> None:
    """The launches of a forward and a backward are those that docs/cuda-kernels.md describes."""
    assert all(name.startswith("columns::") or name == "JoinArgs" for name in ran), ran
    r, iterates = case.num_iterations, case.num_iterations > 1 and case.gradient == "full"
    uniform = not (case.logits or case.mask or (r == 1 and case.coupling))  # the first pass has no softmax
    pairs_of_first = bool(case.logits or case.out_mask) or (case.gradient == "last" and r > 1)
    backward = (r - 1 if iterates else 0) + (pairs_of_first if case.gradient == "full" or r > 1 else bool(case.logits))
    assert ran["columns::StepArgs"] == r + 1 + (r - 1 if iterates else 0)
    assert ran["columns::GradientArgs"] == 1
    softmaxes = r - uniform + backward
    assert ran["columns::PassArgs"] == uniform + softmaxes * (2 if sections > 1 else 1), ran


@pytest.mark.rows(5)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: Shape, case: Case) -> None:
    launches()
    check(make(shape, case, dtype=torch.float32), BACKEND)
    assert_columns(case, emulator.columns_plan(*shape)["sections"], launches())


@pytest.mark.parametrize("case", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [Shape(17, 9, 10, 16, 8), Shape(3, 5, 50, 4, 2)], ids=str)
def test_options(shape: Shape, case: Case) -> None:
    check(make(shape, case, dtype=torch.float32), BACKEND)
    assert "columns::GradientArgs" in launches()


@pytest.mark.rows(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [QUIET, Case(gradient="last"), ALL_OPTIONS], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(17, 7, 10, 16, 1),
        Shape(9, 5, 3, 32, 1),
        Shape(2, 9, 66, 8, 1),
        Shape(5, 3, 7, 13, 1),
        Shape(3, 3, 2, 64, 1),
    ],
    ids=str,
)
def test_given_votes(shape: Shape, case: Case, dtype: torch.dtype) -> None:
    launches()
    problem = make(shape, case, "route_votes", dtype)
    check(problem, BACKEND)
    assert "columns::GradientArgs" in launches()
    wanted = run(problem, emulator.NAME)
    for kind in ("sliced", "transposed"):
        moved = replace(problem, inputs=problem.inputs | {"votes": relayout(problem.inputs["votes"], kind)})
        for name, value in run(moved, emulator.NAME).items():
            assert torch.equal(value, wanted[name]), (kind, name)


@pytest.mark.rows(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [QUIET, ALL_OPTIONS], ids=str)
@pytest.mark.parametrize("shape", [Shape(5, 9, 10, 16, 8), Shape(18, 3, 4, 8, 16), Shape(2, 3, 7, 30, 25)], ids=str)
def test_sixteen_bits(shape: Shape, case: Case, dtype: torch.dtype) -> None:
    check(make(shape, case, dtype=dtype), BACKEND)
    assert "columns::GradientArgs" in launches()


@pytest.mark.rows(4)
@pytest.mark.parametrize("case", [QUIET, Case(shared=True), Case(logits="IJ", mask=True)], ids=str)
@pytest.mark.parametrize(
    ("shape", "device"),
    [
        # Copies of 16 bytes or of an element, no bulk copies.
        (Shape(33, 40, 10, 16, 8), {"clusters": False, "architecture": 80}),
        (Shape(20, 30, 3, 13, 5), {"clusters": False, "architecture": 80}),
        # One block of threads walks over all input capsules; more splits than a thread of a step adds up at a time.
        (Shape(20, 90, 10, 16, 8), {"multiprocessors": 1}),
        (Shape(2, 400, 3, 16, 8), {"multiprocessors": 132}),
        # Less shared memory than the largest cut needs: fewer column warps, and with them several tiles.
        (Shape(17, 6, 40, 16, 16), {"multiprocessors": 2, "shared_bytes": 99 * 1024}),
        (Shape(17, 6, 10, 32, 32), {"multiprocessors": 2, "shared_bytes": 64 * 1024}),
        # Strips beyond the batch; parts of the batch that several blocks of the gradient pass have.
        (Shape(150, 3, 4, 16, 8), {"multiprocessors": 3}),
        (Shape(100, 40, 3, 4, 2), {"multiprocessors": 4}),
    ],
    ids=lambda value: str(value) if isinstance(value, Shape) else "",
)
def test_ways_to_cut_the_work(shape: Shape, device: dict[str, Any], case: Case) -> None:
    with emulator.device(**(DEVICE | device)):
        check(make(shape, case, dtype=torch.float32), BACKEND)
    assert "columns::GradientArgs" in launches()


@pytest.mark.parametrize("op", ["dynamic_routing", "route_votes"])
@pytest.mark.parametrize("case", [QUIET, Case(gradient="last"), Case(shared=True), ALL_OPTIONS], ids=str)
@pytest.mark.parametrize("limit", [1, 20_000])
def test_pairs_of_some_input_capsules_at_a_time(limit: int, case: Case, op: str) -> None:
    """Little memory for the stored couplings and their gradients: passes make them again for the gradient pass."""
    if case.shared and op == "route_votes":
        pytest.skip("given votes have no weight")
    problem = make(Shape(17, 50, 10, 16, 8), case, op, torch.float32)
    launches()
    with emulator.device(**(DEVICE | {"pairs_bytes": limit})):
        check(problem, BACKEND)
    assert launches()["columns::GradientArgs"] > 1


@pytest.mark.parametrize("times", [20.0, 200.0, 3000.0])
@pytest.mark.parametrize("case", [QUIET, Case(out_mask=True), Case(logits="BIJ", leaky=True, mask=True)], ids=str)
@pytest.mark.parametrize("J", [4, 10, 32, 50])
def test_logits_far_from_zero(J: int, case: Case, times: float) -> None:
    """Each column warp subtracts the maximum of its own output capsules; some have none that counts."""
    problem = make(Shape(17, 5, J, 16, 8), case, dtype=torch.float32)
    scaled = {name: value * times if name in ("u", "logits") else value for name, value in problem.inputs.items()}
    check(replace(problem, inputs=scaled), BACKEND, slack=20)  # an ulp of a logit decides


@pytest.mark.parametrize(
    "case", [Case(mask=True), Case(mask=True, logits="IJ"), Case(mask=True, gradient="last")], ids=str
)
@pytest.mark.parametrize("op", ["dynamic_routing", "route_votes"])
def test_a_masked_input_capsule_has_no_part_in_the_nan_of_others(op: str, case: Case) -> None:
    problem = make(Shape(17, 4, 10, 16, 8), case, op, torch.float32)
    inputs = "u" if op == "dynamic_routing" else "votes"
    problem.masks["mask"].fill_(True)
    problem.masks["mask"][1, 0] = False
    problem.inputs[inputs][1, 1] = torch.nan
    wanted, got = run(problem, "reference"), run(problem, emulator.NAME)
    for name, value in got.items():
        assert torch.equal(value.isnan(), wanted[name].isnan()), name


def test_any_number_of_iterations() -> None:
    check(make(Shape(2, 3, 10, 16, 8), Case(num_iterations=12, coupling=False), dtype=torch.float32), BACKEND, slack=4)


def test_results_repeat_bit_by_bit() -> None:
    """The emulator runs threads and blocks in another order each time."""
    problem = make(Shape(17, 9, 32, 16, 8), ALL_OPTIONS, dtype=torch.float32)
    first = run(problem, emulator.NAME)
    for _ in range(3):
        for name, value in run(problem, emulator.NAME).items():
            assert torch.equal(value, first[name]), name


def test_all_launches_but_the_first_start_early() -> None:
    problem = make(Shape(40, 9, 10, 16, 8), Case(coupling=False, bias=True), dtype=torch.float32)
    launches()
    run(problem, emulator.NAME)
    ran = launches(ways=True)
    assert sum(count for name, count in ran.items() if not name.endswith(" early")) == 2  # a forward, a backward
    with emulator.device(**(DEVICE | {"architecture": 80, "clusters": False})):
        run(problem, emulator.NAME)
    assert not any(name.endswith(" early") for name in launches(ways=True))


# Prints the launches of a call and its results bit by bit.
ALONE = """
import hashlib

import torch
from tests.emulator import backend as emulator
from tests.support.backends import Shape
from tests.support.problems import Case, make, run

emulator.install()
with emulator.device(multiprocessors=6, shared_bytes=227 * 1024, columns_first=True):
    results = run(make(Shape(33, 30, 3, 16, 8), Case(coupling=False), dtype=torch.float32), emulator.NAME)
print(*sorted(emulator.take_launches(ways=True)), sep="|")
print({name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in results.items()})
"""


@pytest.mark.slow
def test_the_environment_forbids_early_launches() -> None:
    found = []
    for pdl in "10":
        environment = os.environ | {"CAPSFAST_PDL": pdl, "CAPSFAST_SCRATCH_APART": pdl}
        command = [sys.executable, "-c", ALONE]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert ran.returncode == 0, ran.stderr
        found.append(ran.stdout.splitlines())
    (early, results), (late, same_results) = found
    assert " early" in early and " early" not in late
    assert same_results == results


def test_a_batch_is_cut_evenly_for_every_multiprocessor() -> None:
    """From B = 128 on a launch has work for all blocks of an H100, cut evenly."""
    with emulator.device(**(DEVICE | {"multiprocessors": 132})):
        for B in (*range(128, 4097, 64), 16384, 65536):
            plan = emulator.columns_plan(B, 1152, 10, 16, 8)
            blocks = plan["groups"] * plan["splits"]
            waves, capsules = -(-blocks // 132), -(-1152 // plan["splits"])
            turns = -(-capsules // plan["streams"])
            work = -(-B // 16) * 1152 / plan["strips"] / plan["streams"]
            assert work / (132 * waves * turns) > 0.85, (B, plan)
            gradient = plan["gradient_parts"] * plan["gradient_splits"]
            groups, chunks = -(-B // 32), -(-plan["together"] // plan["gradient_streams"])
            rounds = -(-groups // plan["gradient_parts"]) * -(-chunks // plan["gradient_splits"])
            assert gradient <= 132 and groups * chunks / (132 * rounds) > 0.7, (B, plan)


@pytest.mark.parametrize(
    ("shape", "case", "dtype"),
    [
        (Shape(2, 3, 4, 16, 8), QUIET, torch.float64),
        (Shape(2, 3, 4, 16, 33), QUIET, torch.float32),
        (Shape(2, 3, 4, 65, 8), QUIET, torch.float32),
        # A grid might not have a block for each column warp.
        pytest.param(Shape(1, 1, 65536, 1, 1), QUIET, torch.float32, marks=pytest.mark.slow),
        (Shape(2, 3, 4, 16, 8), Case(softmax="in"), torch.float32),
    ],
    ids=str,
)
def test_what_the_family_does_not_serve_goes_to_the_general_kernels(
    shape: Shape, case: Case, dtype: torch.dtype
) -> None:
    problem = make(shape, case, dtype=dtype)
    launches()
    run(problem, emulator.NAME)
    assert {"AccumulateArgs", "GradientArgs"} <= set(launches())


def test_a_weight_that_is_not_contiguous_goes_to_the_general_kernels() -> None:
    problem = make(Shape(2, 3, 4, 16, 8), QUIET, dtype=torch.float32)
    problem.inputs["weight"] = problem.inputs["weight"].transpose(1, 2).contiguous().transpose(1, 2)
    launches()
    check(problem, BACKEND)
    assert "AccumulateArgs" in launches()


@both_families
def test_votes_on_tensor_cores_are_as_exact_as_einsum(request: pytest.FixtureRequest) -> None:
    # Three products in TF32. With a single product the error would be hundreds of times larger.
    check(make(Shape(2, 200, 10, 16, 8), QUIET, dtype=torch.float32), BACKEND, slack=1)
    check(make(Shape(20, 20, 10, 16, 16), QUIET, dtype=torch.float32), BACKEND, slack=1)
    with emulator.device(multiprocessors=1, columns_first=request.node.callspec.params["_device"]):  # long sums
        check(make(Shape(20, 60, 10, 16, 8), QUIET, dtype=torch.float32), BACKEND, slack=1)


def errors(problem: Problem, function: Callable[..., Any] = call) -> dict[str, float]:
    truth = run(problem.to(torch.float64), "reference")
    found = run(problem, emulator.NAME, function=function)
    return {name: relative_l2(value.double(), truth[name]) for name, value in found.items()}


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@both_families
@pytest.mark.parametrize("case", [Case(coupling=False), Case(shared=True, coupling=False)], ids=str)
@pytest.mark.parametrize("shape", [Shape(17, 9, 3, 16, 8), Shape(2, 9, 3, 16, 16)], ids=str)
def test_one_product_where_torch_allows_tf32(shape: Shape, case: Case, request: pytest.FixtureRequest) -> None:
    problem = make(shape, case, dtype=torch.float32)
    exact = errors(problem)
    request.getfixturevalue("tf32")
    for name, error in errors(problem).items():
        assert exact[name] < 2e-6, name
        if name in ("v", "du", "dweight"):
            assert 1e-5 < error < 1e-2, (name, error)


@both_families
@pytest.mark.parametrize(("allowed", "most"), [(False, 2e-7), (True, 6e-5)], ids=["exact", "single"])
def test_bits_that_products_drop_make_gradients_no_smaller(
    allowed: bool, most: float, request: pytest.FixtureRequest
) -> None:
    if allowed:
        request.getfixturevalue("tf32")
    problem = make(Shape(33, 40, 10, 16, 8), Case(coupling=False), dtype=torch.float32)
    truth, got = run(problem.to(torch.float64), "reference"), run(problem, emulator.NAME)
    for name in ("du", "dweight"):
        slope = ((got[name].double() - truth[name]) * truth[name]).sum() / truth[name].square().sum()
        assert abs(slope) < most, (name, float(slope))


@both_families
@pytest.mark.parametrize("name", ["u", "weight"])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000], ids=hex)
@pytest.mark.parametrize("allowed", [False, True])
def test_no_nan_is_rounded_away(allowed: bool, bits: int, name: str, request: pytest.FixtureRequest) -> None:
    if allowed:
        request.getfixturevalue("tf32")
    problem = make(Shape(17, 3, 3, 16, 8), Case(coupling=False), dtype=torch.float32)
    problem.inputs[name].view(torch.int32)[(0,) * problem.inputs[name].dim()] = bits
    got = run(problem, emulator.NAME)
    assert got["v"][0, 0].isnan().any()
    assert got["dweight" if name == "u" else "du"].isnan().any()


@both_families
def test_small_gradients_of_capsules_that_vote_against_all() -> None:
    """exp() of logits near -55, times gradients of 1e-18, underflows in a float."""
    problem = make(Shape(1, 8, 3, 16, 8), Case(coupling=False), dtype=torch.float32)
    u, weight = problem.inputs["u"], problem.inputs["weight"]
    towards = weight[0, :, :, 0] / weight[0, :, :, 0].norm(dim=-1, keepdim=True)
    lengths = torch.tensor([-28.0, *[10.0] * 7])
    weight.copy_(
        0.01 * weight
        + lengths[:, None, None, None]
        * towards[:, :, None]
        * (u[0] / u[0].square().sum(-1, keepdim=True))[:, None, None]
    )
    assert errors_of_gradients(problem, 2.0**-60) < 4 * errors_of_gradients(problem, 1.0)


def errors_of_gradients(problem: Problem, scale: float) -> float:
    """Relative errors of du and dweight of input capsule 0, for a gradient of v of this scale."""
    small = replace(problem, gradients={**problem.gradients, "v": problem.gradients["v"] * scale})
    truth, got = run(small.to(torch.float64), "reference"), run(small, emulator.NAME)
    du, dweight = (
        relative_l2(got[name].double().select(axis, 0) / scale, truth[name].select(axis, 0) / scale)
        for name, axis in (("du", 1), ("dweight", 0))
    )
    return max(du, dweight)


@pytest.mark.parametrize("api", ["set_float32_matmul_precision", "fp32_precision"])
def test_a_compiled_call_follows_the_setting(api: str) -> None:
    problem = make(Shape(17, 9, 3, 16, 8), QUIET, dtype=torch.float32)
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    @partial(torch.compile, fullgraph=True, backend=counter)
    def function(u: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return capsfast.dynamic_routing(u, weight, backend=emulator.NAME)

    def set_to(allowed: bool) -> None:
        if api == "fp32_precision":
            torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"
        else:
            torch.set_float32_matmul_precision("high" if allowed else "highest")

    before = torch.backends.cuda.matmul.fp32_precision
    try:
        found = []
        for allowed in (False, True, False, True):
            set_to(allowed)
            found.append(max(errors(problem, lambda problem, inputs, backend: function(**inputs)).values()))
    finally:
        set_to(False)
        torch.backends.cuda.matmul.fp32_precision = before
    assert found[0] == found[2] < 2e-6
    assert 1e-5 < found[1] == found[3] < 1e-2
    assert counter.frame_count == 2  # each setting has its graph


@pytest.mark.parametrize(
    ("shape", "case", "dtype"),
    [
        (Shape(3, 5, 3, 16, 8), QUIET, torch.bfloat16),  # exact in TF32 anyway
        (Shape(3, 5, 3, 65, 5), QUIET, torch.float32),  # general kernels use no tensor cores
        (Shape(3, 5, 3, 16, 8), Case(softmax="in"), torch.float32),
        (Shape(3, 5, 3, 16, 8), QUIET, torch.float64),
    ],
    ids=str,
)
def test_tf32_changes_nothing_else(
    shape: Shape, case: Case, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    problem = make(shape, case, dtype=dtype)
    before = run(problem, emulator.NAME)
    request.getfixturevalue("tf32")
    for name, value in run(problem, emulator.NAME).items():
        assert torch.equal(value, before[name]), name


def misplaced(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins one element beyond an aligned address."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


@both_families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("K", [4, 8, 16])
@pytest.mark.parametrize(
    ("name", "moved"),
    [("u", partial(relayout, kind="sliced")), ("u", partial(relayout, kind="transposed")), ("weight", misplaced)],
    ids=["sliced-u", "transposed-u", "weight"],
)
def test_inputs_may_lie_anywhere(
    name: str, moved: Callable[[torch.Tensor], torch.Tensor], K: int, dtype: torch.dtype
) -> None:
    problem = make(Shape(18, 3, 4, 16, K), QUIET, dtype=dtype)
    wanted = run(problem, emulator.NAME)
    problem.inputs[name] = moved(problem.inputs[name])
    emulator.take_launches()
    for result, value in run(problem, emulator.NAME).items():
        assert torch.equal(value, wanted[result]), result
    assert "AccumulateArgs" not in emulator.take_launches()
