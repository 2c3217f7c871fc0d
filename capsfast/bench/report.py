"""Records to Markdown."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..files import write_text
from . import plots, roofline
from .cases import CANONICAL, OPS, Case, sweep
from .contenders import COMPILED, EAGER
from .executed import CPP
from .floors import floor
from .formats import gigaflops, markdown_table, mebibytes, milliseconds, percent, times
from .record import load
from .results import Results, differing, shares

AXIS_TITLES = {
    "I": "input capsules I",
    "J": "output capsules J",
    "batch": "batch B",
    "dims": "capsule sizes D and K",
    "iterations": "iterations r",
    "dtype": "dtype",
    "corners": "wide layers at small batches",
}

# By the last word of the file's name.
PICTURES = {
    "speedup": ("Speed-up", "the number of capsules"),
    "memory": ("Memory", "the number of capsules"),
    "batch": ("Time and memory", "the batch, forward and backward"),
}


def _cell(results: Results, case: Case, name: str) -> str:
    row = results.row(case, name)
    if row is None:
        return ""
    return milliseconds(row.seconds["median"]) if row.status == "ok" else row.status


def _table(results: Results, cases: list[Case], label: Callable[[Case], str], limits: dict[str, float]) -> str:
    with_ours = any(results.ours(case) is not None for case in cases)
    baselines = [name for name in (COMPILED, EAGER) if with_ours and name in results.contenders]
    remembered = [name for name in results.contenders if any(results.memory(case, name) is not None for case in cases)]
    shared = {
        case: shares(case, seconds, limits)
        for case in cases
        if (ours := results.ours(case)) is not None and (seconds := results.seconds(case, ours)) is not None
    }
    with_shares = any(shared.values())
    header = ["", *(f"{name}, ms" for name in results.contenders)]
    header += [f"speed-up over {name}" for name in baselines]
    header += [f"{name}, MiB" for name in remembered]
    header += ["of matmul rate", "of copy rate"] if with_shares else []
    reached = {case: roofline.share(results.row(case, CPP), limits) for case in cases}
    with_reached = any(each is not None for each in reached.values())
    header += ["of the multiply-adds"] if with_reached else []
    with_floors = any(floor(case, limits) is not None for case in shared)
    header += ["of the floor's rate"] if with_floors else []
    lines = []
    for case in cases:
        line = [label(case), *(_cell(results, case, name) for name in results.contenders)]
        line += [times(results.speedup(case, name)) for name in baselines]
        for name in remembered:
            growth = results.memory(case, name)
            line.append("-" if growth is None else mebibytes(growth))
        if with_shares:
            share = shared.get(case)
            line += ["-", "-"] if share is None else [percent(each) for each in share]
        if with_reached:
            line.append(percent(reached[case]))
        if with_floors:
            line.append(_floor_share(results, case, limits))
        lines.append(line)
    return markdown_table(header, lines)


def _floor_share(results: Results, case: Case, limits: dict[str, float]) -> str:
    ours = results.ours(case)
    seconds = None if ours is None else results.seconds(case, ours)
    least = floor(case, limits)
    if seconds is None or least is None:
        return "-"
    return f"{percent(least.seconds / seconds)} ({least.limiting})"


def _unmeasured(results: Results) -> str:
    """Skipped, wrong and failed rows with their reasons, each reason once."""
    reasons: dict[str, list[str]] = {}
    for row in results.rows.values():
        if row.status != "ok":
            reasons.setdefault(f"{row.contender}, {row.status}: {row.reason}", []).append(row.case.name)
    return "\n".join(f"* {reason} ({'; '.join(names)})" for reason, names in reasons.items())


def describe(surroundings: dict[str, Any]) -> str:
    """Machine, versions and commit in one sentence each."""
    machine, versions, commit = surroundings["machine"], surroundings["versions"], surroundings["commit"]
    generation = f" ({machine['microarchitecture']})" if machine.get("microarchitecture") else ""
    text = (
        f"{machine['cpu']}{generation}, {machine['cores']} cores, torch threads: {machine['threads']}, "
        f"{machine['memory_gib']} GiB"
    )
    if "gpu" in machine:
        text += f"; {machine['gpu']}, {machine['gpu_memory_gib']} GiB"
    text += f". capsfast {versions['capsfast']}, torch {versions['torch']}, Python {versions['python']}"
    for name in ("triton", "cuda"):
        if versions[name]:
            text += f", {name} {versions[name]}"
    if commit is not None:
        text += f"; commit {commit['hash'][:12]}" + (" with changes" if commit["changed"] else "")
    limits = surroundings.get("limits")
    return f"{text}. {describe_limits(limits)}" if limits else f"{text}."


def describe_limits(limits: dict[str, float]) -> str:
    """The measured rates in one sentence."""
    rates = [
        f"{gigaflops(limits['matmul_flops_per_second'])} (float32 matmul)",
        f"{limits['copy_bytes_per_second'] / 1e9:.1f} GB/s (copy, read and written)",
    ]
    others = (("tf32", "TF32 matmul"), ("bf16", "bfloat16 matmul"), ("multiply_add", "multiply-adds on registers"))
    for key, name in others:
        if f"{key}_flops_per_second" in limits:
            rates.append(f"{gigaflops(limits[f'{key}_flops_per_second'])} ({name})")
    return f"Measured limits: {', '.join(rates)}."


def _section(path: Path, images: Path, docs: Path) -> str:
    surroundings, rows = load(path)
    results = Results(rows)
    limits = surroundings.get("limits") or {}
    title = path.stem
    parts = [f"## {title}", describe(surroundings)]
    if any(row.clock == "graph" for row in rows):
        parts.append("Times are those of CUDA graphs of many calls, which leave the host out.")
    axes = results.axes()
    for op in dict.fromkeys(axis.op for axis in axes):
        parts.append(f"### {op}")
        for image in plots.sweep_plots(results, op, images, title):
            kind, axis_title = PICTURES[image.stem.rpartition("-")[2]]
            parts.append(f"![{kind} of {op} against {axis_title}]({os.path.relpath(image, docs)})")
        for axis in axes:
            if axis.op == op:
                parts.append(f"#### {op}: {AXIS_TITLES[axis.name]}, {axis.direction}")
                parts.append(_table(results, axis.cases, axis.label, limits))
    for routing in dict.fromkeys(name for name, _ in results.routings()):
        parts.append(f"### Routing {routing}")
        for (name, direction), cases in results.routings().items():
            if name == routing:
                parts += [f"#### Routing {routing}: {direction}", _table(results, cases, differing, limits)]
    for op in OPS:
        layers = roofline.table(results, op, limits)
        if layers:
            parts += [f"### {op}: the backend cpp against the multiply-adds", markdown_table(roofline.HEADER, layers)]
    others = results.others(axes)
    if limits.get(roofline.RATE):
        tabulated = {case for op in OPS for case in sweep("roofline", op)}
        others = [case for case in others if case not in tabulated]
    if others:
        parts += ["### Other cases", _table(results, others, lambda case: case.name, limits)]
    unmeasured = _unmeasured(results)
    if unmeasured:
        parts += ["### Not measured", unmeasured]
    return "\n\n".join(parts)


INTRODUCTION = f"""# Measurements

