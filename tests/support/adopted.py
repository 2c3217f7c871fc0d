"""Routing layers and models for identify and accelerate, and comparisons before and after."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

import capsfast
from capsfast.adopt import Acceleration, undo
from capsfast.adopt.trial import relative

from . import published_layers as layers

I, J, D, K = 7, 4, 5, 6
IMAGES = (4, 1, 6, 6)


def squash(s: Tensor) -> Tensor:
    n = s.square().sum(-1, keepdim=True)
    return n / (1 + n) * s / torch.sqrt(n + 1e-8)


class Plain(nn.Module):
    """Paper routing with a bare torch.zeros. Variants override methods."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.W = nn.Parameter(0.3 * torch.randn(*(sizes or (I, J, D, K))))

    def votes(self, u: Tensor) -> Tensor:
        return torch.einsum("ijdk,bik->bijd", self.W, u)

    def start(self, votes: Tensor) -> Tensor:
        return torch.zeros(votes.shape[:3])

    def couple(self, b: Tensor) -> Tensor:
        return b.softmax(2)

    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        votes = self.votes(u)
        b = self.start(votes)
        for _ in range(num_iterations):
            v = squash((self.couple(b)[..., None] * votes).sum(1))
            b = b + (votes * v[:, None]).sum(-1)
        return v


def variant(buffer: Tensor | None = None, attribute: Any = None, sizes: tuple[int, ...] = (), **methods: Any) -> Any:
    """A Plain with other methods, which may read ``self.kept``: a buffer or an attribute."""
    layer = type("Variant", (Plain,), methods)(*sizes)
    if buffer is not None:
        layer.register_buffer("kept", buffer)
    if attribute is not None:
        layer.kept = attribute
    return layer


def masked_after(self: Plain, u: Tensor, mask: Tensor) -> Tensor:
    """A forward that masks the coupling after a softmax over the inputs, as torch ports of ComiRec do."""
    votes = self.votes(u)
    b = torch.zeros(votes.shape[:3])
    for _ in range(3):
        c = b.softmax(1)
        c = torch.where(mask[..., None], c, 0 * c) if mask.dtype == torch.bool else c * mask[..., None]
        v = squash((c[..., None] * votes).sum(1))
        b = b + (votes * v[:, None]).sum(-1)
    return v


def example(B: int = 5) -> Tensor:
    return torch.randn(B, I, K)


def accelerate(model: nn.Module, example: Any, **options: Any) -> Acceleration:
    """accelerate() with short timings and no required speedup, because the machine may be busy."""
    return capsfast.accelerate(model, example, **{"only_faster": False, "seconds": 0, **options})


class Net(nn.Module):
    """For images of 6 x 6: a convolution and two layers of capsules. The second has its routing as a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Dropout(0.5))
        self.first = layers.DigitCapsules(16, 6, 5, 7)
        self.second = layers.CapsLayer(5, 7, 3, 4, layers.AgreementRouting(5, 3, 2))

    def forward(self, images: Tensor) -> Tensor:
        u = self.conv(images).flatten(2).transpose(1, 2)  # [B, 16, 6]
        return self.second(self.first(u))  # type: ignore[no-any-return]


def outcome(model: nn.Module, example: Any) -> list[Tensor]:
    """Output and gradients; the gradient of the input comes first."""
    first, *others = example if isinstance(example, tuple) else (example,)
    leaf = first.clone().requires_grad_()
    v = model(leaf, *others)
    inputs = [leaf, *model.parameters()]
    return [v.detach(), *torch.autograd.grad(v, inputs, torch.linspace(-1, 1, v.numel()).view(v.shape))]


def assert_same(one: nn.Module, other: nn.Module, example: Any) -> None:
    pairs = list(zip(outcome(one, example), outcome(other, example), strict=True))
    assert max(relative(a, b) for a, b in pairs) < 1e-4


def undone_copy(model: nn.Module) -> Any:
    found = copy.deepcopy(model)
    undo(found)
    return found
