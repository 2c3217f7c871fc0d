"""Pictures of capsule networks: functions that draw into matplotlib Axes, and functions that make whole figures."""

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from .environment.install import in_the_checkout
from .storage.files import replacing

try:
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    raise ModuleNotFoundError(f"capsfast.plot needs matplotlib; {in_the_checkout('cli')}") from None

__all__ = [
    "class_colours",
    "classes",
    "confusion_figure",
    "coupling",
    "curve_figure",
    "entropy",
    "images",
    "images_figure",
    "losses",
    "matrix",
    "overlap_colours",
    "perturbations_figure",
    "predictions_figure",
    "read_metrics",
    "results",
    "routing_figure",
    "save",
]

CELL = 0.5  # inches
SHADES = 31
RIGHT, WRONG, OTHER = "tab:green", "tab:red", "lightgrey"
# The metrics in a log that are a loss of the classes, and the number of steps between two rows of the log.
OF_CLASSES = ("margin", "mse", "spread", "cross_entropy")
LOG_EVERY = 10


def save(figure: Figure, path: Path, dpi: int = 90) -> Path:
    """Writes a complete PNG, or none if it fails."""
    # Into memory first: the encoder reports a full disk without its errno.
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi, bbox_inches="tight", pil_kwargs={"optimize": True})
    with replacing(path) as draft:
        draft.write_bytes(picture.getbuffer())
    return path


def _in_colour(images: Tensor) -> Tensor:
    """``[n, C, H, W]`` as red, green and blue. C is 1, 3, or 2 for a stereo pair: left becomes red, right cyan."""
    images = images.detach().cpu()
    return images[:, [0, 1, 1]] if images.shape[1] == 2 else images.expand(-1, 3, -1, -1)


def _shades(pixels: Tensor) -> Tensor:
    # The noise in the last bits is most of a PNG's size.
    return (pixels.clamp(0, 1) * SHADES).round() / SHADES


