"""Figures; matplotlib is needed."""

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from ..files import replacing
from .inspect import DELTAS, Predictions, RoutingStatistics
from .progress import LOG_EVERY, OF_CLASSES

CELL = 0.5  # inches
SHADES = 31


def save(figure: Figure, path: Path) -> Path:
    # Into memory first: the encoder reports a full disk without its errno.
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=90, bbox_inches="tight", pil_kwargs={"optimize": True})
    with replacing(path) as draft:
        draft.write_bytes(picture.getbuffer())
    return path


def in_colour(images: Tensor) -> Tensor:
    """``[n, C, H, W]`` of 1 or 3 channels, or of a stereo pair, as red, green and blue: left is red, right cyan."""
    return images[:, [0, 1, 1]] if images.shape[1] == 2 else images.expand(-1, 3, -1, -1)


def _mosaic(rows: Sequence[Tensor], gap: int) -> Tensor:
    """Rows of images ``[n, C, H, W]`` in [0, 1] side by side on white: ``[height, width, 3]``."""
    # Rows may come from the data and from a device.
    spaced = [F.pad(in_colour(images.detach().cpu()), [gap, 0, gap, 0], value=1.0) for images in rows]
    lines = [images.permute(2, 0, 3, 1).flatten(1, 2) for images in spaced]  # [H, n W, 3]
    # The noise in the last bits is most of a PNG's size.
    return (torch.cat(lines).clamp(0, 1) * SHADES).round() / SHADES


