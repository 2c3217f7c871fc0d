"""ConvCaps2d against a direct loop over places, windows and capsules."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capsfast.nn import ConvCaps2d, FlattenCaps, Groups, LowRank, PrimaryCaps, SharedWeight, Weight

from .support import plain
from .support.backends import Backend, assert_path, recorded_ops
from .support.plain import assert_alike, assert_same, on_cpu

B, C, J, K, D = 2, 4, 6, 3, 5
SIZE = (5, 6)


def looped(layer: ConvCaps2d, poses: Tensor) -> Tensor:
    """At every place, routes the capsules inside the image, group by group."""
    routing, (kh, kw), grid = layer.routing, layer.kernel_size, layer.grid(poses.shape[3:])
    groups = routing.held.groups
    out = poses.new_zeros(B, J, D, *grid)
    found = plain.meetings(layer, poses.shape[3:], grid)
    for place, g in itertools.product(itertools.product(*map(range, grid)), range(groups)):
        types, outputs = range(g * C // groups, (g + 1) * C // groups), slice(g * J // groups, (g + 1) * J // groups)
        seen = [(at, offset) for other, at, offset in found if other == place]
        if not seen:
            continue
        capsules = [poses[:, c, :, row, column] for c in types for (row, column), _ in seen]
        of_window = [(c * kh + dy) * kw + dx for c in types for _, (dy, dx) in seen]
        v, _ = plain.route(
            plain.votes(torch.stack(capsules, 1), routing.W[of_window]),
            routing.num_iterations,
            None if routing.logits is None else routing.logits[of_window],
            None if routing.bias is None else routing.bias[outputs],
            routing.softmax,
        )
        out[(slice(None), outputs, slice(None), *place)] = v
    return out


WINDOWS: dict[str, dict[str, Any]] = {
    "3x3": {},
    "2x3": {"kernel_size": (2, 3)},
    "1x1": {"kernel_size": 1},
    "stride": {"stride": (2, 1)},
    "padding": {"padding": (1, 2)},
    "dilation": {"kernel_size": (2, 3), "dilation": (3, 2)},
    "groups": {"weight": Groups(2)},
    "all": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 1), "dilation": (2, 3), "weight": Groups(2)},
}
ROUTINGS: dict[str, dict[str, Any]] = {
    "paper": {},
    "in": {"softmax": "in", "num_iterations": 2},
    "learned": {"learned_logits": True},
}


def layer_of(by: Backend, **options: Any) -> ConvCaps2d:
    layer = ConvCaps2d(C, J, K, D, **options, backend=by.name, dtype=torch.float64)
    if layer.routing.logits is not None:
        nn.init.normal_(layer.routing.logits)
    return layer


@pytest.mark.rows(20)
@on_cpu
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("windows", WINDOWS)
def test_is_a_loop_over_places(by: Backend, windows: str, routing: str) -> None:
    layer = layer_of(by, **WINDOWS[windows], **ROUTINGS[routing])
    poses = torch.randn(B, C, K, *SIZE, dtype=torch.float64, requires_grad=True)
    assert_alike(layer(poses), looped(layer, poses), [poses, *layer.parameters()])


@on_cpu
@pytest.mark.parametrize("softmax", ["out", "in"])
def test_padding_takes_no_part(by: Backend, softmax: str) -> None:
    layer = layer_of(by, padding=2, softmax=softmax, bias=True)
    poses = torch.randn(B, C, K, *SIZE, dtype=torch.float64)
    v, c = layer(poses, return_coupling=True)
    assert_same(v, layer(poses))
    inside = F.pad(torch.ones(SIZE), (2, 2, 2, 2)).unfold(0, 3, 1).unfold(1, 3, 1).flatten(2).bool()  # [H', W', 9]
    inside = inside.repeat(1, 1, C)
    assert c.shape == (B, *layer.grid(SIZE), C * 9, J)
    assert not c[:, ~inside].any()
    assert c[:, inside].min() > 0
    if softmax == "out":
        assert_same(c.sum(4)[:, inside], torch.ones(B, int(inside.sum()), dtype=torch.float64))


@on_cpu
def test_the_votes_are_not_unfolded(by: Backend) -> None:
    layer = ConvCaps2d(C, J, K, D, padding=1, backend=by.name)
    poses = torch.randn(20, C, K, *SIZE, requires_grad=True)
    with recorded_ops() as ops:
        layer(poses).sum().backward()
    assert_path(by, "dynamic_routing", ops)
    assert layer.unfold(poses).shape == (20 * 5 * 6, C * 9, K) and layer.routing.W.shape == (C * 9, J, D, K)


@on_cpu
@pytest.mark.parametrize("weight", [LowRank(2), LowRank(2, "UV"), SharedWeight(), Groups(2, LowRank(2))], ids=str)
def test_every_weight_goes_here_too(by: Backend, weight: Weight) -> None:
    layer = layer_of(by, padding=1, weight=weight)
    poses = torch.randn(B, C, K, *SIZE, dtype=torch.float64, requires_grad=True)
    v = layer(poses)
    assert v.shape == (B, J, D, *SIZE)
    window = F.pad(poses, (1, 1, 1, 1))[..., 2:5, 3:6]
    assert_same(v[..., 2, 3], layer.routing(FlattenCaps()(window)))
    v.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())


def test_the_initial_deviation_keeps_the_length() -> None:
    """With equal coupling the weighted sum is as long as the input capsules, with one iteration twice as long.

    Where 1 / coupling is above 1.15 times the size of an output capsule, further iterations need shorter sums.
    """
    poses = torch.randn(16, 8, 6, 7, 7)
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 12),
        ({"softmax": "in"}, 8 * 9),
        ({"weight": Groups(4)}, 3),
        ({"weight": LowRank(8)}, 12),
    ]
    for num_iterations, out_dim in itertools.product((1, 3), (10, 2)):
        for options, share in cases:
            wanted = 2 if num_iterations == 1 else min(1, (1.152 * out_dim / share) ** 0.5)
            layer = ConvCaps2d(8, 12, 6, out_dim, 3, num_iterations=num_iterations, squash="identity", **options)
            layer.routing.num_iterations = 1
            gain = layer(poses).norm(dim=2).square().mean().sqrt() / poses.norm(dim=2).square().mean().sqrt()
            assert gain.item() == pytest.approx(0.88 * wanted, rel=0.1)  # 0.88: W is cut at two deviations


def test_a_deep_stack_neither_fades_nor_saturates() -> None:
    stack = nn.Sequential(
        PrimaryCaps(1, 8, 4, 3, 1, 1, squash="exp", flatten=False),
        *(ConvCaps2d(8, 8, 4, 4, padding=1, num_iterations=1, squash="exp") for _ in range(12)),
    )
    lengths = stack(torch.rand(4, 1, 8, 8)).norm(dim=2)
    assert 0.2 < lengths.mean().item() < 0.9
