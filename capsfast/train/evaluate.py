"""What a trained network does: accuracy, also on attacked images, predictions, reconstructions, coupling."""

from collections.abc import Callable, Iterator
from math import log
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassConfusionMatrix

from ..calls import checks
from ..data import Batch, files
from ..data.images import resized
from ..data.sets import DrawnSet
from ..models.segcaps import PRESENT
from ..nn import Capsules, couplings
from .learner import Learner, found_classes, right_predictions
from .objective import multi_hot
from .segmentation import SegmentationLearner

# Takes a function of images to raise, and images; returns the attacked images.
Attack = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
# The range of Sabour, Frosst, Hinton (2017), figure 4.
DELTAS = tuple(0.05 * n for n in range(-5, 6))


class Evaluation(NamedTuple):
    """images: number of images. right: number of images whose class, or both classes, are right.
    confusion: ``[J, J]`` counts by true (row) and predicted class (column); None for overlapping images.
    found: number of classes that are right, of one or two for each image."""

    images: int
    right: int
    confusion: Tensor | None
    found: int

    @property
    def accuracy(self) -> float:
        return self.right / self.images

    def numbers(self) -> dict[str, int]:
        """What a record holds: ``found`` only of overlapping images, which have two classes."""
        counts = {"images": self.images, "right": self.right}
        return counts if self.confusion is not None else counts | {"found": self.found}

    def __str__(self) -> str:
        text = f"{self.accuracy:.2%} of {self.images} right"
        objects = 2 * self.images
        return text if self.confusion is not None else f"{text}, {self.found / objects:.2%} of {objects} objects found"


