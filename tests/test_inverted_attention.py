"""InvertedAttentionCapsNet against plain code, and as a module."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import capsfast
from capsfast.models import InvertedAttentionCapsNet
from capsfast.nn import recorded

from .support import plain
from .support.backends import Backend, recorded_ops
from .support.plain import assert_alike, assert_same, on_cpu

B = 4
SMALL: dict[str, Any] = {
    "conv_channels": 3,
    "primary_groups": 2,
    "primary_dim": 4,
    "types": 3,
    "num_caps": 5,
    "digit_dim": 6,
}


def small(**more: Any) -> InvertedAttentionCapsNet:
    torch.manual_seed(0)
    return InvertedAttentionCapsNet(2, (12, 9), 4, **SMALL, **more)


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    return torch.rand(B, 2, 12, 9, dtype=dtype)


def normalized(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    return gain * plain.normalized(x) + shift


def plain_network(model: InvertedAttentionCapsNet, x: Tensor) -> tuple[Tensor, Tensor]:
    """Tsai et al. 2020, procedures 1 and 2, from the model's parameters: activations and class capsules."""
    p = dict(model.named_parameters())
    x = F.conv2d(F.relu(F.conv2d(x, p["conv.weight"], p["conv.bias"], 2, 1)), p["primary.weight"], padding=1)
    primary = normalized(
        x.view(B, 2, 4, *x.shape[2:]).movedim(2, -1), p["norm.weight"], p["norm.bias"]
    )  # [B, C, y, x, K]
    names = ("layers.0.routing.routing", "layers.1.routing", "layers.2.routing")

    def below(n: int, poses: Tensor) -> Tensor:
        """Input capsules of layer n: of every window, or all, ``[samples, I, K]``."""
        if n > 0:
            return poses.flatten(1, -2)
        H, W = ((size - 3) // 2 + 1 for size in poses.shape[2:4])
        windows = [poses[:, :, 2 * y : 2 * y + 3, 2 * x : 2 * x + 3].flatten(1, 3) for y in range(H) for x in range(W)]
        return torch.stack(windows, 1).flatten(0, 1)

    def updated(n: int, poses: Tensor, last: Tensor | None) -> Tensor:
        name = names[n]
        votes = plain.votes(below(n, poses), p[f"{name}.W"])
        query = torch.zeros_like(votes[:, 0])
        if last is not None:
            query = last.movedim(1, 3).flatten(0, 2) if n == 0 else last
        c = plain.couple((votes * query[:, None]).sum(-1) / (6**0.5 if model.layers[1].routing.routing.scaled else 1))
        s = normalized((c[..., None] * votes).sum(1), p[f"{name}.routing.gain"], p[f"{name}.routing.shift"])
        if n > 0:
            return s
        H, W = ((size - 3) // 2 + 1 for size in poses.shape[2:4])
        return s.view(B, H, W, *s.shape[1:]).movedim(3, 1)  # [B, J, y, x, D]

    if model.concurrent:
        poses = [primary]
        for n in range(3):
            poses.append(updated(n, poses[n], None))
        for _ in range(model.num_iterations - 1):
            poses = [primary] + [updated(n, poses[n], poses[n + 1]) for n in range(3)]
    else:
        poses = [primary]
        for n in range(3):
            last = None
            for _ in range(model.num_iterations):
                last = updated(n, poses[n], last)
            poses.append(last)
    logits = (poses[-1] * p["classifier.weight"]).sum(-1) + p["classifier.bias"]
    return 1 / (1 + (-logits).exp()), poses[-1]


@on_cpu
@pytest.mark.parametrize(
    "options",
    [{"num_iterations": 3}, {"num_iterations": 3, "concurrent": False}, {"num_iterations": 1}, {"scaled": False}],
    ids=str,
)
def test_is_the_papers_routing(by: Backend, options: dict[str, Any]) -> None:
    model = small(backend=by.name, dtype=torch.float64, reconstruction=False, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    x = images(torch.float64)
    with recorded_ops() as ops:
        found = model(x)
    assert ("capsfast::routing_pass" in ops) == by.fused
    assert_alike(found[:2], plain_network(model, x), list(model.parameters()), 1e-8)


def test_couplings_of_its_layers_are_recorded() -> None:
    """One record for each update. The parts ``routing`` are layers; the updating modules are not."""
    model, x = small(num_iterations=3), images()
    hidden, classes = (layer.routing for layer in model.layers[1:])
    with recorded(hidden) as of_hidden, recorded(classes) as of_classes, recorded(model.layers[0].routing.routing) as c:
        model.poses(x)
    assert len(of_hidden) == len(of_classes) == len(c) == 3
    assert_same(of_classes[0], torch.full((B, 5, 4), 0.25))
    assert not torch.allclose(of_classes[2], of_classes[0])
    with pytest.raises(TypeError, match="layer must be a RoutedCaps, got FullAttention"):
        recorded(model.layers[2]).__enter__()
    with pytest.raises(TypeError, match=r"got ConvAttention; of a model, take its part \.routing"):
        capsfast.diagnose(model.layers[0], x)


def test_activations_are_those_of_the_classifier() -> None:
    model = small()
    x = images()
    capsules, activations = model.classify(x)
    torch.testing.assert_close(activations, model.logits(capsules).sigmoid())
    chosen = model.logits(capsules).argmax(1)
    assert torch.equal(model(x).reconstruction, model.reconstruct(capsules, chosen))
    assert torch.equal(model.reconstruct(capsules), model.reconstruct(capsules, chosen))
