"""What is done to a batch of images at random beside moving them: crops, mirror images, light, cutout."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import checks
from .labelled import CHUNK, Labelled


class Transform(Protocol):
    """A function of images and of draws in [0, 1), ``columns`` of them for each image."""

    @property
    def columns(self) -> int: ...

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """``images [B, C, H, W]`` and ``draws [B, columns]`` to images."""
        ...


@dataclass(frozen=True)
class Chain:
    """One transform after the other, each with draws of its own."""

    steps: tuple[Transform, ...]

    @property
    def columns(self) -> int:
        return sum(step.columns for step in self.steps)

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        for step, own in zip(self.steps, draws.split([step.columns for step in self.steps], 1), strict=True):
            images = step(images, own)
        return images


@dataclass(frozen=True)
class RandomCrop:
    """A square at a place that is drawn, all places alike, after ``padding`` pixels of black on every side.

    Args:
        size: of the square. 32 of 48 pixels are the crops of SmallNORB in Hinton, Sabour, Frosst (2018), section 4.
        padding: pixels.

    Raises:
        ValueError: a size below 1 or a negative padding.
    """

    size: int
    padding: int = 0
    columns = 2

    def __post_init__(self) -> None:
        _check_crop("RandomCrop", self.size, self.padding)

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Draws: across, down."""
        free = torch.tensor(images.shape[:1:-1]) + 2 * self.padding - self.size  # across, down
        starts = (draws * (free + 1)).long()
        columns, rows = (starts[:, n, None] + torch.arange(self.size) for n in (0, 1))  # [B, size]
        sample = torch.arange(len(images))[:, None, None]
        padded = F.pad(images, [self.padding] * 4)
        # Indices on both sides of a slice put the channels last.
        return padded[sample, :, rows[:, :, None], columns[:, None, :]].movedim(3, 1)


@dataclass(frozen=True)
class CentreCrop:
    """The square in the middle, after ``padding`` pixels of black on every side.

    Args, Raises: as for :class:`RandomCrop`.
    """

    size: int
    padding: int = 0
    columns = 0

    def __post_init__(self) -> None:
        _check_crop("CentreCrop", self.size, self.padding)

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        padded = F.pad(images, [self.padding] * 4)
        top, left = ((length - self.size) // 2 for length in padded.shape[2:])
        return padded[:, :, top : top + self.size, left : left + self.size]


@dataclass(frozen=True)
class RandomFlip:
    """Left to right, half of the images."""

    columns = 1

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        return torch.where(draws[:, 0, None, None, None] < 0.5, images, images.flip(3))


@dataclass(frozen=True)
class RandomLight:
    """Brightness, then contrast, drawn for each image as for SmallNORB in Hinton, Sabour, Frosst (2018), section 4.

    Args:
        brightness: largest number that is added to all pixels or taken from them.
        contrast: fraction; the distance of every pixel from the mean of its channel is multiplied by a factor from
            [1 - contrast, 1 + contrast]. The result is cut at black and white.

    Raises:
        ValueError: a negative number, or a contrast above 1.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    columns = 2

    def __post_init__(self) -> None:
        for name, value in (("brightness", self.brightness), ("contrast", self.contrast)):
            if not 0 <= value <= 1:
                raise ValueError(f"capsfast.data.RandomLight: {name} must be from 0 to 1, got {checks.shown(value)}")

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Draws: brightness, contrast."""
        added, factor = (2 * draws - 1)[:, :, None, None, None].unbind(1)
        brighter = images + self.brightness * added
        mean: Tensor = brighter.mean((2, 3), keepdim=True)
        return (mean + (1 + self.contrast * factor) * (brighter - mean)).clamp(0, 1)


@dataclass(frozen=True)
class Cutout:
    """A square takes one colour (DeVries, Taylor 2017): its centre is any pixel, so that it may lie partly outside.

    Args:
        size: side of the square, in pixels.
        fill: of each channel. Cutout writes 0 into images that are normalized, which is the mean of a training set.

    Raises:
        ValueError: a size below 1.
    """

    size: int
    fill: tuple[float, ...] = (0.0,)
    columns = 2

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"capsfast.data.Cutout: size must be at least 1, got {checks.shown(self.size)}")

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Draws: across, down."""
        H, W = images.shape[2:]
        first = (draws * torch.tensor([W, H])).long() - self.size // 2  # [B, 2]
        columns, rows = (torch.arange(length) - first[:, n, None] for n, length in ((0, W), (1, H)))
        rows_in, columns_in = ((n >= 0) & (n < self.size) for n in (rows, columns))  # [B, H], [B, W]
        inside = rows_in[:, None, :, None] & columns_in[:, None, None, :]
        return torch.where(inside, torch.tensor(self.fill)[:, None, None], images)


def _check_crop(name: str, size: int, padding: int) -> None:
    if size < 1:
        raise ValueError(f"capsfast.data.{name}: size must be at least 1, got {checks.shown(size)}")
    if padding < 0:
        raise ValueError(f"capsfast.data.{name}: padding must not be negative, got {checks.shown(padding)}")


def channel_statistics(images: Labelled) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, over all images and pixels, which are in [0, 1]."""
    C = images.images.shape[1]
    sums, squares = torch.zeros(C, dtype=torch.float64), torch.zeros(C, dtype=torch.float64)
    for rows in torch.arange(len(images.labels)).split(CHUNK):
        values = images.scaled(rows).double()
        sums += values.sum((0, 2, 3))
        squares += values.square().sum((0, 2, 3))
    count = images.images.numel() // C
    mean = sums / count
    deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
    return tuple(mean.tolist()), tuple(deviation.tolist())
