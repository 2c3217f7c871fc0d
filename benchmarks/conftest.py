"""``pytest benchmarks``: options, cases and the body of the benchmark; see README.md in this folder."""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import capsfast
from capsfast.bench.cases import OPS, SWEEPS, Case, sweep
from capsfast.bench.contenders import OURS, Contender, contenders, missing
from capsfast.bench.gate import Gate
from capsfast.bench.inputs import InputSet, Step, input_sets, step
from capsfast.bench.measure import first_line, free_bytes
from capsfast.bench.timing import capture, host_seconds, interleave
from capsfast.nn import ROUTINGS

SECONDS = 0.4
LEAST_ROUNDS, MOST_ROUNDS = 3, 200
# The 16 samples for a CPU do not fill a GPU.
GPU_BATCH = 128
# Calls between two readings of the timer on a GPU: the host launches the next call while the GPU runs one.
GPU_CALLS = 20
SHORT = {"forward": "fwd", "forward+backward": "both", "torch.compile einsum": "compiled", "eager einsum": "eager"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("capsfast")
    group.addoption("--sweep", choices=SWEEPS, default="capsules", help="which cases to run (default capsules)")
    group.addoption("--op", choices=(*OPS, *ROUTINGS), default=OPS[0], help="an op or a routing of capsfast.nn")
    group.addoption("--device", choices=("cpu", "cuda"), action="append", help="default: cpu, and cuda if available")


def pytest_configure(config: pytest.Config) -> None:
    if "cuda" in devices(config) and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no CUDA device")
    # So that `pytest benchmarks` finds the file.
    config.addinivalue_line("python_files", "benchmark_*.py")
    # Only the columns for a comparison, so that the table fits into a terminal.
    if not any(word.startswith("--benchmark-columns") for word in config.invocation_params.args):
        config.option.benchmark_columns = ["median", "min", "rounds"]


def devices(config: pytest.Config) -> list[str]:
    return config.getoption("device") or ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def pytest_report_header(config: pytest.Config) -> list[str]:
    names = [device + (f" ({torch.cuda.get_device_name()})" if device == "cuda" else "") for device in devices(config)]
    return [f"capsfast: {capsfast.__version__} from {Path(capsfast.__file__).parent}; measured: {', '.join(names)}"]


def label(case: Case, device: str) -> str:
    """A short label without "=" and blanks, which -k does not take, such as ``B16-I64-J10-fwd``."""
    sizes = [f"{size}{getattr(case, size)}" for size in "BIJ"]
    sizes += [f"{size}{getattr(case, size)}" for size in "DKr" if getattr(case, size) not in (0, getattr(Case, size))]
    dtype = [] if case.dtype == "float32" else [case.dtype]
    return "-".join([*(["cuda"] if device == "cuda" else []), *sizes, *dtype, SHORT[case.direction]])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    name = config.getoption("sweep")
    cases = sweep(name, config.getoption("op"))
    params = []
    for device in devices(config):
        where = torch.device(device)
        timer = [pytest.mark.benchmark(timer=when_done)] if device == "cuda" else []
        for case in cases:
            if device == "cuda" and name == "capsules":
                case = dataclasses.replace(case, B=GPU_BATCH)
            group = label(case, device)
            for absent, reason in missing(where).items():
                skip = pytest.mark.skip(reason=f"{absent}: {reason}")
                params.append(pytest.param((case, where, None), marks=skip, id=f"{group}-{absent}"))
            for contender in contenders():
                if contender.serves(where):
                    ident = SHORT.get(contender.name, contender.name.removeprefix(OURS))
                    params.append(pytest.param((case, where, contender), marks=timer, id=f"{group}-{ident}"))
    metafunc.parametrize("compare", params, indirect=True)


@functools.lru_cache(maxsize=1)
def prepared(case: Case, device: torch.device) -> tuple[list[InputSet], Gate]:
    """Inputs and gate of a case, made once for all its contenders, which run in sequence."""
    sets = input_sets(case, device)
    return sets, Gate(case, sets[0])


def when_done() -> float:
    """The timer on a GPU."""
    torch.cuda.synchronize()
    return time.perf_counter()


def graphed(one: Step, device: torch.device) -> tuple[Callable[[], object], dict[str, Any]]:
    """A replay of the call in a CUDA graph, or the call itself if it can't be captured; and what to note beside it."""
    one()  # compiles
    beside = {"eager": interleave({"": one}, device, 0.0, 1)[""].median, "host": host_seconds(one, device)}
    try:
        return capture(one).replay, {"timed": "in a CUDA graph", **beside}
    except Exception as error:
        return one, {"timed": f"eager; no CUDA graph: {first_line(error)}", **beside}


@pytest.fixture
def compare(request: pytest.FixtureRequest, benchmark: BenchmarkFixture) -> Callable[[], None]:
    """Checks a contender on a case, then times it."""
    case, device, chosen = request.param
    assert isinstance(chosen, Contender)

    def run() -> None:
        reason = chosen.why_not(case, device, free_bytes(device))
        if reason:
            pytest.skip(f"{chosen.name}: {reason}")
        sets, gate = prepared(case, device)
        torch.compiler.reset()
        forward = chosen.make(case)
        verdict = gate.check(forward)
        assert not verdict.reason, f"{chosen.name} on {case.name}: {verdict.reason}"

        call: Callable[[], object] = step(forward, case, sets)
        timer, calls = time.perf_counter, 1
        benchmark.group = label(case, device.type)
        benchmark.extra_info |= {**dataclasses.asdict(case), "contender": chosen.name, "errors": verdict.errors}
        if device.type == "cuda":
            call, beside = graphed(call, device)
            timer, calls = when_done, GPU_CALLS
            benchmark.extra_info |= beside
        begin = timer()
        call()
        rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(SECONDS / calls / max(timer() - begin, 1e-7))))
        benchmark.pedantic(call, rounds=rounds, iterations=calls, warmup_rounds=1)

    return run
