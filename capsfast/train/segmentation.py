"""Segmentation: the classes of pixels, their loss and their metrics."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MultilabelExactMatch, MultilabelJaccardIndex

from ..data import Batch
from ..models.segcaps import PRESENT
from ..nn import MarginLoss
from .learner import Learner

# A pixel has the class of an object if the object's own image is at least this bright there.
BRIGHT = 0.5
# The factor of absent classes in the margin loss. Whole images have 0.5; a pixel often has no class at all.
ABSENT = 0.25


def pixel_classes(batch: Batch, num_classes: int) -> Tensor:
    """The classes of every pixel, bool ``[B, J, H, W]``: the classes of all objects that are at least half white there.

    A pixel where two objects overlap has both classes; a background pixel has none. For overlapping images the objects
    are the separate parts, otherwise the image itself.
    """
    objects = batch.images[:, None] if batch.parts is None else batch.parts  # [B, n, C, H, W]
    labels = batch.labels[:, None].flatten(1)  # [B, n]
    bright = objects.mean(2) >= BRIGHT
    classes = bright.new_zeros(len(labels), num_classes, *bright.shape[2:])
    for n in range(labels.shape[1]):
        classes[torch.arange(len(labels), device=labels.device), labels[:, n]] |= bright[:, n]
    return classes


class Overlap(MultilabelJaccardIndex):
    """Intersection over union of pixels, over all images together: the mean over the classes that occur."""

    def compute(self) -> Tensor:
        there = self.confmat.flatten(1)[:, 1:].sum(1) > 0  # without pixels that neither label nor prediction has
        return super().compute()[there].mean()


class SegmentationLearner(Learner, model="segcaps"):
    """:class:`Learner` for a network that gives every pixel its classes.

    The loss is the margin loss of Sabour et al. (2017, eq. 4), averaged over pixels, with factor 0.25 for absent
    classes; plus the squared error of the image on pixels that have a class, as in LaLonde and Bagci (2018), with the
    true classes given to the decoder.

    A test logs ``test_iou``, over all images together, and ``test_pixels``, the share of pixels with exactly the right
    classes; a validation ``val_iou`` and ``val_pixels``. Arguments as for Learner, except ``loss``.
    """

    pixel_loss = MarginLoss(lam=ABSENT)
    monitor = ("val_iou", "max")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.overlap = Overlap(self.sizes["num_classes"], average="none")
        self.pixels = MultilabelExactMatch(self.sizes["num_classes"])

    def measured(self, batch: Batch) -> tuple[dict[str, Tensor], Any]:
        classes = pixel_classes(batch, self.sizes["num_classes"])
        output = self.output(batch.images, classes)
        lengths, targets = (tensor.movedim(1, -1).flatten(0, -2) for tensor in (output.lengths, classes))
        margin = self.pixel_loss(lengths, targets)
        if output.reconstruction is None:
            return {"loss": margin, "margin": margin}, output
        error = self.reconstruction_loss(output.reconstruction, batch.images * classes.any(1, keepdim=True))
        losses = {"loss": margin + self.reconstruction_weight * error, "margin": margin, "reconstruction": error}
        return losses, output

    def results(self, batch: Batch, found: dict[str, Tensor], output: Any) -> dict[str, Tensor | Metric]:
        classes = pixel_classes(batch, self.sizes["num_classes"])
        for metric in (self.overlap, self.pixels):
            metric.update((output.lengths > PRESENT).long(), classes.long())
        return super().results(batch, found, output) | {"iou": self.overlap, "pixels": self.pixels}


@torch.no_grad()
def segmented(learner: SegmentationLearner, batch: Batch) -> dict[str, Tensor]:
    """The network's results for images, as rows of pictures for :func:`capsfast.plot.images`.

    Returns:
        ``image``, ``classes``, ``predicted`` and, with a decoder, ``reconstruction`` from the predicted classes, all on
        the CPU.
    """
    from ..plot import class_colours

    output = learner.model(learner.normalized(batch.images.to(learner.device)))
    rows = {
        "image": batch.images.cpu(),
        "classes": class_colours(pixel_classes(batch, learner.sizes["num_classes"])),
        "predicted": class_colours(output.lengths > PRESENT),
    }
    return rows if output.reconstruction is None else {**rows, "reconstruction": output.reconstruction.cpu()}
