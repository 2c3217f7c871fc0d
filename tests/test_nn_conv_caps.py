"""Convolutional capsules against a direct loop over places, windows and capsules."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capsfast.nn import ConvCaps1d, ConvCaps2d, ConvCaps3d, Groups, LowRank, PrimaryCaps, SharedWeight, Weight

from .support import plain
from .support.backends import Backend, assert_path, recorded_ops
from .support.plain import assert_alike, assert_same, on_cpu

B, C, J, K, D = 2, 4, 6, 3, 5
LAYERS = {1: ConvCaps1d, 2: ConvCaps2d, 3: ConvCaps3d}
SIZES = {1: (9,), 2: (5, 6), 3: (3, 4, 5)}


def looped(layer: ConvCaps2d, poses: Tensor) -> Tensor:
    """At every place, routes the capsules inside the image, group by group."""
    routing, grid = layer.routing, layer.grid(poses.shape[3:])
    groups = routing.held.groups
    out = poses.new_zeros(B, math.prod(grid), J, D)
    u = plain.windows(layer, poses, grid)
    inside = plain.windows(layer, torch.ones_like(poses[:1, :, 0]), grid)[0].bool()
    for place, g in itertools.product(range(len(inside)), range(groups)):
        outputs = slice(g * J // groups, (g + 1) * J // groups)
        of_group = torch.arange(inside.shape[1]).unflatten(0, (groups, -1))[g]
        seen = of_group[inside[place, of_group]]
        if len(seen):
            out[:, place, outputs], _ = plain.route(
                plain.votes(u[:, place, seen], routing.W[seen]),
                routing.num_iterations,
                None if routing.logits is None else routing.logits[seen],
                None if routing.bias is None else routing.bias[outputs],
                routing.softmax,
            )
    return plain.to_image(out.flatten(0, 1), B, grid)


ALL: dict[int, dict[str, Any]] = {
    1: {"kernel_size": 3, "stride": 2, "padding": (2,), "dilation": 2},
    2: {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 1), "dilation": (2, 3)},
    3: {"kernel_size": (2, 3, 2), "stride": (2, 1, 3), "padding": (1, 0, 2), "dilation": (1, 1, 2)},
}
WINDOWS: dict[str, tuple[int, dict[str, Any]]] = {
    "3x3": (2, {}),
    "2x3": (2, {"kernel_size": (2, 3)}),
    "1x1": (2, {"kernel_size": 1}),
    "stride": (2, {"stride": (2, 1)}),
    "padding": (2, {"padding": (1, 2)}),
    "dilation": (2, {"kernel_size": (2, 3), "dilation": (3, 2)}),
    "groups": (2, {"weight": Groups(2)}),
    "3": (1, {}),
    "3x3x3": (3, {"padding": 1}),
    **{f"all of {axes} axes": (axes, {**options, "weight": Groups(2)}) for axes, options in ALL.items()},
}
ROUTINGS: dict[str, dict[str, Any]] = {
    "paper": {},
    "in": {"softmax": "in", "num_iterations": 2},
    "learned": {"learned_logits": True},
}


def layer_of(by: Backend, axes: int = 2, **options: Any) -> ConvCaps2d:
    layer = LAYERS[axes](C, J, K, D, **options, backend=by.name, dtype=torch.float64)
    if layer.routing.logits is not None:
        nn.init.normal_(layer.routing.logits)
    return layer


def images(axes: int = 2) -> Tensor:
    return torch.randn(B, C, K, *SIZES[axes], dtype=torch.float64, requires_grad=True)


@pytest.mark.rows(24)
@on_cpu
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("windows", WINDOWS)
def test_is_a_loop_over_places(by: Backend, windows: str, routing: str) -> None:
    axes, options = WINDOWS[windows]
    layer, poses = layer_of(by, axes, **options, **ROUTINGS[routing]), images(axes)
    assert_alike(layer(poses), looped(layer, poses), [poses, *layer.parameters()])


@on_cpu
@pytest.mark.parametrize("axes", LAYERS)
@pytest.mark.parametrize("softmax", ["out", "in"])
def test_padding_takes_no_part(by: Backend, softmax: str, axes: int) -> None:
    layer, poses = layer_of(by, axes, padding=2, softmax=softmax, bias=True), images(axes)
    v, c = layer(poses, return_coupling=True)
    assert_same(v, layer(poses))
    grid = layer.grid(SIZES[axes])
    inside = plain.windows(layer, torch.ones(1, C, *SIZES[axes]), grid)[0].bool()
    assert torch.equal(inside.repeat(B, 1), layer.inside(poses)) and not inside.all()
    assert c.shape == (B, *grid, C * 3**axes, J)
    c = c.flatten(1, axes)
    assert not c[:, ~inside].any()
    assert c[:, inside].min() > 0
    if softmax == "out":
        assert_same(c.sum(3)[:, inside], torch.ones(B, int(inside.sum()), dtype=torch.float64))


@on_cpu
def test_the_votes_are_not_unfolded(by: Backend) -> None:
    layer = ConvCaps2d(C, J, K, D, padding=1, backend=by.name)
    poses = torch.randn(20, C, K, *SIZES[2], requires_grad=True)
    with recorded_ops() as ops:
        layer(poses).sum().backward()
    assert_path(by, "dynamic_routing", ops)
    assert layer.unfold(poses).shape == (20 * 5 * 6, C * 9, K) and layer.routing.W.shape == (C * 9, J, D, K)


@on_cpu
@pytest.mark.parametrize("axes", LAYERS)
@pytest.mark.parametrize("weight", [LowRank(2), LowRank(2, "UV"), SharedWeight(), Groups(2, LowRank(2))], ids=str)
def test_every_weight_goes_here_too(by: Backend, weight: Weight, axes: int) -> None:
    layer, poses = layer_of(by, axes, padding=1, weight=weight), images(axes)
    u = plain.windows(layer, poses, SIZES[axes])
    alone = torch.stack([layer.routing(u[:, place]) for place in range(u.shape[1])], 1)
    parameters = [*layer.parameters()]
    assert_alike(layer(poses), plain.to_image(alone.flatten(0, 1), B, SIZES[axes]), [poses, *parameters])
    assert all(gradient.any() for gradient in plain.gradients(layer(poses), parameters))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # batched gradients of Tensor.unfold
@pytest.mark.parametrize("axes", LAYERS)
@pytest.mark.parametrize("options", [{}, {"competition": "child"}, {"competition": "child", "pose_rows": 2}], ids=str)
def test_derivatives_of_every_kind(options: dict[str, Any], axes: int) -> None:
    options = {**options, "routing": "em", "num_iterations": 2, "backend": "reference", "dtype": torch.float64}
    layer = LAYERS[axes](1, 2, 2, 2, 2, padding=1, **options)
    poses = torch.randn(2, 1, 2, *(3, 2, 1)[:axes], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x).poses, poses, fast_mode=True)
    out = layer(poses).poses
    upstream = torch.randn(3, *out.shape, dtype=torch.float64)

    def gradient(upstream: Tensor) -> Tensor:
        return torch.autograd.grad(out, poses, upstream, retain_graph=True)[0]

    wanted = torch.stack([*map(gradient, upstream)])
    assert_same(torch.autograd.grad(out, poses, upstream, is_grads_batched=True, retain_graph=True)[0], wanted)
    assert_same(torch.func.vmap(gradient)(upstream), wanted)
    mapped = torch.func.vmap(lambda image: layer(image.unsqueeze(0)).poses.squeeze(0))(poses)
    assert_same(mapped, out)


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
