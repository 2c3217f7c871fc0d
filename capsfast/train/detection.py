"""Attacks found by how badly the capsule of the predicted class rebuilds the image."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..data.sets import DrawnSet
from .evaluate import Attack, batches
from .learner import Learner


class Detection(NamedTuple):
    """What became of attacked images.

    threshold: an image whose reconstruction error is larger counts as attacked. false_positives: of the clean images,
    the share that counts as attacked. images: how many were attacked. fooled: those whose class is wrong. flagged:
    those that count as attacked. undetected: those that fool the network and do not count as attacked.
    """

    threshold: float
    false_positives: float
    images: int
    fooled: int
    flagged: int
    undetected: int

    @property
    def undetected_rate(self) -> float:
        """The share of all attacked images that fool the network and pass for clean ones."""
        return self.undetected / self.images

    @property
    def detection_rate(self) -> float:
        """The share that is found of the attacked images that fool the network; NaN where there are none."""
        return 1 - self.undetected / self.fooled if self.fooled else math.nan


@torch.no_grad()
def reconstruction_errors(learner: Learner, images: Tensor) -> tuple[Tensor, Tensor]:
    """The predicted classes ``[B]``, and the squared error ``[B]`` of what their capsules are decoded into."""
    capsules, activations = learner.classify(images)
    predicted = activations.argmax(1)
    error = learner.model.reconstruct(capsules, predicted) - images
    return predicted, error.float().square().flatten(1).sum(1)


def clean_errors(
    learner: Learner,
    dataset: DrawnSet,
    *,
    batch_size: int = 256,
    on_step: Callable[[int], None] = lambda images: None,
) -> Tensor:
    """The squared errors ``[N]`` of all images of a set, as they are, each rebuilt from its predicted class's capsule.

    Raises:
        ValueError: a network without classes or decoder, overlapping images.
    """
    learner.check_decoder("clean_errors")
    learner.eval()
    found = []
    for batch in batches(dataset, batch_size):
        if batch.labels.dim() != 1:
            raise ValueError("capsfast.train.clean_errors: images of one class each are needed, these overlap")
        found.append(reconstruction_errors(learner, batch.images.to(learner.device))[1].cpu())
        on_step(len(batch.labels))
    return torch.cat(found)


def detection(
    learner: Learner,
    dataset: DrawnSet,
    attack: Attack,
    *,
    false_positive_rate: float = 0.05,
    clean: Tensor | None = None,
    limit: int | None = None,
    batch_size: int = 256,
    on_step: Callable[[int], None] = lambda images: None,
) -> Detection:
    """How many attacks the reconstruction gives away (Frosst, Sabour, Hinton 2018; the global threshold test of Qin et
    al. 2020).

    An image counts as attacked if the error of its reconstruction from the capsule of the predicted class is above a
    threshold. That is the smallest error of a clean image that at most ``false_positive_rate`` of the clean images
    exceed. The attack knows the network, but nothing of the threshold.

    Args:
        learner: a network with classes and a decoder; runs where it is, in evaluation mode.
        dataset: the images; all of them, as they are, set the threshold.
        attack: as for :func:`evaluate`.
        false_positive_rate: at least 0 and below 1.
        clean: of :func:`clean_errors`, where they are known; other images than those of dataset may have set them.
        limit: attack the first so many images only.
        batch_size: images at a time.
        on_step: hears how many images were just done.

    Raises:
        ValueError: a network without classes or decoder, overlapping images, a rate out of range.
    """
    learner.check_decoder("detection")
    if not 0 <= false_positive_rate < 1:
        got = checks.shown(false_positive_rate)
        raise ValueError(f"capsfast.train.detection: false_positive_rate must be at least 0 and below 1, got {got}")
    learner.eval()
    if clean is None:
        clean = clean_errors(learner, dataset, batch_size=batch_size, on_step=on_step)
    allowed = int(false_positive_rate * len(clean))
    threshold = float(clean.sort(descending=True).values[allowed])
    fooled = flagged = undetected = seen = 0
    for batch in batches(dataset, batch_size, limit):
        images, labels, _ = batch.to(learner.device)
        predicted, errors = reconstruction_errors(learner, attack(learner.class_loss_of(labels), images))
        wrong, found = predicted != labels, errors > threshold
        fooled += int(wrong.sum())
        flagged += int(found.sum())
        undetected += int((wrong & ~found).sum())
        seen += len(labels)
        on_step(len(labels))
    exceeding = int((clean > threshold).sum()) / len(clean)
    return Detection(threshold, exceeding, seen, fooled, flagged, undetected)
