"""The models by the names of the command line."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..models import CapsAutoEncoder, CapsNet, DeepCaps, MatrixCapsNet
from ..nn import DynamicRouting, RoutedCaps
from ..nn.routing.names import RoutingChoice, routing_class
from ..nn.routing.names import options_of as options_of_routing

NETWORKS: dict[str, type[nn.Module]] = {
    "capsnet": CapsNet,
    "deepcaps": DeepCaps,
    "autoencoder": CapsAutoEncoder,
    "matrixcapsnet": MatrixCapsNet,
}
# From the data set, or moved by Lightning.
GIVEN = ("in_channels", "image_size", "num_classes", "device", "dtype")


def options_of(name: str, routing: RoutingChoice | None = None) -> list[str]:
    """What :func:`build` takes for a model and its routing (None: its default) beside the sizes of the data set.

    Raises:
        ValueError: no model or no routing of that name.
    """
    op = "capsfast.train.build"
    if name not in NETWORKS:
        raise ValueError(f"{op}: model must be one of {', '.join(NETWORKS)}, got {name!r}")
    taken = inspect.signature(NETWORKS[name]).parameters
    own = [each for each, what in taken.items() if what.kind != what.VAR_KEYWORD]
    if len(own) < len(taken):
        if routing is None:
            routing = taken["routing"].default
        # Of a network of matrix capsules no layer is a DynamicRouting.
        if routing == "dynamic" and name != "matrixcapsnet":
            own += _keywords(DynamicRouting)
        else:
            own += _keywords(RoutedCaps) + options_of_routing(routing_class(op, routing))
    return [each for each in dict.fromkeys(own) if each not in GIVEN]


def _keywords(layer: type[nn.Module]) -> list[str]:
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
