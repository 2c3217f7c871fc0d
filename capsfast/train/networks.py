"""The models by the names of the command line."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..models import CapsAutoEncoder, CapsNet, DeepCaps
from ..nn import DynamicRouting

NETWORKS: dict[str, type[nn.Module]] = {"capsnet": CapsNet, "deepcaps": DeepCaps, "autoencoder": CapsAutoEncoder}
# From the data set, or moved by Lightning.
GIVEN = ("in_channels", "image_size", "num_classes", "device", "dtype")


def options_of(name: str) -> list[str]:
    """What :func:`build` takes for a model beside the sizes that the data set gives.

    Raises:
        ValueError: no model of that name.
    """
    if name not in NETWORKS:
        raise ValueError(f"capsfast.train.build: model must be one of {', '.join(NETWORKS)}, got {name!r}")
    taken = inspect.signature(NETWORKS[name]).parameters
    own = [each for each, what in taken.items() if what.kind != what.VAR_KEYWORD]
    if len(own) < len(taken):
        routing = inspect.signature(DynamicRouting).parameters.items()
        own += [each for each, what in routing if what.kind == what.KEYWORD_ONLY and each not in own]
    return [each for each in own if each not in GIVEN]


def build(name: str, sizes: Mapping[str, int], options: Mapping[str, Any]) -> nn.Module:
    """A model with the sizes ``in_channels``, ``image_size`` and ``num_classes`` of a data set.

    Raises:
        ValueError: no model of that name, an option that it does not have, or one that it rejects.
    """
    known = options_of(name)
    for each in options:
        if each not in known:
            raise ValueError(f"capsfast.train.build: {name} has no option {each}; it has {', '.join(known)}")
    taken = inspect.signature(NETWORKS[name]).parameters
    return NETWORKS[name](**{size: value for size, value in sizes.items() if size in taken}, **options)
