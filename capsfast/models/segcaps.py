"""Segmentation by slim convolutional capsules."""

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..calls import checks
from ..calls.options import Backend, Gradient, Squash
from ..environment.private_torch import result
from ..nn import SlimConvCaps2d, SlimConvTransposeCaps2d, _arguments
from ..nn.decoder import perceptron
from ..nn.routing.base import Capsules
from ..nn.routing.names import RoutingChoice
from ._images import ImageNetwork, through

# A pixel has the classes whose capsules are longer than this.
PRESENT = 0.5
Caps = tuple[int, int]  # capsule types, size of a capsule


@result
class SegCapsOutput(NamedTuple):
    """lengths ``[B, J, H, W]``, or the activations of a routing that has its own; capsules ``[B, J, D, H, W]``;
    reconstruction ``[B, C, H, W]`` or None."""

    lengths: Tensor
    capsules: Tensor
    reconstruction: Tensor | None


class _Layout(NamedTuple):
    """The capsules that each layer makes, from the image down and up again. Without ``start`` the channels are one
    capsule type. If ``route_up`` ends early, the class capsules follow."""

    start: Caps | None
    down: Sequence[Caps]
    route_down: Sequence[Caps]
    up: Sequence[Caps]
    route_up: Sequence[Caps]


# SegCaps-R3, as in the authors' code.
R3 = _Layout(
    start=None,
    down=((2, 16), (4, 32), (8, 64)),
    route_down=((4, 16), (8, 32), (8, 32)),
    up=((8, 32), (4, 16), (2, 16)),
    route_up=((4, 32), (4, 16)),
)