def images(ax: Axes, rows: Mapping[str, Tensor], columns: Sequence[str]) -> None:
    """A row of images ``[n, C, H, W]`` in [0, 1] beside each name, a column under each text."""
    H, W = next(iter(rows.values())).shape[2:]
    gap = max(1, W // 10)
    spaced = [F.pad(_in_colour(row), [gap, 0, gap, 0], value=1.0) for row in rows.values()]
    lines = [tensor.permute(2, 0, 3, 1).flatten(1, 2) for tensor in spaced]  # [H, n W, 3]
    ax.imshow(_shades(torch.cat(lines)).numpy(), interpolation="nearest")
    ax.xaxis.tick_top()
    ax.set_xticks([gap + W / 2 - 0.5 + n * (W + gap) for n in range(len(columns))], columns, fontsize="small")
    ax.set_yticks([gap + H / 2 - 0.5 + n * (H + gap) for n in range(len(rows))], list(rows), fontsize="small")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def images_figure(rows: Mapping[str, Tensor], columns: Sequence[str], title: str = "") -> Figure:
    """A figure of :func:`images`, such as images above their reconstructions."""
    figure = Figure(figsize=(CELL * len(columns) + 1.2, CELL * len(rows) + 0.6), layout="constrained")
    images(figure.subplots(), rows, columns)
    figure.suptitle(title, fontsize="medium")
    return figure


def perturbations_figure(images: Tensor, label: str, deltas: Sequence[float]) -> Figure:
    """``images [D, n, C, H, W]``: a row for each dimension of a capsule, a column for each value added."""
    rows = {f"dimension {d + 1}": row for d, row in enumerate(images)}
    return images_figure(rows, [f"{delta:+.2f}" for delta in deltas], f"capsule of {label}, one dimension varied")


def overlap_colours(parts: Tensor) -> Tensor:
    """Two grey images ``[B, 2, C, H, W]`` in red and green, ``[B, 3, H, W]``; yellow where they overlap."""
    grey = parts.mean(2)
    return torch.stack([grey[:, 0], grey[:, 1], torch.zeros_like(grey[:, 0])], 1)


def class_colours(there: Tensor) -> Tensor:
    """The classes of pixels, bool ``[B, J, H, W]``, as colours ``[B, 3, H, W]``: the mean if a pixel has several."""
    J = there.shape[1]
    shades = colormaps["tab10"](range(J)) if J <= 10 else colormaps["hsv"](torch.linspace(0, 1, J + 1)[:-1].numpy())
    colours = torch.tensor(shades[:, :3], dtype=torch.float32)  # [J, 3]
    weight = there.float().cpu()
    return torch.einsum("bjyx,jc->bcyx", weight, colours) / weight.sum(1, keepdim=True).clamp_min(1)


def classes(ax: Axes, activations: Tensor, true: Sequence[int]) -> list[int]:
    """A bar for each of ``activations [J]``: green for the classes of the image, red for one found that is not there.

    Returns:
        The classes found, as many as are there.
    """
    J, values = len(activations), activations.detach().cpu()
    guesses: list[int] = values.topk(len(true)).indices.tolist()
    colours = [RIGHT if j in true else WRONG if j in guesses else OTHER for j in range(J)]
    ax.barh(range(J), values.tolist(), color=colours)
    ax.set(xlim=(0, max(1.0, float(values.max()))), yticks=range(J) if J <= 20 else [])
    ax.invert_yaxis()
    ax.tick_params(labelsize=5, length=1)
    return guesses


def predictions_figure(pictures: Tensor, labels: Tensor, activations: Tensor, columns: int = 4) -> Figure:
    """Images ``[n, C, H, W]``, each beside :func:`classes` of its ``activations [n, J]``; above each, what was found.

    labels: ``[n]``, or ``[n, 2]`` where two objects overlap.
    """
    n, J = activations.shape
    columns = min(columns, n)
    rows = -(-n // columns)
    figure = Figure(figsize=(2.6 * columns, max(1.1, 0.11 * J) * rows + 0.4), layout="constrained")
    places = figure.subplots(rows, 2 * columns, squeeze=False).flat
    for ax in places[2 * n :]:
        ax.set_axis_off()
    pixels = _shades(_in_colour(pictures)).permute(0, 2, 3, 1).numpy()
    right = 0
    for k, (picture, label, values) in enumerate(zip(pixels, labels, activations, strict=True)):
        places[2 * k].imshow(picture, interpolation="nearest")
        places[2 * k].set_axis_off()
        true = label.view(-1).tolist()
        guesses = classes(places[2 * k + 1], values, true)
        same = sorted(guesses) == sorted(true)
        right += same
        places[2 * k + 1].set_title(
            ", ".join(map(str, guesses)), fontsize="small", color=RIGHT if same else WRONG, pad=2
        )
    figure.suptitle(f"{right} of {n} right; above each, what was found", fontsize="medium")
    return figure


def matrix(ax: Axes, values: Tensor, shown: str, ylabel: str, xlabel: str) -> None:
    """``values [J, J]`` as shades; up to J = 20 with the numbers, in the format ``shown``."""
    J = len(values)
    top = float(values.nan_to_num().max()) or 1.0
    ax.imshow(values.numpy(), cmap="Blues", vmin=0, vmax=top)
    ax.set(xticks=range(J), yticks=range(J), ylabel=ylabel, xlabel=xlabel)
    for row in range(J if J <= 20 else 0):
        for column in range(J):
            value = values[row, column].item()
            if value and value == value:
                color = "white" if value > 0.6 * top else "black"
                ax.text(column, row, format(value, shown), ha="center", va="center", fontsize=7, color=color)


def confusion_figure(counts: Tensor, title: str) -> Figure:
    """``counts [J, J]`` by true class (row) and predicted class (column)."""
    side = max(4.0, 0.5 * len(counts))
    figure = Figure(figsize=(side, side), layout="constrained")
    ax = figure.subplots()
    matrix(ax, counts, ".0f", "class", "predicted")
    ax.set_title(title, fontsize="medium")
    return figure


def coupling(ax: Axes, c: Tensor) -> None:
    """The coupling coefficients of one sample, ``[I, J]``, such as an entry of :func:`capsfast.nn.couplings`.

    A row for each input capsule, a column for each output capsule.
    """
    shown = ax.imshow(c.detach().float().cpu().numpy(), cmap="Blues", vmin=0, aspect="auto", interpolation="nearest")
    ax.set(xlabel="output capsule j", ylabel="input capsule i", title="coupling coefficients")
    ax.figure.colorbar(shown, ax=ax)


def entropy(ax: Axes, values: Tensor) -> None:
    """The coupling entropy ``[r, J]`` from iteration to iteration, a line for each class of images."""
    iterations = range(1, len(values) + 1)
    for label, line in enumerate(values.T.tolist()):
        ax.plot(iterations, line, marker="o", color=f"C{label % 10}", label=str(label))
    ax.set(xlabel="iteration", ylabel="mean entropy / log J", title="coupling entropy", xticks=list(iterations))
    ax.grid(alpha=0.3)
    ax.legend(title="class", fontsize="small", ncols=2)


def routing_figure(lengths: Tensor, coupling_entropy: Tensor, title: str) -> Figure:
    """Mean capsule ``lengths [J, J]`` by class, and :func:`entropy` of ``[r, J]``."""
    side = max(4.0, 0.5 * len(lengths))
    figure = Figure(figsize=(2.1 * side, side), layout="constrained")
    left, right = figure.subplots(1, 2)
    matrix(left, lengths, ".2f", "class of the image", "capsule")
    left.set_title("mean capsule length")
    entropy(right, coupling_entropy)
    figure.suptitle(title)
    return figure


def read_metrics(version: Path, resumed: bool = False) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every metric in the CSV log of a run, a folder ``version_n``.

    resumed: the run continues ``version_(n-1)``, and so on back to step 0. An earlier log is read up to the step where
    the next log begins.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    number, first_step = int(version.name.removeprefix("version_")), sys.maxsize
    for n in range(number, number - 1 if not resumed else -1, -1):
        path = version.with_name(f"version_{n}") / "metrics.csv"
        if not path.is_file():
            continue
        # A killed run may have left half a line.
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        rows = [row for row in csv.DictReader(whole) if int(row["step"]) < first_step]
        for row in rows:
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    points.setdefault(name, []).append((int(row["step"]), float(value)))
        first_step = min([first_step, *(int(row["step"]) for row in rows)])
        if first_step < LOG_EVERY:
            break
    return {name: sorted(values) for name, values in points.items()}


def losses(ax: Axes, metrics: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """The loss and its parts against the steps: training as solid lines, validation dashed, tests dotted."""
    for name in ("loss", *OF_CLASSES, "reconstruction", "entropy"):
        for source, style, marker in ((name, "-", None), (f"val_{name}", "--", "o"), (f"test_{name}", ":", "s")):
            if any(value for _, value in metrics.get(source, ())):
                ax.plot(*zip(*metrics[source], strict=True), style, marker=marker, label=source, linewidth=1)
    # A negative log likelihood may be below 0.
    negative = any(value < 0 for points in metrics.values() for _, value in points)
    ax.set(xlabel="step", ylabel="mean of an image", title="loss and its parts")
    ax.set_yscale("linear" if negative else "log")
    if ax.lines:  # a short run logs no loss, and matplotlib warns of a legend without lines
        ax.legend(fontsize="small")
    ax.grid(alpha=0.3)


def results(ax: Axes, metrics: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """The results of validation and tests against the steps; if there is none, the images trained on per second."""
    labels = {"accuracy": "accuracy, %", "iou": "mean IoU, %"}
    measured = [
        (f"{part}_{name}", name) for name in labels for part in ("val", "test") if metrics.get(f"{part}_{name}")
    ]
    for source, name in measured:
        steps, values = zip(*metrics[source], strict=True)
        ax.plot(steps, [100 * value for value in values], "o-" if source.startswith("val") else "s-", label=source)
        ax.set(ylabel=labels[name])
    if measured:
        ax.legend(fontsize="small")
    elif metrics.get("images_per_s"):
        ax.plot(*zip(*metrics["images_per_s"], strict=True))
        ax.set(ylabel="images/s")
    ax.set(xlabel="step")
    ax.grid(alpha=0.3)


def curve_figure(metrics: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """:func:`losses` beside :func:`results`."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    losses(left, metrics)
    results(right, metrics)
    return figure
