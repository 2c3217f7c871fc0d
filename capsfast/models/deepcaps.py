"""A deep stack of convolutional capsules, after DeepCaps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import checks
from ..nn import ConvCaps2d, ConvDecoder, FlattenCaps, Length, PrimaryCaps, _arguments
from ..nn._layer import Layer
from ..nn.dynamic_routing import fully_connected
from ..nn.routing.base import Capsules
from ..nn.routing.names import RoutingChoice
from ._capsules import image_lengths, with_lengths
from ._decoded import DecodedCapsules
from ._images import check_images, image_shape


class CapsCell(Layer):
    """Halves the image of capsules, then adds two more layers to a skip connection that is a layer itself.

    Args:
        types: capsules at each place, before and after.
        in_dim, out_dim: sizes of a capsule.
        skip: num_iterations and routing of the skip connection; the other layers have dynamic routing of one iteration.
        made: options of :class:`capsfast.nn.ConvCaps2d`.

    Shapes: ``[B, types, in_dim, H, W]`` to ``[B, types, out_dim, ceil(H / 2), ceil(W / 2)]``.
    """

    def __init__(self, types: int, in_dim: int, out_dim: int, skip: dict[str, Any], **made: Any) -> None:
        super().__init__()
        self.down = ConvCaps2d(types, types, in_dim, out_dim, 3, stride=2, padding=1, num_iterations=1, **made)
        same: dict[str, Any] = {
            "in_types": types,
            "out_types": types,
            "in_dim": out_dim,
            "out_dim": out_dim,
            "padding": 1,
        }
        self.first, self.second = (ConvCaps2d(**same, num_iterations=1, **made) for _ in range(2))
        if skip.get("routing", "dynamic") != "dynamic":
            made = {name: made[name] for name in ("backend", "device", "dtype") if name in made}
        self.skip = ConvCaps2d(**same, **skip, **made)

    def forward(self, poses: Tensor) -> Tensor:
        halved = self.down(poses)
        if self.skip.uses_poses_alone:
            skipped = self.skip(halved)
        else:
            skipped = with_lengths(self.skip(halved, image_lengths(halved)))
        return self.second(self.first(halved)) + skipped  # type: ignore[no-any-return]


class DeepCaps(DecodedCapsules):
    """Cells of convolutional capsules with skip connections (after Rajasegaran et al. 2019).

    As there, only the last cell's skip connection routes with ``num_iterations``, the class capsules take the capsules
    of the last two cells, and the decoder gets the capsule of the class without knowing which class that is.
    Unlike there, no batch normalisation keeps the capsules from fading in the stack, but the squash and the initial
    deviation of :class:`capsfast.nn.ConvCaps2d`.

    Parts: ``conv``, ``primary``, ``cells``, ``routing`` (:class:`capsfast.DynamicRouting` or
    :class:`capsfast.nn.RoutedCaps`), ``decoder`` (:class:`capsfast.nn.ConvDecoder` or None).

    Args:
        in_channels, image_size, num_classes, digit_dim, num_iterations, routing, reconstruction: as in
            :class:`CapsNet`. The routing is that of the class capsules and of the last skip connection.
        conv_channels: of the convolution before the primary capsules.
        types: capsule types of all cells.
        dims: size of the primary capsules, then of those of each cell; the last two alike. By default (4, 4, 8, 8, 8);
            images below 17 pixels have fewer cells, at least two, so that the last holds 2 x 2 places if it can.
        squash: of the primary capsules and the cells; that of the class capsules is the paper's.
        backend, gradient, eps: of all routings; the last two of dynamic ones.
        routing_options: of the class capsules' layer, as in CapsNet; those of a routing other than dynamic also go to
            the skip connection.
        device, dtype: of the parameters.

    Shapes, errors: as CapsNet.
    """

    _op = "capsfast.models.DeepCaps"

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int | Sequence[int] = 28,
        num_classes: int = 10,
        *,
        conv_channels: int = 128,
        types: int = 32,
        dims: Sequence[int] | None = None,
        digit_dim: int = 16,
        num_iterations: int | None = None,
        routing: RoutingChoice = "dynamic",
        reconstruction: bool = True,
        squash: str = "exp",
        backend: str | None = None,
        gradient: str = "full",
        eps: float = 1e-8,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **routing_options: Any,
    ) -> None:
        super().__init__()
        op = self._op
        self.image_shape = image_shape(op, in_channels, image_size)
        _arguments.integers(op, num_classes=num_classes, digit_dim=digit_dim)
        _arguments.integers(op, conv_channels=conv_channels, types=types)
        if dims is None:
            cells = min(4, max(2, (min(self.image_shape[1:]) - 1).bit_length() - 1))
            dims = (4, *(4, 8, 8, 8)[-cells:])
        dims = _arguments.sizes(op, "dims", dims, 3)
        if dims[-1] != dims[-2]:
            raise ValueError(f"{op}: the last two of dims must be alike, got {checks.shown(dims)}")
        checks.boolean(op, "reconstruction", reconstruction)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {"backend": backend, "gradient": gradient, "eps": eps, **made}
        self.conv = nn.Conv2d(in_channels, conv_channels, 3, padding=1, **made)
        self.primary = PrimaryCaps(conv_channels, types, dims[0], 3, 1, 1, squash=squash, flatten=False, **made)
        chosen: dict[str, Any] = {"routing": routing, "num_iterations": num_iterations}
        skips = [{"num_iterations": 1}] * (len(dims) - 2) + [chosen | ({} if routing == "dynamic" else routing_options)]
        self.cells = nn.ModuleList(
            CapsCell(types, before, after, skip, squash=squash, **options)
            for before, after, skip in zip(dims, dims[1:], skips, strict=False)
        )
        size, places = self.image_shape[1:], []
        for _ in self.cells:
            size = ((size[0] + 1) // 2, (size[1] + 1) // 2)
            places.append(size[0] * size[1])
        self.flatten = FlattenCaps()
        if routing != "dynamic":
            options = {"backend": backend, **made}
        self.routing = fully_connected(
            types * (places[-2] + places[-1]), num_classes, dims[-1], digit_dim, **chosen, **options, **routing_options
        )
        self.length = Length()
        self.decoder = (
            ConvDecoder(num_classes, digit_dim, self.image_shape, class_independent=True, **made)
            if reconstruction
            else None
        )

    def encode(self, images: Tensor) -> Tensor:
        """The capsules ``u [B, I, K]`` of the last two cells, from ``images [B, C, H, W]``."""
        check_images(self._op, images, self.image_shape)
        poses = self.primary(F.relu(self.conv(images)))
        seen = []
        for cell in self.cells:
            poses = cell(poses)
            seen.append(poses)
        return torch.cat([self.flatten(image) for image in seen[-2:]], 1)

    def classify(self, images: Tensor) -> Capsules:
        """The class capsules of ``images [B, C, H, W]``, without a decoder."""
        return self.routing.capsules(self.encode(images))
