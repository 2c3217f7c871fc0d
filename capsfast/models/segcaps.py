"""Segmentation by slim convolutional capsules."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import checks
from ..nn import SlimConvCaps2d, SlimConvTransposeCaps2d, _arguments
from ..nn.routing.base import Capsules
from ..nn.routing.names import RoutingChoice
from ._capsules import image_lengths, with_lengths
from ._images import check_images, image_shape
from ._network import Network

# A pixel has the classes whose capsules are longer.
PRESENT = 0.5


class SegCapsOutput(NamedTuple):
    """lengths ``[B, J, H, W]``, with a routing that has activations these; capsules ``[B, J, D, H, W]``; reconstruction
    ``[B, C, H, W]`` or None."""

    lengths: Tensor
    capsules: Tensor
    reconstruction: Tensor | None


class SegCaps(Network):
    """A U of slim convolutional capsules, with a capsule of each class at every pixel (after LaLonde, Bagci 2018).

    On the way down each level halves the image, on the way up a transposed convolution doubles it, and the capsules of
    the same size from the way down are put beside its own as more types. Layers that change the size are dynamic
    routing of one iteration, as are the first capsules; the others route with ``routing``. If that has activations of
    its own, poses get them as their lengths before the next layer. A pixel may have several classes or none: no capsule
    stands for the background.

    Parts: ``conv``; ``start``, ``down``, ``route_down``, ``up``, ``route_up`` and ``classes`` (slim capsules);
    ``decoder``, three convolutions of 1 x 1 that see the capsules of a pixel's classes alone, or None.

    Args:
        in_channels, image_size: of the images; an int or (height, width), of any parity.
        num_classes, digit_dim: J and D.
        conv_channels: of the convolution before the capsules.
        types: capsule types of all layers between.
        dims: their sizes, at the full image and then at each halving; as many levels as there are numbers.
        kernel_size: of all convolutions, odd.
        num_iterations: of the routing; None for its default, 3 for dynamic routing.
        routing: ``"dynamic"``, or another one as for :class:`capsfast.nn.SlimConvCaps2d`.
        reconstruction: whether there is a decoder.
        hidden: channels between its convolutions.
        squash, gradient, eps: of all dynamic routings.
        backend: of all routings.
        routing_options: of the layers that route with ``routing``, all others of SlimConvCaps2d.
        device, dtype: of the parameters.

    Shapes: images ``[B, C, H, W]`` with values in [0, 1] and, to decode by, ``classes`` bool ``[B, J, H, W]`` to
    :class:`SegCapsOutput`.

    Raises:
        ValueError, TypeError: a size, an option or an input that does not fit.
    """

    _op = "capsfast.models.SegCaps"

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int | Sequence[int] = 28,
        num_classes: int = 10,
        *,
        conv_channels: int = 16,
        types: int = 4,
        dims: Sequence[int] = (8, 16, 16),
        digit_dim: int = 16,
        kernel_size: int = 5,
        num_iterations: int | None = None,
        routing: RoutingChoice = "dynamic",
        reconstruction: bool = True,
        hidden: Sequence[int] = (64, 128),
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
        _arguments.integers(op, num_classes=num_classes, conv_channels=conv_channels, types=types, digit_dim=digit_dim)
        _arguments.integer(op, "kernel_size", kernel_size)
        if kernel_size % 2 == 0:
            raise ValueError(f"{op}: kernel_size must be odd, so that a window has a middle, got {kernel_size}")
        dims = _arguments.sizes(op, "dims", dims)
        hidden = _arguments.sizes(op, "hidden", hidden, 0)
        checks.boolean(op, "reconstruction", reconstruction)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        dynamic: dict[str, Any] = {"squash": squash, "gradient": gradient, "eps": eps, "backend": backend}
        window: dict[str, Any] = {"kernel_size": kernel_size, "padding": kernel_size // 2}
        resized: dict[str, Any] = {**window, **dynamic, **made, "stride": 2, "num_iterations": 1}
        routed: dict[str, Any] = {"routing": routing, "num_iterations": num_iterations, **routing_options, **made}
        routed |= dynamic if routing == "dynamic" else {"backend": backend}
        self.conv = nn.Conv2d(in_channels, conv_channels, **window, **made)
        self.start = SlimConvCaps2d(1, types, conv_channels, dims[0], **{**resized, "stride": 1})
        levels = list(pairwise(dims))
        self.down = nn.ModuleList(SlimConvCaps2d(types, types, above, below, **resized) for above, below in levels)
        self.route_down = nn.ModuleList(
            SlimConvCaps2d(types, types, below, below, **window, **routed) for _, below in levels
        )
        self.up = nn.ModuleList(
            SlimConvTransposeCaps2d(types, types, below, above, **resized) for above, below in reversed(levels)
        )
        self.route_up = nn.ModuleList(
            SlimConvCaps2d(2 * types, types, above, above, **window, **routed) for above, _ in reversed(levels)
        )
        self.classes = SlimConvCaps2d(types, num_classes, dims[0], digit_dim, 1, **routed)
        self.num_classes = num_classes
        self.decoder: nn.Sequential | None = None
        if reconstruction:
            widths = [num_classes * digit_dim, *hidden, in_channels]
            layers: list[nn.Module] = []
            for before, after in pairwise(widths):
                layers += [nn.Conv2d(before, after, 1, **made), nn.ReLU()]
            self.decoder = nn.Sequential(*layers[:-1], nn.Sigmoid())

    def classify(self, images: Tensor) -> Capsules:
        """The class capsules ``[B, J, D, H, W]`` of every pixel and their activations, without a decoder."""
        check_images(self._op, images, self.image_shape)
        poses = _through(self.start, F.relu(self.conv(images)).unsqueeze(1))
        passed = []
        for down, route in zip(self.down, self.route_down, strict=True):
            passed.append(poses)
            poses = _through(route, _through(down, poses))
        for up, route, beside in zip(self.up, self.route_up, reversed(passed), strict=True):
            larger = _through(up, poses, size=beside.shape[3:])
            poses = _through(route, torch.cat([larger, beside], 1))
        return _routed(self.classes, poses)

    def reconstruct(self, capsules: Tensor, classes: Tensor) -> Tensor:
        """``capsules [B, J, D, H, W]`` to images, at each pixel from the capsules that ``classes [B, J, H, W]`` keeps.

        Raises:
            RuntimeError: there is no decoder.
            ValueError, TypeError: capsules or classes of another shape, classes that are not bool.
        """
        op = self._op
        if self.decoder is None:
            raise RuntimeError(f"{op}: there is no decoder; build the model with reconstruction=True")
        _arguments.floats(op, "capsules", capsules, "[B, J, D, H, W]")
        checks.tensor(op, "classes", classes, "[B, J, H, W]")
        if classes.dtype != torch.bool:
            raise TypeError(f"{op}: classes must be bool, got {checks.dtype_of(classes)}; convert with classes.bool()")
        if classes.shape != (*capsules.shape[:2], *capsules.shape[3:]):
            raise ValueError(
                f"{op}: classes must be [B, J, H, W] of capsules {checks.shape_of(capsules)}, "
                f"got {checks.shape_of(classes)}"
            )
        # By a choice and not by a product: what the other capsules hold does not matter.
        kept = torch.where(classes.unsqueeze(2), capsules, 0)
        return self.decoder(kept.flatten(1, 2))  # type: ignore[no-any-return]

    def forward(self, images: Tensor, classes: Tensor | None = None) -> SegCapsOutput:
        """``classes``: of each pixel, which the decoder gets; without them those whose capsules are longer than 0.5."""
        capsules, activations = self.classify(images)
        images_again = None
        if self.decoder is not None:
            images_again = self.reconstruct(capsules, activations > PRESENT if classes is None else classes)
        return SegCapsOutput(activations, capsules, images_again)


def _routed(layer: nn.Module, poses: Tensor) -> Capsules:
    if layer.uses_poses_alone:
        found = layer(poses)
        return Capsules(found, image_lengths(found))
    return layer(poses, image_lengths(poses))  # type: ignore[no-any-return]


def _through(layer: nn.Module, poses: Tensor, **options: Any) -> Tensor:
    """Between layers capsules say by their length how present they are, which poses of other routings need not."""
    if layer.uses_poses_alone:
        return layer(poses, **options)  # type: ignore[no-any-return]
    return with_lengths(_routed(layer, poses))
