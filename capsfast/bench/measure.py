"""One case, all contenders: gate, then interleaved timing, then memory; one row for each."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import memory
from .cases import Case
from .contenders import Contender
from .deadline import deadline
from .executed import executed_flops
from .gate import Gate
from .graphs import Replay
from .inputs import Step, input_sets, step
from .timing import Turn, interleave, take_turns, turn_of


@dataclass(frozen=True)
class Row:
    """One contender on one case.

    status: "ok", "skipped" (it was not run: reason), "wrong" (the gate found an error: reason) or
    "failed" (it raised: reason). seconds: median, p10, p90, least, calls. errors: relative L2 errors.
    memory_bytes: growth of peak memory beyond inputs and gradients, None where not measured.
    clock: what seconds were taken by: "host", "graph" (replays of a CUDA graph) or "events" (between the
    calls). event_seconds: beside those of a graph, what events saw of calls that the host launched.
    flops: that a call on the CPU executes, None where nobody says.
    """

    case: Case
    contender: str
    status: str
    reason: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    memory_bytes: int | None = None
    clock: str = "host"
    event_seconds: dict[str, float] = field(default_factory=dict)
    flops: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> "Row":
        return Row(**{**fields, "case": Case(**fields["case"])})


def without_paths(text: str) -> str:
    """``text`` without the folders of absolute paths: records hold none."""
    return re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", text)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return without_paths(f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}")


def free_bytes(device: torch.device) -> int | None:
    """Memory free on the device, None where the system does not say."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for itself counts as taken
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            found = re.search(r"MemAvailable:\s+(\d+) kB", lines.read())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """One stream for all that a case does, and not the default one, which no graph can capture."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()


def measure(
    case: Case,
    contenders: Sequence[Contender],
    device: torch.device,
    *,
    seconds: float = 2.0,
    least_rounds: int = 5,
    with_memory: bool = True,
    first_call_seconds: float | None = None,
    on_step: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """A row for every contender, in order; ``on_step`` is told what goes on.

    first_call_seconds: a contender whose first call, which compiles, takes longer has failed.
    """
    rows: dict[str, Row] = {}
    free = free_bytes(device)
    able = []
    for each in contenders:
        reason = each.why_not(case, device, free)
        if reason:
            rows[each.name] = Row(case, each.name, "skipped", reason)
        else:
            able.append(each)
    if able:
        with _stream(device):
            rows |= _gate_and_time(case, able, device, seconds, least_rounds, with_memory, first_call_seconds, on_step)
    if with_memory and device.type == "cpu":
        for each in able:
            if rows[each.name].status == "ok":
                on_step(f"memory of {each.name}")
                growth, reason = memory.peak_growth(case, each, device)
                rows[each.name] = dataclasses.replace(rows[each.name], memory_bytes=growth, reason=reason)
    return [rows[each.name] for each in contenders]


def _gate_and_time(
    case: Case,
    able: list[Contender],
    device: torch.device,
    seconds: float,
    least_rounds: int,
    with_memory: bool,
    first_call_seconds: float | None,
    on_step: Callable[[str], None],
) -> dict[str, Row]:
    on_step("reference in float64")
    sets = input_sets(case, device)
    gate = Gate(case, sets[0])
    rows: dict[str, Row] = {}
    steps = {}
    for each in able:
        on_step(f"checking {each.name}")
        forward = each.make(case)
        try:
            # The first call: compiles what is compiled.
            with deadline(first_call_seconds, "the first call"):
                verdict = gate.check(forward)
                if gate.case != case and not verdict.reason:
                    step(forward, case, sets)(0)  # of this size, too
        except Exception as error:  # a contender may fail in any way; the others go on
            rows[each.name] = Row(case, each.name, "failed", _first_line(error))
            continue
        rows[each.name] = Row(case, each.name, "wrong" if verdict.reason else "ok", verdict.reason, {}, verdict.errors)
        if not verdict.reason:
            steps[each.name] = step(forward, case, sets)
    on_step("timing")
    if steps and device.type == "cuda":
        rows |= _time_on_gpu(case, {name: rows[name] for name in steps}, steps, len(sets), device, seconds, with_memory)
    elif steps:
        for name, timing in interleave(steps, device, seconds, least_rounds).items():
            flops = executed_flops(case, name)
            rows[name] = dataclasses.replace(rows[name], seconds=dataclasses.asdict(timing), flops=flops)
    # The next shape is compiled afresh instead of counting as a recompilation of this one.
    torch.compiler.reset()
    return rows


def _time_on_gpu(
    case: Case,
    rows: dict[str, Row],
    steps: dict[str, Step],
    sets: int,
    device: torch.device,
    seconds: float,
    with_memory: bool,
) -> dict[str, Row]:
    """Peak memory of each, then replays of graphs in turns, then the same calls launched by the host."""
    turns: dict[str, Turn] = {}
    for name, call in steps.items():
        try:
            if with_memory:
                rows[name] = dataclasses.replace(rows[name], memory_bytes=memory.cuda_growth(case, call, device))
        except RuntimeError as error:
            rows[name] = dataclasses.replace(rows[name], status="failed", reason=_first_line(error))
            continue
        try:
            turns[name] = Replay(call, sets, device)
            rows[name] = dataclasses.replace(rows[name], clock="graph")
        except RuntimeError as error:  # out of memory, or an op that no graph can hold
            rows[name] = dataclasses.replace(rows[name], clock="events", reason=f"no graph: {_first_line(error)}")
            turns[name] = turn_of(call, device)
    for name, timing in take_turns(turns, seconds / 2).items():
        rows[name] = dataclasses.replace(rows[name], seconds=dataclasses.asdict(timing))
    turns.clear()  # the graphs' memory
    by_events = {name: call for name, call in steps.items() if rows[name].clock == "graph"}
    for name, timing in interleave(by_events, device, seconds / 2).items():
        rows[name] = dataclasses.replace(rows[name], event_seconds=dataclasses.asdict(timing))
    return rows
