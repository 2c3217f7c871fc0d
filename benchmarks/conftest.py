"""Options and the shared body of the benchmarks; see README.md beside this file."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import capsfast
from capsfast.bench.cases import ROUTING, SWEEPS, Case, sweep
from capsfast.bench.checkout import why_not_this_one
from capsfast.bench.contenders import OURS, contender, contenders, missing
from capsfast.bench.gate import Gate
from capsfast.bench.inputs import InputSet, input_sets, step
from capsfast.bench.measure import free_bytes
from capsfast.nn import ROUTINGS

# pytest-benchmark's clock is the host's; CUDA is measured by python -m capsfast bench, with events.
CPU = torch.device("cpu")
SECONDS = 1.0
LEAST_ROUNDS, MOST_ROUNDS = 3, 500


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("capsfast")
    group.addoption("--sweep", choices=SWEEPS, default="smoke", help="which cases to run")
    group.addoption("--threads", type=int, default=None, help="torch threads, default torch's own choice")


def pytest_configure(config: pytest.Config) -> None:
    hides = why_not_this_one("pytest benchmarks")
    if hides:
        raise pytest.UsageError(hides)
    # So that `pytest benchmarks` finds the files.
    config.addinivalue_line("python_files", "benchmark_*.py")
    threads = config.getoption("threads", default=None)
    if threads is not None:
        torch.set_num_threads(threads)


def pytest_report_header() -> list[str]:
    absent = [f"not measured, {OURS}{name}: {reason}" for name, reason in missing(CPU).items()]
    return [f"capsfast: {capsfast.__version__} from {Path(capsfast.__file__).parent}", *absent]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        op = metafunc.module.OP
        name = metafunc.config.getoption("sweep", default="smoke")
        routings = ROUTINGS if op == ROUTING else ("",)
        cases = [case for routing in routings for case in sweep(name, op, routing=routing)]
        # Without "=" and blanks, which -k does not take.
        ids = [case.name.removeprefix(f"{op} ").replace("=", "").replace(" ", "-") for case in cases]
        metafunc.parametrize("case", cases, ids=ids, scope="module")
        absent = [pytest.param(OURS + name, marks=pytest.mark.skip(reason)) for name, reason in missing(CPU).items()]
        metafunc.parametrize("name", [*absent, *(each.name for each in contenders(op))])


@pytest.fixture(scope="module")
def prepared(case: Case) -> Callable[[], tuple[list[InputSet], Gate]]:
    """Input sets and gate of a case, made once for all contenders and only if one of them runs."""

    @functools.cache
    def prepare() -> tuple[list[InputSet], Gate]:
        sets = input_sets(case, CPU)
        return sets, Gate(case, sets[0])

    return prepare


@pytest.fixture
def compare(
    benchmark: BenchmarkFixture,
    prepared: Callable[[], tuple[list[InputSet], Gate]],
) -> Callable[[Case, str], None]:
    """Checks a contender on a case, then times it."""

    def run(case: Case, name: str) -> None:
        chosen = contender(name)
        reason = chosen.why_not(case, CPU, free_bytes(CPU))
        if reason:
            pytest.skip(f"{name}: {reason}")
        sets, gate = prepared()
        torch.compiler.reset()
        forward = chosen.make(case)
        verdict = gate.check(forward)
        assert not verdict.reason, f"{name} on {case.name}: {verdict.reason}"

        call = step(forward, case, sets)
        begin = time.perf_counter()
        call(0)
        estimate = time.perf_counter() - begin
        rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(SECONDS / max(estimate, 1e-7))))
        numbers = itertools.count()
        benchmark.group = case.name
        benchmark.extra_info |= {**dataclasses.asdict(case), "contender": name, "errors": verdict.errors}
        benchmark.pedantic(lambda: call(next(numbers)), rounds=rounds, warmup_rounds=1)

    return run
