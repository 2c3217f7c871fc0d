"""Primary capsules of a depthwise convolution."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import checks
from ..functional import squash
from ..options import SQUASH
from . import _arguments
from ._layer import Layer
from .primary_caps import FlattenCaps


class DepthwisePrimaryCaps(Layer):
    """One depthwise convolution whose channels are cut into capsules and squashed (Mazzia et al. 2021).

    Every feature map has a filter of its own. With a kernel as large as the maps there is one place, and ``types``
    capsules in all.

    Parameters: ``conv.weight [types·dim, 1, *kernel_size]`` and ``conv.bias [types·dim]``. Channel ``t·dim + k`` is
    component k of capsule type t.

    Args:
        types: capsules at each place, C.
        dim: size of a capsule, K.
        kernel_size, stride: of the convolution; an int or two of them (vertical, horizontal).
        bias: of the convolution.
        squash, eps: see :func:`capsfast.squash`; the paper's is ``"exp"``.
        flatten: a list of capsules, or False for an image of them, as :class:`ConvCaps2d` takes it.
        device, dtype: of the parameters.

    Shapes: ``[B, types·dim, H, W]`` to ``u [B, types·H'·W', dim]`` with the capsules in the order (type, y, x);
    without ``flatten`` to ``[B, types, dim, H', W']``.

    Raises:
        ValueError, TypeError: a size, an option or an input that does not fit.
    """

    def __init__(
        self,
        types: int,
        dim: int,
        kernel_size: int | Sequence[int] = 9,
        stride: int | Sequence[int] = 1,
        *,
        bias: bool = True,
        squash: str = "exp",
        eps: float = 1e-8,
        flatten: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        op = "capsfast.nn.DepthwisePrimaryCaps"
        _arguments.integers(op, types=types, dim=dim)
        checks.boolean(op, "bias", bias)
        checks.boolean(op, "flatten", flatten)
        checks.choice(op, "squash", squash, SQUASH)
        checks.positive_eps(op, eps)
        self.types = types
        self.dim = dim
        self.squash = squash
        self.eps = eps
        self.flatten = FlattenCaps() if flatten else nn.Identity()
        self.conv = nn.Conv2d(
            types * dim,
            types * dim,
            _arguments.pair(op, "kernel_size", kernel_size),
            _arguments.pair(op, "stride", stride),
            groups=types * dim,
            bias=bias,
            device=device,
            dtype=dtype,
        )

    def grid(self, size: Sequence[int]) -> tuple[int, int]:
        """(H', W') for feature maps of ``size`` (H, W)."""
        return _arguments.conv_grid("capsfast.nn.DepthwisePrimaryCaps", size, self.conv)

    def forward(self, features: Tensor) -> Tensor:
        op = "capsfast.nn.DepthwisePrimaryCaps"
        _arguments.sized(op, "features", features, "[B, types·dim, H, W]", types·dim=self.types * self.dim)
        self.grid(features.shape[2:])
        poses = self.conv(features).unflatten(1, (self.types, self.dim))
        return self.flatten(squash(poses, 2, self.eps, self.squash))  # type: ignore[no-any-return]
