"""Checks of the images of a model."""

from collections.abc import Sequence

from torch import Tensor

from .. import checks
from ..nn import _arguments


def image_shape(op: str, in_channels: int, image_size: int | Sequence[int]) -> tuple[int, int, int]:
    """(channels, height, width)."""
    return in_channels, *_arguments.pair(op, "image_size", image_size)


def check_images(op: str, images: Tensor, shape: tuple[int, int, int]) -> None:
    if checks.is_proxy(images):
        return  # in a symbolic_trace of a network there is nothing to check
    _arguments.floats(op, "images", images, "[B, C, H, W]")
    if tuple(images.shape[1:]) != shape:
        C, H, W = shape
        raise ValueError(f"{op}: images must be [B, {C}, {H}, {W}], got {checks.shape_of(images)}")
