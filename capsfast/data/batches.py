"""The images of each batch: a function of seed, epoch and step, the same for any number of processes."""

import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..calls import checks
from .seeds import generator


class Draw(NamedTuple):
    """The rows of a batch, and the epoch that seeds its augmentation."""

    epoch: int
    rows: Tensor


class BatchOrder(Sampler[Draw]):
    """The batches of one process out of ``world_size``.

    Training (``shuffle``): all processes together get the batches that one process with ``batch_size * world_size``
    would get. A smaller last batch is split evenly; the remaining images, fewer than ``world_size``, are left out of
    this epoch. A last batch of one image for each process is left out too, because batch normalisation could not take
    it. Without ``shuffle`` every image is used once, in order.

    Args:
        size: number of images in the data set.
        batch_size: images in a batch of this process.
        shuffle: shuffle differently in every epoch.
        seed: seed of the order.
        rank, world_size: number of this process, and number of all processes.

    Raises:
        ValueError: a batch size below 1, or fewer images than processes.
    """

    def __init__(
        self, size: int, batch_size: int, *, shuffle: bool, seed: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        size, batch_size, seed, rank, world_size = checks.plain((size, batch_size, seed, rank, world_size))
        if batch_size < 1:
            raise ValueError(f"capsfast.data.BatchOrder: batch_size must be at least 1, got {checks.shown(batch_size)}")
        if size < world_size:
            raise ValueError(f"capsfast.data.BatchOrder: {world_size} processes need as many images, got {size}")
        self.size = size
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._batches(torch.arange(self.size)))

    def __iter__(self) -> Iterator[Draw]:
        rows = torch.arange(self.size)
        if self.shuffle:
            rows = torch.randperm(self.size, generator=generator(self.seed, "order", self.epoch))
        for batch in self._batches(rows)[self.start :]:
            yield Draw(self.epoch, batch)

    def _batches(self, rows: Tensor) -> list[Tensor]:
        if not self.shuffle:
            return list(rows[self.rank :: self.world_size].split(self.batch_size))
        shares: list[Tensor] = []
        for together in rows.split(self.batch_size * self.world_size):
            each = len(together) // self.world_size
            if each > 1 or (each == 1 and not (shares and len(shares[-1]) > 1)):
                shares.append(together[self.rank * each : (self.rank + 1) * each])
        return shares


def _leave_signals_to_the_parent(worker: int) -> None:
    # Ctrl-C reaches all processes of a terminal, but the parent still needs its workers to finish the step.
    # A forked worker inherits the parent's SIGTERM handler, with which it would not end on SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class ResumableLoader(DataLoader[Any]):
    """Batches of a data set indexed by :class:`Draw`; ``state_dict`` holds the position in the epoch."""

    def __init__(self, dataset: Dataset[Any], order: BatchOrder, **options: Any) -> None:
        options.setdefault("worker_init_fn", _leave_signals_to_the_parent)
        super().__init__(dataset, batch_size=None, sampler=order, **options)
        self.order = order
        self._done = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator, so that the order is made at the first batch, after the trainer has set the epoch.
        self._done = self.order.start
        for batch in super().__iter__():
            self._done += 1
            # Reset for the next epoch here: a trainer that counts batches never asks for one after the last.
            self.order.start = 0
            yield batch

    def state_dict(self) -> dict[str, int]:
        # When all batches are done, the position is the start of the next epoch.
        return {"batches": self._done % len(self.order)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.order.start = state["batches"]
