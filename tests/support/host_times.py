"""Host times of calls, and counts of what takes them: allocations, launches, op calls, Python calls, torch calls.

Needs no GPU. For the backend triton, kernels are compiled for sm_90, and a stub in place of the launcher records
launches, which do not run (see triton_host.py): the times are the host's alone. The backend cpp runs its kernels.

    KINETO_LOG_LEVEL=99 python -m tests.support.host_times [--backend cpp] [--batch 4] [--rounds 50] [--calls]
"""

import argparse
import os
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import capsfast
from capsfast.calls import checks
from capsfast.environment import native, toolchain
from capsfast.nn import EMRouting, SelfAttentionRouting

from . import triton_host

PACKAGE = str(Path(capsfast.__file__).parent) + os.sep
# Runs of a step between two runs of other steps.
VISIT = 5
NUMBERS = ("host_us", "allocations", "launches", "op_calls", "python_calls", "torch_calls")


class Case(NamedTuple):
    """call: takes the inputs and returns tensors. inputs: tensors with gradients; call may use more of them."""

    name: str
    call: Callable[..., Iterable[Tensor]]
    inputs: Sequence[Tensor]


def cases(backend: str, B: int) -> list[Case]:
    I, J, D, K, r = 64, 10, 16, 8, 3
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw).requires_grad_()

    u, weight, votes, query = normal(B, I, K), normal(I, J, D, K), normal(B, I, J, D), normal(B, J, D)
    activation = torch.rand(B, I, generator=draw).requires_grad_()
    em = EMRouting(I, J, K, D, num_iterations=r, backend=backend)
    attention = SelfAttentionRouting(I, J, K, D, backend=backend)
    own = {routing: [*routing.parameters()] for routing in (em, attention)}
    return [
        Case("dynamic routing", lambda u, w: [capsfast.dynamic_routing(u, w, r, backend=backend)], [u, weight]),
        Case("given votes", lambda x: [capsfast.route_votes(x, r, backend=backend)], [votes]),
        Case(
            "one pass",
            lambda u, weight, query: capsfast.routing_pass(u, weight, query=query, backend=backend)[:2],
            [u, weight, query],
        ),
        Case("EM", lambda u, weight, *own: em((u, weight)), [u, weight, *own[em]]),
        Case(
            "EM, activation",
            lambda u, weight, activation, *own: em((u, weight), activation),
            [u, weight, activation, *own[em]],
        ),
        Case("self-attention", lambda u, weight, *own: attention((u, weight)), [u, weight, *own[attention]]),
        # How fast this machine is: its times become those of another machine by the ratio of their add_.
        Case("add_", lambda x: [x * 1 if torch.is_grad_enabled() else x.add_(1)], [torch.ones(1).requires_grad_()]),
    ]


class Step(NamedTuple):
    """One of the three things that are measured of a case. prepare: runs unmeasured before each run, which takes it."""

    name: str
    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None
    with_grad: bool = True


def steps(case: Case) -> list[Step]:
    def forward(_: object = None) -> Iterable[Tensor]:
        return case.call(*case.inputs)

    def outputs() -> Sequence[Tensor]:
        return [value for value in forward() if value.requires_grad]

    gradients = [torch.ones_like(value) for value in outputs()]

    def backward(outputs: Sequence[Tensor]) -> object:
        return torch.autograd.grad(outputs, case.inputs, gradients)

    return [
        Step("forward", forward, with_grad=False),
        Step("forward, autograd", forward),
        Step("backward", backward, outputs),
    ]


def launches(launched: triton_host.Launches) -> int:
    """How many kernels were launched since the last call. Another way of launching adds its own count here."""
    count = len(launched) + (len(triton_host.taken()) if native.extension is not None else 0)
    launched.clear()
    return count


def counts(step: Step, launched: triton_host.Launches) -> dict[str, int]:
    """All NUMBERS of one run but the time."""
    given = step.prepare()
    launches(launched)
    with torch.set_grad_enabled(step.with_grad):
        step.run(given)
    found = {"launches": launches(launched), "python_calls": python_calls(step).total()}
    given = step.prepare()
    with torch.set_grad_enabled(step.with_grad), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        step.run(given)
    events = p.profiler.kineto_results.events()  # type: ignore[union-attr]
    # Memory events come from the allocator, so what C++ allocates without an op is among them. A negative one frees.
    found["allocations"] = sum(event.name() == "[memory]" and event.nbytes() > 0 for event in events)
    found["op_calls"] = sum(event.name().startswith("capsfast::") for event in events)
    found["torch_calls"] = outermost([event for event in events if event.name().startswith("aten::")])
    return found


def outermost(events: Sequence[Any]) -> int:
    """How many of the events do not lie in another one."""
    count, end = 0, defaultdict[int, int](int)
    for event in sorted(events, key=lambda each: (each.start_ns(), -each.end_ns())):
        thread = event.start_thread_id()
        if event.start_ns() >= end[thread]:
            count, end[thread] = count + 1, event.end_ns()
    return count


def python_calls(step: Step) -> Counter[str]:
    """The calls of functions of the package, by function. On the CPU a backward runs in the thread that asks for it."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found[f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_firstlineno} {code.co_name}"] += 1

    given = step.prepare()
    with torch.set_grad_enabled(step.with_grad):
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            step.run(given)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    return found


def seconds(step: Step) -> float:
    given = step.prepare()
    with torch.set_grad_enabled(step.with_grad):
        start = time.perf_counter()
        step.run(given)
        return time.perf_counter() - start


def measure(backend: str, B: int, rounds: int, launched: triton_host.Launches, calls: bool = False) -> None:
    """Prints a table."""
    measured = {(case.name, step.name): step for case in cases(backend, B) for step in steps(case)}
    for step in measured.values():
        for _ in range(10):
            seconds(step)
    taken: dict[tuple[str, str], list[float]] = {name: [] for name in measured}
    for _ in range(rounds):
        for name, step in measured.items():
            taken[name] += [seconds(step) for _ in range(VISIT)]
            launches(launched)
    print(f"torch {torch.__version__}, backend {backend}, B={B} I=64 J=10 D=16 K=8 r=3, float32, {VISIT * rounds} runs")
    print(f"{'case':18}{'step':20}" + "".join(f"{number:>14}" for number in NUMBERS))
    for (case, what), step in measured.items():
        row = {"host_us": round(1e6 * statistics.median(taken[case, what]), 1), **counts(step, launched)}
        print(f"{case:18}{what:20}" + "".join(f"{row[number]:>14}" for number in NUMBERS))
        if calls:
            print("".join(f"    {count:4} {name}\n" for name, count in python_calls(step).most_common()), end="")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("triton", "cpp"), default="triton")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--calls", action="store_true", help="also print the Python calls by function")
    given = parser.parse_args()
    torch.set_num_threads(1)
    launched = triton_host.Launches()
    if given.backend == "triton":
        os.environ.pop("TRITON_INTERPRET", None)
        # The backend sends calls to Triton as if Triton's interpreter ran, and looks at no numbers, as on a GPU.
        toolchain.interpreting = lambda: True
        checks.can_be_looked_at = lambda value: False
        launched = triton_host.stub()
    measure(given.backend, given.batch, given.rounds, launched, given.calls)
