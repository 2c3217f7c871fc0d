"""Plots of results. matplotlib is imported when a plot is drawn."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..files import replacing
from .cases import DIRECTIONS, Case
from .contenders import COMPILED, EAGER
from .results import Results

CAPSULES = {"I": "input capsules I", "J": "output capsules J"}
COLORS = {"eager": "#8c8c8c", "torch.compile": "#d1622b", "capsfast": "#1460aa"}


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


def _lines(plot: Any, lines: dict[str, list[tuple[int, float]]], label: str, quantity: str) -> None:
    """Lines on logarithmic axes with the measured sizes as ticks."""
    for name, points in lines.items():
        if points:
            plot.plot(*zip(*points, strict=True), marker="o", color=COLORS.get(name), label=name)
    plot.set(xscale="log", yscale="log", xlabel=label, ylabel=quantity)
    sizes = sorted({size for points in lines.values() for size, _ in points})
    plot.set_xticks(sizes, labels=[str(size) for size in sizes], rotation=30)
    plot.xaxis.minorticks_off()
    plot.yaxis.set_major_formatter("{x:g}")
    plot.grid(alpha=0.3)


def _known(cases: Sequence[Case], size: str, values: Iterable[float | None]) -> list[tuple[int, float]]:
    """The points of a line. A logarithmic axis can't show zero."""
    return [
        (getattr(case, size), round(max(value, 2**-8), 3))
        for case, value in zip(cases, values, strict=True)
        if value is not None
    ]


def speedup_plot(results: Results, op: str, folder: Path, machine: str) -> Path | None:
    """A panel for each number of capsules (I, J) and direction; None if capsfast was measured for fewer than two."""
    panels = []
    for size, direction in itertools.product(CAPSULES, DIRECTIONS):
        cases = results.along(size, op, direction)
        lines = {
            name: _known(cases, size, [results.speedup(case, name) for case in cases]) for name in results.contenders
        }
        if len(cases) > 1 and any(lines.values()):
            panels.append((lines, CAPSULES[size], direction))
    if not panels:
        return None
    rows = -(-len(panels) // 2)
    figure, plots = _new_figure(rows, 2, (10, 3.6 * rows))
    for plot, (lines, label, direction) in zip(plots.flat, panels, strict=False):
        _lines(plot, lines, label, "times the time of capsfast")
        plot.set_title(direction)
    figure.legend(*plots.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return _save(figure, folder / f"{machine}-{op}-speedup.png")


def sweep_plots(results: Results, op: str, folder: Path, machine: str) -> list[tuple[Path, str]]:
    """Draws the record of ``op`` against capsule counts and batch. Returns the files with their descriptions."""
    drawn = [
        (
            speedup_plot(results, op, folder, machine),
            "Times slower than capsfast, against the number of capsules,",
        ),
        (batch_plot(results, op, folder, machine), "Time and memory against the batch, forward and backward,"),
    ]
    return [(path, what) for path, what in drawn if path is not None]


def batch_plot(results: Results, op: str, folder: Path, machine: str) -> Path | None:
    """Time and peak memory against the batch; None if the record lacks one of them.

    The file's description holds the numbers, so that a test can tell whether the picture is older than its record.
    """
    cases = results.along("B", op, "forward+backward")
    names = {"eager": EAGER, "torch.compile": COMPILED, "capsfast": ""}
    quantities = {"milliseconds": (results.seconds, 1e3), "peak memory, MiB": (results.memory, 2**-20)}

    def line(quantity: str, name: str) -> list[tuple[int, float]]:
        value, scale = quantities[quantity]
        found = [value(case, name or results.ours(case) or "") for case in cases]
        return _known(cases, "B", [None if each is None else each * scale for each in found])

    lines = {quantity: {label: line(quantity, name) for label, name in names.items()} for quantity in quantities}
    if not all(points for drawn in lines.values() for points in drawn.values()):
        return None
    figure, (plots,) = _new_figure(1, 2, (8, 3.2))
    for plot, (quantity, drawn) in zip(plots, lines.items(), strict=True):
        _lines(plot, drawn, "batch B", quantity)
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
