"""Classes of pixels: what is trained on, and how it is measured."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data import Batch
from ..models.segcaps import PRESENT
from ..nn import LossParts, MarginLoss
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


class Overlap(NamedTuple):
    """Pixel counts of every class, ``[J]`` each: in prediction and target, and in either of them."""

    both: Tensor
    either: Tensor

    @property
    def iou(self) -> Tensor:
        """Intersection over union, the mean of the classes that occur."""
        there = self.either > 0
        return (self.both[there] / self.either[there]).mean()


def overlap(found: Tensor, classes: Tensor) -> Overlap:
    """Of predicted and true classes, bool ``[B, J, H, W]``."""
    return Overlap(*(each.sum((0, 2, 3)) for each in (found & classes, found | classes)))


class SegmentationLearner(Learner):
    """:class:`Learner` of a network that gives every pixel its classes.

    The margin loss of Sabour et al. (2017, eq. 4) for every pixel, the mean over all, with absent classes times 0.25;
    and the squared error of the image where it has a class, as LaLonde and Bagci (2018) do, with the classes given to
    the decoder.

    A test gives ``test_iou``, of the classes over all images together, and ``test_pixels``, the share of pixels with
    exactly the right classes. Arguments as for Learner.
    """

    pixel_loss = MarginLoss(lam=ABSENT)

    def losses(self, batch: Batch) -> tuple[LossParts, Tensor]:
        """The parts of the loss, means over the batch, and the capsules' lengths ``[B, J, H, W]``."""
        classes = pixel_classes(batch, self.sizes["num_classes"])
        output = self.model(batch.images, classes)
        lengths, targets = (each.movedim(1, -1).flatten(0, -2) for each in (output.lengths, classes))
        margin = self.pixel_loss(lengths, targets)
        if output.reconstruction is None:
            return LossParts(margin, margin, torch.zeros_like(margin)), output.lengths
        shown = batch.images * classes.any(1, keepdim=True)
        error = self.loss.reconstruction(output.reconstruction, shown)
        return LossParts(margin + self.loss.reconstruction_weight * error, margin, error), output.lengths

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        found, _ = self.losses(batch)
        self.log_dict(found._asdict() | {"loss": found.total}, prog_bar=True)
        self.log("lr", self.lr * self.decay(self.global_step))
        return found.total

    def on_validation_epoch_start(self) -> None:
        # Over this process's images: intersections and unions of the classes; then margin, reconstruction, pixels with
        # the right classes, all pixels and the images.
        J = self.sizes["num_classes"]
        self._sums = torch.zeros(2 * J + 5, device=self.device, dtype=torch.float64)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        found, lengths = self.losses(batch)
        classes = pixel_classes(batch, self.sizes["num_classes"])
        predicted = lengths > PRESENT
        right = (predicted == classes).all(1)
        n = len(batch.images)
        rest = [n * found.margin, n * found.reconstruction, right.sum(), right.numel(), n]
        counts = [*overlap(predicted, classes), torch.tensor(rest, device=lengths.device)]
        self._sums += torch.cat([each.double() for each in counts])

    def on_validation_epoch_end(self) -> None:
        sums = self.trainer.strategy.reduce(self._sums, reduce_op="sum")
        self.tested_at = self.global_step
        both, either, rest = sums.split([self.sizes["num_classes"]] * 2 + [5])
        margin, reconstruction, right, pixels, count = rest.tolist()
        results: dict[str, Any] = {
            "test_margin": margin / count,
            "test_reconstruction": reconstruction / count,
            "test_iou": float(Overlap(both, either).iou),
            "test_pixels": right / pixels,
        }
        # The same on all processes already; Lightning wants to be told.
        self.log_dict(results, prog_bar=True, sync_dist=True)


@torch.no_grad()
def segmented(learner: SegmentationLearner, batch: Batch) -> dict[str, Tensor]:
    """What the network makes of images: rows of pictures for :func:`capsfast.train.pictures.image_grid`.

    Returns:
        ``image``, ``classes``, ``predicted`` and, with a decoder, ``reconstruction`` by the predicted classes.
    """
    from .pictures import class_colours

    batch = batch.to(learner.device)
    output = learner.model(batch.images)
    rows = {
        "image": batch.images,
        "classes": class_colours(pixel_classes(batch, learner.sizes["num_classes"])),
        "predicted": class_colours(output.lengths > PRESENT),
    }
    return rows if output.reconstruction is None else {**rows, "reconstruction": output.reconstruction}


def make_learner(model: str, *sizes: int, **options: Any) -> Learner:
    """The learner of a model, with its arguments: :class:`SegmentationLearner` of one that segments, else Learner."""
    return (SegmentationLearner if model == "segcaps" else Learner)(model, *sizes, **options)
