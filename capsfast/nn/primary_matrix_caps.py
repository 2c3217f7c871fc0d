"""From feature maps to capsules with an activation of their own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from . import _arguments
from ._layer import Layer
from .routing.base import Capsules


class PrimaryMatrixCaps(Layer):
    """Two convolutions: one makes poses, the other, under a sigmoid, activations.

    Parameters: ``pose`` and ``activation``, convolutions of ``types·dim`` and of ``types`` channels. Channel
    ``t·dim + k`` of the first is component k of capsule type t. With ``batch_norm`` those of its parts ``pose_norm``
    and ``activation_norm`` too.

    Args:
        in_channels: of the feature maps.
        types: capsules at each place, C.
        dim: size of a capsule, K; of a pose matrix, the number of its entries.
        kernel_size, stride, padding: of both convolutions; an int or two of them.
        batch_norm: whether the poses of a type, all their K numbers together, and the argument of its sigmoid are
            normalised over the batch and the places. The convolutions have no bias then (Ribeiro, Leontidis, Kollias
            2020, the authors' code).
        activation_std: the weight of the activations starts with this deviation and their bias with -1; 3.0 in the
            code of Hinton, Sabour, Frosst (2018), whose bias stays. None: both as torch starts a convolution.
        device, dtype: of the parameters.

    Shapes: ``[B, in_channels, H, W]`` to :class:`Capsules`: poses ``[B, types, dim, H', W']``, activations
    ``[B, types, H', W']``.

    Source: Hinton, Sabour, Frosst (2018), section 4.

    Raises:
        ValueError, TypeError: a size or an input that does not fit.
    """

    def __init__(
        self,
        in_channels: int,
        types: int,
        dim: int,
        kernel_size: int | Sequence[int] = 1,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        *,
        batch_norm: bool = False,
        activation_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        op = "capsfast.nn.PrimaryMatrixCaps"
        _arguments.integers(op, in_channels=in_channels, types=types, dim=dim)
        checks.boolean(op, "batch_norm", batch_norm)
        if activation_std is not None:
            _arguments.positive(op, "activation_std", activation_std)
            if batch_norm:
                raise ValueError(f"{op}: activation_std needs batch_norm=False: a norm would undo it; leave it out")
        self.activation_std = activation_std
        window = (
            _arguments.pair(op, "kernel_size", kernel_size),
            _arguments.pair(op, "stride", stride),
            _arguments.pair(op, "padding", padding, least=0),
        )
        self.in_channels = in_channels
        self.types = types
        self.dim = dim
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.pose = nn.Conv2d(in_channels, types * dim, *window, bias=not batch_norm, **made)
        self.activation = nn.Conv2d(in_channels, types, *window, bias=not batch_norm, **made)
        self.pose_norm = nn.BatchNorm3d(types, **made) if batch_norm else nn.Identity()
        self.activation_norm = nn.BatchNorm2d(types, **made) if batch_norm else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights anew; a batch normalisation starts anew."""
        for each in self.children():
            if not isinstance(each, nn.Identity):
                each.reset_parameters()  # type: ignore[operator]
        # Features of a ReLU are well below 1. The authors' code has 0.5 for 64 of them, and so has this.
        nn.init.trunc_normal_(self.pose.weight, std=4 / self.pose.weight[0].numel() ** 0.5)
        if self.activation_std is not None:
            std = self.activation_std
            nn.init.trunc_normal_(self.activation.weight, std=std, a=-2 * std, b=2 * std)
            nn.init.constant_(self.activation.bias, -1.0)  # type: ignore[arg-type]

    def grid(self, size: Sequence[int]) -> tuple[int, int]:
        """(H', W') for feature maps of ``size`` (H, W)."""
        return _arguments.conv_grid("capsfast.nn.PrimaryMatrixCaps", size, self.pose)

    def forward(self, features: Tensor) -> Capsules:
        op = "capsfast.nn.PrimaryMatrixCaps"
        _arguments.sized(op, "features", features, "[B, in_channels, H, W]", in_channels=self.in_channels)
        self.grid(features.shape[2:])
        poses = self.pose(features).unflatten(1, (self.types, self.dim))
        return Capsules(self.pose_norm(poses), self.activation_norm(self.activation(features)).sigmoid())
