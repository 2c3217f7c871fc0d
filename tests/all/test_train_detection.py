"""``capsfast.train``: attacks found by reconstruction, predictions and their pictures."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("lightning")
pytest.importorskip("matplotlib")

from capsfast import train
from capsfast.plot import predictions_figure
from capsfast.train import Detection, ImageData, Learner

from ..support.training import TINY, learner_for


def errors_of(learner: Learner, images: Tensor) -> tuple[Tensor, Tensor]:
    output = learner.model(images)
    predicted = output.lengths.argmax(1)
    again = learner.model.reconstruct(output.capsules, predicted)
    return predicted, (again - images).square().sum((1, 2, 3)).detach()


@pytest.mark.parametrize(("rate", "allowed"), [(0.1, 2), (0.0, 0), (0.24, 4)])
def test_detection_counts(folder: Path, rate: float, allowed: int) -> None:
    images = ImageData(str(folder))
    learner = learner_for(images).eval()
    test = images.sets.test
    batch = test.batch(torch.arange(20))
    _, clean = errors_of(learner, batch.images)
    threshold = clean.sort().values[19 - allowed]

    def attack(loss: object, x: Tensor) -> Tensor:
        # Every other image is far from what a decoder makes. The others are paler: no error equals the threshold.
        far = torch.where(torch.arange(len(x)) % 2 == 0, 1.0, 0.0)[:, None, None, None]
        return (1 - far) * 0.75 * x + far * (x > 0.5).float()

    predicted, errors = errors_of(learner, attack(None, batch.images[:12]))
    wrong, flagged = predicted != batch.labels[:12], errors > threshold
    seen: list[int] = []
    # An even batch size: the attack must see the same images in the same places.
    found = train.detection(
        learner, test, attack, false_positive_rate=rate, limit=12, batch_size=6, on_step=seen.append
    )
    assert found.threshold == pytest.approx(float(threshold)) and found.false_positives == pytest.approx(allowed / 20)
    counts = (12, int(wrong.sum()), int(flagged.sum()), int((wrong & ~flagged).sum()))
    assert found[2:] == counts and counts[2] >= 6
    assert seen == [6, 6, 6, 2, 6, 6]
    known = train.clean_errors(learner, test)
    torch.testing.assert_close(known, clean)
    again = train.detection(learner, test, attack, false_positive_rate=rate, limit=12, batch_size=6, clean=known)
    # Errors of other batches: rounding differs.
    assert again[1:] == found[1:] and again.threshold == pytest.approx(found.threshold)


def test_detection_rates() -> None:
    found = Detection(1.0, 0.05, 10, 4, 5, 1)
    assert found.undetected_rate == 0.1 and found.detection_rate == 0.75
    assert math.isnan(Detection(1.0, 0.05, 10, 0, 5, 0).detection_rate)


def test_detection_rejects(folder: Path) -> None:
    images = ImageData(str(folder))
    learner = learner_for(images)
    with pytest.raises(ValueError, match="false_positive_rate must be at least 0 and below 1, got 1"):
        train.detection(learner, images.sets.test, lambda loss, x: x, false_positive_rate=1)
    without = learner_for(images, options=TINY | {"reconstruction": False})
    with pytest.raises(ValueError, match="detection: class capsules with a decoder are needed"):
        train.detection(without, images.sets.test, lambda loss, x: x)
    two = ImageData(f"multi:{folder}")
    with pytest.raises(ValueError, match="images of one class each are needed, these overlap"):
        train.clean_errors(learner_for(two), two.sets.test)


@pytest.mark.parametrize("kind", ["", "multi:"])
def test_predictions(folder: Path, kind: str) -> None:
    images = ImageData(f"{kind}{folder}")
    learner = learner_for(images)
    batch = images.sets.test.batch(torch.arange(20))
    lengths = learner.eval().classify(batch.images).activations
    n = batch.labels.view(20, -1).shape[1]
    best = lengths.topk(n).indices.tolist()
    right = [set(a) == set(b) for a, b in zip(best, batch.labels.view(20, -1).tolist(), strict=True)]
    found = train.predictions(learner, images.sets.test, 9)
    assert found.right.tolist() == right[:9]
    torch.testing.assert_close(found.activations, lengths[:9])  # of other batches: rounding differs
    assert torch.equal(found.images, batch.images[:9]) and torch.equal(found.labels, batch.labels[:9])
    wrong = train.predictions(learner, images.sets.test, 5, wrong=True)
    rows = [row for row in range(20) if not right[row]][:5]
    assert not wrong.right.any() and torch.equal(wrong.images, batch.images[rows])
    figure = predictions_figure(found.images, found.labels, found.activations)
    bars = [plot for plot in figure.axes if plot.patches]
    assert len(bars) == 9
    for plot, values in zip(bars, found.activations, strict=True):
        assert [bar.get_width() for bar in plot.patches] == pytest.approx(values.tolist())  # type: ignore[attr-defined]
    titles = [plot.get_title() for plot in bars]
    assert titles == [", ".join(map(str, each)) for each in best[:9]]


def test_predictions_need_classes_and_mistakes(folder: Path) -> None:
    images = ImageData(str(folder))
    with pytest.raises(ValueError, match="classes is needed, got autoencoder"):
        train.predictions(learner_for(images, "autoencoder"), images.sets.test, 3)
    learner = learner_for(images)
    test = images.sets.test
    test.labels.copy_(learner.eval().classify(test.batch(torch.arange(len(test))).images).activations.argmax(1))
    with pytest.raises(ValueError, match="no image is taken wrongly"):
        train.predictions(learner, images.sets.test, 3, wrong=True)
