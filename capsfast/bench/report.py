"""Turns records into Markdown and pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import write_text
from .cases import CANONICAL, DIRECTIONS, ROUTING, Case
from .contenders import COMPILED, EAGER
from .measure import Row
from .record import load
from .results import Results, differing, markdown_table, mebibytes, milliseconds, percent, times

RATES = {
    "matmul": "float32 matmul",
    "tf32": "TF32 matmul",
    "bf16": "bfloat16 matmul",
    "multiply_add": "multiply-adds on registers",
}
TITLES = {ROUTING: "Routings"}  # of tables; an op without a title has its name


def describe(surroundings: dict[str, Any]) -> str:
    """Machine, versions, commit and measured limits, in a few sentences."""
    machine, versions, commit = surroundings["machine"], surroundings["versions"], surroundings["commit"]
    # Older records have a name for the generation of the CPU.
    generation = machine.get("microarchitecture") or machine.get("family_model_stepping")
    text = machine["cpu"] + (f" ({generation})" if generation else "")
    text += f", {machine['cores']} cores, torch threads: {machine['threads']}, {machine['memory_gib']} GiB"
    if "gpu" in machine:
        text += f"; {machine['gpu']}, {machine['gpu_memory_gib']} GiB"
    text += f". capsfast {versions['capsfast']}, torch {versions['torch']}, Python {versions['python']}"
    text += "".join(f", {name} {versions[name]}" for name in ("triton", "cuda") if versions[name])
    if commit is not None:
        text += f"; commit {commit['hash'][:12]}" + (" with changes" if commit["changed"] else "")
    limits = surroundings.get("limits") or {}
    rates = [
        f"{limits[key + '_flops_per_second'] / 1e9:.0f} GFLOP/s ({name})"
        for key, name in RATES.items()
        if key + "_flops_per_second" in limits
    ]
    if "copy_bytes_per_second" in limits:
        rates.append(f"{limits['copy_bytes_per_second'] / 1e9:.1f} GB/s (copy, read and written)")
    return f"{text}. Measured limits: {', '.join(rates)}." if rates else f"{text}."


def _cells(results: Results, case: Case, limits: dict[str, float]) -> dict[str, str]:
    """A line of a table, by the titles of the columns."""
    names = results.contenders
    cells = {f"{name}, ms": results.shown(case, name) for name in names}
    cells |= {f"speed-up over {name}": times(results.speedup(case, name)) for name in (COMPILED, EAGER)}
    cells |= {f"{name} in a CUDA graph, ms": milliseconds(results.of(case, name, "graph")) for name in names}
    cells |= {f"host of {name}, ms": milliseconds(results.of(case, name, "host")) for name in names}
    cells |= {f"{name}, MiB": mebibytes(results.memory(case, name)) for name in names}
    cells["of the multiply-adds"] = percent(results.share(case, limits))
    if "tf32_flops_per_second" in limits:  # measured on a GPU
        cells |= {"GFLOP": f"{case.flops / 1e9:.2f}", "least MB": f"{case.least_bytes / 1e6:.1f}"}
    return cells


def _table(results: Results, cases: Sequence[Case], limits: dict[str, float]) -> str:
    """A line for each case, without columns that have no number. The times are always there."""
    lines = [_cells(results, case, limits) for case in cases]
    always = {f"{name}, ms" for name in results.contenders}
    titles = [title for title in lines[0] if title in always or any(line[title] != "-" for line in lines)]
    rows = [
        [f"{case.routing} {differing(case)}".lstrip(), *(line[title] for title in titles)]
        for case, line in zip(cases, lines, strict=True)
    ]
    return markdown_table(["", *titles], rows)


def _section(path: Path, images: Path | None) -> str:
    surroundings, rows = load(path)
    results, limits = Results(rows), surroundings.get("limits") or {}
    parts = [f"## {path.stem}", describe(surroundings)]
    for op in dict.fromkeys(case.op for case in results.cases):
        own = [case for case in results.cases if case.op == op]
        if images is not None and not any(case.routing for case in own):
            from . import plots  # needs matplotlib

            drawn = plots.sweep_plots(results, op, images, path.stem)
            parts += [f"![{what} of {op}]({image.parent.name}/{image.name})" for image, what in drawn]
        for direction in DIRECTIONS:
            cases = [case for case in own if case.direction == direction]
            if cases:
                parts += [f"### {TITLES.get(op, op)}, {direction}", _table(results, cases, limits)]
    missing: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.status != "ok":
            missing.setdefault((row.contender, row.status), []).append(row)
    if missing:
        lines = [
            f"* {name}, {status} ({len(found)}), such as {found[0].case.name}: {found[0].reason}"
            for (name, status), found in missing.items()
        ]
        parts += ["### Not measured", "\n".join(lines)]
    return "\n\n".join(parts)


INTRODUCTION = f"""# Measurements

`python -m capsfast report benchmarks/results/*.json --out docs` writes this page from these records; do not edit it.
`capsfast report FILE` shows other records, such as the records of an older capsfast in `benchmarks/results/older/`.

* Except where a row names other sizes, the layer is B={CANONICAL.B} I={CANONICAL.I} J={CANONICAL.J} D={CANONICAL.D}
  K={CANONICAL.K} r={CANONICAL.r} in {CANONICAL.dtype}.
* A time is the median of one call. All contenders of a case ran in one process, in turns, after their results were
  compared with float64. Memory is the growth of the peak beyond inputs and gradients.
* A speed-up compares with the fastest capsfast backend. Ratios differ by machine, so every record has a section.
* "of the multiply-adds": the FLOPs of a call that makes the votes again in every pass, divided by the time of `cpp` and
  by the measured rate of multiply-adds on registers. "least MB", on a GPU: each input and each result once.
* The broadcast matmul of older records expands the weight to the batch.
* The einsum form of another routing makes the votes once with einsum. Gradients then include activations and the
  parameters of the routing."""


def page(records: Sequence[Path], images: Path | None = None) -> str:
    """The records as one Markdown page. images: folder for pictures, which the page links to; None for no pictures.

    Raises:
        OSError: a record can't be read, or the folder can't be written to.
        ValueError: a file is not a record.
    """
    return "\n\n".join([INTRODUCTION, *(_section(path, images) for path in sorted(records))]) + "\n"


def write(records: Sequence[Path], folder: Path) -> Path:
    """Writes ``benchmarks.md`` and ``images/*.png`` into the folder and returns the page's path. Raises: as page()."""
    text = page(records, folder / "images")
    write_text(folder / "benchmarks.md", text)
    return folder / "benchmarks.md"
