"""Compares every family of kernels of this machine with float64; the command ``check``.

A worker process checks one family: ``python -m capsfast.bench.check FAMILY``. The worker names each call before the
call runs, so a call that hangs or ends the process is known, and the calls behind it go to another worker.
"""

import argparse
import dataclasses
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from .problems import LINEAR, LOADED, LOADED_OUT, LOADED_PASS, OPS, PASS_OPS, QUADRATIC, PassCase, RoutingCase, run

WORKER = (sys.executable, "-m", "capsfast.bench.check")
# A call that takes longer counts as wrong. Triton compiles.
HANG_SECONDS = {"cpp": 15.0, "cuda": 15.0, "triton": 60.0}
# The largest relative L2 error against float64. These bounds find wrong kernels; the tests know how exact kernels are.
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float64: 1e-10}
OP_OF = {op.name: op for op in (*OPS, *PASS_OPS)}
EM = "em"
QUIET = RoutingCase(coupling=False)
ROUTINGS = (QUIET, LOADED, LOADED_OUT)
PASSES = (LINEAR, LOADED_PASS)
NARROW = (torch.float32, torch.bfloat16)
WIDE = (*NARROW, torch.float16, torch.float64)


class Family(NamedTuple):
    """Kernels of a backend that share their code. shapes: (B, I, J, D, K). op: a function, or "em" for the routing."""

    backend: str
    op: str
    shapes: tuple[tuple[int, ...], ...] = ((5, 33, 10, 16, 8),)
    cases: tuple[Any, ...] = (None,)
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)


LAYER, ODD, MANY = (33, 63, 10, 16, 8), (17, 21, 5, 23, 3), (33, 9, 300, 4, 4)
FAMILIES = {
    "cpp routing": Family("cpp", "dynamic_routing", (LAYER, ODD, MANY), ROUTINGS, WIDE),
    "cpp shared weight": Family("cpp", "dynamic_routing", (LAYER, ODD), (RoutingCase(shared=True),), WIDE),
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
    "cuda general": Family("cuda", "dynamic_routing", (LAYER, ODD, MANY), (LOADED, LOADED_OUT, RoutingCase()), WIDE),
    "cuda votes": Family("cuda", "route_votes", (ODD, (4, 2520, 10, 16, 1)), ROUTINGS, WIDE),
    "cuda passes": Family("cuda", "routing_pass", (LAYER, MANY), PASSES, WIDE),
    "cuda votes passes": Family("cuda", "votes_pass", (ODD,), PASSES, WIDE),
    # Each call is compiled, which takes seconds.
    "triton routing": Family("triton", "dynamic_routing", (LAYER,), (QUIET, LOADED_OUT), NARROW),
    "triton softmax in": Family("triton", "dynamic_routing", (LAYER,), (LOADED,), NARROW),
    "triton large": Family("triton", "dynamic_routing", (MANY, (17, 33, 10, 32, 32)), (QUIET, LOADED_OUT)),
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
        return " ".join(str(word).removeprefix("torch.") for word in words if word is not None)


def calls(name: str) -> list[FamilyCall]:
    """The calls of a family. The first of each case come first, so that a check that ends early has seen all cases."""
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
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = function()

    def replay() -> dict[str, Tensor]:
        graph.replay()
        torch.cuda.synchronize()
        return outputs

    return replay


def other_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """The names of the results that are not equal bit by bit."""
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)]


def compare(call: FamilyCall, device: torch.device) -> dict[str, Any]:
    """Runs a call and compares the results: forward, and forward with backward, with float64; then the call again.

    On a GPU the second run of the forward with backward is the replay of a graph on other inputs; launches in a graph
    are not cooperative.

    Returns:
        "errors", the largest relative L2 error by dtype, and "wrong", the reasons why the call is wrong.
    """
    if call.case is None:
        return _compare_em(call, device)
    backend, op, wrong = call.family.backend, OP_OF[call.family.op], []
    problem, other = (op.make(call.shape, call.case, call.dtype, str(device), seed) for seed in (0, 1))
    bound, truth = BOUNDS[call.dtype], run(problem.to(torch.float64, str(device)), "reference")
    errors = {}
    for need, word in (((), " alone"), (None, "")):
        for name, value in run(problem, backend, need).items():
            errors[name + word] = relative_error(value, truth[name])
    wanted = run(other, backend)
    if device.type == "cuda":
        static = problem.copied()
        replay = captured(lambda: run(static, backend))
        static.overwrite(other)
        wrong += [f"{name} of a CUDA graph has other bits" for name in other_bits(replay(), wanted)]
    else:
        wrong += [f"{name} of a second call has other bits" for name in other_bits(run(other, backend), wanted)]
    return _verdict(call, errors, dict.fromkeys(errors, bound), wrong)


