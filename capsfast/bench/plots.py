"""Plots of results; matplotlib is imported when one is drawn."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..files import replacing
from .cases import Case
from .contenders import COMPILED, EAGER, OURS
from .results import Axis, Results

CAPSULES = {"I": "input capsules I", "J": "output capsules J"}
BATCH_COLORS = {"eager": "#8c8c8c", "torch.compile": "#d1622b", "capsfast": "#1460aa"}


def _new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot: no display is looked for and no state is left behind.
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure: Any, path: Path, dpi: int = 120, **metadata: str) -> None:
    with replacing(path) as draft:
        figure.savefig(draft, dpi=dpi, metadata=metadata)


def _lines(
    plot: Any, axis: Axis, names: list[str], value: Callable[[Case, str], float | None], colors: list[str]
) -> None:
    for name in names:
        points = [(getattr(case, axis.name), value(case, name)) for case in axis.cases]
        known = [(x, y) for x, y in points if y is not None]
        if known:
            plot.plot(*zip(*known, strict=True), marker="o", label=name, color=f"C{colors.index(name)}")
    plot.set_xscale("log")
    plot.set_yscale("log", base=2)
    sizes = [getattr(case, axis.name) for case in axis.cases]
    plot.set_xticks(sizes, labels=[str(size) for size in sizes], fontsize="small", rotation=30)
    plot.xaxis.minorticks_off()
    plot.yaxis.set_major_formatter("{x:g}")
    plot.set_xlabel(CAPSULES[axis.name])
    plot.set_title(axis.direction)
    plot.grid(alpha=0.3)


def _panels(
    axes: list[Axis],
    path: Path,
    title: str,
    label: str,
    results: Results,
    names: list[str],
    value: Callable[[Case, str], float | None],
    level: float | None,
) -> Path | None:
    """One panel for each axis; nothing when there is nothing to show."""
    if not any(value(case, name) is not None for axis in axes for case in axis.cases for name in names):
        return None
    columns = 2 if len(axes) > 1 else 1
    rows = -(-len(axes) // columns)
    figure, plots = _new_figure(rows, columns, (5 * columns, 3.6 * rows))
    for n in range(rows * columns):
        plot = plots[n // columns][n % columns]
        if n >= len(axes):
            plot.axis("off")
            continue
        _lines(plot, axes[n], names, value, results.contenders)
        plot.set_ylabel(label)
        if level is not None:
            plot.axhline(level, color="black", linewidth=0.8)
    # A contender may be missing from the first panel: each label is taken from where it occurs.
    handles: dict[str, Any] = {}
    for row in plots:
        for plot in row:
            for handle, name in zip(*plot.get_legend_handles_labels(), strict=True):
                handles.setdefault(name, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles))
    figure.suptitle(title)
    _save(figure, path)
    return path


def sweep_plots(results: Results, op: str, folder: Path, machine: str) -> list[Path]:
    """Speed-up and memory of ``op`` against the capsule counts, both against the batch; the files written."""
    axes = [axis for axis in results.axes() if axis.op == op and axis.name in CAPSULES]
    others = [name for name in results.contenders if not name.startswith(OURS)]

    stem = f"{machine}-{op}"
    written = [
        _panels(
            axes,
            folder / f"{stem}-speedup.png",
            f"{op}: time of others over time of capsfast, {machine}",
            "times slower than capsfast",
            results,
            others,
            results.speedup,
            1.0,
        ),
        _panels(
            axes,
            folder / f"{stem}-memory.png",
            f"{op}: peak memory beyond inputs and gradients, {machine}",
            "MiB",
            results,
            results.contenders,
            partial(_memory, results),
            None,
        ),
        batch_plot(results, op, folder, machine),
    ]
    return [path for path in written if path is not None]


def _memory(results: Results, case: Case, name: str) -> float | None:
    growth = results.memory(case, name)
    # A logarithmic axis has no zero.
    return None if growth is None else max(growth, 2**12) / 2**20


def _batch_lines(results: Results, op: str) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """By quantity and name: (batch, value) of capsfast and of the einsum forms, forward and backward."""
    lines: dict[str, dict[str, list[tuple[int, float]]]] = {
        quantity: {name: [] for name in BATCH_COLORS} for quantity in ("milliseconds", "peak memory, MiB")
    }
    axes = [axis for axis in results.axes() if (axis.op, axis.name) == (op, "batch")]
    for case in [case for axis in axes for case in axis.cases if case.backward]:
        for label, name in (("eager", EAGER), ("torch.compile", COMPILED), ("capsfast", results.ours(case))):
            seconds = results.seconds(case, name) if name else None
            values = (seconds and 1e3 * seconds, _memory(results, case, name) if name else None)
            for line, value in zip(lines.values(), values, strict=True):
                if value is not None:
                    line[label].append((case.B, round(value, 3)))
    return lines


def batch_plot(results: Results, op: str, folder: Path, machine: str) -> Path | None:
    """Time and peak memory against the batch; nothing where the record lacks one of them.

    The file's description holds the numbers, so a test sees whether the picture is older than its record.
    """
    lines = _batch_lines(results, op)
    if not all(points for drawn in lines.values() for points in drawn.values()):
        return None
    figure, (plots,) = _new_figure(1, 2, (8, 3.2))
    for plot, (quantity, drawn) in zip(plots, lines.items(), strict=True):
        for label, points in drawn.items():
            plot.loglog(*zip(*points, strict=True), marker="o", color=BATCH_COLORS[label], linewidth=2, label=label)
        sizes = [size for size, _ in drawn["capsfast"]]
        plot.set_xticks(sizes, labels=[str(size) for size in sizes])
        plot.minorticks_off()
        plot.yaxis.set_major_formatter("{x:g}")
        plot.set_xlabel("batch B")
        plot.set_ylabel(quantity)
        plot.grid(alpha=0.3)
        plot.spines[["top", "right"]].set_visible(False)
    figure.legend(*plots[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    path = folder / f"{machine}-{op}-batch.png"
    _save(figure, path, dpi=200, Description=repr(lines))
    return path


def bars(results: Results, path: Path) -> None:
    """Milliseconds of every contender on every case, for the short run of the command line."""
    figure, plots = _new_figure(len(results.cases), 1, (8, 0.9 + 1.4 * len(results.cases)))
    for row, case in zip(plots, results.cases, strict=True):
        plot = row[0]
        names = [name for name in reversed(results.contenders) if results.seconds(case, name) is not None]
        values = [1e3 * (results.seconds(case, name) or 0.0) for name in names]
        drawn = plot.barh(names, values, color=[f"C{results.contenders.index(name)}" for name in names])
        plot.bar_label(drawn, fmt="%.3g ms", padding=3)
        plot.margins(x=0.15)
        plot.set_title(case.name, fontsize="small")
        plot.tick_params(labelsize="small")
    _save(figure, path)
