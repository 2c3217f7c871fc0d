"""Data sets that return whole batches."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .batches import Draw
from .images import Images
from .seeds import seed_for
from .transforms import Transform
from .vision import torchvision


class Batch(NamedTuple):
    """``images [B, C, H, W]`` in [0, 1] and ``labels [B]``. If two objects overlap, ``labels [B, 2]`` and
    ``parts [B, 2, C, H, W]``, the separate images of the objects."""

    images: Tensor
    labels: Tensor
    parts: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(tensor if tensor is None else tensor.to(device) for tensor in self))  # type: ignore[arg-type]


class DrawnSet(Dataset[Batch], ABC):
    """Images whose augmentation is a function of seed, epoch and row.

    Args:
        source: the images.
        seed: seed of the augmentation.
        fresh: draw anew in every epoch, for training; a test set keeps the first draw.
    """

    def __init__(self, source: Images, *, seed: int = 0, fresh: bool = False) -> None:
        self.source = source
        self.seed = seed
        self.fresh = fresh

    @property
    def labels(self) -> Tensor:
        """int64 ``[N]``; for overlapping images the labels of the first object."""
        return self.source.labels

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, draw: Draw) -> Batch:
        return self.batch(draw.rows, draw.epoch)

    def batch(self, rows: Tensor, epoch: int = 0) -> Batch:
        """The images of ``rows [B]`` int64, augmented as in this epoch."""
        when = epoch if self.fresh else 0
        state = torch.get_rng_state()
        try:
            samples = []
            for row in rows.tolist():
                # torch.manual_seed would also seed the GPUs, which takes a hundred times as long.
                torch.default_generator.manual_seed(seed_for(self.seed, "transform", when, row))
                samples.append(self.sample(row))
        finally:
            torch.set_rng_state(state)
        return Batch(*(torch.stack(tensor) for tensor in zip(*samples, strict=True)))

    @abstractmethod
    def of(self, source: Images) -> "DrawnSet":
        """Other images, drawn like these."""

    @abstractmethod
    def sample(self, row: int) -> tuple[Tensor, ...]:
        """One sample with the fields of :class:`Batch`, augmented with torch's generator."""


class ImageSet(DrawnSet):
    """Labelled images with an optional transform. Other arguments as for :class:`DrawnSet`."""

    def __init__(
        self, source: Images, transform: Transform | None = None, *, seed: int = 0, fresh: bool = False
    ) -> None:
        super().__init__(source, seed=seed, fresh=fresh)
        self.transform = transform

    def of(self, source: Images) -> "ImageSet":
        return ImageSet(source, self.transform, seed=self.seed, fresh=self.fresh)

    def sample(self, row: int) -> tuple[Tensor, Tensor]:
        image = self.source[row]
        return image if self.transform is None else self.transform(image), self.labels[row]


class OverlappingSet(DrawnSet):
    """Two overlapping objects of different classes: MultiMNIST (Sabour, Frosst, Hinton 2017, section 6).

    Image n is image n of the source plus a random image of another class, each shifted on a larger canvas. The sum is
    clamped to white. Other arguments as for :class:`DrawnSet`.

    Args:
        margin: largest shift in each direction, and additional pixels on each side of the canvas. 4 turns 28 x 28
            into 36 x 36.
    """

    def __init__(self, source: Images, margin: int = 4, *, seed: int = 0, fresh: bool = False) -> None:
        super().__init__(source, seed=seed, fresh=fresh)
        self.margin = margin
        self._place = placed(source.shape[1], margin)
        self._by_class = torch.argsort(source.labels, stable=True)
        self._counts = torch.bincount(source.labels)
        self._ends = self._counts.cumsum(0)

    def of(self, source: Images) -> "OverlappingSet":
        return OverlappingSet(source, self.margin, seed=self.seed, fresh=self.fresh)

    def sample(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        pair = [row, self._partner(row, float(torch.rand((), dtype=torch.float64)))]
        parts = torch.stack([self._place(self.source[index]) for index in pair])
        return parts.sum(0).clamp(max=1), self.labels[pair], parts

    def _partner(self, row: int, draw: float) -> int:
        """A random image of another class, uniform: images sorted by class, counted cyclically after the own class."""
        label = int(self.labels[row])
        others = len(self) - int(self._counts[label])
        return int(self._by_class[(int(self._ends[label]) + int(draw * others)) % len(self)])


def placed(size: int, margin: int) -> Transform:
    """Places an image uniformly at random on a canvas with ``margin`` more pixels on every side."""
    place: Transform = torchvision("transforms.v2").RandomCrop(size + 2 * margin, padding=2 * margin)
    return place
