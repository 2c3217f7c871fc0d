"""Labelled images, read one at a time from memory, from files, or from any data set."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from ..calls import checks
from .vision import torchvision

OP = "capsfast.data.load"
PARTS = ("train", "val", "test")


class Images(Dataset[Tensor]):
    """The images of a data set as float32 ``[C, H, W]`` in [0, 1], all of one shape, and their labels.

    Args:
        images: ``[N, C, H, W]`` or ``[N, H, W]``, uint8 or floats in [0, 1], or a data set of (image, label), whose
            images are PIL pictures, arrays ``[H, W, C]``, or tensors ``[C, H, W]`` or ``[H, W]``.
        labels: ``[N]``, integers from 0 on; default: ``targets`` or ``labels`` of the data set, or the labels that it
            returns with its images.
        name: the name of the data in messages.
        image_size: resizes to a square, bilinear with antialiasing.

    ``classes`` holds the names of the classes if the data set has them.

    Raises:
        ValueError: labels are not such integers, there are fewer than two classes, or the first image is not an image.
    """

    def __init__(self, images: Any, labels: Any = None, *, name: str = "data", image_size: int | None = None) -> None:
        image_size = checks.plain(image_size)
        if image_size is not None and image_size < 1:
            raise ValueError(f"{OP}: image_size must be at least 1, got {checks.shown(image_size)}")
        if not hasattr(images, "__len__") or not hasattr(images, "__getitem__"):
            raise ValueError(f"{OP}: {name} must have a length and be indexed by number, got {checks.shown(images)}")
        self.images, self.name, self.image_size = images, name, image_size
        names = getattr(images, "classes", None)
        self.classes: list[str] | None = [str(name) for name in names] if isinstance(names, list | tuple) else None
        self.labels = _checked(name, labels_of(images) if labels is None else labels, len(images))
        if self.classes is not None and len(self.classes) != int(self.labels.max()) + 1:
            self.classes = None
        if isinstance(images, Tensor):
            self._check_pixels(images)
        self.shape = self._read(0).shape

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> Tensor:
        image = self._read(row)
        if image.shape != self.shape:
            got = f"{checks.shape_of(image)} at {row}"
            raise ValueError(f"{OP}: images of {self.name} must all be {list(self.shape)}, got {got}; give image_size")
        return image

    def _read(self, row: int) -> Tensor:
        found = self.images[row]
        image = found[0] if isinstance(found, tuple | list) else found
        if not isinstance(image, Tensor):
            image = torchvision("transforms.v2.functional").to_image(image).as_subclass(Tensor)
        image = image[None] if image.dim() == 2 else image
        if not isinstance(self.images, Tensor):  # a tensor was checked as a whole
            self._check_pixels(image, f" at {row}")
        return resized(image, self.image_size)

    def _check_pixels(self, pixels: Tensor, where: str = "") -> None:
        """Raises ValueError for numbers that are no colours. where: which image; without it they are all images."""
        name, dtype = f"{OP}: images of {self.name}", pixels.dtype
        shaped = pixels.dim() == 3 if where else pixels.dim() in (3, 4)
        # A single image may be so dark that its largest byte is 1, but not all images of a data set.
        if dtype == torch.uint8 and not where and pixels.max() == 1:
            remedy = "give floats from 0 to 1, or multiply them by 255"
            raise ValueError(f"{name} must be bytes up to 255, got nothing above 1, which is nearly black; {remedy}")
        if dtype == torch.uint8 and shaped:
            return
        # torch has no minimum of some integers, such as uint16.
        low, high = (float(bound) for bound in (pixels if dtype.is_floating_point else pixels.double()).aminmax())
        if dtype.is_floating_point and shaped and 0 <= low <= high <= 1:
            return
        remedy = "the option normalize normalizes"
        if not low <= high:
            remedy = "replace NaN, or leave such images out"
        elif not shaped:
            remedy = "reshape them"
        elif low >= 0 and high <= 255:
            integers = "convert them to uint8" if high > 1 else "convert them to floats"
            remedy = "divide them by 255" if dtype.is_floating_point else integers
        rule = "must be [C, H, W] of uint8 or of floats in [0, 1]"
        raise ValueError(f"{name} {rule}, got {checks.shown(pixels)} from {low:.3g} to {high:.3g}{where}; {remedy}")

    def part(self, rows: Tensor) -> "Images":
        """The images in ``rows [n]``."""
        images = self.images[rows] if isinstance(self.images, Tensor) else Subset(self.images, rows.tolist())
        images_of_part = Images(images, self.labels[rows], name=self.name, image_size=self.image_size)
        images_of_part.classes = self.classes
        return images_of_part


def resized(image: Tensor, size: int | None) -> Tensor:
    """``[C, H, W]``, uint8 or floats in [0, 1], as float32 in [0, 1], with ``size`` resized to a square."""
    image = image.float() / 255 if image.dtype == torch.uint8 else image.float()
    if size is None or image.shape[1:] == (size, size):
        return image
    resize = torchvision("transforms.v2.functional").resize
    return resize(image, [size, size], antialias=True).clamp(0, 1)  # type: ignore[no-any-return]


class Split(NamedTuple):
    """Images to train on, for validation and for tests.

    val is None if the data has no such part. If the data has no part for tests, val and test are the same images.
    """

    train: Images
    val: Images | None
    test: Images


def labels_of(dataset: Any) -> Any:
    """Labels from the attributes of torchvision's data sets; otherwise every item is read once."""
    if isinstance(dataset, Subset):
        return torch.as_tensor(labels_of(dataset.dataset))[torch.as_tensor(dataset.indices)]
    known = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if known is None or getattr(dataset, "target_transform", None) is not None:
        return [dataset[row][1] for row in range(len(dataset))]
    return known


