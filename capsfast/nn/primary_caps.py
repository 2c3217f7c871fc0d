"""From feature maps to capsules, and from images of capsules to a list of them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..calls import checks
from ..calls.options import Squash
from ..functional import squash
from . import _arguments
from ._arguments import FactoryKwargs
from ._layer import Layer

EACH = ("type", "component")


class FlattenCaps(Layer):
    """An image of capsules ``[B, C, K, H, W]`` to a list ``u [B, C·H·W, K]``, in the order (type, y, x).

    Also with one axis of positions, ``[B, C, K, L]``, or three, ``[B, C, K, Z, H, W]``.
    """

    def forward(self, poses: Tensor) -> Tensor:
        axes = {4: "L", 6: "Z, H, W"}.get(poses.dim() if isinstance(poses, Tensor) else 5, "H, W")
        _arguments.floats(self._op, "poses", poses, f"[B, C, K, {axes}]")
        return poses.movedim(2, -1).flatten(1, -2)


class PrimaryCaps(Layer):
    """Primary capsules: a convolution, whose channels become squashed capsules (Sabour et al. 2017, section 4).

    Parameters: ``conv.weight [types·dim, in_channels, *kernel_size]`` and ``conv.bias [types·dim]``. ``order`` says
    which channel is which component.

    A state dict of a list of convolutions can be loaded too (keys ``<any name>.<n>.weight`` and ``.bias``). Each entry
    makes one capsule type (``types`` entries with ``dim`` channels) or one pose component (``dim`` entries with
    ``types`` channels). With ``types == dim`` the two look the same: use :meth:`from_list`. With ``order="view"`` the
    channels of the entries are concatenated in both cases.

    Args:
        in_channels: channels of the feature maps.
        types: capsules at each place, C.
        dim: size of a capsule, K.
        kernel_size, stride, padding, dilation: of the convolution; an int or two ints.
        bias: whether the convolution has a bias.
        order: which numbers of the feature maps form a capsule, so that weights of other code can be loaded.

            * ``"type"``: channel ``t·dim + k`` is component k of type t.
            * ``"component"``: channel ``k·types + t`` is component k of type t.
            * ``"view"``: ``conv(x).view(B, -1, dim)``, as in much public code. The components of a capsule are then
              ``dim`` neighbouring places of a channel, row by row, continued in the next channel. Such a capsule has
              neither type nor place.
        squash, eps: see :func:`capsfast.squash`.
        flatten: return a list of capsules; False: an image of capsules, as :class:`ConvCaps2d` takes it; not with
            ``order="view"``.
        device, dtype: device and dtype of the parameters.

    Shapes: ``[B, in_channels, H, W]`` to ``u [B, types·H'·W', dim]`` with the capsules in the order
    (type, y, x); without ``flatten`` to ``[B, types, dim, H', W']``.

    Raises:
        ValueError, TypeError: a size, an option or an input that does not fit.
    """

    _depthwise = False

    def __init__(
        self,
        in_channels: int,
        types: int,
        dim: int,
        kernel_size: int | Sequence[int] = 9,
        stride: int | Sequence[int] = 2,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        *,
        bias: bool = True,
        order: Literal["type", "component", "view"] = "type",
        squash: Squash = "paper",
        eps: float = 1e-8,
        flatten: bool = True,
        **factory_kwargs: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        op = self._op
        if order == "view" and not flatten:
            raise ValueError(f"{op}: flatten=False needs capsules with a place, got order='view', which has none")
        self.in_channels, self.types, self.dim = in_channels, types, dim
        self.order, self.squash, self.eps = order, squash, eps
        self.flatten = FlattenCaps() if flatten else nn.Identity()
        self.conv = nn.Conv2d(
            in_channels,
            types * dim,
            _arguments.pair(op, "kernel_size", kernel_size),
            _arguments.pair(op, "stride", stride),
            _arguments.pair(op, "padding", padding, least=0),
            _arguments.pair(op, "dilation", dilation),
            groups=in_channels if self._depthwise else 1,
            bias=bias,
            **factory_kwargs,
        )

    def grid(self, size: Sequence[int]) -> tuple[int, int]:
        """(H', W') for feature maps of ``size`` (H, W)."""
        return _arguments.conv_grid(self._op, size, self.conv)

    def forward(self, features: Tensor) -> Tensor:
        op = self._op
        _arguments.sized(op, "features", features, "[B, in_channels, H, W]", in_channels=self.in_channels)
        self.grid(features.shape[2:])
        maps = self.conv(features)
        if self.order == "view":
            return squash(maps.flatten(1).unflatten(1, (-1, self.dim)), 2, self.eps, self.squash)
        if self.order == "component":
            poses = maps.unflatten(1, (self.dim, self.types)).transpose(1, 2)
        else:
            poses = maps.unflatten(1, (self.types, self.dim))
        return self.flatten(squash(poses, 2, self.eps, self.squash))

    def from_list(self, state: Mapping[str, Tensor], each: str) -> "PrimaryCaps":
        """Loads the weights of a list of convolutions: ``state`` has the keys ``<n>.weight`` and ``<n>.bias``.

        Args:
            state: the state dict of the ``ModuleList``.
            each: ``"type"`` if a convolution makes a capsule type, ``"component"`` if it makes a pose component.

        Returns:
            This module.

        Raises:
            ValueError: shapes, entries or their number that do not fit.
        """
        self.conv.load_state_dict(self._stacked(state, each))
        return self

    def _list_sizes(self, each: str) -> tuple[int, int]:
        """The number of convolutions that make this layer, and the channels of each."""
        return (self.types, self.dim) if each == "type" else (self.dim, self.types)

    def _stacked(self, state: Mapping[str, Tensor], each: str) -> dict[str, Tensor]:
        op = f"{self._op}.from_list"
        checks.choice(op, "each", each, EACH)
        count, channels = self._list_sizes(each)
        names = ("weight",) if self.conv.bias is None else ("weight", "bias")
        wanted = {f"{n}.{name}" for n in range(count) for name in names}
        if wanted != set(state):
            raise ValueError(
                f"{op}: state must hold {' and '.join(names)} of {count} convolutions, "
                f"missing {sorted(wanted - set(state))}, too many {sorted(set(state) - wanted)}"
            )
        stacked = {}
        for name in names:
            shape = (channels, *self.conv.weight.shape[1:]) if name == "weight" else (channels,)
            parts = [state[f"{n}.{name}"] for n in range(count)]
            for n, part in enumerate(parts):
                if part.shape != shape:
                    raise ValueError(f"{op}: {n}.{name} must be {list(shape)}, got {checks.shape_of(part)}")
            stacked[name] = torch.stack(parts, 0 if self.order in (each, "view") else 1).flatten(0, 1)
        return stacked

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        entry = re.compile(re.escape(prefix) + r"(\w+)\.(\d+\.(?:weight|bias))")
        matches = {key: match for key in state_dict if (match := entry.fullmatch(key))}
        if len({match[1] for match in matches.values()}) == 1:
            _, _, error_msgs = lists
            convs = {match[2]: state_dict.pop(key) for key, match in matches.items()}
            first = convs.get("0.weight")
            sizes = (sum(key.endswith("weight") for key in convs), 0 if first is None else len(first))
            fitting = [order for order in EACH if self._list_sizes(order) == sizes]
            try:
                if len(fitting) != 1 and not (fitting and self.order == "view"):
                    raise ValueError(
                        f"{self._op}: a list of convolutions must have types={self.types} entries of "
                        f"dim={self.dim} channels or dim entries of types channels, and types and dim must differ, "
                        f"got {sizes[0]} entries of {sizes[1]} channels; where they are equal call from_list"
                    )
                joined = self._stacked(convs, fitting[0])
                state_dict.update({f"{prefix}conv.{name}": value for name, value in joined.items()})
            except ValueError as error:
                error_msgs.append(str(error))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)


class DepthwisePrimaryCaps(PrimaryCaps):
    """Primary capsules: a depthwise convolution, whose channels become squashed capsules (Mazzia et al. 2021).

    Every feature map has its own filter. With a kernel as large as the maps there is one place, and ``types`` capsules
    in all.

    Parameters: ``conv.weight [types·dim, 1, *kernel_size]`` and ``conv.bias [types·dim]``. Channel ``t·dim + k`` is
    component k of capsule type t.

    Args:
        squash: see :func:`capsfast.squash`; the paper's is ``"exp"``.
        all others, and errors: as for :class:`PrimaryCaps`.

    Shapes: ``[B, types·dim, H, W]`` to the capsules of PrimaryCaps.
    """

    _depthwise = True

    def __init__(
        self,
        types: int,
        dim: int,
        kernel_size: int | Sequence[int] = 9,
        stride: int | Sequence[int] = 1,
        *,
        bias: bool = True,
        squash: Squash = "exp",
        eps: float = 1e-8,
        flatten: bool = True,
        **factory_kwargs: Unpack[FactoryKwargs],
    ) -> None:
        options: dict[str, Any] = {"bias": bias, "squash": squash, "eps": eps, "flatten": flatten}
        super().__init__(types * dim, types, dim, kernel_size, stride, **options, **factory_kwargs)