Written by `python -m capsfast report` from the records in `benchmarks/results/`; do not edit.

Unless a table says otherwise the layer is B={CANONICAL.B} I={CANONICAL.I} J={CANONICAL.J} D={CANONICAL.D}
K={CANONICAL.K} r={CANONICAL.r} in {CANONICAL.dtype}. Times are medians of one call; all contenders of a case ran
interleaved in one process, each after its result was held against float64. Memory is the growth of the
peak beyond inputs and gradients. Speed-ups are those of the fastest capsfast backend. Ratios against
`torch.compile` differ by machine: every record has a section of its own. The shares of the matmul and copy
rates count the least FLOPs and bytes a forward needs. A kernel may exceed the rate of torch's matrix product: its share
is then above 100 %. The broadcast matmul expands the weight to the batch. The share of the multiply-adds counts
the FLOPs that the backend `cpp` executes, votes that it makes again included, against multiply-adds on
registers, all threads at once; a record without that rate has no such column. Of a routing that has a name in
`capsfast.nn.ROUTINGS` the einsum form is the same routing over votes formed once by einsum, its passes in plain torch;
gradients are those of capsules, weight, activations and the routing's own parameters."""


def write(records: Sequence[Path], docs: Path) -> Path:
    """Writes ``docs/benchmarks.md`` and ``docs/images/*.png`` from the records; returns the former.

    Raises:
        OSError: a record can't be read, or the folder not be written to.
        ValueError: a file is no record.
    """
    images = docs / "images"
    page = docs / "benchmarks.md"
    sections = [_section(path, images, docs) for path in sorted(records)]
    write_text(page, "\n\n".join([INTRODUCTION, *sections]) + "\n")
    return page