def _checked(name: str, labels: Any, count: int) -> Tensor:
    """The labels as int64 ``[count]``."""
    try:
        # torch warns at a list of arrays.
        arrays = isinstance(labels, list) and len(labels) > 0 and isinstance(labels[0], np.ndarray)
        tensor = torch.as_tensor(np.stack(labels) if arrays else labels)
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.zeros(0)
    # The network gets a class for every number up to the largest label, so a wrong label costs memory.
    most = max(count, 1000)
    fits = count > 0 and tensor.numel() == count and not tensor.is_floating_point()
    tensor = tensor.long()
    if not fits or not 0 <= int(tensor.min()) <= int(tensor.max()) < most:
        got = f"{int(tensor.min())} to {int(tensor.max())}" if fits else checks.shown(labels)
        rule = f"must have an integer label for each of its {count} images, from 0 to less than {most}"
        remedy = "" if fits else "; numpy's astype(int) converts floats, argmax(1) one-hot labels"
        raise ValueError(f"{OP}: {name} {rule}, got {got}{remedy}")
    if tensor.min() == tensor.max():
        raise ValueError(f"{OP}: {name} must have at least two classes, got only images of class {int(tensor.min())}")
    return tensor.reshape(count)


def parted(parts: dict[str, Images]) -> Split:
    """The parts by their names in PARTS. A single part is a whole data set, split 80:20, always in the same way."""
    if len(parts) == 1:
        (whole,) = parts.values()
        train, test = divided(whole, 0.2, seed=0)
        return Split(train, None, test)
    return Split(parts["train"], parts.get("val"), parts["test" if "test" in parts else "val"])


def divided(images: Images, share: float, seed: int) -> tuple[Images, Images]:
    """Two parts: ``share`` of the images of every class, drawn by the seed, are in the second one.

    Raises:
        ValueError: the second part would have images of fewer than two classes.
    """
    drawn = torch.zeros(len(images), dtype=torch.bool)
    for label in images.labels.unique():
        rows = (images.labels == label).nonzero()[:, 0]
        mixed = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
        drawn[mixed[: min(round(len(rows) * share), len(rows) - 1)]] = True
    if len(images.labels[drawn].unique()) < 2:
        rule = f"must have two classes of at least {max(2, int(0.5 / share) + 1)} images"
        raise ValueError(f"{OP}: {images.name} {rule} to set {share:.2g} of them apart; or give train, val and test")
    kept, second = (images.part(rows.nonzero()[:, 0]) for rows in (~drawn, drawn))
    return kept, second


def channel_statistics(images: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over all pixels, without augmentation.

    images: :class:`Images`, or a set of :func:`capsfast.data.open_sets`.
    """
    source: Images = getattr(images, "source", images)
    sums = torch.zeros(2, source.shape[0], dtype=torch.float64)
    for row in range(len(source)):
        image = source[row].double()
        sums += torch.stack([image.sum((1, 2)), image.square().sum((1, 2))])
    mean, squares = sums / (len(source) * source.shape[1] * source.shape[2])
    return tuple(mean.tolist()), tuple((squares - mean.square()).clamp(min=0).sqrt().tolist())
