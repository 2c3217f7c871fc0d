"""The data sets as a Lightning data module."""

import inspect
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import lightning.pytorch as pl
import torch

from ..calls import checks
from ..data import BatchOrder, ResumableLoader, Sets, open_sets
from ..data.catalogue import CHOICES, absolute
from ..data.sets import DrawnSet

# Options of the loaders; all other options go to open_sets.
OF_LOADERS = ("batch_size", "workers")
# The share of the training images held out if best checkpoints or patience need images for validation.
HELD_OUT = 0.1
# By default a batch has at most so many images, and an epoch at least so many steps of as many images.
LARGEST_BATCH, STEPS = 128, 8


def check_types(op: str, init: Callable[..., None], options: Mapping[str, Any]) -> None:
    """Compares options with the annotations of a constructor. A configuration file or a checkpoint may hold anything.

    Raises:
        TypeError: a value of another type.
    """
    for name, parameter in inspect.signature(init).parameters.items():
        if name in options and not _is_of(parameter.annotation, options[name]):
            wanted = inspect.formatannotation(parameter.annotation).replace("typing.", "")
            raise TypeError(f"{op}: {name} must be {wanted}, got {checks.shown(options[name])}")


def _is_of(annotation: Any, value: Any) -> bool:
    kind, parts = get_origin(annotation) or annotation, get_args(annotation)
    if kind is UnionType:
        return any(_is_of(part, value) for part in parts)
    if kind is Any or isinstance(value, bool) or value is None:
        return kind is Any or kind is (bool if isinstance(value, bool) else NoneType)
    if kind is list:
        return isinstance(value, list | tuple) and all(_is_of(parts[0], element) for element in value)
    if kind in (int, float):  # also NumPy's
        return hasattr(type(value), "__index__" if kind is int else "__float__")
    return isinstance(value, os.PathLike if kind is str and not isinstance(value, str) else kind)


