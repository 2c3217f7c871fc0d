"""The base class of networks with class capsules and a decoder."""

from torch import Tensor, nn

from ..nn.routing.base import Capsules
from ._network import Network
from .output import CapsNetOutput


class DecodedCapsules(Network):
    """A network that classifies, with a part ``decoder`` or None."""

    decoder: nn.Module | None

    def classify(self, images: Tensor) -> Capsules:
        """The class capsules of ``images [B, C, H, W]``, without a decoder."""
        return self.routing.capsules(self.encode(images))  # type: ignore[no-any-return, operator, union-attr]

    def reconstruct(self, capsules: Tensor, labels: Tensor | None = None) -> Tensor:
        """``capsules [B, J, D]`` to images: from the capsule of the label, without labels from the longest capsule.

        If the routing has its own activations, pass the most active capsules as labels, as ``forward`` does.

        Raises:
            RuntimeError: there is no decoder.
        """
        if self.decoder is None:
            raise RuntimeError(f"{self._op}: there is no decoder; build the model with reconstruction=True")
        return self.decoder(capsules, labels)  # type: ignore[no-any-return]

    def forward(self, images: Tensor, labels: Tensor | None = None) -> CapsNetOutput:
        """``labels [B]``: the capsules that are decoded; default the capsules with the largest activations."""
        found = self.classify(images)
        chosen = found.activations.detach().argmax(1) if labels is None else labels
        images_again = None if self.decoder is None else self.reconstruct(found.poses, chosen)
        return CapsNetOutput(found.activations, found.poses, images_again)
