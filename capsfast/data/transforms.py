"""Transforms of single images. They draw random numbers from torch's generator."""

from collections.abc import Callable
from functools import partial
from math import radians
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..calls import checks
from ..storage.dotted import by_path
from .vision import torchvision

# From float32 [C, H, W] in [0, 1] to float32 [C, H, W] in [0, 1].
Transform = Callable[[Tensor], Tensor]
OP = "capsfast.data.open_sets"


def in_proportion(pixels: int, size: int) -> int:
    """``pixels`` for MNIST's 28 pixels, scaled to another image size, at least 1."""
    return max(1, round(size * pixels / 28))


def augmentation(
    size: int,
    *,
    shift: int | None = None,
    crop: int | None = None,
    crop_padding: int = 0,
    flip: bool = False,
    brightness: float = 0.0,
    contrast: float = 0.0,
    transform: str | dict[str, Any] | None = None,
) -> tuple[Transform | None, Transform | None]:
    """The transforms for training, in the order of the arguments, and for tests.

    Args:
        size: size of the images in pixels.
        others: see :class:`capsfast.train.ImageData`.

    Raises:
        ValueError: an option out of its range.
    """
    padded = size + 2 * crop_padding
    for name, value, fits, rule in (
        ("shift", shift, shift is None or shift >= 0, "must not be negative"),
        ("crop_padding", crop_padding, crop_padding >= 0, "must not be negative"),
        ("crop_padding", crop_padding, crop is not None or not crop_padding, "needs a crop"),
        ("crop", crop, crop is None or 1 <= crop <= padded, f"must be from 1 to {padded}, the padded size"),
        ("brightness", brightness, 0 <= brightness <= 1, "must be from 0 to 1"),
        ("contrast", contrast, 0 <= contrast <= 1, "must be from 0 to 1"),
    ):
        if not fits:
            raise ValueError(f"{OP}: {name} {rule}, got {checks.shown(value)}")
    v2 = torchvision("transforms.v2")
    if shift is None:
        shift = in_proportion(2, size) if crop is None else 0
    steps: list[Transform] = []
    if shift:
        steps.append(v2.RandomCrop(size, padding=shift))
    if crop is not None:
        steps.append(v2.RandomCrop(crop, padding=crop_padding))
    if flip:
        steps.append(v2.RandomHorizontalFlip())
    if brightness or contrast:
        steps.append(partial(light, brightness=brightness, contrast=contrast))
    if transform is not None:
        steps.append(_own(transform))
    return v2.Compose(steps) if steps else None, None if crop is None else v2.CenterCrop(crop)


def light(image: Tensor, brightness: float, contrast: float) -> Tensor:
    """Brightness, then contrast, as in Hinton, Sabour, Frosst (2018), section 4. torchvision's ColorJitter multiplies
    by a brightness instead of adding it, and takes no images with 2 channels."""
    added, factor = (2 * torch.rand(2) - 1).tolist()
    brighter = image + brightness * added
    mean = brighter.mean((1, 2), keepdim=True)
    lit: Tensor = (mean + (1 + contrast * factor) * (brighter - mean)).clamp(0, 1)
    return lit


def _own(named: str | dict[str, Any]) -> Transform:
    path, arguments = (named.get("class_path"), named.get("init_args")) if isinstance(named, dict) else (named, None)
    found = by_path(f"{OP}: transform", str(path))
    if isinstance(found, type) and any("__call__" in vars(kind) for kind in found.__mro__):
        found = found(**arguments or {})
    elif isinstance(found, type) or arguments:
        # A checkpoint holds this path, so it must not be able to call anything with any arguments.
        raise ValueError(f"{OP}: transform must be a function of an image, or a class with __call__, got {path}")
    return partial(_changed, function=found)


def _changed(image: Tensor, function: Callable[[Tensor], Any]) -> Tensor:
    changed = function(image)
    if not isinstance(changed, Tensor) or (changed.shape, changed.dtype) != (image.shape, image.dtype):
        got = checks.shown(changed)
        raise ValueError(f"{OP}: transform must return what it gets, float32 {checks.shape_of(image)}, got {got}")
    return changed


def random_warp(image: Tensor) -> Tensor:
    """Warps an image at random, uniform in the ranges of affNIST."""
    turn, wide, high, skew = (2 * torch.rand(4) - 1).tolist()
    return warped(image, 20 * turn, (1 + 0.2 * wide, 1 + 0.2 * high), 0.2 * skew)


def warped(image: Tensor, rotation: float, scale: tuple[float, float], shear: float) -> Tensor:
    """Scales ``image [C, H, W]`` (across, down), shears it sideways, then rotates it clockwise by degrees, about its
    centre. Pixels from outside are black. torchvision's affine transforms scale both axes by one factor.
    """
    angle = torch.tensor(radians(rotation))
    cos, sin = angle.cos(), angle.sin()
    rotate = torch.stack([cos, -sin, sin, cos]).view(2, 2)
    forth = rotate @ torch.tensor([[1.0, shear], [0.0, 1.0]]) @ torch.diag(torch.tensor(scale, dtype=torch.float32))
    half = torch.tensor([image.shape[2] / 2, image.shape[1] / 2])  # grid coordinates run from -1 to 1
    # affine_grid takes the inverse map, from places of the result to places of the image.
    back = torch.linalg.inv(forth) * half / half[:, None]
    grid = F.affine_grid(F.pad(back, (0, 1))[None], [1, *image.shape], align_corners=False)
    return F.grid_sample(image[None], grid, mode="bilinear", padding_mode="zeros", align_corners=False)[0]