class ImageData(pl.LightningDataModule):
    """Batches of labelled images, distributed over the processes.

    Seed, epoch and step decide order and augmentation: a resumed run gets the same batches as an uninterrupted run,
    and n processes with a batch size of B get the batches of one process with a batch size of n·B.

    Args:
        data: digits, mnist, fashion-mnist, kmnist, cifar10, svhn or smallnorb; multi:NAME (two images overlap) or
            affine:NAME (images placed on a larger canvas, warped for tests) with one of these names; a folder with a
            sub-folder of pictures for each class, with a table labels.csv, or with four IDX files; a .csv or .npz file;
            or the path of a data set in Python such as my_module.MyImages.
        data_dir: Folder with the files of a named data set. Default: $CAPSFAST_DATA/NAME, then ~/.cache/capsfast/NAME.
        download: Let torchvision download missing files into data_dir or ~/.cache/capsfast/NAME.
        batch_size: Images per step in one process. Default: 128; from 8 to 127 if an epoch had fewer than eight steps.
        image_size: Resize all images to a square with this many pixels per side first.
        shift: Move training images by up to this many pixels. Default: 2 for 28 pixels and in proportion for other
            sizes; none with crop, multi: or affine:.
        crop: Crop a square of this many pixels: anywhere for training, in the centre for tests.
        crop_padding: Add this many black pixels on every side before the crop.
        flip: Mirror half of the training images, left to right.
        brightness: Add a number from -brightness to brightness to all pixels of a training image.
        contrast: Multiply the distance of pixels from their channel's mean by a factor from 1 - contrast to
            1 + contrast.
        transform: Path of your own class or function, applied last to training images, float tensors [C, H, W]; or a
            dict with class_path and init_args. It must draw random numbers from torch's generator.
        hold_out: Share of the training images held out for validation: of every class, drawn by the seed, and shown
            without augmentation. Default: 0.1 if a run with best checkpoints or patience has no images for validation,
            else 0. Leave it out for data that has them.
        seed: Seed of order, augmentation and images held out.
        workers: Number of processes that prepare batches. 0 prepares them in the training process.
        train: From Python, in place of data: a data set of (image, label) for training; alone it is split 80:20.
        val: From Python, with train: a data set for validation.
        test: From Python, with train: a data set for tests. Default: val.

    Raises:
        TypeError: an option of another type.
        ValueError: no data, data together with train, val or test, or a negative number of workers. ``sets`` raises
            the errors of :func:`capsfast.data.open_sets`.
    """

    def __init__(
        self,
        data: str | None = None,
        data_dir: str | None = None,
        *,
        download: bool = False,
        batch_size: int | None = None,
        image_size: int | None = None,
        shift: int | None = None,
        crop: int | None = None,
        crop_padding: int = 0,
        flip: bool = False,
        brightness: float = 0.0,
        contrast: float = 0.0,
        transform: str | dict[str, Any] | None = None,
        hold_out: float | None = None,
        seed: int = 0,
        workers: int = 0,
        train: Any = None,
        val: Any = None,
        test: Any = None,
    ) -> None:
        super().__init__()
        op = "capsfast.train.ImageData"
        batch_size, image_size, shift, crop, crop_padding, flip = checks.plain(
            (batch_size, image_size, shift, crop, crop_padding, flip)
        )
        brightness, contrast, hold_out, seed, workers = checks.plain((brightness, contrast, hold_out, seed, workers))
        if data is not None and (train, val, test) != (None, None, None):
            raise ValueError(f"{op}: give data, or train, val and test, not both")
        if data is None and train is None:
            raise ValueError(f"{op}: data must be {CHOICES}; from Python train, val and test go too")
        self.save_hyperparameters(logger=False, ignore=["train", "val", "test"])
        check_types(op, ImageData.__init__, self.hparams)
        checks.integer(op, "workers", workers, least=0)
        data = None if data is None else os.fspath(data)
        self.options: dict[str, Any] = {**self.hparams, "data": data}
        self._given = train, val, test
        # A checkpoint must find the data from any working directory, and download nothing.
        self.hparams["data"] = None if data is None else absolute(data)
        self.hparams["data_dir"] = None if data_dir is None else str(Path(data_dir).expanduser().absolute())
        self.hparams["download"] = False

    @cached_property
    def sets(self) -> Sets:
        """The data sets for training, validation and tests; the first access reads the files."""
        options = {name: value for name, value in self.options.items() if name not in OF_LOADERS}
        return open_sets(**options | ({"data": self._given} if options["data"] is None else {}))

    @property
    def watched(self) -> str:
        """The part that a training measures after every epoch, val, or test if there are no images for validation."""
        return "test" if self.sets.val is None else "val"

    def hold_out(self, share: float) -> None:
        """Takes a share for the option hold_out that was left out; checkpoints hold the share too."""
        if share:
            self.sets = self.sets.holding_out(share, self.options["seed"])
        self.options["hold_out"] = self.hparams["hold_out"] = share

    def hold_out_for(self, trainer: pl.Trainer) -> None:
        """Decides the default of hold_out for a training.

        Raises:
            ValueError: best checkpoints or patience without images for validation.
        """
        asked = any(str(getattr(callback, "monitor", None)).startswith("val_") for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if self.options["hold_out"] is None:
            self.hold_out(HELD_OUT if asked and self.sets.val is None else 0.0)
        if asked and self.sets.val is None:
            raise ValueError(
                f"capsfast.train.ImageData: best checkpoints and patience need images for validation, got hold_out="
                f"{self.options['hold_out']}; begin a run with a share, such as hold_out=0.1: a resumed run holds out "
                f"what it did before"
            )

    def setup(self, stage: str) -> None:
        if stage == "fit":
            assert self.trainer is not None
            self.hold_out_for(self.trainer)

    def _loader(self, dataset: DrawnSet, shuffle: bool) -> ResumableLoader:
        rank, world_size = (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
        size = self.options["batch_size"]
        order = BatchOrder(
            len(dataset),
            min(LARGEST_BATCH, max(STEPS, len(self.sets.train) // STEPS)) if size is None else size,
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
        return self._loader(self.sets.test if self.sets.val is None else self.sets.val, shuffle=False)

    def test_dataloader(self) -> ResumableLoader:
        return self._loader(self.sets.test, shuffle=False)

    def predict_dataloader(self) -> ResumableLoader:
        return self.test_dataloader()
