"""Capsule layers that are updated concurrently by inverted dot-product attention."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from ..calls import checks
from ..calls.options import Backend
from ..nn import ConvCaps2d, Decoder, FlattenCaps, RoutedCaps
from ..nn._arguments import FactoryKwargs
from ..nn._layer import Layer
from ..nn.routing.base import Capsules
from ._images import DecodedCapsules
from .output import CapsNetOutput

ONE_UPDATE: dict[str, Any] = {"routing": "inverted-attention", "num_iterations": 1, "learned_readout": False}


class ConvAttention(Layer):
    """One update of convolutional capsules: from the poses of both layers to new poses of the upper layer.

    Args:
        routing: a layer with inverted-attention routing of one iteration.

    Shapes: ``[B, in_types, in_dim, H, W]``, and ``[B, out_types, out_dim, H', W']`` or None for 0, to the second.
    """

    def __init__(self, routing: ConvCaps2d) -> None:
        super().__init__()
        self.routing = routing

    def forward(self, poses: Tensor, last: Tensor | None = None) -> Tensor:
        layer = self.routing
        places = (poses.shape[0], *layer.grid(poses.shape[3:]))
        if last is not None:
            last = last.permute(0, 3, 4, 1, 2).flatten(0, 2)
        updated: Tensor = layer.routing.routing(layer.votes(poses), pose=last).poses.unflatten(0, places)
        return updated.permute(0, 3, 4, 1, 2)


class FullAttention(Layer):
    """One update of fully connected capsules: from the poses of both layers to new poses of the upper layer.

    Args:
        routing: a layer with inverted-attention routing of one iteration.

    Shapes: ``[B, I, K]`` or an image of capsules, and ``[B, J, D]`` or None for 0, to ``[B, J, D]``.
    """

    def __init__(self, routing: RoutedCaps) -> None:
        super().__init__()
        self.flatten = FlattenCaps()
        self.routing = routing

    def forward(self, poses: Tensor, last: Tensor | None = None) -> Tensor:
        u = self.flatten(poses) if poses.dim() == 5 else poses
        return self.routing.routing(self.routing.votes(u), pose=last).poses


def route_in_turn(layers: Sequence[nn.Module], primary: Tensor, num_iterations: int) -> list[Tensor]:
    """Poses of every layer; each is updated ``num_iterations`` times before the next one starts."""
    poses = [primary]
    for layer in layers:
        last = None
        for _ in range(num_iterations):
            last = layer(poses[-1], last)
        assert last is not None
        poses.append(last)
    return poses


def route_at_once(layers: Sequence[nn.Module], primary: Tensor, num_iterations: int) -> list[Tensor]:
    """Poses of every layer by concurrent routing (Tsai et al. 2020, procedure 2).

    The first iteration goes through the layers in turn. In every further one all layers are updated from the poses of
    the iteration before, of the layer below and of their own.
    """
    poses = route_in_turn(layers, primary, 1)
    for _ in range(num_iterations - 1):
        poses = [primary, *(layer(below, above) for layer, below, above in zip(layers, poses, poses[1:], strict=False))]
    return poses


class InvertedAttentionCapsNet(DecodedCapsules):
    """Convolution, primary capsules, and capsule layers that are routed at once (Tsai et al. 2020).

    The primary capsules are one convolution and a LayerNorm of each capsule. Above them are a convolutional capsule
    layer, a fully connected one and the class capsules, routed by inverted dot-product attention. A linear map that all
    class capsules share gives the logit of a class, and the sigmoid of it the activation, which the margin loss takes.
    The paper has a residual network before the capsules, one capsule layer more of each kind, and the cross-entropy of
    the logits, :meth:`logits`.

    Parts: ``conv``, ``primary``, ``norm``, ``layers``, ``classifier``, ``decoder`` (:class:`capsfast.nn.Decoder` or
    None). Inside of ``layers`` are the capsule layers from the primary capsules up to the classes; the part ``routing``
    of each, a ConvCaps2d or RoutedCaps, makes one update.

    Args:
        conv_channels: of the first convolution, of 3 x 3 with a stride of 2.
        primary_groups, primary_dim: types and size of the primary capsules, at least 2 numbers.
        types: of the convolutional capsules, whose windows are 3 x 3 places (or all there are) with a stride of 2.
        num_caps: of the fully connected layer.
        digit_dim: size of the capsules of all layers above the primary one, at least 2.
        num_iterations: poses that are formed of each layer, at least 1.
        concurrent: False routes one layer to its end before the next.
        scaled: as in :class:`capsfast.nn.InvertedAttentionRouting`.
        reconstruction: whether there is a decoder; the paper has none.
        all others, shapes, errors: as for :class:`CapsNet`.

    The lengths of its output are the activations.
    """

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int | Sequence[int] = 28,
        num_classes: int = 10,
        *,
        conv_channels: int = 64,
        primary_groups: int = 16,
        primary_dim: int = 16,
        types: int = 16,
        num_caps: int = 32,
        digit_dim: int = 16,
        num_iterations: int = 2,
        concurrent: bool = True,
        scaled: bool = True,
        reconstruction: bool = True,
        backend: Backend | None = None,
        **factory_kwargs: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        op = self._op
        # A LayerNorm of one number is a constant.
        checks.integer(op, "primary_dim", primary_dim, 2)
        checks.integer(op, "digit_dim", digit_dim, 2)
        self.num_iterations, self.concurrent = num_iterations, concurrent
        self.conv = nn.Conv2d(in_channels, conv_channels, 3, stride=2, padding=1, **factory_kwargs)
        self.primary = nn.Conv2d(
            conv_channels, primary_groups * primary_dim, 3, padding=1, bias=False, **factory_kwargs
        )
        self.norm = nn.LayerNorm(primary_dim, **factory_kwargs)
        self.primary_groups = primary_groups
        size = tuple((n + 1) // 2 for n in self._sees(in_channels, image_size))
        options: dict[str, Any] = {**ONE_UPDATE, "scaled": scaled, "backend": backend, **factory_kwargs}
        window = tuple(min(3, n) for n in size)
        image = ConvCaps2d(primary_groups, types, primary_dim, digit_dim, window, stride=2, **options)
        height, width = image.grid(size)
        hidden = RoutedCaps(types * height * width, num_caps, digit_dim, digit_dim, **options)
        classes = RoutedCaps(num_caps, num_classes, digit_dim, digit_dim, **options)
        self.layers = nn.ModuleList((ConvAttention(image), FullAttention(hidden), FullAttention(classes)))
        self.classifier = nn.Linear(digit_dim, 1, **factory_kwargs)
        self.decoder = Decoder(num_classes, digit_dim, self.image_shape, **factory_kwargs) if reconstruction else None

    def primary_capsules(self, images: Tensor) -> Tensor:
        """``images [B, C, H, W]`` to poses ``[B, types, dim, H', W']``."""
        self._check(images)
        poses = self.primary(F.relu(self.conv(images))).unflatten(1, (self.primary_groups, -1))
        return self.norm(poses.movedim(2, -1)).movedim(-1, 2)  # type: ignore[no-any-return]

    def poses(self, images: Tensor) -> list[Tensor]:
        """Poses of the primary capsules and of every layer above, the class capsules ``[B, J, D]`` last."""
        route = route_at_once if self.concurrent else route_in_turn
        return route(tuple(self.layers), self.primary_capsules(images), self.num_iterations)

    def logits(self, capsules: Tensor) -> Tensor:
        """Class capsules ``[B, J, D]`` to ``[B, J]``, for a cross-entropy."""
        return self.classifier(capsules).squeeze(-1)  # type: ignore[no-any-return]

    def classify(self, images: Tensor) -> Capsules:
        """The class capsules of ``images [B, C, H, W]``, without a decoder."""
        capsules = self.poses(images)[-1]
        return Capsules(capsules, self.logits(capsules).sigmoid())

    def reconstruct(self, capsules: Tensor, labels: Tensor | None = None) -> Tensor:
        """``capsules [B, J, D]`` to images: from the capsule of the label, without labels from the most active one."""
        if labels is None:
            labels = self.logits(capsules.detach()).argmax(1)
        return super().reconstruct(capsules, labels)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> CapsNetOutput:
        # The class of the largest logit: several activations may be rounded to 1.
        capsules, activations = self.classify(images)
        images_again = None if self.decoder is None else self.reconstruct(capsules, labels)
        return CapsNetOutput(activations, capsules, images_again)
