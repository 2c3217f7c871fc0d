"""Plots of records, for the report."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from .. import plot
from .cases import DIRECTIONS, Case
from .contenders import COMPILED, EAGER, OURS
from .results import Results

CAPSULES = {"I": "input capsules I", "J": "output capsules J"}
ON_GPU = {"torch.compile": COMPILED, "capsfast triton": OURS + "triton", "capsfast cuda": OURS + "cuda"}
COLORS = {"eager": "#8c8c8c", "torch.compile": "#d1622b", "capsfast": "#1460aa"}
COLORS |= {"capsfast triton": "#1460aa", "capsfast cuda": "#3c9a5f"}
Lines = dict[str, list[tuple[int, float]]]
Value = Callable[[Case, str], float | None]


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
    axes.yaxis.set_minor_formatter(LogFormatter())  # labels minor ticks only if there are few major ones
    axes.grid(alpha=0.3)


def _lines(cases: Sequence[Case], size: str, names: Mapping[str, str], value: Value, scale: float = 1.0) -> Lines:
    """A line for each label: the values of the contender with this name. A logarithmic axis can't show zero."""
    points = {label: [(getattr(case, size), value(case, name)) for case in cases] for label, name in names.items()}
    return {
        label: [(at, round(max(number * scale, 2**-8), 3)) for at, number in values if number is not None]
        for label, values in points.items()
    }


def sweep_plots(results: Results, op: str, folder: Path, machine: str, on_gpu: bool) -> list[tuple[Path, str]]:
    """Draws the record of ``op`` against capsule counts and batch. Returns the files with their descriptions."""
    if on_gpu:
        drawn = [(times_figure(results, op), "times", "Time of a call, against the batch and the number of capsules,")]
    else:
        drawn = [
            (speedup_figure(results, op), "speedup", "Times slower than capsfast, against the number of capsules,"),
            (batch_figure(results, op), "batch", "Time and memory against the batch, forward and backward,"),
        ]
    return [
        (plot.save(figure, folder / f"{machine}-{op}-{kind}.png", dpi=180), what)
        for figure, kind, what in drawn
        if figure is not None
    ]


def speedup_figure(results: Results, op: str) -> Figure | None:
    """A panel for each number of capsules (I, J) and direction; None if capsfast was measured for fewer than two."""
    names = dict(zip(results.contenders, results.contenders, strict=True))
    return _panels(results, op, CAPSULES, names, results.speedup, "times the time of capsfast")


def times_figure(results: Results, op: str) -> Figure | None:
    """On a GPU: a panel for each size (B, I, J) with several cases and each direction; None if there is none."""
    how = "graph" if any(results.main(case) == "graph" for case in results.cases) else "eager"

    def us(case: Case, name: str) -> float | None:
        seconds = results.seconds(case, name, how)
        return None if seconds is None else 1e6 * seconds

    sizes, quantity = {"B": "batch B", **CAPSULES}, {"graph": "µs in a CUDA graph", "eager": "µs, eager"}[how]
    return _panels(results, op, sizes, ON_GPU, us, quantity)


def _panels(
    results: Results, op: str, sizes: Mapping[str, str], names: Mapping[str, str], value: Value, quantity: str
) -> Figure | None:
    panels = []
    for size, direction in itertools.product(sizes, DIRECTIONS):
        cases = results.along(size, op, direction)
        lines = _lines(cases, size, names, value)
        if len(cases) > 1 and any(lines.values()):
            panels.append((lines, sizes[size], direction))
    if not panels:
        return None
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(10, 3.6 * rows), layout="constrained")
    plots = figure.subplots(rows, 2, squeeze=False)
    for axes, (lines, label, direction) in zip(plots.flat, panels, strict=False):
        _draw(axes, lines, label, quantity)
        axes.set_title(direction)
    figure.legend(*plots.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def batch_figure(results: Results, op: str) -> Figure | None:
    """Time and peak memory against the batch; None if the record lacks one of them."""
    cases = results.along("B", op, "forward+backward")
    names = {"eager": EAGER, "torch.compile": COMPILED, "capsfast": ""}

    def lines(value: Value, scale: float) -> Lines:
        return _lines(cases, "B", names, lambda case, name: value(case, name or results.ours(case) or ""), scale)

    drawn = {"milliseconds": lines(results.seconds, 1e3), "peak memory, MiB": lines(results.memory, 2**-20)}
    if not all(points for value in drawn.values() for points in value.values()):
        return None
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    plots = figure.subplots(1, 2)
    for axes, (quantity, curves) in zip(plots, drawn.items(), strict=True):
        _draw(axes, curves, "batch B", quantity)
    figure.legend(*plots[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return figure
