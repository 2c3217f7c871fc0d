"""Convolutional layers of capsfast.nn as functions of tensors: as users call them, or over stored windows and votes."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from ..functional import dynamic_routing, route_votes
from ..nn import ConvCaps2d, ConvCaps3d, SlimConvCaps2d, SlimConvCaps3d

# Windows of 3 in every axis, without padding.
LAYERS: dict[str, Any] = {layer.__name__: layer for layer in (ConvCaps2d, ConvCaps3d, SlimConvCaps2d, SlimConvCaps3d)}
KERNEL = 3


def make(name: str, I: int, J: int, K: int, D: int, r: int, **factory_kwargs: Any) -> Any:
    """The layer from I to J types with r iterations of dynamic routing."""
    return LAYERS[name](I, J, K, D, KERNEL, num_iterations=r, **factory_kwargs)


def in_caps(layer: Any) -> int:
    """The number of input capsules that a window routes: a slim layer has a vote of each type for the whole window."""
    area = 1 if isinstance(layer, SlimConvCaps2d) else math.prod(layer.kernel_size)
    return int(layer.in_types * area)


class Layered:
    """A layer as a function of poses and its parameters: as users call it, on a backend."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.layer, self.names = layer, [name for name, _ in layer.named_parameters()]

    def __call__(self, u: Tensor, *parameters: Tensor) -> Tensor:
        values = dict(zip(self.names, parameters, strict=True))
        return functional_call(self.layer, values, (u,))  # type: ignore[no-any-return]


def unfolded(layer: Any, r: int, u: Tensor, weight: Tensor) -> Tensor:
    """The layer as in a textbook: stores all windows and votes, or for a slim layer the votes of a convolution."""
    grid = [extent - KERNEL + 1 for extent in u.shape[3:]]
    if isinstance(layer, SlimConvCaps2d):
        convolution = F.conv2d if len(grid) == 2 else F.conv3d
        votes = convolution(u.flatten(0, 1), weight).view(*u.shape[:2], layer.out_types, layer.out_dim, -1)
        v = route_votes(votes.movedim(4, 1).flatten(0, 1), num_iterations=r, backend="reference")
    else:
        windows = u
        for axis in range(len(grid)):
            windows = windows.unfold(3 + axis, KERNEL, 1)  # appends the axis of the window
        windows = windows.movedim(2, -1).movedim(1, 1 + len(grid))  # [B, *grid, I, *window, K]
        capsules = windows.reshape(-1, weight.shape[0], weight.shape[3])
        v = dynamic_routing(capsules, weight, num_iterations=r, backend="reference")
    image: Tensor = v.unflatten(0, (u.shape[0], *grid)).movedim((-2, -1), (1, 2))
    return image
