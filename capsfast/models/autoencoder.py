"""Capsules learned from images without labels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..nn import Decoder
from ..nn.routing.names import RoutingChoice
from ._encoder import CapsuleEncoder
from .output import CapsNetOutput


class CapsAutoEncoder(CapsuleEncoder):
    """The encoder of :class:`CapsNet`, and a decoder that sees all capsules: no labels, no classes.

    Parts: ``conv``, ``primary``, ``routing``, ``decoder``. Trained with
    :class:`capsfast.nn.ReconstructionLoss` on the third entry of its output.

    Args:
        num_caps, caps_dim: number and size of the capsules that the image is decoded from.
        all others, shapes, errors: as in CapsNet, without labels.
    """

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int | Sequence[int] = 28,
        num_caps: int = 10,
        caps_dim: int = 16,
        *,
        conv_channels: int = 256,
        primary_groups: int = 32,
        primary_dim: int = 8,
        num_iterations: int | None = None,
        routing: RoutingChoice = "dynamic",
        kernel_size: int | None = None,
        conv_stride: int | None = None,
        primary_stride: int = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **routing_options: Any,
    ) -> None:
        super().__init__(
            in_channels,
            image_size,
            num_caps,
            caps_dim,
            conv_channels,
            primary_groups,
            primary_dim,
            kernel_size,
            conv_stride,
            primary_stride,
            num_iterations,
            routing,
            device,
            dtype,
            routing_options,
        )
        self.decoder = Decoder(num_caps, caps_dim, self.image_shape, masked=False, device=device, dtype=dtype)

    def reconstruct(self, capsules: Tensor) -> Tensor:  # type: ignore[override]
        """``capsules [B, J, D]`` to images ``[B, C, H, W]``."""
        return self._decoder()(capsules)  # type: ignore[no-any-return]

    def forward(self, images: Tensor) -> CapsNetOutput:  # type: ignore[override]
        capsules, activations = self.classify(images)
        return CapsNetOutput(activations, capsules, self.reconstruct(capsules))
