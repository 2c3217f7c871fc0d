"""Class capsules and a decoder: what the networks that have both share."""

from torch import Tensor, nn

from ..nn.routing.base import Capsules
from ._capsules import class_of
from ._network import Network
from .output import CapsNetOutput


class DecodedCapsules(Network):
    """A network that classifies, with a part ``decoder`` or None."""

    _op: str
    decoder: nn.Module | None

    def classify(self, images: Tensor) -> Capsules:
        """The class capsules of ``images [B, C, H, W]``, without a decoder."""
        raise NotImplementedError(f"{self._op}: a network overrides classify")

    def reconstruct(self, capsules: Tensor, labels: Tensor | None = None) -> Tensor:
        """``capsules [B, J, D]`` to images: from the capsule of the label, without labels from the longest.

        Where a routing has activations, give the most active capsules as labels, as ``forward`` does.

        Raises:
            RuntimeError: there is no decoder.
        """
        if self.decoder is None:
            raise RuntimeError(f"{self._op}: there is no decoder; build the model with reconstruction=True")
        return self.decoder(capsules, labels)  # type: ignore[no-any-return]

    def forward(self, images: Tensor, labels: Tensor | None = None) -> CapsNetOutput:
        """``labels [B]``: which capsules the decoder gets; without them those with the largest activations."""
        found = self.classify(images)
        images_again = None if self.decoder is None else self.reconstruct(found.poses, class_of(labels, found))
        return CapsNetOutput(found.activations, found.poses, images_again)
