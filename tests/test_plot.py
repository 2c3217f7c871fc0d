"""``capsfast.plot``: the content of the pictures."""

import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from capsfast import plot


def shown(ax: object) -> torch.Tensor:
    (image,) = (child for child in ax.get_children() if isinstance(child, AxesImage))  # type: ignore[attr-defined]
    return torch.from_numpy(image.get_array().data.copy())


@pytest.mark.parametrize(
    ("true", "values", "found", "colours"),
    [
        ([1], [0.1, 0.9, 0.2, 0.0], [1], [plot.OTHER, plot.RIGHT, plot.OTHER, plot.OTHER]),
        ([1], [0.1, 0.2, 0.0, 0.9], [3], [plot.OTHER, plot.RIGHT, plot.OTHER, plot.WRONG]),
        ([1, 0], [0.9, 0.1, 0.8, 0.0], [0, 2], [plot.RIGHT, plot.RIGHT, plot.WRONG, plot.OTHER]),
    ],
)
def test_bars_of_classes(true: list[int], values: list[float], found: list[int], colours: list[str]) -> None:
    ax = Figure().subplots()
    assert plot.classes(ax, torch.tensor(values), true) == found
    assert [bar.get_facecolor() for bar in ax.patches] == [to_rgba(colour) for colour in colours]
    assert [bar.get_width() for bar in ax.patches] == pytest.approx(values)  # type: ignore[attr-defined]


def test_images_in_rows_with_gaps_and_stereo_pairs_in_red_and_cyan() -> None:
    pair = (torch.rand(3, 2, 4, 5) * plot.SHADES).round() / plot.SHADES
    ax = Figure().subplots()
    plot.images(ax, {"left and right": pair, "left": pair[:, :1]}, ["a", "b", "c"])
    pixels = shown(ax).movedim(-1, 0)
    assert pixels.shape == (3, 2 * (1 + 4), 3 * (1 + 5))
    left, right = pair.unbind(1)
    torch.testing.assert_close(pixels[:, 1:5, 7:12], torch.stack([left[1], right[1], right[1]]))
    torch.testing.assert_close(pixels[:, 6:10, 7:12], left[1].expand(3, -1, -1))
    assert pixels[:, 0].min() == 1
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["left and right", "left"]


def test_a_matrix_is_written_out_where_there_is_room() -> None:
    ax = Figure().subplots()
    plot.matrix(ax, torch.tensor([[3.0, 0.0], [torch.nan, 1.0]]), ".0f", "class", "predicted")
    assert [(text.get_text(), text.get_position()) for text in ax.texts] == [("3", (0, 0)), ("1", (1, 1))]
    large = Figure().subplots()
    plot.matrix(large, torch.ones(21, 21), ".0f", "class", "predicted")
    assert not large.texts


def test_coupling_and_entropy() -> None:
    c = torch.softmax(torch.randn(6, 3), 1)
    coupling, entropy = Figure().subplots(1, 2)
    plot.coupling(coupling, c.requires_grad_())
    torch.testing.assert_close(shown(coupling), c.detach())
    assert (coupling.get_xlabel(), coupling.get_ylabel()) == ("output capsule j", "input capsule i")
    plot.entropy(entropy, torch.tensor([[1.0, 1.0], [0.5, 0.25]]))
    assert [line.get_ydata().tolist() for line in entropy.lines] == [[1.0, 0.5], [1.0, 0.25]]  # type: ignore[union-attr]


@pytest.mark.parametrize(("value", "scale"), [(-3.0, "linear"), (3.0, "log")])
def test_curves(tmp_path: Path, value: float, scale: str) -> None:
    """A loss may be negative, and a part of it always 0; both axes have labels."""
    metrics = {"loss": [(0, 5.0), (9, value)], "reconstruction": [(0, 0.0), (9, 0.0)], "test_accuracy": [(9, 0.5)]}
    metrics |= {"val_accuracy": [(5, 0.25), (9, 0.75)], "val_loss": [(5, 2.0)]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = plot.curve_figure(metrics)
        assert plot.save(figure, tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    left, right = figure.axes
    assert left.get_yscale() == scale and left.get_ylabel()
    assert [line.get_label() for line in left.lines] == ["loss", "val_loss"]
    assert [line.get_ydata().tolist() for line in right.lines] == [[25.0, 75.0], [50.0]]  # type: ignore[union-attr]
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["val_accuracy", "test_accuracy"]  # type: ignore[union-attr]
    assert right.get_ylabel() == "accuracy, %"


@pytest.mark.parametrize("metrics", [{"images_per_s": [(0, 90.0)]}, {"val_accuracy": [(2, 0.5)]}])
def test_curves_of_a_run_too_short_to_log_a_loss(metrics: dict[str, list[tuple[int, float]]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = plot.curve_figure(metrics)
    assert [ax.get_legend() is None for ax in figure.axes] == [True, "val_accuracy" not in metrics]
