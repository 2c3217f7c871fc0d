"""A model with layers that accelerate fuses, and what it computes before and after."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import capsfast
from capsfast.adopt import Acceleration, undo
from capsfast.adopt.fused import is_fused, original_class
from capsfast.adopt.verification import relative

from . import published_layers as layers

IMAGES = (4, 1, 6, 6)


def accelerate(model: nn.Module, example: Any, **options: Any) -> Acceleration:
    """In short, and whatever is faster on a machine that does other things beside."""
    return capsfast.accelerate(model, example, **{"only_faster": False, "seconds": 0, **options})


class Net(nn.Module):
    """Images of 6 x 6: a convolution and two layers of capsules, the second of which holds its routing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Dropout(0.5))
        self.first = layers.DigitCapsules(16, 6, 5, 7)
        self.second = layers.CapsLayer(5, 7, 3, 4, layers.AgreementRouting(5, 3, 2))

    def forward(self, images: Tensor) -> Tensor:
        u = self.conv(images).flatten(2).transpose(1, 2)  # [B, 16, 6]
        return self.second(self.first(u))  # type: ignore[no-any-return]


class Choosy(layers.Router):
    """A layer with further arguments."""

    def forward(self, u: Tensor, mask: Tensor | None = None, iterations: int = 3) -> Tensor:
        self_iterations, self.iterations = self.iterations, iterations
        try:
            v = super().forward(u if mask is None else u * mask[:, :, None])
        finally:
            self.iterations = self_iterations
        return v


def outcome(model: nn.Module, example: Any) -> list[Tensor]:
    """Output and gradients, that of the input first."""
    first, *others = example if isinstance(example, tuple) else (example,)
    leaf = first.clone().requires_grad_()
    v = model(leaf, *others)
    inputs = [leaf, *model.parameters()]
    return [v.detach(), *torch.autograd.grad(v, inputs, torch.linspace(-1, 1, v.numel()).view(v.shape))]


def assert_same(one: nn.Module, other: nn.Module, example: Any) -> None:
    pairs = list(zip(outcome(one, example), outcome(other, example), strict=True))
    assert max(relative(a, b) for a, b in pairs) < 1e-4


def calls_own_forward(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Gives the number of calls of the forward that the layer's author wrote."""
    count = [0]
    author = original_class(type(layer)) if is_fused(layer) else type(layer)
    own = author.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return own(self, *args, **kwargs)

    monkeypatch.setattr(author, "forward", forward)
    return lambda: count[0]


def undone_copy(model: nn.Module) -> Any:
    found = copy.deepcopy(model)
    undo(found)
    return found
