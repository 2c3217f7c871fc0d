"""Measures all contenders on a case: the gate, then interleaved timing, then memory; a row for each contender."""

import dataclasses
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..environment import native
from . import memory
from .cases import Case
from .contenders import Contender
from .gate import Gate
from .inputs import InputSet, Step, input_sets, step
from .timing import graph_seconds, host_seconds, interleave

# The memory of a container's control group: version 2, then version 1.
GROUPS = (("memory.max", Path("/sys/fs/cgroup")), ("memory.limit_in_bytes", Path("/sys/fs/cgroup/memory")))


@dataclass(frozen=True)
class Row:
    """One contender on one case.

    Args:
        status: "ok", "skipped" (it was not run), "wrong" (the gate found an error) or "failed" (it raised).
        reason: why the status is not "ok", or why memory or graph is None.
        seconds: the fields of :class:`capsfast.bench.timing.Timing`.
        errors: relative L2 errors by name of the output or gradient.
        memory_bytes: growth of peak memory beyond inputs and gradients, None if it was not measured.
        host, graph: on a GPU, seconds of the host for a call, and seconds of a call in a CUDA graph.
    """

    case: Case
    contender: str
    status: str
    reason: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    memory_bytes: int | None = None
    host: float | None = None
    graph: float | None = None

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> "Row":
        """The row in a record, without fields that only older records have."""
        known = {column.name for column in dataclasses.fields(Row)}
        return Row(**{**{key: fields[key] for key in fields.keys() & known}, "case": Case(**fields["case"])})


def without_paths(text: str) -> str:
    """``text`` without the folders of absolute paths, which records must not hold."""
    return re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", text)


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return without_paths(f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}")


def free_bytes(device: torch.device) -> int | None:
    """Free memory of the device in bytes, within the limit of a container; None if the system does not say."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory in torch's cache would count as used
        return torch.cuda.mem_get_info(device)[0]
    free = []
    with suppress(OSError):
        free += [1024 * int(kib) for kib in re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())]
    for limit, group in GROUPS:
        # No such file, or no limit: "max". The pages of files do not count, because the system can drop them.
        with suppress(OSError, ValueError):
            used = re.findall(r"^(?:anon|total_rss) (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            free.append(int((group / limit).read_text()) - sum(map(int, used)))
    return min(free, default=None)


def multiply_adds(samples: int = 9) -> dict[str, float]:
    """FLOP per second of float32 multiply-adds on registers, all threads, median; empty without the extension."""
    if native.extension is None:
        return {}
    return {
        "multiply_add_flops_per_second": sorted(native.extension.peak_flops() for _ in range(samples))[samples // 2]
    }


def lost(device: torch.device) -> bool:
    """Whether an error, such as a kernel's access to a wrong address, ended the use of a GPU in this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def prepared(case: Case, contender: Contender, sets: list[InputSet], gate: Gate) -> tuple[Row, Step | None]:
    """Checks a contender, which compiles it. A contender that is wrong or fails has no step to time."""
    try:
        forward = contender.make(case)
        verdict = gate.check(forward)
        row = Row(case, contender.name, "wrong" if verdict.reason else "ok", verdict.reason, {}, verdict.errors)
        if verdict.reason:
            return row, None
        once = step(forward, case, sets)
        once()
        return row, once
    except Exception as error:  # a contender may fail in any way; the others continue
        # The type of a refusal by capsfast.backend.choose is RuntimeError itself.
        refused = "cannot serve this call" in str(error)
        return Row(case, contender.name, "skipped" if refused else "failed", first_line(error)), None


def beside(step: Step, row: Row, device: torch.device) -> Row:
    """The row with the time of the host and the time in a CUDA graph, or the reason why there is no graph."""
    row = dataclasses.replace(row, host=host_seconds(step, device))
    try:
        return dataclasses.replace(row, graph=graph_seconds(step))
    except Exception as error:  # a contender need not work in a graph
        reasons = filter(None, [row.reason, f"no CUDA graph: {first_line(error)}"])
        return dataclasses.replace(row, reason="; ".join(reasons))


def measure(
    case: Case, contenders: Sequence[Contender], device: torch.device, *, seconds: float = 2.0, with_memory: bool = True
) -> list[Row]:
    """A row for every contender, in order.

    Raises:
        RuntimeError: an error ended the use of the GPU, or no contender could run, such as without memory.
    """
    free = free_bytes(device)
    rows = {
        contender.name: Row(case, contender.name, "skipped", contender.why_not(case, device, free))
        for contender in contenders
    }
    able = [contender for contender in contenders if not rows[contender.name].reason]
    steps: dict[str, Step] = {}
    if able:
        sets = input_sets(case, device)
        gate = Gate(case, sets[0])
    for contender in able:
        rows[contender.name], once = prepared(case, contender, sets, gate)
        if once is not None:
            steps[contender.name] = once
        elif lost(device):
            raise RuntimeError(f"{contender.name}: {rows[contender.name].reason}")
    for name, timing in interleave(steps, device, seconds).items() if steps else ():
        rows[name] = dataclasses.replace(rows[name], seconds=dataclasses.asdict(timing))
    for contender in able if with_memory else ():
        if contender.name in steps:
            growth, reason = memory.peak_growth(case, contender, device, steps[contender.name])
            rows[contender.name] = dataclasses.replace(rows[contender.name], memory_bytes=growth, reason=reason)
    # Graphs come last, because a capture that fails may leave torch in a broken state.
    for name in steps if device.type == "cuda" else ():
        rows[name] = beside(steps[name], rows[name], device)
    # So that torch compiles the next shape from scratch, and does not count it as a recompilation.
    torch.compiler.reset()
    return [rows[contender.name] for contender in contenders]
