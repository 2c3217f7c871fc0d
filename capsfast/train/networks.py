"""The models by the names of the command line."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from .. import checks
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
from ..nn import AgreementRouting, DynamicRouting, RoutedCaps, Routing, SlimConvCaps2d
from ..nn.routing.names import RoutingChoice, routing_class
from ..nn.routing.names import options_of as options_of_routing

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
# Whose options a network hands on, with dynamic routing and with another one; the others have a layer of their own for
# dynamic routing, DynamicRouting, and RoutedCaps for all else.
LAYERS: dict[str, tuple[tuple[type, ...], tuple[type, ...]]] = {
    "matrixcapsnet": ((RoutedCaps, AgreementRouting), (RoutedCaps,)),
    "segcaps": ((SlimConvCaps2d, AgreementRouting), (SlimConvCaps2d,)),
}
# From the data set, or moved by Lightning.
GIVEN = ("in_channels", "image_size", "num_classes", "device", "dtype")


def options_of(name: str, routing: RoutingChoice | None = None) -> list[str]:
    """What :func:`build` takes for a model and its routing beside the sizes that the data set gives.

    ``routing``: None for the model's default.

    Raises:
        ValueError: no model or no routing of that name.
    """
    op = "capsfast.train.build"
    checks.choice(op, "model", name, NETWORKS)
    taken = inspect.signature(NETWORKS[name]).parameters
    if routing is None:
        routing = taken["routing"].default if "routing" in taken else "dynamic"
    own = [each for each, what in taken.items() if what.kind != what.VAR_KEYWORD]
    if len(own) < len(taken):
        dynamic, others = LAYERS.get(name, ((DynamicRouting,), (RoutedCaps,)))
        layers = dynamic if routing == "dynamic" else (*others, routing_class(op, routing))
        own += [option for layer in layers for option in _keywords(layer)]
    return [each for each in dict.fromkeys(own) if each not in GIVEN]


def _keywords(layer: Any) -> list[str]:
    if inspect.isclass(layer) and issubclass(layer, Routing):
        return options_of_routing(layer)
    return [each for each, what in inspect.signature(layer).parameters.items() if what.kind == what.KEYWORD_ONLY]


def build(name: str, sizes: Mapping[str, int], options: Mapping[str, Any]) -> nn.Module:
    """A model with the sizes ``in_channels``, ``image_size`` and ``num_classes`` of a data set.

    Raises:
        ValueError: no model of that name, an option that it does not have, or one that it rejects.
    """
    known = options_of(name, options.get("routing"))
    for each in options:
        if each not in known:
            raise ValueError(f"capsfast.train.build: {name} has no option {each}; it has {', '.join(known)}")
    taken = inspect.signature(NETWORKS[name]).parameters
    return NETWORKS[name](**{size: value for size, value in sizes.items() if size in taken}, **options)
