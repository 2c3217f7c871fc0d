"""Plots of records, for the report."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from .. import plot
from .cases import DIRECTIONS, Case
from .contenders import COMPILED, EAGER
from .results import Results

CAPSULES = {"I": "input capsules I", "J": "output capsules J"}
COLORS = {"eager": "#8c8c8c", "torch.compile": "#d1622b", "capsfast": "#1460aa"}
Lines = dict[str, list[tuple[int, float]]]


def _draw(axes: Any, lines: Lines, label: str, quantity: str) -> None:
    """Lines on logarithmic axes with the measured sizes as ticks."""
    for name, points in lines.items():
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=COLORS.get(name), label=name)
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel=quantity)
    sizes = sorted({size for points in lines.values() for size, _ in points})
    axes.set_xticks(sizes, labels=[str(size) for size in sizes], rotation=30)
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)


def _known(cases: Sequence[Case], size: str, values: Iterable[float | None]) -> list[tuple[int, float]]:
    """The points of a line. A logarithmic axis can't show zero."""
    return [
        (getattr(case, size), round(max(value, 2**-8), 3))
        for case, value in zip(cases, values, strict=True)
        if value is not None
    ]


def sweep_plots(results: Results, op: str, folder: Path, machine: str) -> list[tuple[Path, str]]:
    """Draws the record of ``op`` against capsule counts and batch. Returns the files with their descriptions."""
    drawn = (
        (speedup_figure(results, op), "speedup", "Times slower than capsfast, against the number of capsules,"),
        (batch_figure(results, op), "batch", "Time and memory against the batch, forward and backward,"),
    )
    return [
        (plot.save(figure, folder / f"{machine}-{op}-{kind}.png", dpi=180), what)
        for figure, kind, what in drawn
        if figure is not None
    ]


def speedup_figure(results: Results, op: str) -> Figure | None:
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
    figure = Figure(figsize=(10, 3.6 * rows), layout="constrained")
    plots = figure.subplots(rows, 2, squeeze=False)
    for axes, (lines, label, direction) in zip(plots.flat, panels, strict=False):
        _draw(axes, lines, label, "times the time of capsfast")
        axes.set_title(direction)
    figure.legend(*plots.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def batch_figure(results: Results, op: str) -> Figure | None:
    """Time and peak memory against the batch; None if the record lacks one of them."""
    cases = results.along("B", op, "forward+backward")
    names = {"eager": EAGER, "torch.compile": COMPILED, "capsfast": ""}

    def lines(value: Any, scale: float) -> Lines:
        found = {
            label: [value(case, name or results.ours(case) or "") for case in cases] for label, name in names.items()
        }
        return {
            label: _known(cases, "B", [None if each is None else each * scale for each in values])
            for label, values in found.items()
        }

    drawn = {"milliseconds": lines(results.seconds, 1e3), "peak memory, MiB": lines(results.memory, 2**-20)}
    if not all(points for each in drawn.values() for points in each.values()):
        return None
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    plots = figure.subplots(1, 2)
    for axes, (quantity, each) in zip(plots, drawn.items(), strict=True):
        _draw(axes, each, "batch B", quantity)
    figure.legend(*plots[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return figure
