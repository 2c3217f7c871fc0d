"""Turns records into Markdown and pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..storage.files import write_text
from .cases import CANONICAL, DIRECTIONS, LAYER, ROUTING, Case
from .contenders import COMPILED, EAGER
from .measure import Row
from .record import load
from .results import Results, differing, markdown_table, mebibytes, microseconds, percent, times

RATES = {
    "matmul": "float32 matmul",
    "tf32": "TF32 matmul",
    "bf16": "bfloat16 matmul",
    "multiply_add": "multiply-adds on registers",
}
TITLES = {ROUTING: "Routings", LAYER: "Convolutional layers"}  # of tables; an op without a title has its name
EMPTY = {"", "-"}  # cells of a table that say nothing


def describe(surroundings: dict[str, Any]) -> str:
    """Machine, versions, commit, measured limits and the record's note, in a few sentences."""
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
    text += f". Measured limits: {', '.join(rates)}" if rates else ""
    return f"{text}. {surroundings['note']}." if "note" in surroundings else f"{text}."


def _lines(results: Results, case: Case, limits: dict[str, float], on_gpu: bool) -> dict[str, dict[str, str]]:
    """The lines of a case by the captions of the tables, and the cells by the titles; a CPU has one table."""
    names = results.contenders
    memory = {f"{name}, MiB": mebibytes(results.memory(case, name)) for name in names}
    if not on_gpu:
        cells = {f"{name}, ms": results.shown(case, name) for name in names}
        cells |= {f"speed-up over {name}": times(results.speedup(case, name)) for name in (COMPILED, EAGER)}
        return {"": cells | memory | {"of the multiply-adds": percent(results.share(case, limits))}}

    def timed(how: str) -> dict[str, str]:
        ratio = results.speedup(case, COMPILED, how)
        marked = f"**{ratio:.2f}x, slower**" if ratio is not None and ratio < 0.995 else times(ratio)
        cells = {name: results.shown(case, name, how, microseconds) for name in names}
        cells[f"speed-up over {COMPILED}"] = marked
        if how == "eager":
            cells |= {f"host of {name}": microseconds(results.seconds(case, name, "host")) for name in names}
        # The work stands beside the main times.
        main = how == results.main(case) and results.ours(case, how) is not None
        cells["GFLOP"] = f"{case.flops / 1e9:.2f}" if main and case.flops else ""
        return cells | {"least MB": f"{case.least_bytes / 1e6:.1f}" if main else ""}

    graphs = timed("graph") if results.main(case) == "graph" else {}
    return {"In a CUDA graph, µs:": graphs, "Eager, and the host's part, µs:": timed("eager"), "Memory:": memory}


def _tables(results: Results, cases: Sequence[Case], limits: dict[str, float], on_gpu: bool) -> list[str]:
    """Captions and tables, without lines and columns that are empty."""
    found = {case: _lines(results, case, limits, on_gpu) for case in cases}
    parts = []
    for caption in found[cases[0]]:
        lines = {case: tables[caption] for case, tables in found.items() if set(tables[caption].values()) - EMPTY}
        titles = [title for line in [*lines.values()][:1] for title in line]
        titles = [title for title in titles if any(line[title] not in EMPTY for line in lines.values())]
        rows = [
            [f"{case.module_name} {differing(case)}".lstrip(), *(line[title] for title in titles)]
            for case, line in lines.items()
        ]
        parts += [caption, markdown_table(["", *titles], rows)] if rows else []
    return [part for part in parts if part]


def _section(path: Path, images: Path | None) -> str:
    surroundings, rows = load(path)
    results, limits = Results(rows), surroundings.get("limits") or {}
    on_gpu = surroundings["machine"]["device"] == "cuda"
    parts = [f"## {path.stem}", describe(surroundings)]
    for op in dict.fromkeys(case.op for case in results.cases):
        of_op = [case for case in results.cases if case.op == op]
        if images is not None and op not in TITLES:
            from . import plots  # needs matplotlib

            drawn = plots.sweep_plots(results, op, images, path.stem, on_gpu)
            parts += [f"![{what} of {op}]({image.parent.name}/{image.name})" for image, what in drawn]
        for direction in DIRECTIONS:
            cases = [case for case in of_op if case.direction == direction]
            if cases:
                parts += [f"### {TITLES.get(op, op)}, {direction}", *_tables(results, cases, limits, on_gpu)]
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
* A time is the median of one call. Results were compared with float64 before, unless the section says otherwise. On a
  CPU all contenders of a case ran in one process, in turns; on a GPU one contender runs at a time, in one process or in
  several. Memory is the growth of the peak beyond inputs and gradients.
* A speed-up compares with the fastest capsfast backend. Ratios differ by machine, so every record has a section.
* "of the multiply-adds": the FLOPs of a call that makes the votes again in every pass, divided by the time of `cpp` and
  by the measured rate of multiply-adds on registers.
* On a GPU times are in µs. The first is the time of a call in a CUDA graph of several calls: the kernels alone, with
  warm caches. An eager time is the time between two events around a call, after the L2 cache was cleared; if the host
  launches kernels more slowly than the GPU runs them, it is the host's time. The host's part: until a call returns.
* On a GPU a speed-up compares times of the same kind; "slower" marks calls for which `torch.compile` is faster. GFLOP:
  the FLOPs of a call that makes the votes again in every pass. Least MB: each input and each result once.
* The broadcast matmul of older records expands the weight to the batch.
* The einsum form of another routing makes the votes once with einsum. Gradients then include activations and the
  parameters of the routing.
* A convolutional layer has windows of 3 along every axis of its image, without padding, and routes I to J capsule types
  dynamically. Its einsum form unfolds the poses, and stores windows and votes; of a slim layer it stores the votes of a
  convolution."""


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
