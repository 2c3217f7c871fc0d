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


def fitting_kernel(height: int, width: int) -> int:
    """9 as in the paper; for small images the largest odd kernel whose primary capsules are at least 2 x 2 places."""
    return max(1, min(9, (min(height, width) - 1) // 2 - 1 | 1))


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
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.conv = nn.Conv2d(in_channels, conv_channels, kernel, **made)
        self.primary = PrimaryCaps(conv_channels, primary_groups, primary_dim, kernel, stride=2, **made)
        features = _arguments.window_grid(op, size, (kernel, kernel), (1, 1), (0, 0), (1, 1))
        height, width = self.primary.grid(features)
        in_caps = primary_groups * height * width
        self.routing = fully_connected(
            in_caps, num_caps, primary_dim, caps_dim, routing, num_iterations=num_iterations, **made, **routing_options
        )
        self.length = Length()

    def encode(self, images: Tensor) -> Tensor:
        """The primary capsules ``u [B, I, K]`` of ``images [B, C, H, W]``."""
        self._check(images)
        return self.primary(F.relu(self.conv(images)))
