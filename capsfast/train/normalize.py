"""Normalises images before the network."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..calls import checks
from ..nn._layer import Layer

# Added to a variance: it is 0 for an image of one shade, and the root has no derivative at 0.
EPS = 1e-8


class Normalize(Layer):
    """Normalises images to mean 0 and deviation 1.

    Args:
        kind: ``"image"`` uses mean and deviation of each image, over all its numbers (Hinton, Sabour, Frosst 2018,
            section 4). ``"set"`` uses the mean and the deviation of each channel: ``set()`` takes them from
            :func:`capsfast.data.channel_statistics`. A channel with deviation 0 is not divided.
        in_channels: C.

    Shapes: ``[B, C, H, W]``.

    Raises:
        ValueError: any other word.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, kind: str, in_channels: int) -> None:
        super().__init__()
        checks.choice("capsfast.train.Learner", "normalize", kind, ("image", "set"))
        self.each = kind == "image"
        for name in () if self.each else ("mean", "deviation"):
            self.register_buffer(name, torch.full((in_channels, 1, 1), torch.nan))

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
