"""Data sets that hand out whole batches."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .affine import COLUMNS, RandomAffine
from .augment import Transform
from .batches import Draw
from .labelled import Labelled
from .seeds import generator


class Batch(NamedTuple):
    """``images [B, C, H, W]`` in [0, 1]; ``labels [B]``, or ``[B, 2]`` where two objects overlap, then with
    ``parts [B, 2, C, H, W]``, the two images before they were laid over each other."""

    images: Tensor
    labels: Tensor
    parts: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(each if each is None else each.to(device) for each in self))  # type: ignore[arg-type]


class DrawnSet(Dataset[Batch], ABC):
    """A batch is a function of seed, epoch and rows alone. fresh: other draws in every epoch."""

    def __init__(self, source: Labelled, columns: int, seed: int, fresh: bool) -> None:
        self.source = source
        self.seed = seed
        self.fresh = fresh
        self._columns = columns
        self._drawn: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, draw: Draw) -> Batch:
        return self.batch(draw.rows, draw.epoch)

    @abstractmethod
    def batch(self, rows: Tensor, epoch: int = 0) -> Batch:
        """The images of these rows, as the epoch draws them."""

    def _draws(self, rows: Tensor, epoch: int) -> Tensor:
        epoch = epoch if self.fresh else 0
        if self._drawn is None or self._drawn[0] != epoch:
            drawn = torch.rand(len(self), self._columns, generator=generator(self.seed, "transform", epoch))
            self._drawn = epoch, drawn
        return self._drawn[1][rows]


class ImageSet(DrawnSet):
    """Labelled images, changed at random if a transform is given.

    Args:
        source: the images.
        transform: what to do to them, such as a :class:`RandomAffine`.
        seed: of the draws.
        fresh: other draws in every epoch, as training wants; a test set keeps the first.
    """

    def __init__(
        self, source: Labelled, transform: Transform | None = None, *, seed: int = 0, fresh: bool = False
    ) -> None:
        super().__init__(source, COLUMNS if transform is None else transform.columns, seed, fresh)
        self.transform = transform

    def batch(self, rows: Tensor, epoch: int = 0) -> Batch:
        """``rows [B]`` int64 to their images and ``labels [B]``."""
        images = self.source.scaled(rows)
        if self.transform is not None:
            images = self.transform(images, self._draws(rows, epoch))
        return Batch(images, self.source.labels[rows])


class OverlappingSet(DrawnSet):
    """Two objects of different classes laid over each other: MultiMNIST (Sabour, Frosst, Hinton 2017, section 6).

    Image n is the n-th of the source with another one, each moved on a canvas that leaves room for it; the
    sum of both is cut at white.

    Args:
        source: the images, of at least two classes.
        max_shift: pixels; the canvas is twice as much larger. 4 turns 28 x 28 into 36 x 36.
        seed, fresh: as for :class:`ImageSet`.

    Raises:
        ValueError: images of one class only.
    """

    def __init__(self, source: Labelled, *, max_shift: int = 4, seed: int = 0, fresh: bool = False) -> None:
        super().__init__(source, 2 * COLUMNS + 1, seed, fresh)
        self.transform = RandomAffine(shift=max_shift, canvas=max_shift)
        self._by_class = torch.argsort(source.labels, stable=True)
        counts = torch.bincount(source.labels)
        if int(counts.max()) == len(source.labels):
            raise ValueError("capsfast.data.OverlappingSet: images of at least two classes are needed, got one class")
        self._counts = counts
        self._ends = counts.cumsum(0)

    def batch(self, rows: Tensor, epoch: int = 0) -> Batch:
        """``rows [B]`` int64 to images, ``labels [B, 2]`` and ``parts [B, 2, C, H, W]``."""
        draws = self._draws(rows, epoch)
        pair = torch.stack([rows, self._partners(rows, draws[:, -1])], 1)  # [B, 2]
        first, second = (
            self.transform(self.source.scaled(pair[:, n]), draws[:, n * COLUMNS : (n + 1) * COLUMNS]) for n in (0, 1)
        )
        return Batch((first + second).clamp(max=1), self.source.labels[pair], torch.stack([first, second], 1))

    def _partners(self, rows: Tensor, draw: Tensor) -> Tensor:
        """Any image of another class, each as likely: those sorted behind the own class, around the end."""
        labels = self.source.labels[rows]
        others = len(self) - self._counts[labels]
        chosen = torch.minimum((draw.double() * others).long(), others - 1)
        return self._by_class[(self._ends[labels] + chosen) % len(self)]
