"""``capsfast.train``: predictions and their pictures."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("matplotlib")

from capsfast import train
from capsfast.plot import predictions_figure
from capsfast.train import ImageData

from ..support.training import learner_for


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
    torch.testing.assert_close(found.activations, lengths[:9])  # in other batches: rounding differs
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


def test_predictions_need_mistakes(folder: Path) -> None:
    images = ImageData(str(folder))
    learner, test = learner_for(images), images.sets.test
    test.labels.copy_(learner.eval().classify(test.batch(torch.arange(len(test))).images).activations.argmax(1))
    with pytest.raises(ValueError, match="no image is misclassified"):
        train.predictions(learner, test, 3, wrong=True)
