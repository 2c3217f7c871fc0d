"""Compares every family of kernels of this machine with float64; the command ``check``.

A worker process checks one family: ``python -m capsfast.bench.check FAMILY``. The worker names each call before the
call runs, so a call that hangs or ends the process is known, and the calls behind it go to another worker.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backend import backends
from .cases import CANONICAL, DIRECTIONS
from .contenders import OURS, contender
from .gate import Gate, relative_error
from .inputs import input_set, step
from .measure import first_line
from .problems import (
    LINEAR,
    LOADED,
    LOADED_OUT,
    LOADED_PASS,
    OPS,
    PASS_OPS,
    QUADRATIC,
    PassCase,
    RoutingCase,
    run,
    stretched,
)
from .timing import capture

# Begins the lines of a worker that hold JSON.
MARK = "@"
WORKER = (sys.executable, "-m", "capsfast.bench.check")
# A call that takes longer counts as wrong. Triton compiles.
HANG_SECONDS = {"cpp": 30.0, "cuda": 30.0, "triton": 90.0}
# The largest relative L2 error against float64. These bounds find wrong kernels; the tests know how exact kernels are.
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float64: 1e-10}
OP_OF = {op.name: op for op in (*OPS, *PASS_OPS)}
EM = "em"
QUIET = RoutingCase(coupling=False)
ROUTINGS = (QUIET, LOADED, LOADED_OUT)
PASSES = (LINEAR, LOADED_PASS)
# Logits of 1e5, where an ulp changes a coupling by a percent: forward and backward must compute the same logits.
LONG = (RoutingCase(coupling=False, softmax="in"),)
NARROW = (torch.float32, torch.bfloat16)
WIDE = (*NARROW, torch.float16, torch.float64)


class Family(NamedTuple):
    """Kernels of a backend that share their code. shapes: (B, I, J, D, K). op: a function, or "em" for the routing.

    exponent: input capsules are 10**exponent times as long as usual. variable: set to 1 in the environment.
    """

    backend: str
    op: str
    shapes: tuple[tuple[int, ...], ...] = ((5, 33, 10, 16, 8),)
    cases: tuple[Any, ...] = (None,)
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    exponent: int = 0
    variable: str = ""


LAYER, ODD, MANY = (33, 63, 10, 16, 8), (17, 21, 5, 23, 3), (33, 9, 300, 4, 4)
# Fewer samples than a strip, one strip, all; several column warps; column tiles of 32 and 64 components; groups of
# column warps in several blocks; more coupling coefficients than are stored for the gradient at a time.
COLUMNS: Any = (LAYER, *((B, 1152, 10, 16, 8) for B in (1, 16, 128)), (33, 63, 32, 16, 8), ODD, (17, 33, 10, 32, 32))
COLUMNS += ((9, 13, 3, 64, 32), (17, 21, 320, 16, 8), (16, 3500, 320, 1, 4))
FAMILIES = {
    "cpp routing": Family("cpp", "dynamic_routing", (LAYER, ODD, MANY), ROUTINGS, WIDE),
    "cpp shared weight": Family("cpp", "dynamic_routing", (LAYER, ODD), (RoutingCase(shared=True),), WIDE),
    "cpp long votes": Family("cpp", "dynamic_routing", (LAYER,), LONG, exponent=5),
    "cpp votes": Family("cpp", "route_votes", (LAYER, ODD), (*ROUTINGS, RoutingCase(spatial=(3, 2))), WIDE),
    "cpp passes": Family("cpp", "routing_pass", (LAYER, MANY), (*PASSES, QUADRATIC), WIDE),
    "cpp EM": Family("cpp", EM),
    # Full tiles of columns; padded ones; clusters, which share input capsules, with weights in bulk copies.
    "cuda rows": Family(
        "cuda",
        "dynamic_routing",
        (LAYER, (1, 33, 10, 12, 16), (2, 6000, 5, 16, 8)),
        (QUIET, RoutingCase(coupling=False, bias=True, gradient="last")),
        WIDE[:3],
    ),
    "cuda columns": Family(
        "cuda",
        "dynamic_routing",
        COLUMNS,
        (QUIET, LOADED_OUT, RoutingCase(shared=True), RoutingCase(coupling=False, logits="BIJ", gradient="last")),
        WIDE[:3],
        variable="CAPSFAST_COLUMNS",
    ),
    # Wider capsules than other kernels take, so that these serve every softmax and dtype.
    "cuda general": Family(
        "cuda",
        "dynamic_routing",
        (LAYER, (17, 21, 5, 70, 3), (33, 9, 300, 4, 40)),
        (LOADED, LOADED_OUT, RoutingCase()),
        WIDE,
    ),
    "cuda long votes": Family("cuda", "dynamic_routing", (LAYER,), LONG, exponent=5),
    "cuda votes": Family("cuda", "route_votes", (ODD, (4, 2520, 10, 16, 1), MANY), ROUTINGS, WIDE),
    "cuda passes": Family("cuda", "routing_pass", (LAYER, MANY), PASSES, WIDE),
    "cuda votes passes": Family("cuda", "votes_pass", (ODD,), PASSES, WIDE),
    # Each call is compiled, which takes seconds.
    "triton routing": Family("triton", "dynamic_routing", (LAYER,), (QUIET, LOADED_OUT), NARROW),
    "triton softmax in": Family("triton", "dynamic_routing", (LAYER,), (LOADED,), NARROW),
    "triton long votes": Family("triton", "dynamic_routing", (LAYER,), LONG, exponent=5),
    "triton many outputs": Family("triton", "dynamic_routing", (MANY,), (QUIET, LOADED_OUT)),
    "triton wide capsules": Family("triton", "dynamic_routing", ((17, 33, 10, 32, 32),), (QUIET, LOADED_OUT)),
    "triton pose matrices": Family("triton", "dynamic_routing", ((9, 13, 5, 16, 4),), (RoutingCase(poses=4),), NARROW),
    "triton votes": Family("triton", "route_votes", (ODD,), ROUTINGS, NARROW),
    "triton positions": Family("triton", "route_votes", (ODD,), (RoutingCase(spatial=(3, 2)),), NARROW),
    "triton passes": Family("triton", "routing_pass", (LAYER,), PASSES, NARROW),
    "triton quadratic passes": Family("triton", "routing_pass", (LAYER,), (QUADRATIC,), NARROW),
    "triton EM": Family("triton", EM),
}


class FamilyCall(NamedTuple):
    """One call of a family, forward and backward. case: None for EM routing."""

    family: Family
    shape: tuple[int, ...]
    case: RoutingCase | PassCase | None
    dtype: torch.dtype

    def __str__(self) -> str:
        words = [self.family.backend, self.family.op, "x".join(map(str, self.shape)), self.case, self.dtype]
        words += [f"times 1e{self.family.exponent}"] if self.family.exponent else []
        return " ".join(str(word).removeprefix("torch.") for word in words if word is not None)


def calls(name: str) -> list[FamilyCall]:
    """The calls of a family. The first calls cover all cases, so that a check that ends early has seen every case."""
    family = FAMILIES[name]
    ordered = sorted(
        (s + d, s, c, d)
        for s in range(len(family.shapes))
        for c in range(len(family.cases))
        for d in range(len(family.dtypes))
    )
    return [FamilyCall(family, family.shapes[s], family.cases[c], family.dtypes[d]) for _, s, c, d in ordered]


def captured(function: Callable[[], dict[str, Tensor]]) -> Callable[[], dict[str, Tensor]]:
    """Captures a function in a CUDA graph. Returns the function that replays the graph."""
    outputs: dict[str, Tensor] = {}
    graph = capture(lambda: outputs.update(function()))

    def replay() -> dict[str, Tensor]:
        graph.replay()
        torch.cuda.synchronize()
        return outputs

    return replay


def other_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """What is wrong with the results of a second run."""
    differing = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
    return [f"{name} of a second run, on a GPU of a CUDA graph, has other bits" for name in differing]


def compare(call: FamilyCall, device: torch.device) -> dict[str, Any]:
    """Runs a call and compares the results: forward, and forward with backward, with float64; then the call again.

    On a GPU the second run of the forward with backward is the replay of a graph on other inputs; launches in a graph
    are not cooperative.

    Returns:
        "errors", the largest relative L2 error by dtype, and "wrong", the reasons why the call is wrong.
    """
    if call.case is None:
        return _compare_em(call, device)
    backend, op, bound = call.family.backend, OP_OF[call.family.op], BOUNDS[call.dtype]
    problem, other = (
        stretched(op.make(call.shape, call.case, seed=seed), call.family.exponent).to(call.dtype, str(device))
        for seed in (0, 1)
    )
    truth = run(problem.to(torch.float64, str(device)), "reference")
    errors, wrong = [], []
    for need, word in (((), " alone"), (None, "")):
        for name, value in run(problem, backend, need).items():
            errors.append(relative_error(value, truth[name]))
            if not errors[-1] <= bound:  # so that NaN fails
                wrong.append(f"{name}{word} has relative error {errors[-1]:.1e}, bound {bound:.0e}")
    wanted, static = run(other, backend), problem.copied()
    again = _again(lambda: run(static, backend), device)
    static.overwrite(other)
    return {"errors": _largest(call, errors), "wrong": wrong + other_bits(again(), wanted)}


def _compare_em(call: FamilyCall, device: torch.device) -> dict[str, Any]:
    """EM routing, whose passes are quadratic and whose updates have a kernel."""
    sizes = dict(zip("BIJDK", call.shape, strict=True))
    case = dataclasses.replace(CANONICAL, **sizes, direction=DIRECTIONS[1], op="routing", routing=EM)  # type: ignore[arg-type]
    forward, inputs = contender(OURS + call.family.backend).make(case), input_set(case, device)
    verdict, once = Gate(case, inputs).check(forward), step(forward, case, [inputs])

    def gradients() -> dict[str, Tensor]:
        return {f"d{name}": value for name, value in zip(case.shapes, once(), strict=True)}  # type: ignore[call-overload]

    wrong = [verdict.reason] if verdict.reason else []
    wrong += other_bits(_again(gradients, device)(), gradients())
    return {"errors": _largest(call, verdict.errors.values()), "wrong": wrong}


def _again(function: Callable[[], dict[str, Tensor]], device: torch.device) -> Callable[[], dict[str, Tensor]]:
    # Without torch's allocator, as under compute-sanitizer, a graph can't have memory.
    graph = device.type == "cuda" and os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1"
    return captured(function) if graph else function


def _largest(call: FamilyCall, errors: Iterable[float]) -> dict[str, float]:
    return {str(call.dtype).removeprefix("torch."): max(filter(math.isfinite, errors), default=0.0)}


def device_of(name: str) -> torch.device:
    return torch.device("cpu" if FAMILIES[name].backend == "cpp" else "cuda")


def families(device_type: str) -> list[str]:
    """The families for a type of device, "cpu" or "cuda"."""
    return [name for name in FAMILIES if device_of(name).type == device_type]


def work(name: str, skip: int, count: int | None) -> bool:
    """Checks ``count`` calls of a family, or all, from number ``skip`` on. Prints each call before and after.

    Returns: whether all were right.
    """
    device, right = device_of(name), True
    torch.set_float32_matmul_precision("highest")  # an image of a system may allow TF32 everywhere
    for number, call in [*enumerate(calls(name))][skip:][:count]:
        _say(call=number, name=str(call))
        try:
            compared = compare(call, device)
        except Exception as error:  # refused, or an error of the GPU
            compared = {"wrong": [first_line(error)]}
        _say(done=number, **compared)
        right &= not compared["wrong"]
        if device.type == "cuda":
            # After an error of the GPU every later call of this process fails too: this ends the process.
            torch.cuda.synchronize()
    return right


def _say(**fact: Any) -> None:
    print(MARK + json.dumps(fact), flush=True)


RIGHT, WRONG, LATE, ABSENT = "right", "wrong", "not checked in time", "not here"


@dataclass
class Result:
    """What is known of a family.

    Args:
        of: the number of calls of the family; ``calls`` is how many were compared.
        errors: the largest relative L2 error against float64 by dtype.
        wrong: reasons, each with the call.
        absent: why the backend can't run here.
    """

    family: str
    of: int
    calls: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    absent: str = ""

    @property
    def status(self) -> str:
        if self.absent:
            return ABSENT
        return WRONG if self.wrong else RIGHT if self.calls else LATE

    def add(self, name: str, found: dict[str, Any]) -> None:
        """Adds what a worker found for the call ``name``."""
        self.calls += 1
        self.wrong += [f"{name}: {reason}" for reason in found["wrong"]]
        for dtype, error in found.get("errors", {}).items():
            self.errors[dtype] = max(error, self.errors.get(dtype, 0.0))


def check_families(
    names: Sequence[str], seconds: float, told: Callable[[Result], None] = lambda result: None
) -> list[Result]:
    """Checks families at the same time, each in a process of its own.

    Args:
        names: of families.
        seconds: for everything. The families share what is left, and what is not checked then is left out.
        told: is called with each result as soon as it is known.
    """
    end, states = time.monotonic() + seconds, backends()
    results = [Result(name, len(calls(name)), absent=states[FAMILIES[name].backend].reason) for name in names]
    waiting, running = [result for result in results if not result.absent], list[_Watch]()
    # A family waits for disks, compilers and a GPU as much as it computes.
    at_once = max(4, 2 * len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0)
    for result in results:
        if result.absent:
            told(result)
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    share = (end - time.monotonic()) * min(1.0, at_once / (len(waiting) + len(running)))
                    running.append(_Watch(waiting.pop(0), time.monotonic() + share, Path(folder)))
                for watch in [watch for watch in running if not watch.goes_on()]:
                    running.remove(watch)
                    told(watch.result)
                time.sleep(0.05)
        finally:
            for watch in running:
                watch.kill()
    return results


class _Watch:
    """Runs workers for the calls of a family, one after the other, until ``end``. Their output is in a file."""

    def __init__(self, result: Result, end: float, folder: Path) -> None:
        self.result, self.begin, self.end = result, time.monotonic(), end
        self.file, self.patience = folder / result.family, HANG_SECONDS[FAMILIES[result.family].backend]
        self.start(0)

    def start(self, skip: int) -> None:
        """Starts a worker that skips calls."""
        path = os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH"))))
        # Threads that wait must not spin on the cores of the other workers.
        environment = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": path}
        environment |= {"CAPSFAST_BACKEND": "", "TRITON_INTERPRET": "0"}
        self.begun = self.skip = skip
        self.call, self.since, self.rest, self.last = "", time.monotonic(), "", "no output"
        with self.file.open("wb") as output:
            self.process = subprocess.Popen(
                [*WORKER, self.result.family, "--skip", str(skip)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # so that the compilers that it starts end with it
            )
        self.output = self.file.open(encoding="utf-8", errors="replace")

    def goes_on(self) -> bool:
        """Takes what the worker said, and starts the next worker if this one ended or hangs."""
        status = self.process.poll()  # before the rest of the output is read
        self.read()
        self.result.seconds = time.monotonic() - self.begin
        if status == 0 or time.monotonic() > self.end:
            self.kill()
            return False
        if status is not None:
            return self.failed(f"the process ended with status {status}: {self.last}")
        if self.call and time.monotonic() - self.since > self.patience:
            return self.failed(f"no answer within {self.patience:.0f} s")
        return True

    def read(self) -> None:
        *lines, self.rest = (self.rest + self.output.read()).split("\n")
        for line in filter(str.strip, lines):
            fact: dict[str, Any] = {}
            with contextlib.suppress(ValueError):  # a line of a compiler
                fact = json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else {}
            if "call" in fact:
                self.call, self.since = fact["name"], time.monotonic()
            elif "done" in fact:
                self.result.add(self.call, fact)
                self.call, self.skip = "", fact["done"] + 1
            else:
                self.last = line

    def failed(self, why: str) -> bool:
        """Goes on behind the call that runs, if there is one."""
        self.kill()
        # If a worker ends between calls, it has reported an error, and the next worker goes on. If it ends before its
        # first call, the next worker would end there too.
        told = not self.call and self.skip > self.begun
        if not told:
            self.result.wrong.append(f"{self.call or 'the start'}: {why}")
        skip = self.skip + 1 if self.call else self.skip if told else self.result.of
        if skip >= self.result.of:
            return False
        self.start(skip)
        return True

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL) if os.name == "posix" else self.process.kill()
        self.process.wait()
        self.output.close()


def main() -> None:
    parser = argparse.ArgumentParser("python -m capsfast.bench.check", description=__doc__)
    parser.add_argument("family", choices=tuple(FAMILIES))
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--calls", type=int, help="how many; default all")
    asked, parent = parser.parse_args(), os.getppid()

    def end_with_the_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=end_with_the_parent, daemon=True).start()
    torch.manual_seed(0)
    if variable := FAMILIES[asked.family].variable:
        os.environ[variable] = "1"
    right = work(asked.family, asked.skip, asked.calls)
    # The parent of a check reads the results. A tool that watches two calls reads the status.
    sys.exit(asked.calls is not None and not right)


if __name__ == "__main__":
    main()
