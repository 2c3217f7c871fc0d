"""Convolution, primary capsules and routing, which CapsNet and the auto-encoder share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..nn import Length, PrimaryCaps, _arguments
from ..nn.dynamic_routing import fully_connected
from ..nn.routing.names import RoutingChoice
from ._images import DecodedCapsules

LARGEST_SIDE, MOST_PLACES = 44, 14 * 14


def fitting_kernel(height: int, width: int) -> int:
    """9 as in the paper; for small images the largest odd kernel whose primary capsules are at least 2 x 2 places."""
    return max(1, min(9, (min(height, width) - 1) // 2 - 1 | 1))


def fitting_stride(height: int, width: int, kernel: int, primary_stride: int) -> int:
    """1; for images with a side above 44 the least stride that leaves at most 14 x 14 places, as 44 pixels do.

    The places of the primary capsules grow with the area of the image, and with them W and the time of a step.
    """
    stride = 1
    while max(height, width) > LARGEST_SIDE:
        features = [(side - kernel) // stride + 1 for side in (height, width)]
        places = [(side - kernel) // primary_stride + 1 for side in features]
        if places[0] * places[1] <= MOST_PLACES or (min(height, width) - kernel) // (stride + 1) + 1 < kernel:
            break
        stride += 1
    return stride


class CapsuleEncoder(DecodedCapsules):
    """Images to capsules (Sabour, Frosst, Hinton 2017, figure 1): ``conv``, ``primary`` and ``routing``."""

    def __init__(
        self,
        in_channels: int,
        image_size: int | Sequence[int],
        num_caps: int,
        caps_dim: int,
        conv_channels: int,
        primary_groups: int,
        primary_dim: int,
        kernel_size: int | None,
        conv_stride: int | None,
        primary_stride: int,
        num_iterations: int | None,
        routing: RoutingChoice,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        routing_options: dict[str, Any],
    ) -> None:
        super().__init__()
        op = self._op
        size = self._sees(in_channels, image_size)
        kernel = fitting_kernel(*size) if kernel_size is None else kernel_size
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        stride = fitting_stride(*size, kernel, primary_stride) if conv_stride is None else conv_stride
        self.conv = nn.Conv2d(in_channels, conv_channels, kernel, stride, **factory_kwargs)
        self.primary = PrimaryCaps(conv_channels, primary_groups, primary_dim, kernel, primary_stride, **factory_kwargs)
        features = _arguments.window_grid(op, size, (kernel, kernel), (stride, stride), (0, 0), (1, 1))
        height, width = self.primary.grid(features)
        in_caps = primary_groups * height * width
        self.routing = fully_connected(
            in_caps,
            num_caps,
            primary_dim,
            caps_dim,
            routing,
            num_iterations=num_iterations,
            **factory_kwargs,
            **routing_options,
        )
        self.length = Length()

    def encode(self, images: Tensor) -> Tensor:
        """The primary capsules ``u [B, I, K]`` of ``images [B, C, H, W]``."""
        self._check(images)
        return self.primary(F.relu(self.conv(images)))
