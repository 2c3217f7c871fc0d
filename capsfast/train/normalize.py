"""Normalises images before the network."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import checks
from ..nn._layer import Layer

# Added to a variance: it is 0 for an image of one shade, and the root has no derivative at 0.
EPS = 1e-8


class Normalize(Layer):
    """Normalises images to mean 0 and deviation 1.

    Args:
        given: ``"image"`` uses mean and deviation of each image, over all its numbers (Hinton, Sabour, Frosst 2018,
            section 4). Two lists are the mean and the deviation of each channel. ``"set"`` waits for ``set()``, with
            numbers from :func:`capsfast.data.channel_statistics`. A channel with deviation 0 is not divided.
        in_channels: C.

    Shapes: ``[B, C, H, W]``.

    Raises:
        ValueError: any other word, or lists that do not fit.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, given: str | Sequence[Sequence[float]], in_channels: int) -> None:
        super().__init__()
        self.each = given == "image"
        if self.each:
            return
        lists = [[torch.nan] * in_channels, [1.0] * in_channels] if given == "set" else given
        if isinstance(lists, str) or [len(part) for part in lists] != [in_channels, in_channels]:
            raise ValueError(
                f'capsfast.train.Learner: normalize must be "image", "set", or mean and deviation of each of '
                f"{in_channels} channels, got {checks.shown(given)}"
            )
        for name in ("mean", "deviation"):
            self.register_buffer(name, torch.empty(in_channels, 1, 1))
        self.set(*lists)

    @property
    def known(self) -> bool:
        """Whether mean and deviation are known."""
        return self.each or not self.mean.isnan().any()

    def set(self, mean: Sequence[float], deviation: Sequence[float]) -> None:
        """Sets mean and deviation, a number for each channel."""
        divisor = [value if value > 0 else 1.0 for value in deviation]
        for buffer, values in ((self.mean, mean), (self.deviation, divisor)):
            buffer.copy_(torch.tensor(values)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        if not self.each:
            return (images - self.mean) / self.deviation
        variance, mean = torch.var_mean(images, (1, 2, 3), correction=0, keepdim=True)
        return (images - mean) / (variance + EPS).sqrt()
