"""The base classes of networks of images: checks of the images, class capsules, a decoder."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..calls import checks
from ..functional import squash
from ..nn import _arguments
from ..nn.routing.base import Capsules
from ._network import Network
from .output import CapsNetOutput


class ImageNetwork(Network):
    """A network that takes images of ``image_shape``: (channels, height, width)."""

    image_shape: tuple[int, int, int]
    decoder: nn.Module | None

    def _sees(self, in_channels: int, image_size: int | Sequence[int]) -> tuple[int, int]:
        """Sets ``image_shape``, and returns (height, width)."""
        height, width = _arguments.pair(self._op, "image_size", image_size)
        self.image_shape = (in_channels, height, width)
        return height, width

    def _check(self, images: Tensor) -> None:
        if checks.is_proxy(images):
            return  # in a symbolic_trace of a network there is nothing to check
        _arguments.floats(self._op, "images", images, "[B, C, H, W]")
        if tuple(images.shape[1:]) != self.image_shape:
            C, H, W = self.image_shape
            raise ValueError(f"{self._op}: images must be [B, {C}, {H}, {W}], got {checks.shape_of(images)}")

    def _decoder(self) -> nn.Module:
        if self.decoder is None:
            raise RuntimeError(f"{self._op}: there is no decoder; build the model with reconstruction=True")
        return self.decoder


class DecodedCapsules(ImageNetwork):
    """A network that classifies, with a part ``decoder`` or None."""

    def classify(self, images: Tensor) -> Capsules:
        """The class capsules of ``images [B, C, H, W]``, without a decoder."""
        return self.routing.capsules(self.encode(images))  # type: ignore[no-any-return, operator, union-attr]

    def reconstruct(self, capsules: Tensor, labels: Tensor | None = None) -> Tensor:
        """``capsules [B, J, D]`` to images: from the capsule of the label, without labels from the longest capsule.

        If the routing has its own activations, pass the most active capsules as labels, as ``forward`` does.

        Raises:
            RuntimeError: there is no decoder.
        """
        return self._decoder()(capsules, labels)  # type: ignore[no-any-return]

    def forward(self, images: Tensor, labels: Tensor | None = None) -> CapsNetOutput:
        """``labels [B]``: the capsules that are decoded; default the capsules with the largest activations."""
        output = self.classify(images)
        chosen = output.activations.detach().argmax(1) if labels is None else labels
        images_again = None if self.decoder is None else self.reconstruct(output.poses, chosen)
        return CapsNetOutput(output.activations, output.poses, images_again)


def through(layer: Any, poses: Tensor, **options: Any) -> Tensor:
    """Between layers capsules say by their lengths how present they are, which poses of many routings do not do."""
    capsules: Capsules = layer.capsules(poses, **options)
    if layer.uses_poses_alone:
        return capsules.poses
    return squash(capsules.poses, 2, kind="unit") * capsules.activations.unsqueeze(2)
