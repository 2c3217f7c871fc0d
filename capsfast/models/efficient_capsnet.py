"""Efficient-CapsNet, the network of Mazzia, Salvetti, Chiaberge (2021)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..nn import Decoder, DepthwisePrimaryCaps, _arguments
from ..nn.dynamic_routing import fully_connected
from ..nn.routing.base import Capsules
from ..nn.routing.names import RoutingChoice
from ._decoded import DecodedCapsules
from ._images import check_images, image_shape

KERNELS = (5, 3, 3, 3)
STRIDES = (1, 1, 1, 2)
# Of the depthwise convolution: as in the paper, and what the convolutions before it should leave on small images.
LARGEST, LEAST = 9, 3


def maps_left(size: Sequence[int], padded: bool) -> tuple[int, int]:
    """(H, W) of the feature maps that the four convolutions make of an image; below 1 if they don't fit."""
    height, width = size
    for kernel, stride, padding in zip(KERNELS, STRIDES, paddings(padded), strict=True):
        height, width = ((n + 2 * padding - kernel) // stride + 1 for n in (height, width))
    return height, width


def paddings(padded: bool) -> tuple[int, ...]:
    return tuple(kernel // 2 if padded and stride == 1 else 0 for kernel, stride in zip(KERNELS, STRIDES, strict=True))


class EfficientCapsNet(DecodedCapsules):
    """Four convolutions, depthwise primary capsules, class capsules by self-attention (Mazzia et al. 2021).

    For 28 x 28 images the defaults are the paper's network for MNIST: 161 824 parameters without the decoder, which it
    gives as 161 K. The convolutions have kernels of 5, 3, 3 and 3, the last a stride of 2; a ReLU and a batch
    normalisation follow each, as in the authors' code. In evaluation mode samples do not depend on each other.

    Parts: ``convs``, ``primary`` (:class:`capsfast.nn.DepthwisePrimaryCaps`), ``routing``
    (:class:`capsfast.nn.RoutedCaps`, or :class:`capsfast.DynamicRouting` where that is chosen), ``decoder``
    (:class:`capsfast.nn.Decoder` or None).

    Args:
        in_channels, image_size: of the images; an int or (height, width), at least 3. On images below 15 pixels the
            first three convolutions are padded, so that they keep the size.
        num_classes: J.
        conv_channels: of the first convolution; the next two have twice as many.
        primary_groups, primary_dim: types and size of the primary capsules. The last convolution has as many channels
            as these have numbers.
        digit_dim: size of the class capsules.
        num_iterations: of a routing that iterates; None for its default.
        routing: ``"self-attention"``, or another one as for :class:`capsfast.nn.RoutedCaps`.
        reconstruction: whether there is a decoder.
        kernel_size: of the primary capsules; by default 9 or, where the maps are smaller, their size. Larger maps have
            primary capsules at several places.
        device, dtype, routing_options: as for :class:`capsfast.models.CapsNet`.

    Shapes, errors: as :class:`CapsNet`. The lengths of its output are the activations of the routing.
    """

    _op = "capsfast.models.EfficientCapsNet"

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int | Sequence[int] = 28,
        num_classes: int = 10,
        *,
        conv_channels: int = 32,
        primary_groups: int = 16,
        primary_dim: int = 8,
        digit_dim: int = 16,
        num_iterations: int | None = None,
        routing: RoutingChoice = "self-attention",
        reconstruction: bool = True,
        kernel_size: int | Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **routing_options: Any,
    ) -> None:
        super().__init__()
        op = self._op
        self.image_shape = image_shape(op, in_channels, image_size)
        _arguments.integers(op, num_classes=num_classes, digit_dim=digit_dim)
        _arguments.integers(op, conv_channels=conv_channels, primary_groups=primary_groups, primary_dim=primary_dim)
        checks.boolean(op, "reconstruction", reconstruction)
        size = self.image_shape[1:]
        if min(size) < LEAST:
            raise ValueError(f"{op}: image_size must be at least {LEAST}, got {size[0]} x {size[1]}")
        padded = min(maps_left(size, False)) < LEAST
        maps = maps_left(size, padded)
        if kernel_size is None:
            kernel_size = (min(LARGEST, maps[0]), min(LARGEST, maps[1]))
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        channels = (in_channels, conv_channels, 2 * conv_channels, 2 * conv_channels, primary_groups * primary_dim)
        layers: list[nn.Module] = []
        for n, (kernel, stride, padding) in enumerate(zip(KERNELS, STRIDES, paddings(padded), strict=True)):
            conv = nn.Conv2d(channels[n], channels[n + 1], kernel, stride, padding, **made)
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
            layers += [conv, nn.ReLU(), nn.BatchNorm2d(channels[n + 1], **made)]
        self.convs = nn.Sequential(*layers)
        kernel_size = _arguments.pair(op, "kernel_size", kernel_size)
        self.primary = DepthwisePrimaryCaps(primary_groups, primary_dim, kernel_size, **made)
        height, width = _arguments.window_grid(op, maps, kernel_size, (1, 1), (0, 0), (1, 1))
        self.routing = fully_connected(
            primary_groups * height * width,
            num_classes,
            primary_dim,
            digit_dim,
            routing,
            num_iterations=num_iterations,
            **made,
            **routing_options,
        )
        self.decoder = Decoder(num_classes, digit_dim, self.image_shape, **made) if reconstruction else None

    def encode(self, images: Tensor) -> Tensor:
        """The primary capsules ``u [B, I, K]`` of ``images [B, C, H, W]``."""
        check_images(self._op, images, self.image_shape)
        return self.primary(self.convs(images))  # type: ignore[no-any-return]

    def classify(self, images: Tensor) -> Capsules:
        """The class capsules of ``images [B, C, H, W]``, without a decoder."""
        return self.routing.capsules(self.encode(images))
