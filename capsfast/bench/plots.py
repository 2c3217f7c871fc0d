"""Plots of results. matplotlib is imported when a plot is drawn."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from ..files import replacing
from .cases import DIRECTIONS, Case
from .contenders import COMPILED, EAGER
from .results import Results

CAPSULES = {"I": "input capsules I", "J": "output capsules J"}
BATCH_COLORS = {"eager": "#8c8c8c", "torch.compile": "#d1622b", "capsfast": "#1460aa"}


def _new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot, which would look for a display and keep state.
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure: Any, path: Path, dpi: int = 120, **metadata: str) -> Path:
    with replacing(path) as draft:
        figure.savefig(draft, dpi=dpi, metadata=metadata)
    return path


def _sizes(plot: Any, sizes: Iterable[int], label: str, **style: Any) -> None:
    """Logarithmic axes with the measured sizes as ticks."""
    plot.set_xscale("log")
    plot.set_yscale("log")
    plot.set_xticks(list(sizes), labels=[str(size) for size in sizes], **style)
    plot.xaxis.minorticks_off()
    plot.yaxis.set_major_formatter("{x:g}")
    plot.set_xlabel(label)
    plot.grid(alpha=0.3)


def _memory(results: Results, case: Case, name: str) -> float | None:
    growth = results.memory(case, name)
    # A logarithmic axis can't show zero.
    return None if growth is None else max(growth, 2**12) / 2**20


def _capsule_plot(
    results: Results, op: str, path: Path, label: str, value: Callable[[Case, str], float | None]
) -> Path | None:
    """A panel for each number of capsules (I, J) and direction; None if no value is known."""
    panels = [(size, direction, results.along(size, op, direction)) for size in CAPSULES for direction in DIRECTIONS]
    panels = [panel for panel in panels if len(panel[2]) > 1]
    if not any(value(case, name) is not None for *_, cases in panels for case in cases for name in results.contenders):
        return None
    rows = -(-len(panels) // 2)
    figure, plots = _new_figure(rows, 2, (10, 3.6 * rows))
    handles: dict[str, Any] = {}
    for plot, (size, direction, cases) in zip(plots.flat, panels, strict=False):
        for n, name in enumerate(results.contenders):
            points = [(getattr(case, size), value(case, name)) for case in cases]
            known = [(x, y) for x, y in points if y is not None]
            if known:
                (handles[name],) = plot.plot(*zip(*known, strict=True), marker="o", color=f"C{n}")
        _sizes(plot, [getattr(case, size) for case in cases], CAPSULES[size], rotation=30)
        plot.set_title(direction)
        plot.set_ylabel(label)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles))
    figure.suptitle(path.stem)
    return _save(figure, path)


def sweep_plots(results: Results, op: str, folder: Path, machine: str) -> list[tuple[Path, str]]:
    """Draws the record of ``op`` against capsule counts and batch. Returns the files with their descriptions."""
    stem = folder / f"{machine}-{op}"
    drawn = [
        (
            _capsule_plot(results, op, Path(f"{stem}-speedup.png"), "times the time of capsfast", results.speedup),
            "Times slower than capsfast, against the number of capsules,",
        ),
        (
            _capsule_plot(results, op, Path(f"{stem}-memory.png"), "peak memory, MiB", partial(_memory, results)),
            "Memory against the number of capsules",
        ),
        (batch_plot(results, op, folder, machine), "Time and memory against the batch, forward and backward,"),
    ]
    return [(path, what) for path, what in drawn if path is not None]


def _batch_lines(results: Results, op: str) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """By quantity and name: (batch, value) for capsfast and the einsum forms, forward plus backward."""
    lines: dict[str, dict[str, list[tuple[int, float]]]] = {
        quantity: {name: [] for name in BATCH_COLORS} for quantity in ("milliseconds", "peak memory, MiB")
    }
    for case in results.along("B", op, "forward+backward"):
        for label, name in (("eager", EAGER), ("torch.compile", COMPILED), ("capsfast", results.ours(case))):
            seconds = results.seconds(case, name) if name else None
            values = (seconds and 1e3 * seconds, _memory(results, case, name) if name else None)
            for line, value in zip(lines.values(), values, strict=True):
                if value is not None:
                    line[label].append((case.B, round(value, 3)))
    return lines


def batch_plot(results: Results, op: str, folder: Path, machine: str) -> Path | None:
    """Time and peak memory against the batch; None if the record lacks one of them.

    The file's description holds the numbers, so that a test can tell whether the picture is older than its record.
    """
    lines = _batch_lines(results, op)
    if not all(points for drawn in lines.values() for points in drawn.values()):
        return None
    figure, (plots,) = _new_figure(1, 2, (8, 3.2))
    for plot, (quantity, drawn) in zip(plots, lines.items(), strict=True):
        for label, points in drawn.items():
            plot.plot(*zip(*points, strict=True), marker="o", color=BATCH_COLORS[label], linewidth=2, label=label)
        _sizes(plot, [size for size, _ in drawn["capsfast"]], "batch B")
        plot.set_ylabel(quantity)
        plot.spines[["top", "right"]].set_visible(False)
    figure.legend(*plots[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return _save(figure, folder / f"{machine}-{op}-batch.png", dpi=200, Description=repr(lines))


def bars(results: Results, path: Path) -> None:
    """Milliseconds of every contender on every case, for ``capsfast bench --png``."""
    figure, plots = _new_figure(len(results.cases), 1, (8, 0.9 + 1.4 * len(results.cases)))
    for plot, case in zip(plots.flat, results.cases, strict=True):
        names = [name for name in reversed(results.contenders) if results.seconds(case, name) is not None]
        values = [1e3 * (results.seconds(case, name) or 0.0) for name in names]
        drawn = plot.barh(names, values, color=[f"C{results.contenders.index(name)}" for name in names])
        plot.bar_label(drawn, fmt="%.3g ms", padding=3)
        plot.margins(x=0.15)
        plot.set_title(case.name, fontsize="small")
    _save(figure, path)