class SegCaps(ImageNetwork):
    """A U-Net of slim convolutional capsules, with a capsule for each class at every pixel (LaLonde, Bagci 2018).

    On the way down each level halves the image. On the way up a transposed convolution doubles it, and the capsules of
    the same size from the way down are concatenated as further types. Layers that change the size, and the first
    capsules, use dynamic routing with one iteration; the others use ``routing``. If this routing has its own
    activations, poses are scaled to them before the next layer. A pixel may have several classes or none: no capsule
    represents the background.

    ``form="r3"`` is SegCaps-R3, the network of the authors' code, with its types and sizes: all layers but the first
    route, with a bias, and the channels of ``conv``, as one capsule type, are concatenated to the capsules of the last
    transposed convolution. Image sides must be multiples of 8. Their code mixes the samples of a batch; here no sample
    depends on another.

    Parts: ``conv``; ``start``, ``down``, ``route_down``, ``up``, ``route_up`` and ``classes`` (slim capsules);
    ``decoder``, three 1 x 1 convolutions that see only the capsules of a pixel's classes, or None.

    Args:
        in_channels, image_size: channels and size of the images; an int or (height, width), even or odd.
        num_classes, digit_dim: J and D.
        form: ``"levels"``, with the next four options, or ``"r3"``, which fixes them.
        conv_channels: channels of the convolution before the capsules.
        types: capsule types of the inner layers; an int, or an int for each of dims.
        dims: capsule sizes of the inner layers, for the full image and then for each level.
        kernel_size: kernel of all convolutions, odd; transposed convolutions of ``"r3"`` have 4.
        num_iterations, routing: as for :class:`capsfast.nn.SlimConvCaps2d`.
        reconstruction, device, dtype: as for :class:`CapsNet`.
        hidden: channels between the decoder's convolutions.
        squash: squash of all dynamic routings; default ``"exp"``, for ``"r3"`` ``"paper"``.
        gradient, eps: of all dynamic routings.
        backend: backend of all routings.
        routing_options: further options of SlimConvCaps2d, for the layers with ``routing``.

    Shapes: images ``[B, C, H, W]`` with values in [0, 1] and, to decode by, ``classes`` bool ``[B, J, H, W]`` to
    :class:`SegCapsOutput`.

    Raises:
        ValueError, TypeError: a size, an option or an input that does not fit.
    """

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int | Sequence[int] = 28,
        num_classes: int = 10,
        *,
        form: Literal["levels", "r3"] = "levels",
        conv_channels: int = 16,
        types: int | Sequence[int] = 4,
        dims: Sequence[int] = (8, 16, 16),
        digit_dim: int = 16,
        kernel_size: int = 5,
        num_iterations: int | None = None,
        routing: RoutingChoice = "dynamic",
        reconstruction: bool = True,
        hidden: Sequence[int] = (64, 128),
        squash: Squash | None = None,
        backend: Backend | None = None,
        gradient: Gradient = "full",
        eps: float = 1e-8,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **routing_options: Any,
    ) -> None:
        super().__init__()
        op = self._op
        size = self._sees(in_channels, image_size)
        if kernel_size % 2 == 0:
            raise ValueError(f"{op}: kernel_size must be odd, so that a window has a middle, got {kernel_size}")
        dims = _arguments.sizes(op, "dims", dims)
        types = _arguments.sizes(op, "types", [types] * len(dims) if isinstance(types, int) else types)
        if len(types) != len(dims):
            raise ValueError(f"{op}: types must be an int or one for each of dims={dims}, got {types}")
        hidden = _arguments.sizes(op, "hidden", hidden, 0)
        self.form = form
        authors = form == "r3"
        if authors and (conv_channels, types, dims, kernel_size) != (16, (4, 4, 4), (8, 16, 16), 5):
            raise ValueError(
                f"{op}: form='r3' has its own conv_channels, types, dims and kernel_size, got {conv_channels}, "
                f"{types}, {dims} and {kernel_size}; leave them out"
            )
        if authors and any(side % 8 for side in size):
            raise ValueError(f"{op}: with form='r3' image_size must be divisible by 8, got {size}; pad the images")
        levels = list(zip(types, dims, strict=True))
        layout = R3 if authors else _Layout(levels[0], levels[1:], levels[1:], levels[-2::-1], levels[-2::-1])
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        if squash is None:
            squash = "paper" if authors else "exp"
        dynamic: dict[str, Any] = {"squash": squash, "gradient": gradient, "eps": eps, "backend": backend}
        window: dict[str, Any] = {"kernel_size": kernel_size, "padding": kernel_size // 2}
        if authors and routing == "dynamic":
            routing_options = {"bias": True, **routing_options}
        routed: dict[str, Any] = {
            "routing": routing,
            "num_iterations": num_iterations,
            **routing_options,
            **factory_kwargs,
        }
        routed |= dynamic if routing == "dynamic" else {"backend": backend}
        once: dict[str, Any] = {**dynamic, **factory_kwargs, "num_iterations": 1, "bias": authors}

        def slim(before: Caps, after: Caps, options: dict[str, Any], kind: Any = SlimConvCaps2d) -> SlimConvCaps2d:
            if authors:  # He's initialisation, with the fan-in of the weight as stored
                fan = before[1] if kind is SlimConvCaps2d else after[0] * after[1]
                options = {"init_std": (2 / (fan * options["kernel_size"] ** 2)) ** 0.5, **options}
            return kind(before[0], after[0], before[1], after[1], **options)  # type: ignore[no-any-return]

        resized: dict[str, Any] = {**(routed if authors else once), "stride": 2}
        # The authors pad an even side by one more at its end: in classify.
        halved = {"kernel_size": kernel_size, "padding": 0} if authors else window
        doubled = {"kernel_size": 4, "padding": 1} if authors else window
        self.conv = nn.Conv2d(in_channels, conv_channels, **window, **factory_kwargs)
        maps = (1, conv_channels)
        self.start = None if layout.start is None else slim(maps, layout.start, {**window, **once})
        whole = [layout.start or maps, *layout.route_down]  # the capsules at each size on the way down
        firsts = [{**once, "stride": 2} if n == 0 else resized for n in range(len(layout.down))]
        self.down = nn.ModuleList(
            slim(above, below, {**halved, **first_layer})
            for above, below, first_layer in zip(whole, layout.down, firsts, strict=False)
        )
        self.route_down = nn.ModuleList(
            slim(*caps, {**window, **routed}) for caps in zip(layout.down, layout.route_down, strict=True)
        )
        self.up = nn.ModuleList(
            slim(*caps, {**doubled, **resized}, SlimConvTransposeCaps2d)
            for caps in zip([whole[-1], *layout.route_up], layout.up, strict=False)
        )
        joined = [
            (types_above + beside, dim)
            for (types_above, dim), (beside, _) in zip(layout.up, whole[-2::-1], strict=True)
        ]
        self.route_up = nn.ModuleList(
            slim(*caps, {**window, **routed}) for caps in zip(joined, layout.route_up, strict=False)
        )
        last = joined[-1] if authors else levels[0]
        self.classes = slim(last, (num_classes, digit_dim), {"kernel_size": 1, **routed})
        self.num_classes = num_classes
        self.decoder: nn.Sequential | None = None
        if reconstruction:
            widths = [num_classes * digit_dim, *hidden, in_channels]
            self.decoder = perceptron(widths, partial(nn.Conv2d, kernel_size=1, **factory_kwargs), nn.Sigmoid())

    def classify(self, images: Tensor) -> Capsules:
        """The class capsules ``[B, J, D, H, W]`` of every pixel and their activations, without a decoder."""
        self._check(images)
        poses = F.relu(self.conv(images)).unsqueeze(1)
        poses = poses if self.start is None else through(self.start, poses)
        passed = []
        for down, route in zip(self.down, self.route_down, strict=True):
            passed.append(poses)
            if self.form == "r3":
                poses = F.pad(poses, (1, 2, 1, 2))
            poses = through(route, through(down, poses))
        for up, route in zip_longest(self.up, self.route_up):
            beside = passed.pop()
            larger = through(up, poses, size=beside.shape[3:])
            poses = torch.cat([larger, beside], 1)
            poses = poses if route is None else through(route, poses)
        return self.classes.capsules(poses)

    def reconstruct(self, capsules: Tensor, classes: Tensor) -> Tensor:
        """``capsules [B, J, D, H, W]`` to images, at each pixel from the capsules that ``classes [B, J, H, W]`` keeps.

        Raises:
            RuntimeError: there is no decoder.
            ValueError, TypeError: capsules or classes of another shape, classes that are not bool.
        """
        op = self._op
        decoder = self._decoder()
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
        return decoder(kept.flatten(1, 2))  # type: ignore[no-any-return]

    def forward(self, images: Tensor, classes: Tensor | None = None) -> SegCapsOutput:
        """``classes``: of each pixel, which the decoder gets; without them those whose capsules are longer than 0.5."""
        capsules, activations = self.classify(images)
        images_again = None
        if self.decoder is not None:
            images_again = self.reconstruct(capsules, activations > PRESENT if classes is None else classes)
        return SegCapsOutput(activations, capsules, images_again)
