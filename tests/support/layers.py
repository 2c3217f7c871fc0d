"""Every layer, every loss and a small network of every kind, with inputs: for the tests that all of them share."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import capsfast
from capsfast import models
from capsfast import nn as caps

from .routings import ALONE, ROUTINGS, randomize

I, J, K, D = 12, 6, 3, 4

# Weights and the shapes of their parameters.
WEIGHTS: dict[caps.Weight, dict[str, tuple[int, ...]]] = {
    caps.FullWeight(): {"W": (I, J, D, K)},
    caps.SharedWeight(): {"W": (1, J, D, K)},
    caps.FullWeight(4): {"W": (3, J, D, K)},
    caps.FullWeight(I): {"W": (1, J, D, K)},
    caps.LowRank(2): {"W": (1, J, D, 2), "A": (I, 2, K)},
    caps.LowRank(2, positions=None): {"W": (1, J, D, 2), "A": (1, 2, K)},
    caps.LowRank(2, positions=3): {"W": (1, J, D, 2), "A": (4, 2, K)},
    caps.LowRank(2, "UV"): {"U": (I, D, 2), "V": (J, K, 2)},
    caps.LowRank(2, "UV", positions=None): {"U": (1, D, 2), "V": (J, K, 2)},
    caps.Groups(3): {"W": (I, 2, D, K)},
    caps.Groups(3, caps.SharedWeight()): {"W": (1, J, D, K)},
    caps.Groups(3, caps.FullWeight(2)): {"W": (6, 2, D, K)},
    caps.Groups(3, caps.FullWeight(4)): {"W": (3, 2, D, K)},
    caps.Groups(2, caps.LowRank(2)): {"W": (1, J, D, 2), "A": (I, 2, K)},
    caps.Groups(2, caps.LowRank(2, positions=None)): {"W": (1, J, D, 2), "A": (1, 2, K)},
    caps.Groups(2, caps.LowRank(2, "UV", 3)): {"U": (4, D, 2), "V": (J, K, 2)},
}

# How to make a module; then for each input its shape without the batch, or a function of the size of the batch.
Row = tuple[Any, ...]


def dense(**options: Any) -> Callable[[], nn.Module]:
    return lambda: capsfast.DynamicRouting(I, J, K, D, **options)


def interests(**options: Any) -> Callable[[], nn.Module]:
    return lambda: caps.InterestCapsules(J, K, D, max_length=I, **options)


def routed(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = caps.RoutedCaps(I, J, K, D, routing=name, **ALONE.get(name, {}))
        if not layer.W.is_meta:
            randomize(layer.routing)
        return layer

    return make


GROUPED = caps.Groups(2, caps.LowRank(2))
LAYERS: dict[str, Row] = {
    **{repr(weight): (dense(weight=weight), (I, K)) for weight in WEIGHTS},
    "learned": (dense(learned_logits=True, bias=True), (I, K)),
    "options": (dense(softmax="in", gradient="last", leaky=True, squash="half", eps=1e-4), (I, K)),
    "sums": (dense(squash_last=False), (I, K)),
    "votes": (lambda: caps.RoutingByAgreement(2, leaky=True), (I, J, D)),
    "em": (lambda: caps.RoutedCaps(I, J, 4, 6, routing="em", pose_rows=2), (I, 4), (I,)),
    "groups of em": (lambda: caps.RoutedCaps(I, J, K, D, routing="em", weight=GROUPED), (I, K), (I,)),
    "windows": (lambda: caps.ConvCaps2d(4, J, K, D, padding=1, softmax="in"), (4, K, 5, 6)),
    "groups of windows": (lambda: caps.ConvCaps2d(4, J, K, D, dilation=2, weight=caps.Groups(2)), (4, K, 5, 6)),
    "children": (lambda: caps.ConvCaps2d(4, J, K, D, routing="em", competition="child"), (4, K, 5, 6), (4, 5, 6)),
    "windows of text": (lambda: caps.ConvCaps1d(4, J, K, D, 2, 2, dilation=2, routing="em"), (4, K, 7), (4, 7)),
    "windows of videos": (lambda: caps.ConvCaps3d(4, J, K, D, 2, padding=1, softmax="in"), (4, K, 2, 4, 3)),
    "children in videos": (lambda: caps.ConvCaps3d(4, J, K, D, 2, competition="child"), (4, K, 3, 4, 3)),
    "classes": (lambda: caps.ClassCaps2d(2, J, 4, 4, 3, pose_rows=2), (2, 4, 3, 3)),
    "classes of videos": (lambda: caps.ClassCaps3d(2, J, 4, 4, (2, 1, 3)), (2, 4, 2, 1, 3)),
    "slim": (lambda: caps.SlimConvCaps2d(4, J, K, D, 2, learned_logits=True, bias=True), (4, K, 5, 6)),
    "everywhere": (lambda: caps.SlimConvCaps2d(4, J, K, D, softmax="everywhere", squash="unit"), (4, K, 5, 6)),
    "slim em": (lambda: caps.SlimConvCaps2d(4, J, K, D, routing="em"), (4, K, 5, 6), (4, 5, 6)),
    "slim up": (lambda: caps.SlimConvTransposeCaps3d(4, J, K, D, 2), (4, K, 3, 3, 3)),
    "primary": (lambda: caps.PrimaryCaps(3, 4, K, 3), (3, 9, 7)),
    "depthwise": (lambda: caps.DepthwisePrimaryCaps(4, K, 3), (12, 9, 7)),
    "matrices": (lambda: caps.PrimaryMatrixCaps(3, 4, 4), (3, 5, 5)),
    "decoder": (lambda: caps.Decoder(J, D, (1, 6, 6)), (J, D)),
    "conv decoder": (lambda: caps.ConvDecoder(J, D, (1, 6, 6), class_independent=True), (J, D)),
    "interests": (interests(projection="linear"), (I, K)),
    "interests by passes": (interests(update="overwrite", weight="output"), (I, K)),
    "interests by votes": (interests(weight="output", gradient="last", count="floor"), (I, K)),
    "vectors": (lambda: caps.VectorRouting(I, J, K, D, normalize=False), (I, K)),
    "any vectors": (lambda: caps.VectorRouting(None, J, K, D, normalize=False), (I, K)),
    "scored matrices": (lambda: caps.MatrixRouting(I, J, 4, 6, 2), (I, 4), (I,)),
    "any scored matrices": (lambda: caps.MatrixRouting(None, J, 4, 6, 2, model="k-means"), (I, 4), (I,)),
    **{f"routed {name}": (routed(name), (I, K), (I,)) for name in ROUTINGS},
}
# One weight for each way to form votes: for tests that take seconds a layer.
WAYS = (repr(caps.FullWeight(4)), repr(caps.LowRank(2, "UV")), repr(caps.Groups(3)), repr(GROUPED))
EACH_KIND = [name for name in LAYERS if name in WAYS or name not in map(repr, WEIGHTS)]


def labels(batch: int) -> Tensor:
    return torch.arange(batch) % J


def reconstructed(batch: int) -> tuple[Tensor, None, Tensor]:
    return torch.rand(batch, J), None, torch.rand(batch, 1, 4, 4)


LOSSES: dict[str, Row] = {
    "margin loss": (lambda: caps.MarginLoss(squared=False), (J,), labels),
    "margin loss of several": (lambda: caps.MarginLoss(reduction="sum"), (J, D), (J,)),
    "reconstruction loss": (caps.ReconstructionLoss, (1, 4, 4), (1, 4, 4)),
    "capsnet loss": (caps.CapsNetLoss, reconstructed, (1, 4, 4), labels),
    "spread loss": (caps.SpreadLoss, (J,), labels, lambda batch: 100),
    "entropy": (lambda: caps.CouplingEntropy("in", normalize=False), (I, J)),
}

CLASSES = 5
CONV = {"conv_channels": 4}
PRIMARY: dict[str, Any] = {"conv_channels": 6, "primary_groups": 3, "primary_dim": 4}
# Options that make each network small.
NETWORKS: dict[str, dict[str, Any]] = {
    "DeepCaps": {"conv_channels": 6, "types": 3, "dims": (3, 4, 4), "digit_dim": 6},
    "CapsAutoEncoder": {"caps_dim": 6, **PRIMARY},
    "CNN": {"channels": (4, 4), "kernel_size": 3, "hidden": (8, 12), "dropout": 0.1},
    "EfficientCapsNet": {"digit_dim": 6, **PRIMARY},
    "InvertedAttentionCapsNet": {"types": 3, "num_caps": 5, "digit_dim": 6, **PRIMARY},
    "MatrixCapsNet": {"conv_channels": 6, "primary_types": 2, "conv_types": (3, 3), "pose_rows": 2},
    "SegCaps": {"conv_channels": 3, "types": 2, "dims": (2, 3), "digit_dim": 4, "kernel_size": 3, "hidden": (5,)},
    "StackedCapsuleAutoencoder": {"num_parts": 3, "num_objects": 4, "template_size": 5, "dim": 4, "hidden": 8, **CONV},
    "CapsNet": {"digit_dim": 6, **PRIMARY},
}


def network(name: str, size: int | Sequence[int] = (12, 10), channels: int = 2, **more: Any) -> Any:
    """A small network of 5 classes in evaluation mode: without dropout, noise and statistics of the batch."""
    torch.manual_seed(0)
    return getattr(models, name)(channels, size, CLASSES, **{**NETWORKS[name], **more}).eval()


MODULES: dict[str, Row] = {
    **LAYERS,
    **LOSSES,
    **{name: (lambda name=name: network(name), (2, 12, 10)) for name in NETWORKS},
}


def made(name: str, batch: int = 3, table: dict[str, Row] = MODULES) -> tuple[nn.Module, list[Any]]:
    """A module and its inputs. The first input is normal, all others are not negative, as activations are."""
    torch.manual_seed(0)
    make, *inputs = table[name]
    draws = [torch.randn, *[torch.rand] * len(inputs)]
    given = [
        value(batch) if callable(value) else draw(batch, *value) for draw, value in zip(draws, inputs, strict=False)
    ]
    return make(), given


def assert_resets(make: Callable[[], nn.Module]) -> None:
    """From memory that holds anything, reset_parameters makes what the constructor makes with the same seed."""
    with torch.device("meta"):
        layer = make()
    layer.to_empty(device="cpu")
    for value in [*layer.parameters(), *layer.buffers()]:
        value.data.fill_(torch.nan if value.is_floating_point() else 99)
    layer.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    tensors = [dict([*each.named_parameters(), *each.named_buffers()]) for each in (layer, make())]
    assert [*tensors[0]] == [*tensors[1]]
    assert all(value.isfinite().all() and not (value == 99).any() for value in tensors[0].values())
    for seed in (0, 1):
        torch.manual_seed(seed)
        layer.reset_parameters()  # type: ignore[operator]
        torch.manual_seed(seed)
        new = make()
        for (name, value), wanted in zip(tensors[0].items(), [*new.parameters(), *new.buffers()], strict=True):
            assert torch.equal(value, wanted), name


def results(found: Any) -> list[Tensor]:
    """The floating-point tensors of a result."""
    return [leave for leave in tree_leaves(found) if isinstance(leave, Tensor) and leave.is_floating_point()]


def without_samples(make: Callable[[int], tuple[Callable[..., Any], Sequence[Any]]], empty: int = 0) -> list[Tensor]:
    """The results of a call with no sample. What gets a gradient from two samples gets a gradient of zeros from none.

    make: from the size of the batch to a function or module and its inputs. empty: the size that has no sample.
    """
    seen = []
    for batch in (2, empty):
        called, given = make(batch)
        leaves = [result.requires_grad_() for result in results(given)]
        leaves += called.parameters() if isinstance(called, nn.Module) else []
        for leaf in leaves:
            leaf.grad = None  # a caller may give the same leaf twice
        found = results(called(*given))
        sum(tensor.square().sum() for tensor in found if tensor.requires_grad).backward()  # type: ignore[union-attr]
        seen.append(([tensor.requires_grad for tensor in found], [leaf.grad is not None for leaf in leaves]))
    assert seen[0] == seen[1] and any(seen[0][1])
    assert not any(leaf.grad.any() for leaf in leaves if leaf.grad is not None)  # a NaN counts as not 0
    return found


def parameters_of(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())
