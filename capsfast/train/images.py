"""The data sets as a Lightning data module."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from ..data import BatchOrder, ResumableLoader, Sets, open_sets
from ..data.catalogue import absolute
from ..data.sets import DrawnSet


class ImageData(pl.LightningDataModule):
    """Batches of a data set of :mod:`capsfast.data`, shared out among the processes.

    Order and augmentation follow from seed, epoch and step: a resumed run sees what an uninterrupted one
    would, and n processes with a batch of B see the batches of one process with a batch of n·B.

    Args:
        data, data_dir, image_size: see :func:`capsfast.data.open_sets`.
        batch_size: of one process.
        shift: augmentation in pixels; default 2 on 28 pixels, in proportion on others, none for ``multi:`` and
            ``affine:`` sets and beside ``crop``.
        rotation: augmentation in degrees.
        scale: augmentation, as a fraction.
        crop, crop_padding, flip, brightness, contrast, cutout: see :func:`capsfast.data.open_sets`.
        seed: of order and augmentation.
        workers: processes that make batches; 0 makes them between the steps, which is enough for these sets.

    Raises:
        ValueError, FileNotFoundError, ModuleNotFoundError: at ``setup``, as :func:`capsfast.data.open_sets`.
    """

    sets: Sets

    def __init__(
        self,
        data: str,
        data_dir: str | None = None,
        *,
        batch_size: int = 128,
        image_size: int | None = None,
        shift: int | None = None,
        rotation: float = 0.0,
        scale: float = 0.0,
        crop: int | None = None,
        crop_padding: int = 0,
        flip: bool = False,
        brightness: float = 0.0,
        contrast: float = 0.0,
        cutout: int | None = None,
        seed: int = 0,
        workers: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.options: dict[str, Any] = dict(self.hparams)
        # What a checkpoint keeps must lead there from another working directory too.
        self.hparams["data"] = absolute(data)
        self.hparams["data_dir"] = None if data_dir is None else str(Path(data_dir).expanduser().absolute())

    def setup(self, stage: str | None = None) -> None:
        """Reads the files, once."""
        if hasattr(self, "sets"):
            return
        given = {name: value for name, value in self.options.items() if name not in ("batch_size", "workers")}
        self.sets = open_sets(**given)

    def _loader(self, dataset: DrawnSet, shuffle: bool) -> ResumableLoader:
        rank, world_size = (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
        order = BatchOrder(
            len(dataset),
            self.options["batch_size"],
            shuffle=shuffle,
            seed=self.options["seed"],
            rank=rank,
            world_size=world_size,
        )
        return ResumableLoader(
            dataset, order, num_workers=self.options["workers"], pin_memory=torch.cuda.is_available()
        )

    def train_dataloader(self) -> ResumableLoader:
        return self._loader(self.sets.train, shuffle=True)

    def val_dataloader(self) -> ResumableLoader:
        return self._loader(self.sets.test, shuffle=False)
