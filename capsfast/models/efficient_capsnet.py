"""Efficient-CapsNet, the network of Mazzia, Salvetti, Chiaberge (2021)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..calls import checks
from ..nn import Decoder, DepthwisePrimaryCaps, _arguments
from ..nn.dynamic_routing import fully_connected
from ..nn.routing.names import RoutingChoice
from ._images import DecodedCapsules

# Largest kernel of the depthwise convolution, as in the paper; least size of its input for small images.
LARGEST, LEAST = 9, 3
# eps and momentum of the normalisations, as in the authors' code; Keras calls this momentum 0.99.
EPS, MOMENTUM = 1e-3, 0.01


class Conv(NamedTuple):
    """Kernel, stride and padding of a convolution, the same along both axes."""

    kernel: int
    stride: int
    padding: int

    def maps_left(self, size: Sequence[int]) -> tuple[int, int]:
        """(H, W) of the feature maps; below 1 if the kernel doesn't fit."""
        height, width = ((n + 2 * self.padding - self.kernel) // self.stride + 1 for n in size)
        return height, width


def four_convs(
    op: str, size: tuple[int, int], kernel_sizes: Sequence[int], strides: Sequence[int]
) -> tuple[list[Conv], tuple[int, int]]:
    """The convolutions, padded where less than 3 x 3 places would be left, and (H, W) of their feature maps.

    Raises:
        ValueError: not four kernels and strides, or the image is too small for them.
    """
    for name, values in (("kernel_sizes", kernel_sizes), ("strides", strides)):
        if len(_arguments.sizes(op, name, values)) != 4:
            raise ValueError(f"{op}: {name} must hold four of them, got {checks.shown(tuple(values))}")
    for padded in (False, True):
        convs, maps = [], size
        for kernel, stride in zip(kernel_sizes, strides, strict=True):
            convs.append(Conv(kernel, stride, kernel // 2 if padded and stride == 1 else 0))
            maps = convs[-1].maps_left(maps)
        if min(maps) >= LEAST:
            break
    if min(maps) < 1 or min(size) < LEAST:
        least = f"at least {LEAST}" if min(size) < LEAST else "larger for these kernel_sizes and strides"
        raise ValueError(f"{op}: image_size must be {least}, got {size[0]} x {size[1]}")
    return convs, maps


class EfficientCapsNet(DecodedCapsules):
    """Four convolutions, depthwise primary capsules, class capsules by self-attention (Mazzia et al. 2021).

    For 28 x 28 images the defaults are the paper's network for MNIST: 161 824 parameters without the decoder; the paper
    says 161 K. The convolutions have kernels of 5, 3, 3 and 3, the last a stride of 2; a ReLU and a batch
    normalisation follow each, as in the authors' code. In evaluation mode samples do not depend on each other.

    The authors' network for MultiMNIST, 36 x 36, 154 656 parameters without the decoder, has ``strides=(1, 1, 2, 2),
    kernel_size=5, primary_stride=2``. Their network for SmallNORB, 48 x 48, has ``kernel_sizes=(7, 3, 3, 3),
    strides=(2, 1, 1, 2), norm="instance"``.

    Parts: ``convs``, ``primary`` (:class:`capsfast.nn.DepthwisePrimaryCaps`), ``routing``
    (:class:`capsfast.nn.RoutedCaps`, or :class:`capsfast.DynamicRouting` where that is chosen), ``decoder``
    (:class:`capsfast.nn.Decoder` or None).

    Args:
        in_channels, image_size: channels and size of the images; an int or (height, width), at least 3. If less than
            3 x 3 places would be left (by default for images below 15 pixels), convolutions with stride 1 are padded to
            keep the size.
        conv_channels: channels of the first convolution; the next two have twice as many, the last has primary_groups ·
            primary_dim.
        kernel_sizes, strides: of the four convolutions.
        norm: ``"batch"``, with eps 1e-3 and momentum 0.01; or ``"instance"``, after a LeakyReLU of slope 0.3.
        kernel_size, primary_stride: of the primary capsules; the kernel by default 9 or, where the maps are smaller,
            their size. Larger maps have primary capsules at several places.
        all others, shapes, errors: as for :class:`CapsNet`.

    The lengths of its output are the activations of the routing.
    """

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int | Sequence[int] = 28,
        num_classes: int = 10,
        *,
        conv_channels: int = 32,
        primary_groups: int = 16,
        primary_dim: int = 8,
        kernel_sizes: Sequence[int] = (5, 3, 3, 3),
        strides: Sequence[int] = (1, 1, 1, 2),
        norm: Literal["batch", "instance"] = "batch",
        digit_dim: int = 16,
        num_iterations: int | None = None,
        routing: RoutingChoice = "self-attention",
        reconstruction: bool = True,
        decoder_hidden: Sequence[int] = (512, 1024),
        kernel_size: int | Sequence[int] | None = None,
        primary_stride: int | Sequence[int] = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **routing_options: Any,
    ) -> None:
        super().__init__()
        op = self._op
        convs, maps = four_convs(op, self._sees(in_channels, image_size), kernel_sizes, strides)
        if kernel_size is None:
            kernel_size = (min(LARGEST, maps[0]), min(LARGEST, maps[1]))
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        channels = (in_channels, conv_channels, 2 * conv_channels, 2 * conv_channels, primary_groups * primary_dim)
        layers: list[nn.Module] = []
        for (before, after), size in zip(pairwise(channels), convs, strict=True):
            conv = nn.Conv2d(before, after, size.kernel, size.stride, size.padding, **factory_kwargs)
            layers += [conv, nn.ReLU(), nn.BatchNorm2d(after, EPS, MOMENTUM, **factory_kwargs)]
            if norm == "instance":
                layers[-2:] = [nn.LeakyReLU(0.3), nn.InstanceNorm2d(after, EPS, affine=True, **factory_kwargs)]
        self.convs = nn.Sequential(*layers)
        kernel_size = _arguments.pair(op, "kernel_size", kernel_size)
        primary_stride = _arguments.pair(op, "primary_stride", primary_stride)
        self.primary = DepthwisePrimaryCaps(primary_groups, primary_dim, kernel_size, primary_stride, **factory_kwargs)
        height, width = _arguments.window_grid(op, maps, kernel_size, primary_stride, (0, 0), (1, 1))
        self.routing = fully_connected(
            primary_groups * height * width,
            num_classes,
            primary_dim,
            digit_dim,
            routing,
            num_iterations=num_iterations,
            **factory_kwargs,
            **routing_options,
        )
        hidden = _arguments.sizes(op, "decoder_hidden", decoder_hidden, 0)
        self.decoder = (
            Decoder(num_classes, digit_dim, self.image_shape, hidden, **factory_kwargs) if reconstruction else None
        )
        self._initialise()

    def _initialise(self) -> None:
        for conv in self.convs:
            if isinstance(conv, nn.Conv2d):
                nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
                nn.init.zeros_(conv.bias)  # type: ignore[arg-type]

    def encode(self, images: Tensor) -> Tensor:
        """The primary capsules ``u [B, I, K]`` of ``images [B, C, H, W]``."""
        self._check(images)
        return self.primary(self.convs(images))
