"""Accuracy, confusion, and accuracy on images that an attack has changed."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from ..data import Batch
from ..data.sets import DrawnSet
from .learner import Learner, right_predictions

# A loss as a function of images, and the images, to those that are shown instead.
Attack = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


class Evaluation(NamedTuple):
    """images: how many were looked at. right: those with the right class, or with both right classes.
    confusion: ``[J, J]`` counts by true (row) and predicted class (column); None where classes overlap."""

    images: int
    right: int
    confusion: Tensor | None

    @property
    def accuracy(self) -> float:
        return self.right / self.images


def batches(dataset: DrawnSet, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
    """The images in order, the first ``limit`` of them."""
    count = len(dataset) if limit is None else min(limit, len(dataset))
    for rows in torch.arange(count).split(batch_size):
        yield dataset.batch(rows)


def evaluate(
    learner: Learner,
    dataset: DrawnSet,
    *,
    attack: Attack | None = None,
    limit: int | None = None,
    batch_size: int = 256,
    on_step: Callable[[int], None] = lambda images: None,
) -> Evaluation:
    """Accuracy of a network.

    Args:
        learner: the network; runs where it is, in evaluation mode.
        dataset: the images; overlapping ones count as right when both classes are.
        attack: from a loss and images to the images that are shown instead, such as
            ``lambda loss, images: fgsm(loss, images, 0.1)``. The loss is that of the classes.
        limit: look at the first so many images only.
        batch_size: images at a time.
        on_step: hears how many images were just done.

    Raises:
        ValueError: the network has no classes.
    """
    if not learner.has_classes:
        raise ValueError(f"capsfast.train.evaluate: a network with classes is needed, got {learner.hparams['model']}")
    learner.eval()
    right = seen = 0
    confusion = MulticlassConfusionMatrix(learner.sizes["num_classes"])
    for batch in batches(dataset, batch_size, limit):
        images, labels, parts = batch.to(learner.device)
        if attack is not None:
            images = attack(learner.class_loss_of(labels), images)
        with torch.no_grad():
            lengths = learner.classify(images).activations
        right += int(right_predictions(lengths, labels).sum())
        seen += len(labels)
        if parts is None:
            confusion.update(lengths.argmax(1).cpu(), labels.cpu())
        on_step(len(labels))
    return Evaluation(seen, right, confusion.compute() if parts is None else None)
