"""Accuracy and confusion matrix, also on attacked images."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from ..data import Batch
from ..data.sets import DrawnSet
from .learner import Learner, right_predictions

# Takes a loss as a function of images, and images; returns the attacked images.
Attack = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


class Evaluation(NamedTuple):
    """images: number of images. right: number of images whose class, or both classes, are right.
    confusion: ``[J, J]`` counts by true (row) and predicted class (column); None for overlapping images."""

    images: int
    right: int
    confusion: Tensor | None

    @property
    def accuracy(self) -> float:
        return self.right / self.images


def batches(dataset: DrawnSet, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
    """Batches of the first ``limit`` images, in order."""
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
        learner: the network; it runs on its device, in evaluation mode.
        dataset: the images; overlapping images are right if both classes are right.
        attack: takes a loss and images and returns attacked images, such as
            ``lambda loss, images: fgsm(loss, images, 0.1)``. The loss is the loss of the classes.
        limit: use only the first ``limit`` images.
        batch_size: images in a batch.
        on_step: called after each batch with its number of images.

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
