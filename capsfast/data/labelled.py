"""Images with labels, as they were loaded."""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F


class Labelled(NamedTuple):
    """``images [N, C, H, W]`` uint8, ``labels [N]`` int64; white: the value that stands for 1."""

    images: Tensor
    labels: Tensor
    white: int = 255

    def scaled(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """float32 in [0, 1]."""
        return self.images[rows].float() / self.white

    def resized(self, size: int) -> "Labelled":
        """Bilinear, smoothed where it shrinks; square. The values keep 8 bits."""
        if self.images.shape[2:] == (size, size):
            return self
        images = F.interpolate(self.scaled(), (size, size), mode="bilinear", antialias=True)
        return Labelled((images.clamp(0, 1) * 255).round().byte(), self.labels)


class Split(NamedTuple):
    """What is trained on and what is tested on."""

    train: Labelled
    test: Labelled

    @property
    def num_classes(self) -> int:
        return int(max(self.train.labels.max(), self.test.labels.max())) + 1
