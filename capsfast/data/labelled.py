"""Images with labels, as they were loaded."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 2048  # images


class Labelled(NamedTuple):
    """``images [N, C, H, W]`` uint8, ``labels [N]`` int64; white: the value that stands for 1.

    info: ``[N, 4]`` int64, of SmallNORB alone: instance, elevation, azimuth and lighting, numbered as in its files.
    """

    images: Tensor
    labels: Tensor
    white: int = 255
    info: Tensor | None = None

    def scaled(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """float32 in [0, 1]."""
        return self.images[rows].float() / self.white

    def resized(self, size: int) -> "Labelled":
        """Bilinear, smoothed where it shrinks; square. The values keep 8 bits."""
        if self.images.shape[2:] == (size, size):
            return self
        # In parts: all images as floats are four times as large.
        parts = [
            F.interpolate(self.scaled(rows), (size, size), mode="bilinear", antialias=True).clamp(0, 1)
            for rows in torch.arange(len(self.labels)).split(CHUNK)
        ]
        images = torch.cat([(part * 255).round().byte() for part in parts])
        return Labelled(images, self.labels, info=self.info)


class Split(NamedTuple):
    """What is trained on and what is tested on."""

    train: Labelled
    test: Labelled

    @property
    def num_classes(self) -> int:
        return int(max(self.train.labels.max(), self.test.labels.max())) + 1