def batches(dataset: DrawnSet, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
    """Batches of the first ``limit`` images, in order."""
    count = len(dataset) if limit is None else min(limit, len(dataset))
    for rows in torch.arange(count).split(checks.plain(batch_size)):
        yield dataset.batch(rows)


def evaluate(
    learner: Learner,
    dataset: DrawnSet,
    *,
    attack: Attack | None = None,
    limit: int | None = None,
    batch_size: int = 256,
) -> Evaluation:
    """Accuracy of a network.

    Args:
        learner: the network; it runs on its device, in evaluation mode.
        dataset: the images; overlapping images are right if both classes are right.
        attack: takes a goal, a function of images to raise, and images, and returns attacked images, such as
            ``lambda goal, images: fgsm(goal, images, 0.1)``. It is called twice, with ``learner.class_loss_of(labels)``
            and with ``learner.lead_of(labels)``. For each image the attempt counts that leaves fewer labels found.
        limit: use only the first ``limit`` images.
        batch_size: images in a batch.

    Raises:
        ValueError: the network has no classes.
    """
    learner.check("evaluate")
    learner.eval()
    right = seen = found = 0
    confusion = MulticlassConfusionMatrix(learner.sizes["num_classes"])
    for batch in batches(dataset, batch_size, limit):
        images, labels, parts = batch.to(learner.device)
        attempts = [images]
        if attack is not None:
            attempts = [attack(goal, images) for goal in (learner.class_loss_of(labels), learner.lead_of(labels))]
        lengths, hits = _worst(learner, attempts, labels)
        right += int(hits.all(1).sum())
        found += int(hits.sum())
        seen += len(labels)
        if parts is None:
            confusion.update(lengths.argmax(1).cpu(), labels.cpu())
    return Evaluation(seen, right, confusion.compute() if parts is None else None, found)


@torch.no_grad()
def _worst(learner: Learner, attempts: list[Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    """The attempt at each image with the fewest labels found: activations ``[B, J]``, and what is found, ``[B, n]``."""
    tried = [learner.classify(images).activations for images in attempts]
    found = torch.stack([found_classes(activations, labels) for activations in tried])
    worst, rows = found.sum(2).argmin(0), torch.arange(len(labels))
    return torch.stack(tried)[worst, rows], found[worst, rows]


@torch.no_grad()
def metrics(
    learner: Learner, dataset: DrawnSet, *, limit: int | None = None, batch_size: int = 256
) -> dict[str, float]:
    """The results of a test by name, as training logs them: of a segmentation network ``iou``, ``pixels`` and losses.

    Arguments as for :func:`evaluate`.
    """
    learner.eval()
    owned = [module for module in learner.modules() if isinstance(module, Metric)]
    for metric in owned:
        metric.reset()
    logged: dict[str, Metric] = {}
    for batch in batches(dataset, batch_size, limit):
        batch = batch.to(learner.device)
        for name, value in learner.results(batch, *learner.measured(batch)).items():
            if isinstance(value, Metric):  # a metric of the learner, which holds this batch already
                logged[name] = value
            else:
                logged.setdefault(name, MeanMetric().to(learner.device)).update(value, len(batch.labels))
    results = {name: float(value.compute()) for name, value in logged.items()}
    for metric in owned:  # training uses these metrics again
        metric.reset()
    return results


def read_picture(path: Path | str, learner: Learner) -> Tensor:
    """A picture as the network takes it, ``[1, C, H, W]`` in [0, 1]: resized to a square, in grey or colour.

    Raises:
        OSError: no such file, or forbidden.
        ValueError: the file is not a picture.
        TypeError: the network does not take images of 1 or 3 channels.
    """
    channels, size = learner.sizes["in_channels"], learner.sizes["image_size"]
    if channels not in (1, 3):
        raise TypeError(f"capsfast.train.read_picture: pictures have 1 or 3 channels, the network takes {channels}")
    return resized(files.read_picture(str(path), channels), size)[None]


@torch.no_grad()
def classified(learner: Learner, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """What a network finds in ``images [B, C, H, W]`` in [0, 1].

    Returns:
        On the CPU the activations of the class capsules ``[B, J]`` and, with a decoder, reconstructions from the most
        active capsules. Of a segmentation network each class's share of the pixels, and their classes as colours.

    Raises:
        ValueError: the network has no classes.
    """
    learner.eval()
    if isinstance(learner, SegmentationLearner):
        from ..plot import class_colours

        there = learner.output(images.to(learner.device)).lengths > PRESENT
        return there.float().mean((2, 3)).cpu(), class_colours(there)
    learner.check("classified")
    poses, activations = learner.classify(images.to(learner.device))
    drawn = learner.model.reconstruct(poses, activations.argmax(1)).cpu() if learner.has_decoder else None
    return activations.cpu(), drawn


def one_of_each_class(dataset: DrawnSet, num_classes: int) -> Tensor:
    """The first image of every class that occurs, as rows ``[n]``."""
    labels = dataset.labels
    return torch.stack([(labels == label).nonzero()[0, 0] for label in range(num_classes) if (labels == label).any()])


class Predictions(NamedTuple):
    """``images [n, C, H, W]``, ``labels`` as in :class:`capsfast.data.Batch`, ``activations [n, J]`` and ``right [n]``:
    whether the labels have the largest activations."""

    images: Tensor
    labels: Tensor
    activations: Tensor
    right: Tensor


@torch.no_grad()
def predictions(learner: Learner, dataset: DrawnSet, count: int, *, wrong: bool = False) -> Predictions:
    """Activations of the class capsules for the first ``count`` images, or with ``wrong`` misclassified images.

    Raises:
        ValueError: the network has no classes, or no image is misclassified.
    """
    learner.check("predictions")
    learner.eval()
    kept: list[Predictions] = []
    for batch in batches(dataset, 256, None if wrong else count):
        activations = learner.classify(batch.images.to(learner.device)).activations.cpu()
        right = right_predictions(activations, batch.labels)
        rows = ~right if wrong else torch.ones_like(right)
        kept.append(Predictions(*(values[rows] for values in (batch.images, batch.labels, activations, right))))
        if sum(len(batch.right) for batch in kept) >= count:
            break
    joined = Predictions(*(torch.cat(tensor)[:count] for tensor in zip(*kept, strict=True)))
    if not len(joined.right):
        raise ValueError("capsfast.train.predictions: no image is misclassified")
    return joined


@torch.no_grad()
def reconstructions(learner: Learner, batch: Batch) -> Tensor:
    """Reconstructions from the capsule of each label; an auto-encoder reconstructs from all its capsules.

    Returns:
        ``[B, C, H, W]``, or ``[B, 2, C, H, W]`` for overlapping images and a network with classes.

    Raises:
        ValueError: the network has no decoder.
    """
    images, labels, _ = batch.to(learner.device)
    found: Tensor
    if not learner.has_classes:
        drawn = learner.output(images).reconstruction
        assert drawn is not None
        return drawn
    learner.check("reconstructions", decoder=True)
    capsules = learner.classify(images).poses
    if labels.dim() == 1:
        found = learner.model.reconstruct(capsules, labels)
        return found
    return torch.stack([learner.model.reconstruct(capsules, label) for label in labels.unbind(1)], 1)


@torch.no_grad()
def perturbations(learner: Learner, image: Tensor, label: int, deltas: tuple[float, ...] = DELTAS) -> Tensor:
    """Reconstructions with one dimension of the class capsule changed (Sabour, Frosst, Hinton 2017, figure 4).

    Args:
        learner: a network with a decoder.
        image: ``[C, H, W]`` in [0, 1].
        label: the capsule that is varied.
        deltas: n values to add.

    Returns:
        ``[D, n, C, H, W]``, a row for each dimension of the capsule.

    Raises:
        ValueError: the network has no decoder.
    """
    learner.check("perturbations", decoder=True)
    label, deltas = checks.plain((label, deltas))
    capsules = learner.classify(image[None].to(learner.device)).poses  # [1, J, D]
    D, n = capsules.shape[2], len(deltas)
    changed = capsules.repeat(D * n, 1, 1)
    step = torch.eye(D, device=learner.device)[:, None, :] * torch.tensor(deltas, device=learner.device)[:, None]
    changed[:, label] += step.flatten(0, 1)  # [D, n, D]
    found: Tensor = learner.model.reconstruct(changed, torch.full([D * n], label, device=learner.device))
    images: Tensor = found.unflatten(0, (D, n))
    return images


class RoutingStatistics(NamedTuple):
    """lengths: ``[J, J]``, mean length of each capsule (column) on images of each class (row). entropy: ``[r, J]``,
    mean entropy of an input capsule's coupling in each iteration on images of each class; 1 is equal coupling.
    NaN for classes without images."""

    lengths: Tensor
    entropy: Tensor


@torch.no_grad()
def routing_statistics(
    learner: Learner, dataset: DrawnSet, *, limit: int | None = None, batch_size: int = 128
) -> RoutingStatistics:
    """Capsule lengths and coupling entropy by class, over the first ``limit`` images.

    Raises:
        ValueError: the network has no classes or no ``encode()``.
    """
    if not learner.has_classes or not hasattr(learner.model, "encode"):
        op = "capsfast.train.routing_statistics"
        raise ValueError(f"{op}: a network with encode() and classes is needed, got {learner.hparams['model']}")
    learner.eval()
    routing = learner.model.routing
    J = learner.sizes["num_classes"]
    lengths, count, entropy = torch.zeros(J, J), torch.zeros(J), torch.zeros(0, J)
    for batch in batches(dataset, batch_size, limit):
        classes = multi_hot(batch.labels, J)  # [B, J]
        encoded = learner.encode(batch.images.to(learner.device))
        u, activation = encoded if isinstance(encoded, Capsules) else (encoded, None)
        coefficients = couplings(routing, u, activation, shares=True)
        of_samples = torch.stack([torch.special.entr(c).sum(2).mean(1).cpu() / log(J) for c in coefficients])  # [r, B]
        entropy = of_samples @ classes + (entropy if len(entropy) else 0)
        lengths += classes.T @ routing.capsules(u, activation).activations.cpu()
        count += classes.sum(0)
    return RoutingStatistics(lengths / count[:, None], entropy / count)
