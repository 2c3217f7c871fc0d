"""One case, all contenders: gate, then interleaved timing, then memory; one row for each."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import memory
from .cases import Case
from .contenders import Contender
from .gate import Gate
from .inputs import input_sets, step
from .timing import interleave


@dataclass(frozen=True)
class Row:
    """One contender on one case.

    status: "ok", "skipped" (it was not run: reason), "wrong" (the gate found an error: reason) or
    "failed" (it raised: reason). seconds: median, p10, p90, least, calls. errors: relative L2 errors.
    memory_bytes: growth of peak memory beyond inputs and gradients, None where not measured.
    """

    case: Case
    contender: str
    status: str
    reason: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    memory_bytes: int | None = None

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
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            found = re.search(r"MemAvailable:\s+(\d+) kB", lines.read())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def measure(
    case: Case,
    contenders: Sequence[Contender],
    device: torch.device,
    *,
    seconds: float = 2.0,
    least_rounds: int = 5,
    with_memory: bool = True,
    on_step: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """A row for every contender, in order; ``on_step`` is told what goes on."""
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
        rows |= _gate_and_time(case, able, device, seconds, least_rounds, on_step)
    if with_memory:
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
            verdict = gate.check(forward)
        except Exception as error:  # a contender may fail in any way; the others go on
            rows[each.name] = Row(case, each.name, "failed", _first_line(error))
            continue
        rows[each.name] = Row(case, each.name, "wrong" if verdict.reason else "ok", verdict.reason, {}, verdict.errors)
        if not verdict.reason:
            steps[each.name] = step(forward, case, sets)
    on_step("timing")
    if steps:
        for name, timing in interleave(steps, device, seconds, least_rounds).items():
            rows[name] = dataclasses.replace(rows[name], seconds=dataclasses.asdict(timing))
    # The next shape is compiled afresh instead of counting as a recompilation of this one.
    torch.compiler.reset()
    return rows


def run(
    cases: Sequence[Case],
    contenders: Sequence[Contender],
    device: torch.device,
    *,
    with_memory: Callable[[Case], bool] = lambda case: True,
    **how: Any,
) -> Iterator[list[Row]]:
    """The rows of each case as soon as they are there; ``how`` goes to :func:`measure`."""
    for case in cases:
        yield measure(case, contenders, device, with_memory=with_memory(case), **how)