def image_grid(rows: Mapping[str, Tensor], columns: Sequence[str], title: str = "") -> Figure:
    """A row of images ``[n, C, H, W]`` beside each name, a column under each text."""
    H, W = next(iter(rows.values())).shape[2:]
    gap = max(1, W // 10)
    figure = Figure(figsize=(CELL * len(columns) + 1.2, CELL * len(rows) + 0.6), layout="constrained")
    plot = figure.subplots()
    plot.imshow(_mosaic(list(rows.values()), gap).numpy(), interpolation="nearest")
    plot.xaxis.tick_top()
    plot.set_xticks([gap + W / 2 - 0.5 + n * (W + gap) for n in range(len(columns))], columns, fontsize="small")
    plot.set_yticks([gap + H / 2 - 0.5 + n * (H + gap) for n in range(len(rows))], list(rows), fontsize="small")
    plot.tick_params(length=0)
    plot.spines[:].set_visible(False)
    figure.suptitle(title, fontsize="medium")
    return figure


def overlap_colours(parts: Tensor) -> Tensor:
    """Two grey images ``[B, 2, C, H, W]`` to red and green ``[B, 3, H, W]``; yellow where both are."""
    grey = parts.mean(2)
    return torch.stack([grey[:, 0], grey[:, 1], torch.zeros_like(grey[:, 0])], 1)


def class_colours(classes: Tensor) -> Tensor:
    """The classes of pixels, bool ``[B, J, H, W]``, to a colour for each, ``[B, 3, H, W]``; the mean of several."""
    J = classes.shape[1]
    shades = colormaps["tab10"](range(J)) if J <= 10 else colormaps["hsv"](torch.linspace(0, 1, J + 1)[:-1].numpy())
    colours = torch.tensor(shades[:, :3], dtype=torch.float32)  # [J, 3]
    there = classes.float().cpu()
    return torch.einsum("bjyx,jc->bcyx", there, colours) / there.sum(1, keepdim=True).clamp_min(1)


def perturbation(images: Tensor, label: str, deltas: Sequence[float] = DELTAS) -> Figure:
    """``images [D, n, C, H, W]``: a row for each dimension, a column for each value added."""
    rows = {f"dimension {d + 1}": row for d, row in enumerate(images)}
    return image_grid(rows, [f"{delta:+.2f}" for delta in deltas], f"capsule of {label}, one dimension varied")


RIGHT, WRONG, OTHER = "tab:green", "tab:red", "lightgrey"


def predictions(shown: Predictions, columns: int = 4) -> Figure:
    """Images, each beside a bar for the activation of every class.

    Green are the classes of the image, red one that was found and is not there.
    """
    n, J = shown.activations.shape
    columns = min(columns, n)
    rows = -(-n // columns)
    height = max(1.1, 0.11 * J)
    figure = Figure(figsize=(2.6 * columns, height * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, 2 * columns, squeeze=False)
    pixels = in_colour(shown.images.detach().cpu()).clamp(0, 1).permute(0, 2, 3, 1)
    for plot in grid.flat[2 * n :]:
        plot.set_axis_off()
    for image, bars, picture, label, values in zip(
        grid.flat[0 : 2 * n : 2], grid.flat[1 : 2 * n : 2], pixels, shown.labels, shown.activations, strict=True
    ):
        classes = label.view(-1).tolist()
        found = values.topk(len(classes)).indices.tolist()
        image.imshow(((picture * SHADES).round() / SHADES).numpy(), interpolation="nearest")
        image.set_axis_off()
        bars.barh(range(J), values.tolist(), color=bar_colours(J, classes, found))
        bars.set(xlim=(0, max(1.0, float(values.max()))), yticks=range(J) if J <= 20 else [])
        bars.invert_yaxis()
        bars.tick_params(labelsize=5, length=1)
        right = sorted(found) == sorted(classes)
        bars.set_title(", ".join(map(str, found)), fontsize="small", color=RIGHT if right else WRONG, pad=2)
    figure.suptitle(f"{int(shown.right.sum())} of {n} right; above each, what was found", fontsize="medium")
    return figure


def bar_colours(J: int, classes: Sequence[int], found: Sequence[int]) -> list[str]:
    """Of the bars of J classes, by those of the image and those that were found."""
    return [RIGHT if j in classes else WRONG if j in found else OTHER for j in range(J)]


def _matrix(plot: Axes, values: Tensor, shown: str, ylabel: str, xlabel: str) -> None:
    J = len(values)
    top = float(values.nan_to_num().max()) or 1.0
    plot.imshow(values.numpy(), cmap="Blues", vmin=0, vmax=top)
    plot.set(xticks=range(J), yticks=range(J), ylabel=ylabel, xlabel=xlabel)
    if J > 20:  # no room for the numbers
        return
    for row in range(J):
        for column in range(J):
            value = values[row, column].item()
            if value and value == value:
                color = "white" if value > 0.6 * top else "black"
                plot.text(column, row, format(value, shown), ha="center", va="center", fontsize=7, color=color)


def confusion(counts: Tensor, title: str) -> Figure:
    """``counts [J, J]`` by true class (row) and predicted class (column)."""
    side = max(4.0, 0.5 * len(counts))
    figure = Figure(figsize=(side, side), layout="constrained")
    plot = figure.subplots()
    _matrix(plot, counts, ".0f", "class", "predicted")
    plot.set_title(title, fontsize="medium")
    return figure


def routing(statistics: RoutingStatistics, title: str) -> Figure:
    """Mean capsule lengths by class, and the coupling entropy from iteration to iteration."""
    r, J = statistics.entropy.shape
    side = max(4.0, 0.5 * J)
    figure = Figure(figsize=(2.1 * side, side), layout="constrained")
    left, right = figure.subplots(1, 2)
    _matrix(left, statistics.lengths, ".2f", "class of the image", "capsule")
    left.set_title("mean capsule length")
    iterations = range(1, r + 1)
    for label, values in enumerate(statistics.entropy.T.tolist()):
        right.plot(iterations, values, marker="o", color=f"C{label % 10}", label=str(label))
    right.set(xlabel="iteration", ylabel="mean entropy / log J", title="coupling entropy", xticks=list(iterations))
    right.grid(alpha=0.3)
    right.legend(title="class", fontsize="small", ncols=2)
    figure.suptitle(title)
    return figure


def read_metrics(version: Path, resumed: bool = False) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every metric in the CSV log of a run, a folder ``version_n``.

    resumed: the run before it, which it went on from, is ``version_(n-1)``, and so on back to step 0; of each, what
    came before the next one.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    number, first = int(version.name.removeprefix("version_")), sys.maxsize
    for n in range(number, number - 1 if not resumed else -1, -1):
        path = version.with_name(f"version_{n}") / "metrics.csv"
        if not path.is_file():
            continue
        # A run that was killed may have left half a line.
        lines = path.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        rows = [row for row in csv.DictReader(whole) if int(row["step"]) < first]
        for row in rows:
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    points.setdefault(name, []).append((int(row["step"]), float(value)))
        first = min([first, *(int(row["step"]) for row in rows)])
        if first < LOG_EVERY:
            break
    return {name: sorted(values) for name, values in points.items()}


def curve(metrics: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """Parts of the loss against the steps, and what was measured on the test images."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in ("loss", *OF_CLASSES, "reconstruction", "entropy"):
        for source, style in ((name, "-"), (f"test_{name}", "--")):
            if metrics.get(source):
                marker = "o" if style == "--" else None
                left.plot(*zip(*metrics[source], strict=True), style, marker=marker, label=source, linewidth=1)
    # A negative log likelihood of densities may be below 0.
    negative = any(value < 0 for line in left.lines for value in map(float, line.get_ydata()))
    left.set(xlabel="step", yscale="linear" if negative else "log", title="loss and its parts")
    left.legend(fontsize="small")
    tested = next((name for name in ("test_accuracy", "test_iou") if metrics.get(name)), None)
    if tested is not None:
        steps, values = zip(*metrics[tested], strict=True)
        right.plot(steps, [100 * value for value in values], "o-")
        right.set(ylabel="test accuracy, %" if tested == "test_accuracy" else "mean IoU, %")
    elif metrics.get("images_per_s"):
        right.plot(*zip(*metrics["images_per_s"], strict=True))
        right.set(ylabel="images/s")
    right.set(xlabel="step")
    for plot in (left, right):
        plot.grid(alpha=0.3)
    return figure
