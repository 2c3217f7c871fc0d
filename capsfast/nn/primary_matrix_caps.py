"""Makes capsules with poses and activations from feature maps."""

from collections.abc import Sequence

from torch import Tensor, nn
from typing_extensions import Unpack

from . import _arguments
from ._arguments import FactoryKwargs
from ._layer import Layer
from .routing.base import Capsules


class PrimaryMatrixCaps(Layer):
    """Two convolutions: the first makes poses; the second, followed by a sigmoid, makes activations.

    Parameters: ``pose`` and ``activation``, convolutions with ``types·dim`` and ``types`` channels. Channel
    ``t·dim + k`` of ``pose`` is component k of capsule type t. ``batch_norm`` adds the parameters of ``pose_norm`` and
    ``activation_norm``.

    Args:
        in_channels: channels of the feature maps.
        types: capsules at each place, C.
        dim: size of a capsule, K; for a pose matrix, the number of its entries.
        kernel_size, stride, padding: of both convolutions; an int or a pair.
        batch_norm: whether to normalise the poses of a type, all K numbers together, and the argument of the sigmoid,
            over the batch and the places. The convolutions then have no bias (Ribeiro, Leontidis, Kollias 2020, the
            authors' code).
        activation_std: the weight of ``activation`` starts with this standard deviation, its bias with -1. The code of
            Hinton, Sabour, Frosst (2018) has 3.0 and does not train the bias. None: both start as in torch's Conv2d.
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
        **factory_kwargs: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        op = self._op
        if activation_std is not None and batch_norm:
            raise ValueError(f"{op}: activation_std needs batch_norm=False: a norm would undo it; leave it out")
        self.activation_std = activation_std
        window = (
            _arguments.pair(op, "kernel_size", kernel_size),
            _arguments.pair(op, "stride", stride),
            _arguments.pair(op, "padding", padding, least=0),
        )
        self.in_channels, self.types, self.dim = in_channels, types, dim
        self.pose = nn.Conv2d(in_channels, types * dim, *window, bias=not batch_norm, **factory_kwargs)
        self.activation = nn.Conv2d(in_channels, types, *window, bias=not batch_norm, **factory_kwargs)
        self.pose_norm = nn.BatchNorm3d(types, **factory_kwargs) if batch_norm else nn.Identity()
        self.activation_norm = nn.BatchNorm2d(types, **factory_kwargs) if batch_norm else nn.Identity()
        self._initialise()

    def _initialise(self) -> None:
        # ReLU features are well below 1. For 64 features the deviation is 0.5, as in the authors' code.
        nn.init.trunc_normal_(self.pose.weight, std=4 / self.pose.weight[0].numel() ** 0.5)
        if self.activation_std is not None:
            std = self.activation_std
            nn.init.trunc_normal_(self.activation.weight, std=std, a=-2 * std, b=2 * std)
            nn.init.constant_(self.activation.bias, -1.0)  # type: ignore[arg-type]

    def grid(self, size: Sequence[int]) -> tuple[int, int]:
        """(H', W') for feature maps of ``size`` (H, W)."""
        return _arguments.conv_grid(self._op, size, self.pose)

    def forward(self, features: Tensor) -> Capsules:
        op = self._op
        _arguments.sized(op, "features", features, "[B, in_channels, H, W]", in_channels=self.in_channels)
        self.grid(features.shape[2:])
        poses = self.pose(features).unflatten(1, (self.types, self.dim))
        return Capsules(self.pose_norm(poses), self.activation_norm(self.activation(features)).sigmoid())
