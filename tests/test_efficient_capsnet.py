"""EfficientCapsNet and its primary capsules against plain code, and as modules."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from capsfast.models import CapsNet, CapsNetOutput, EfficientCapsNet
from capsfast.nn import DepthwisePrimaryCaps

from .support import plain
from .support.backends import Backend, recorded_ops
from .support.layers import parameters_of
from .support.plain import assert_alike, assert_same, on_cpu

B = 4
SMALL: dict[str, Any] = {"conv_channels": 3, "primary_groups": 3, "primary_dim": 4, "digit_dim": 6}
# What the authors' code has for their other data sets, beside how many classes.
MULTI: dict[str, Any] = {"strides": (1, 1, 2, 2), "kernel_size": 5, "primary_stride": 2}
NORB: dict[str, Any] = {"kernel_sizes": (7, 3, 3, 3), "strides": (2, 1, 1, 2), "norm": "instance"}
# image, kernel of the primary capsules, places
SIZES = [
    (28, (9, 9), (1, 1)),
    (32, (9, 9), (3, 3)),
    ((40, 19), (9, 5), (7, 1)),
    (15, (3, 3), (1, 1)),
    (14, (6, 6), (1, 1)),
    (8, (3, 3), (1, 1)),
    ((28, 10), (9, 4), (5, 1)),
    (3, (1, 1), (1, 1)),
]


def small(**more: Any) -> EfficientCapsNet:
    torch.manual_seed(0)
    return EfficientCapsNet(2, (12, 17), 5, **SMALL, **more)


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    return torch.rand(B, 2, 12, 17, dtype=dtype)


def plain_network(
    model: EfficientCapsNet, x: Tensor, labels: Tensor | None, form: dict[str, Any], padded: bool
) -> CapsNetOutput:
    """Mazzia et al. 2021, from the model's parameters."""
    p = dict(model.named_parameters()) | dict(model.named_buffers())
    instance = form.get("norm") == "instance"
    for n, (stride, padding) in enumerate(zip(form.get("strides", (1, 1, 1, 2)), (2, 1, 1, 0), strict=True)):
        x = F.conv2d(x, p[f"convs.{3 * n}.weight"], p[f"convs.{3 * n}.bias"], stride, padding if padded else 0)
        x = torch.where(x > 0, x, 0.3 * x if instance else 0.0)
        norm = f"convs.{3 * n + 2}"
        if instance or model.training:
            x = plain.normalized(x, (2, 3) if instance else (0, 2, 3), 1e-3)
        else:
            mean, variance = (p[f"{norm}.running_{name}"][:, None, None] for name in ("mean", "var"))
            x = (x - mean) / (variance + 1e-3).sqrt()
        x = p[f"{norm}.weight"][:, None, None] * x + p[f"{norm}.bias"][:, None, None]
    W, bias = p["primary.conv.weight"], p["primary.conv.bias"]
    stride = form.get("primary_stride", 1)
    maps = [F.conv2d(x[:, n : n + 1], W[n : n + 1], bias[n : n + 1], stride) for n in range(len(W))]
    K, places = p["routing.W"].shape[3], maps[0][0, 0].numel()
    u = [
        torch.stack([tensor.flatten(1)[:, place] for tensor in maps[t : t + K]], 1)
        for t in range(0, len(W), K)
        for place in range(places)
    ]
    votes = plain.votes(plain.squash(torch.stack(u, 1), "exp"), p["routing.W"])
    scores = torch.einsum("bijd,bkjd->bij", votes, votes) / votes.shape[3] ** 0.5
    c = scores.softmax(2) + p["routing.routing.bias"]
    v = plain.squash((c[..., None] * votes).sum(1), "exp")
    lengths = v.square().sum(2).sqrt()
    return CapsNetOutput(lengths, v, plain.decoded(model.decoder, v, lengths.argmax(1) if labels is None else labels))


