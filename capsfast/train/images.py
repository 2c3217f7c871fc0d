"""The data sets as a Lightning data module."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from ..data import BatchOrder, ResumableLoader, Sets, open_sets
from ..data.catalogue import CHOICES, absolute
from ..data.sets import DrawnSet

# What a loader is made of; all other options are those of open_sets.
OF_LOADERS = ("batch_size", "workers")


class ImageData(pl.LightningDataModule):
    """Batches of labelled images, shared out among the processes.

    Order and augmentation follow from seed, epoch and step: a resumed run sees what an uninterrupted one
    would, and n processes with a batch of B see the batches of one process with a batch of n·B.

    Args:
        data: digits, mnist, fashion-mnist, kmnist, cifar10, svhn or smallnorb; multi:NAME (two images over each other)
            or affine:NAME (images moved on a larger canvas, warped ones to test on) of one of these; a folder with a
            sub-folder of pictures for each class, or with four IDX files; an .npz file; or the path of a data set in
            Python such as my_module.MyImages.
        data_dir: Where the files of a named data set are. Default: $CAPSFAST_DATA/NAME, then ~/.cache/capsfast/NAME.
        download: Let torchvision download the files that are missing, into data_dir or ~/.cache/capsfast/NAME.
        batch_size: Images in a step of one process.
        image_size: Resize all images to a square of so many pixels first.
        shift: Move training images by up to so many pixels. Default: 2 on 28 pixels and in proportion on others, none
            beside crop and for multi: and affine:.
        rotation: Rotate training images by up to so many degrees.
        scale: Scale training images by up to this fraction, larger or smaller.
        crop: Crop a square of so many pixels, from anywhere to train on, from the middle to test on.
        crop_padding: Add so many black pixels on every side before the crop.
        flip: Mirror half of the training images, left to right.
        brightness: Add up to this number to all pixels of a training image, or take it from them.
        contrast: Multiply the distance of pixels from their channel's mean by a factor from 1 - contrast to
            1 + contrast.
        cutout: Give a square of so many pixels in training images the mean colour.
        transform: Path of a class or function of one's own, applied last to training images, float tensors [C, H, W];
            or a dict with class_path and init_args. What it draws must come from torch's generator.
        seed: Seed of order and augmentation.
        workers: Processes that make batches. 0 makes them between the steps.
        train: From Python, in place of data: a data set of (image, label) to train on.
        test: From Python, beside train: a data set to test on.

    Raises:
        ValueError: no data, or data beside train and test. At ``setup``, also what
            :func:`capsfast.data.open_sets` raises.
    """

    sets: Sets

    def __init__(
        self,
        data: str | None = None,
        data_dir: str | None = None,
        *,
        download: bool = False,
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
        transform: str | dict[str, Any] | None = None,
        seed: int = 0,
        workers: int = 0,
        train: Any = None,
        test: Any = None,
    ) -> None:
        super().__init__()
        op = "capsfast.train.ImageData"
        if data is not None and (train is not None or test is not None):
            raise ValueError(f"{op}: give data, or train and test, not both")
        if data is None and (train is None or test is None):
            raise ValueError(
                f"{op}: data must be {CHOICES}; from Python train and test go too. A checkpoint of such data sets is "
                "opened with data= (--data)"
            )
        self.save_hyperparameters(logger=False, ignore=["train", "test"])
        self.options: dict[str, Any] = dict(self.hparams)
        self._given = train, test
        # What a checkpoint keeps must lead there from another working directory too, and download nothing.
        self.hparams["data"] = None if data is None else absolute(data)
        self.hparams["data_dir"] = None if data_dir is None else str(Path(data_dir).expanduser().absolute())
        self.hparams["download"] = False

    def setup(self, stage: str | None = None) -> None:
        """Reads the files, once."""
        if hasattr(self, "sets"):
            return
        options = {name: value for name, value in self.options.items() if name not in OF_LOADERS}
        self.sets = open_sets(**options | ({"data": self._given} if options["data"] is None else {}))

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

    def test_dataloader(self) -> ResumableLoader:
        return self.val_dataloader()

    def predict_dataloader(self) -> ResumableLoader:
        return self.val_dataloader()
