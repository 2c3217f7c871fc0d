"""DeepCaps: a deep stack of convolutional capsules."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..calls import checks
from ..calls.options import Backend, Gradient, Squash
from ..nn import ConvCaps2d, ConvDecoder, PrimaryCaps, SlimConvCaps2d, _arguments
from ..nn._blocks import WindowLayer
from ..nn._layer import Layer
from ..nn.dynamic_routing import DynamicRouting, fully_connected
from ..nn.routing.names import RoutingChoice
from ._images import DecodedCapsules, through


class CapsCell(Layer):
    """A convolution halves the image of capsules; then two convolutions are added to a skip connection with a layer.

    Args:
        in_channels: types times size of the capsules before.
        types, dim: types and size of the capsules after each layer.
        skip: makes the layer of the skip connection; None for a convolution.
        factory_kwargs: options of :class:`capsfast.nn.PrimaryCaps`: every convolution is squashed.

    Shapes: ``[B, in_channels, H, W]`` to ``[B, types, dim, ceil(H / 2), ceil(W / 2)]``.
    """

    def __init__(
        self, in_channels: int, types: int, dim: int, skip: Callable[[], WindowLayer] | None, **factory_kwargs: Any
    ) -> None:
        super().__init__()
        factory_kwargs |= {"bias": False, "flatten": False}
        self.down = PrimaryCaps(in_channels, types, dim, 3, 2, 0, **factory_kwargs)
        same = partial(PrimaryCaps, types * dim, types, dim, 3, 1, 1, **factory_kwargs)
        self.first, self.second, self.skip = same(), same(), (skip or same)()
        self.routed = skip is not None
        self._initialise()

    def _initialise(self) -> None:
        convs = [child for child in self.children() if isinstance(child, PrimaryCaps)]
        for conv in convs:
            # Glorot's bound, but both fans are the root of the number of weights, as in the authors' code.
            bound = (3 / conv.conv.weight.numel() ** 0.5) ** 0.5
            nn.init.uniform_(conv.conv.weight, -bound, bound)

    def forward(self, maps: Tensor) -> Tensor:
        height, width = maps.shape[2:]
        # An even size is padded only at its end.
        halved = self.down(F.pad(maps, (width % 2, 1, height % 2, 1)))
        channels = halved.flatten(1, 2)
        deep = self.second(self.first(channels).flatten(1, 2))
        skipped = through(self.skip, halved) if self.routed else self.skip(channels)
        return deep + skipped


class DeepCaps(DecodedCapsules):
    """Cells of capsules with skip connections (Rajasegaran et al. 2019), as in the authors' code with one repair: the
    routed skip connection sees the poses transposed, where their code merely reshapes them.

    A convolution with batch normalisation, then cells of squashed convolutions. Only the last cell's skip connection
    routes: the 3-D routing of :class:`capsfast.nn.SlimConvCaps2d`, or any other by :class:`capsfast.nn.ConvCaps2d`.
    The class capsules take the capsules of the last two cells, the last first, in the order (y, x, type), and the
    decoder gets the capsule of the class without knowing which class that is.

    Parts: ``conv``, ``norm``, ``cells``, ``routing`` (:class:`capsfast.DynamicRouting` or
    :class:`capsfast.nn.RoutedCaps`), ``decoder`` (:class:`capsfast.nn.ConvDecoder` or None).

    Args:
        in_channels, image_size, num_classes, digit_dim, num_iterations, routing, reconstruction: as in
            :class:`CapsNet`. The class capsules and the last skip connection use this routing.
        conv_channels: channels of the convolution before the cells.
        types: capsule types of all cells.
        dims: capsule size of each cell, equal for the last two. Default (4, 8, 8, 8); images below 17 pixels have fewer
            cells, at least two, so that the last cell has 2 x 2 places if possible.
        squash: squash of the cells; the class capsules use the paper's.
        backend: backend of all routings. gradient: of all dynamic routings. eps: also of the convolutions' squash.
        routing_options: options of the class capsules' layer, as in CapsNet; for a routing other than dynamic also of
            the skip connection. With dynamic routing the default is ``bias=True``, and weight and bias start with the
            deviations of the authors' code.
        device, dtype: device and dtype of the parameters.

    Shapes, errors: as CapsNet.
    """

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int | Sequence[int] = 28,
        num_classes: int = 10,
        *,
        conv_channels: int = 128,
        types: int = 32,
        dims: Sequence[int] | None = None,
        digit_dim: int = 32,
        num_iterations: int | None = None,
        routing: RoutingChoice = "dynamic",
        reconstruction: bool = True,
        squash: Squash = "paper",
        backend: Backend | None = None,
        gradient: Gradient = "full",
        eps: float = 1e-7,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **routing_options: Any,
    ) -> None:
        super().__init__()
        op = self._op
        size = self._sees(in_channels, image_size)
        if dims is None:
            dims = (4, 8, 8, 8)[-min(4, max(2, (min(size) - 1).bit_length() - 1)) :]
        dims = _arguments.sizes(op, "dims", dims, 2)
        if dims[-1] != dims[-2]:
            raise ValueError(f"{op}: the last two of dims must be alike, got {checks.shown(dims)}")
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {"num_iterations": num_iterations, "backend": backend, **factory_kwargs}
        dim = dims[-1]
        window: dict[str, Any] = {"kernel_size": 3, "padding": 1, **options}
        if routing == "dynamic":
            options |= {"gradient": gradient, "eps": eps}
            window |= {"gradient": gradient, "eps": eps, "squash": squash, "softmax": "everywhere", "bias": True}
            window["init_std"] = (2 / (9 * dim)) ** 0.5
            skip: Callable[..., WindowLayer] = SlimConvCaps2d
        else:
            skip, window = ConvCaps2d, {"routing": routing, **window, **routing_options}
        self.conv = nn.Conv2d(in_channels, conv_channels, 3, padding=1, **factory_kwargs)
        self.norm = nn.BatchNorm2d(conv_channels, eps=1e-3, momentum=0.01, **factory_kwargs)
        widths = [conv_channels, *(types * dim for dim in dims)]
        self.cells = nn.ModuleList(
            CapsCell(width, types, dim, None, squash=squash, eps=eps, **factory_kwargs)
            for width, dim in zip(widths, dims[:-1], strict=False)
        )
        skip = partial(skip, types, types, dim, dim, **window)
        self.cells.append(CapsCell(types * dim, types, dim, skip, squash=squash, eps=eps, **factory_kwargs))
        places = []
        for _ in self.cells:
            size = ((size[0] + 1) // 2, (size[1] + 1) // 2)
            places.append(size[0] * size[1])
        in_caps = types * (places[-2] + places[-1])
        if routing == "dynamic":
            std = (2 / (num_classes * in_caps * (dim + digit_dim))) ** 0.5
            routing_options = {"bias": True, "init_std": std, **routing_options}
        self.routing = fully_connected(
            in_caps, num_classes, dim, digit_dim, routing=routing, **options, **routing_options
        )
        self.decoder = (
            ConvDecoder(num_classes, digit_dim, self.image_shape, class_independent=True, **factory_kwargs)
            if reconstruction
            else None
        )
        self._initialise()

    def _initialise(self) -> None:
        if isinstance(self.routing, DynamicRouting) and self.routing.bias is not None:
            nn.init.xavier_uniform_(self.routing.bias)
        nn.init.xavier_uniform_(self.conv.weight)
        nn.init.zeros_(self.conv.get_parameter("bias"))

    def encode(self, images: Tensor) -> Tensor:
        """The capsules ``u [B, I, K]`` of the last two cells, from ``images [B, C, H, W]``."""
        self._check(images)
        maps = self.norm(F.relu(self.conv(images)))
        seen = []
        for cell in self.cells:
            seen.append(cell(maps))
            maps = seen[-1].flatten(1, 2)
        return torch.cat([image.permute(0, 3, 4, 1, 2).flatten(1, 3) for image in (seen[-1], seen[-2])], 1)
