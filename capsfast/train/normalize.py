"""What a network sees of images in [0, 1]."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import checks
from ..nn._layer import Layer

# Of a variance; images of one shade have 0, whose root has no derivative.
EPS = 1e-8


class Normalize(Layer):
    """Images of mean 0 and deviation 1.

    Args:
        given: ``"image"`` takes mean and deviation of each image, over all its numbers (Hinton, Sabour, Frosst 2018,
            section 4). Two lists, the mean and the deviation of each channel, are those of a training set; see
            :func:`capsfast.data.channel_statistics`. A channel of deviation 0 is not divided.
        in_channels: C.

    Shapes: ``[B, C, H, W]``.

    Raises:
        ValueError: another word, or lists that do not fit.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, given: str | Sequence[Sequence[float]], in_channels: int) -> None:
        super().__init__()
        self.each = given == "image"
        if self.each:
            return
        sizes = [] if isinstance(given, str) else [len(part) for part in given]
        if sizes != [in_channels, in_channels]:
            raise ValueError(
                f'capsfast.train.Learner: normalize must be "image", or mean and deviation of each of {in_channels} '
                f"channels, got {checks.shown(given)}"
            )
        mean, deviation = (torch.tensor(part, dtype=torch.float32)[:, None, None] for part in given)  # type: ignore[arg-type]
        # Not in a checkpoint's weights: its settings have them.
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("deviation", torch.where(deviation > 0, deviation, 1.0), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if not self.each:
            return (images - self.mean) / self.deviation
        variance, mean = torch.var_mean(images, (1, 2, 3), correction=0, keepdim=True)
        return (images - mean) / (variance + EPS).sqrt()
