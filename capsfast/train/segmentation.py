"""Classes of pixels: what is trained on, and how it is measured."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MultilabelExactMatch, MultilabelJaccardIndex

from ..data import Batch
from ..models.segcaps import PRESENT
from ..nn import MarginLoss
from .learner import Learner

# Of an object's own image: where it is at least that bright, the pixel is of its class.
BRIGHT = 0.5
# The factor of absent classes in the margin loss, 0.5 for whole images: of ten classes an image has one, a pixel fewer.
ABSENT = 0.25


def pixel_classes(batch: Batch, num_classes: int) -> Tensor:
    """The classes of every pixel, bool ``[B, J, H, W]``: those of the objects that are at least half white there.

    A pixel where two objects overlap has both classes, one of the background none. Of overlapping images the objects
    are the parts before they were laid over each other, of others the image itself.
    """
    objects = batch.images[:, None] if batch.parts is None else batch.parts  # [B, n, C, H, W]
    labels = batch.labels.view(len(batch.labels), -1)  # [B, n]
    bright = objects.mean(2) >= BRIGHT
    classes = bright.new_zeros(len(labels), num_classes, *bright.shape[2:])
    for n in range(labels.shape[1]):
        classes[torch.arange(len(labels), device=labels.device), labels[:, n]] |= bright[:, n]
    return classes


class Overlap(MultilabelJaccardIndex):
    """Intersection over union of pixels by class, over all images together: the mean of the classes that occur."""

    def compute(self) -> Tensor:
        there = self.confmat.flatten(1)[:, 1:].sum(1) > 0  # all pixels but those that neither image has
        return super().compute()[there].mean()


class SegmentationLearner(Learner, model="segcaps"):
    """:class:`Learner` of a network that gives every pixel its classes.

    The margin loss of Sabour et al. (2017, eq. 4) for every pixel, the mean over all, with absent classes times 0.25;
    and the squared error of the image where it has a class, as LaLonde and Bagci (2018) do, with the classes given to
    the decoder.

    A test gives ``test_iou``, of the classes over all images together, and ``test_pixels``, the share of pixels with
    exactly the right classes. Arguments as for Learner, but for loss, which it does not take.
    """

    pixel_loss = MarginLoss(lam=ABSENT)
    monitor = ("test_iou", "max")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.overlap = Overlap(self.sizes["num_classes"], average="none")
        self.pixels = MultilabelExactMatch(self.sizes["num_classes"])

    def measured(self, batch: Batch) -> tuple[dict[str, Tensor], Any]:
        classes = pixel_classes(batch, self.sizes["num_classes"])
        output = self.output(batch.images, classes)
        lengths, targets = (each.movedim(1, -1).flatten(0, -2) for each in (output.lengths, classes))
        margin = self.pixel_loss(lengths, targets)
        if output.reconstruction is None:
            return {"loss": margin, "margin": margin}, output
        error = self.reconstruction_loss(output.reconstruction, batch.images * classes.any(1, keepdim=True))
        found = {"loss": margin + self.reconstruction_weight * error, "margin": margin, "reconstruction": error}
        return found, output

    def results(self, batch: Batch, found: dict[str, Tensor], output: Any) -> dict[str, Tensor | Metric]:
        classes = pixel_classes(batch, self.sizes["num_classes"])
        for metric in (self.overlap, self.pixels):
            metric.update((output.lengths > PRESENT).long(), classes.long())
        return super().results(batch, found, output) | {"iou": self.overlap, "pixels": self.pixels}


@torch.no_grad()
def segmented(learner: SegmentationLearner, batch: Batch) -> dict[str, Tensor]:
    """What the network makes of images: rows of pictures for :func:`capsfast.plot.images`.

    Returns:
        ``image``, ``classes``, ``predicted`` and, with a decoder, ``reconstruction`` by the predicted classes, all on
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
