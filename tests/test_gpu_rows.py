"""The rows kernels of the backend "cuda" on a GPU: clusters, cooperative launches, threads, repeats."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import capsfast

from .support.backends import Shape
from .support.on_gpu import assert_as_accurate_as_einsum, assert_replays, assert_same_bits, drawn
from .support.problems import LOADED, LOADED_OUT, Case, Problem, make, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not capsfast.backends()["cuda"].available, reason="needs the CUDA kernels"),
]

ROOT = Path(__file__).resolve().parent.parent
QUIET = Case(coupling=False)
# Clusters of blocks, eight tiles of samples each.
LAYER = Shape(128, 1152, 10, 16, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        LAYER,
        LAYER._replace(B=1024),
        LAYER._replace(B=1),
        LAYER._replace(B=100),  # a partial tile, and a warp without a tile
        Shape(8, 20_000, 10, 16, 8),  # one tile of samples; clusters share its input capsules
        Shape(40, 2000, 5, 8, 4),
        Shape(130, 1500, 10, 16, 16),
    ],
    ids=str,
)
def test_accuracy(shape: Shape, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_as_accurate_as_einsum(drawn(shape, dtype), "cuda")


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("case", [QUIET, Case(), LOADED, LOADED_OUT], ids=str)
def test_fifty_runs_give_the_same_bits(case: Case, dtype: torch.dtype) -> None:
    problem = make(LAYER, case, "dynamic_routing", dtype, "cuda")
    first = run(problem, "cuda")
    for _ in range(49):
        assert_same_bits(run(problem, "cuda"), first)


@pytest.mark.parametrize("need", [None, ()], ids=["both", "forward"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("case", [QUIET, LOADED], ids=str)
def test_a_graph_holds_launches_of_clusters(case: Case, dtype: torch.dtype, need: Sequence[str] | None) -> None:
    problems = [make(LAYER, case, "dynamic_routing", dtype, "cuda", seed=seed) for seed in range(2)]
    assert_replays(problems, "cuda", need)


def test_two_threads_on_two_streams() -> None:
    """Each launch needs the whole device, and shapes need different limits of shared memory."""
    problems = [
        make(LAYER, QUIET, dtype=torch.float32, device="cuda"),
        make(Shape(33, 700, 5, 8, 4), LOADED, dtype=torch.bfloat16, device="cuda"),
    ]
    wanted = [run(problem, "cuda") for problem in problems]
    torch.cuda.synchronize()
    start = threading.Barrier(2)

    def work(problem: Problem, want: dict[str, torch.Tensor]) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            start.wait(60)
            for _ in range(50):
                assert_same_bits(run(problem, "cuda"), want)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, *each) for each in zip(problems, wanted, strict=True)]:
            done.result(100)


def accumulating_kernels(problem: Problem) -> int:
    """Launches of accumulating kernels in a forward and backward; -1 if the profiler sees no kernel."""
    run(problem, "cuda")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run(problem, "cuda")
        torch.cuda.synchronize()
    names = [event.name for event in found.events() or () if event.device_type == DeviceType.CUDA]
    return sum("accumulate_kernel" in name for name in names) if names else -1


def write_results(path: str) -> None:
    """For a separate process: writes results of several problems, and the launches of the first."""
    problems = [
        make(LAYER, QUIET, dtype=torch.float32, device="cuda"),
        make(LAYER, QUIET, dtype=torch.bfloat16, device="cuda"),
        make(LAYER, LOADED, dtype=torch.float32, device="cuda"),
        make(Shape(33, 63, 10, 16, 8), LOADED_OUT, dtype=torch.float32, device="cuda"),
        make(Shape(2, 6000, 10, 16, 16), QUIET, dtype=torch.float16, device="cuda"),
    ]
    results = [{name: value.cpu() for name, value in run(problem, "cuda").items()} for problem in problems]
    torch.save({"results": results, "launches": accumulating_kernels(problems[0])}, path)


def test_one_launch_or_many_give_the_same_bits(tmp_path: Path) -> None:
    """A process reads CAPSFAST_COOPERATIVE once."""
    found: dict[str, Any] = {}
    for value in ("1", "0"):
        path = tmp_path / f"{value}.pt"
        code = f"from tests.test_gpu_rows import write_results; write_results({str(path)!r})"
        environment = {**os.environ, "CAPSFAST_COOPERATIVE": value}
        answer = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
        )
        assert answer.returncode == 0, answer.stderr
        found[value] = torch.load(path)
    for one, other in zip(found["1"]["results"], found["0"]["results"], strict=True):
        assert_same_bits(one, other)
    if -1 in (found["1"]["launches"], found["0"]["launches"]):
        pytest.skip("the profiler sees no kernel")
    # Three passes in the forward and two in the backward, for r = 3.
    assert (found["1"]["launches"], found["0"]["launches"]) == (2, 5)
