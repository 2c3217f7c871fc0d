"""The models by the names of the command line, or by class path."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .. import checks
from .._imported import by_path, path_of
from ..models import (
    CNN,
    CapsAutoEncoder,
    CapsNet,
    DeepCaps,
    EfficientCapsNet,
    InvertedAttentionCapsNet,
    MatrixCapsNet,
    SegCaps,
    StackedCapsuleAutoencoder,
)
from ..models.output import CapsNetOutput
from ..nn import Capsules
from ..nn.routing.names import routing_class

NETWORKS: dict[str, type[nn.Module]] = {
    "capsnet": CapsNet,
    "deepcaps": DeepCaps,
    "autoencoder": CapsAutoEncoder,
    "cnn": CNN,
    "segcaps": SegCaps,
    "stacked": StackedCapsuleAutoencoder,
    "matrixcapsnet": MatrixCapsNet,
    "efficientcapsnet": EfficientCapsNet,
    "invertedattention": InvertedAttentionCapsNet,
}
# Those that do not say one class, or two, of an image.
WITHOUT_CLASSES = ("autoencoder", "segcaps", "stacked")
# Where it is not the margin loss.
OWN_LOSS = {"cnn": "cross-entropy"}


class OwnNetwork(nn.Module):
    """A user's network as the trainer takes it: images ``[B, C, H, W]`` to :class:`capsfast.models.CapsNetOutput`.

    Args:
        network: its forward takes images alone and gives class capsules ``[B, J, D]``, whose lengths say the class, or
            activations ``[B, J]``.
    """

    decoder = None

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor | None = None) -> CapsNetOutput:
        poses, activations = self.classify(images)
        return CapsNetOutput(activations, poses, None)

    def classify(self, images: Tensor) -> Capsules:
        """
        Raises:
            TypeError: the network gives something else.
        """
        found = self.network(images)
        if not isinstance(found, Tensor) or found.dim() not in (2, 3) or len(found) != len(images):
            got = checks.shape_of(found) if isinstance(found, Tensor) else type(found).__name__
            raise TypeError(
                f"capsfast.train.Learner: model {type(self.network).__name__} must give class capsules [B, J, D] or "
                f"activations [B, J], got {got}; a network with classify(images) may give what it likes"
            )
        return Capsules(found, found.norm(dim=2)) if found.dim() == 3 else Capsules(found[:, :, None], found)


def network_class(op: str, name: str) -> type[nn.Module]:
    """The class of a name, or of a class path.

    Raises:
        ValueError: no model of that name, no such class.
        TypeError: something else than a network.
    """
    if "." not in name:
        checks.choice(op, "model", name, NETWORKS)
        return NETWORKS[name]
    found = by_path(f"{op}: model", name)
    if not (inspect.isclass(found) and issubclass(found, nn.Module)):
        raise TypeError(f"{op}: model must be a class of networks, an nn.Module, got {name}")
    return found


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a checkpoint holds them: a routing class by its path.

    Raises:
        ValueError: another process could not import it.
    """
    routing = options.get("routing")
    if routing is None or isinstance(routing, str):
        return dict(options)
    routing_class("capsfast.train.Learner", routing)
    return {**options, "routing": path_of("capsfast.train.Learner", "routing", routing)}


def build(name: str, sizes: Mapping[str, int], options: Mapping[str, Any]) -> nn.Module:
    """A model with the sizes ``in_channels``, ``image_size`` and ``num_classes`` of a data set.

    Raises:
        ValueError, TypeError: no model of that name, an option that it does not have, or one that it rejects.
    """
    op = "capsfast.train.build"
    make, options = network_class(op, name), dict(options)
    if isinstance(options.get("routing"), str) and "." in options["routing"]:
        options["routing"] = routing_class(op, by_path(f"{op}: routing", options["routing"]))
    taken = inspect.signature(make).parameters
    try:
        network = make(**{size: value for size, value in sizes.items() if size in taken}, **options)
    except TypeError as error:
        # A network hands on to its layers what is none of its own options.
        if options.keys() <= taken.keys():
            raise
        given = (*sizes, "device", "dtype", "options")
        own = ", ".join(each for each in taken if each not in given)
        raise TypeError(f"{op}: {name}'s own options are {own}; {error}") from None
    return network if hasattr(network, "classify") or name in NETWORKS else OwnNetwork(network)
