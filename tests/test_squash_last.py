"""squash_last=False in every layer with dynamic routing: squashing its output gives the usual output."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import capsfast
from capsfast.nn import ConvCaps2d, Groups, RoutedCaps, RoutingByAgreement, SlimConvCaps2d

B, I, J, K, D = 3, 6, 4, 5, 3
f64 = {"dtype": torch.float64}


def conv(**options: Any) -> nn.Module:
    return ConvCaps2d(2, J, K, D, 2, **f64, **options)


def slim(**options: Any) -> nn.Module:
    return SlimConvCaps2d(2, J, K, D, 2, **f64, **options)


def numbers(*size: int) -> Tensor:
    return torch.randn(*size, **f64)  # type: ignore[call-overload, no-any-return]


LAYERS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...], int]] = {
    "DynamicRouting": (lambda **o: capsfast.DynamicRouting(I, J, K, D, bias=True, **f64, **o), (B, I, K), 2),
    "groups": (lambda **o: capsfast.DynamicRouting(I, J, K, D, weight=Groups(2), **f64, **o), (B, I, K), 2),
    "RoutingByAgreement": (lambda **o: RoutingByAgreement(**o), (B, I, J, D), 2),
    "RoutedCaps": (lambda **o: RoutedCaps(I, J, K, D, routing="dynamic", **f64, **o), (B, I, K), 2),
    "windows": (conv, (B, 2, K, 4, 4), 2),
    "one softmax for all windows": (lambda **o: conv(competition="child", **o), (B, 2, K, 4, 4), 2),
    "slim": (slim, (B, 2, K, 4, 4), 2),
    "softmax and squash everywhere": (lambda **o: slim(softmax="everywhere", **o), (B, 2, K, 4, 4), 2),
}


def capsules(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found.poses  # type: ignore[no-any-return]


@pytest.mark.parametrize("num_iterations", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_passes_it_on(name: str, num_iterations: int) -> None:
    make, shape, dim = LAYERS[name]
    layer = make(num_iterations=num_iterations, squash="half")
    sums = make(num_iterations=num_iterations, squash="half", squash_last=False)
    sums.load_state_dict(layer.state_dict())
    u = numbers(*shape)
    s, v = capsules(sums(u)), capsules(layer(u))
    assert (s - v).abs().max() > 1e-3
    if name == "softmax and squash everywhere":
        s, v = s.flatten(2), v.flatten(2)
    torch.testing.assert_close(capsfast.squash(s, dim=dim, kind="half"), v)
    assert "squash_last=False" in repr(sums)


def test_a_network_takes_it_as_an_option() -> None:
    net = capsfast.models.CapsNet(1, 20, 3, conv_channels=4, primary_groups=2, squash_last=False)
    assert "squash_last=False" in repr(net)
    assert net(torch.rand(2, 1, 20, 20)).capsules.shape == (2, 3, 16)


def test_diagnosis_finds_no_saturation_where_nothing_squashes() -> None:
    u = torch.randn(8, 30, K)
    saturated, sums = (
        capsfast.diagnose(capsfast.DynamicRouting(30, J, K, D, init_std=5.0, squash_last=last), u)
        for last in (True, False)
    )
    assert saturated.saturation > 0.5
    assert sums.saturation == 0