@on_cpu
@pytest.mark.parametrize(
    ("size", "form"),
    [((12, 17), {}), (19, {}), (40, MULTI), (30, NORB)],
    ids=["padded", "as in the paper", "for MultiMNIST", "for SmallNORB"],
)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_is_the_papers_network(by: Backend, size: Any, form: dict[str, Any], training: bool) -> None:
    torch.manual_seed(0)
    options = {**SMALL, **form, "init_std": 0.5, "backend": by.name, "dtype": torch.float64}
    model = EfficientCapsNet(2, size, 5, **options).train(training)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.add_(0.3 * torch.rand_like(value))
    x, labels = torch.rand(B, *model.image_shape, dtype=torch.float64), torch.tensor([0, 4, 2, 2])
    for given in (labels, None):
        with recorded_ops() as ops:
            found = model(x, given)
        assert ("capsfast::routing_pass" in ops) == by.fused
        wanted = plain_network(model, x, given, form, padded=size == (12, 17))
        assert_alike(found, wanted, list(model.parameters()))


def test_has_the_papers_parameters() -> None:
    """161 K without the decoder (Mazzia et al. 2021)."""
    model = EfficientCapsNet(device="meta")
    convs = (25 + 1) * 32 + (9 * 32 + 1) * 64 + (9 * 64 + 1) * 64 + (9 * 64 + 1) * 128
    assert parameters_of(model.convs) == convs + 2 * (32 + 64 + 64 + 128) == 130_688
    assert parameters_of(model.primary) == (81 + 1) * 128 == 10_496
    assert parameters_of(model.routing) == 16 * 10 * 16 * 8 + 16 * 10 == 20_640
    assert parameters_of(model.decoder) == 1_411_344
    assert parameters_of(model) == 161_824 + 1_411_344
    assert parameters_of(EfficientCapsNet(device="meta", reconstruction=False)) == 161_824


def test_has_the_parameters_of_the_authors_other_networks() -> None:
    """154 K for MultiMNIST, 151 K for SmallNORB without the decoder; one place of primary capsules."""
    multi = EfficientCapsNet(1, 36, 10, device="meta", **MULTI)
    assert parameters_of(multi) - parameters_of(multi.decoder) == 154_656 and multi.routing.in_caps == 16
    norb = EfficientCapsNet(2, 48, 5, device="meta", reconstruction=False, **NORB)
    assert parameters_of(norb) == 151_664 and norb.primary.conv.kernel_size == (8, 8) and norb.routing.in_caps == 16


def test_the_running_statistics_are_those_of_keras() -> None:
    """Keras has a momentum of 0.99: after a batch, 0.99 of the old statistics is left."""
    model = small().train()
    x = images()
    model(x)
    maps = F.conv2d(x, model.convs[0].weight, model.convs[0].bias, padding=2).relu()
    torch.testing.assert_close(model.convs[2].running_mean, 0.01 * maps.mean((0, 2, 3)))


@pytest.mark.parametrize("kind", [EfficientCapsNet, CapsNet])
def test_widths_of_the_decoder(kind: Any) -> None:
    assert [layer.out_features for layer in kind(1, 8, 3, decoder_hidden=[5, 7]).decoder.layers[::2]] == [5, 7, 64]


@pytest.mark.parametrize(("size", "kernel", "places"), SIZES, ids=str)
def test_primary_capsules_follow_from_the_image(size: Any, kernel: tuple[int, int], places: tuple[int, int]) -> None:
    model = EfficientCapsNet(3, size, 7, **SMALL)
    assert model.primary.conv.kernel_size == kernel
    assert model.encode(torch.rand(2, *model.image_shape)).shape == (2, 3 * places[0] * places[1], 4)


def test_depthwise_capsules_are_a_convolution_of_each_map() -> None:
    torch.manual_seed(0)
    layer = DepthwisePrimaryCaps(2, 3, (3, 2), stride=(1, 2), dtype=torch.float64)
    image = DepthwisePrimaryCaps(2, 3, (3, 2), stride=(1, 2), flatten=False, squash="identity", dtype=torch.float64)
    image.load_state_dict(layer.state_dict())
    x = torch.randn(B, 6, 5, 6, dtype=torch.float64)
    assert layer.grid((5, 6)) == (3, 3)
    found, poses = layer(x), image(x)
    assert found.shape == (B, 2 * 3 * 3, 3) and poses.shape == (B, 2, 3, 3, 3)
    for t in range(2):
        for k in range(3):
            n = 3 * t + k
            alone = F.conv2d(x[:, n : n + 1], layer.conv.weight[n : n + 1], layer.conv.bias[n : n + 1], (1, 2))
            assert_same(poses[:, t, k], alone[:, 0])
    assert_same(found.view(B, 2, 3, 3, 3).movedim(-1, 2), plain.squash(poses.movedim(2, -1), "exp").movedim(-1, 2))