def _compare_em(call: FamilyCall, device: torch.device) -> dict[str, Any]:
    """EM routing, whose passes are quadratic and whose updates have a kernel."""
    sizes = dict(zip("BIJDK", call.shape, strict=True))
    case = dataclasses.replace(CANONICAL, **sizes, direction=DIRECTIONS[1], op="routing", routing=EM)  # type: ignore[arg-type]
    forward, inputs = contender(OURS + call.family.backend).make(case), input_set(case, device)
    gate = Gate(case, inputs)
    found, once = gate.check(forward), step(forward, case, [inputs])

    def gradients() -> dict[str, Tensor]:
        return dict(zip(case.shapes, once(), strict=True))  # type: ignore[call-overload]

    wanted, again = gradients(), captured(gradients) if device.type == "cuda" else gradients
    differing = [f"d{name} of a second call has other bits" for name in other_bits(again(), wanted)]
    return _verdict(call, found.errors, gate.bounds, differing)


def _verdict(call: FamilyCall, errors: dict[str, float], bounds: dict[str, float], wrong: list[str]) -> dict[str, Any]:
    wrong += [
        f"{name} has relative error {error:.1e}, bound {bounds[name]:.0e}"
        for name, error in errors.items()
        if not error <= bounds[name]  # so that NaN fails
    ]
    largest = max(filter(math.isfinite, errors.values()), default=0.0)
    return {"errors": {str(call.dtype).removeprefix("torch."): largest}, "wrong": wrong}


def device_of(name: str) -> torch.device:
    return torch.device("cpu" if FAMILIES[name].backend == "cpp" else "cuda")


def families(device_type: str) -> list[str]:
    """The families for a type of device, "cpu" or "cuda"."""
    return [name for name in FAMILIES if device_of(name).type == device_type]


def work(name: str, skip: int, count: int | None) -> None:
    """Checks ``count`` calls of a family, or all, from number ``skip`` on. Prints JSON before and after each call."""
    device = device_of(name)
    for number, call in [*enumerate(calls(name))][skip:][:count]:
        print(json.dumps({"call": number, "name": str(call)}), flush=True)
        try:
            found = compare(call, device)
        except Exception as error:  # refused, or an error of the GPU
            found = {"wrong": [first_line(error)]}
        print(json.dumps({"done": number, **found}), flush=True)
        if device.type == "cuda":
            # After an error of the GPU every later call of this process fails too: this ends the process.
            torch.cuda.synchronize()


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


def check(names: Sequence[str], seconds: float, told: Callable[[Result], None] = lambda result: None) -> list[Result]:
    """Checks families at the same time, each in a process of its own.

    Args:
        names: of families.
        seconds: for everything. The families share what is left, and what is not checked then is left out.
        told: is called with each result as soon as it is known.
    """
    end = time.monotonic() + seconds
    at_once = max(1, min(len(names), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4))
    states, waiting, lock = backends(), len(names), threading.Lock()

    def one(name: str) -> Result:
        nonlocal waiting
        with lock:
            share = (end - time.monotonic()) * min(1.0, at_once / waiting)
            waiting -= 1
        result = Result(name, len(calls(name)), absent=states[FAMILIES[name].backend].reason)
        if not result.absent:
            begin = time.monotonic()
            _watch(result, min(end, begin + share))
            result.seconds = time.monotonic() - begin
        told(result)
        return result

    with ThreadPoolExecutor(at_once) as pool:
        try:
            return list(pool.map(one, names))
        except BaseException:  # Ctrl-C ends the workers that run
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _watch(result: Result, end: float) -> None:
    """Runs workers until all calls of a family were checked or the time ends."""
    skip = 0
    while skip < result.of:
        begun, running = skip, {}
        for fact in _facts(result.family, skip, end):
            if "call" in fact:
                running, skip = fact, fact["call"]
            elif "done" in fact:
                result.add(running["name"], fact)
                running, skip = {}, fact["done"] + 1
            elif fact["ended"] == LATE:
                return
            elif running or skip == begun:
                # A worker that ends before its first call would do so again.
                result.wrong.append(f"{running.get('name', 'the start')}: {fact['ended']}")
                skip = skip + 1 if running else result.of


def _facts(name: str, skip: int, end: float) -> Iterator[dict[str, Any]]:
    """The lines of a worker as they come. If the worker does not end well, the last fact says how it "ended"."""
    command = [*WORKER, name, "--skip", str(skip)]
    path = os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH"))))
    environment = {"OMP_NUM_THREADS": "2", **os.environ, "PYTHONPATH": path}
    environment |= {"CAPSFAST_BACKEND": "", "TRITON_INTERPRET": "0"}
    patience, said = HANG_SECONDS[FAMILIES[name].backend], list[str]()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        lines: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        try:
            while True:
                left = end - time.monotonic()
                try:
                    line = lines.get(timeout=max(0.0, min(left, patience)))
                except queue.Empty:
                    ended = LATE if left <= patience else f"no answer within {patience:.0f} s"
                    yield {"ended": ended}
                    return
                if line is None:
                    break
                if line.startswith("{"):
                    yield json.loads(line)
                else:
                    said += line.split("\n")[:1]
            if process.wait():
                yield {"ended": f"the process ended with status {process.returncode}: {' '.join(said[-1:])}"}
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser("python -m capsfast.bench.check", description=__doc__)
    parser.add_argument("family", choices=tuple(FAMILIES))
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--calls", type=int, help="how many; default all")
    asked = parser.parse_args()
    torch.manual_seed(0)
    work(asked.family, asked.skip, asked.calls)


if __name__ == "__main__":
    main()
