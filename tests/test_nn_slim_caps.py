"""Slim convolutional capsules against a loop over types, windows and positions."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import capsfast
from capsfast.nn import (
    SlimConvCaps2d,
    SlimConvCaps3d,
    SlimConvTransposeCaps2d,
    SlimConvTransposeCaps3d,
)
from capsfast.nn.routing.base import Routing

from .support import plain
from .support.backends import Backend, assert_path, recorded_ops
from .support.plain import assert_same, on_cpu
from .support.routings import ROUTINGS as ROWS
from .support.routings import randomize

B, I, J, K, D = 2, 3, 4, 3, 5
SIZE = {2: (5, 4), 3: (3, 4, 3)}
each_name = pytest.mark.parametrize("name", ROWS)
each_of_votes = pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.of_votes])


def kernel_of(layer: Any, i: int, offset: tuple[int, ...]) -> Tensor:
    """The matrix ``[J D, K]`` of input type i at one place of the window."""
    weight = layer.conv.weight[(..., *offset)]
    if isinstance(layer, SlimConvTransposeCaps2d):
        rows = weight if layer.shared else weight[i * K : (i + 1) * K]
        return rows.T
    return weight if layer.shared else weight[i * J * D : (i + 1) * J * D]


def meetings(layer: Any, before: tuple[int, ...], after: tuple[int, ...]) -> list[Any]:
    """(position before, position after, place of the window), all that there are."""
    found = []
    for offset in itertools.product(*map(range, layer.kernel_size)):
        # A convolution steps through its input, a transposed one through its output.
        stepping = before if isinstance(layer, SlimConvTransposeCaps2d) else after
        for step in itertools.product(*map(range, stepping)):
            place = tuple(
                at * s - p + o * d
                for at, s, p, o, d in zip(step, layer.stride, layer.padding, offset, layer.dilation, strict=True)
            )
            other = after if isinstance(layer, SlimConvTransposeCaps2d) else before
            if all(0 <= at < n for at, n in zip(place, other, strict=True)):
                found.append(
                    (step, place, offset) if isinstance(layer, SlimConvTransposeCaps2d) else (place, step, offset)
                )
    return found


def looped_votes(layer: Any, poses: Tensor, after: tuple[int, ...]) -> Tensor:
    """``[B, I, J, D, *spatial]``."""
    at: dict[tuple[int, ...], list[Tensor]] = {}
    found = meetings(layer, tuple(poses.shape[3:]), after)
    for source, target, offset in found:
        each = [poses[(slice(None), i, slice(None), *source)] @ kernel_of(layer, i, offset).T for i in range(I)]
        at.setdefault(target, []).append(torch.stack(each, 1))
    rows = [
        sum(at.get(target, []), poses.new_zeros(len(poses), I, J * D))
        for target in itertools.product(*map(range, after))
    ]
    votes = torch.stack(rows, 3)
    if layer.conv.bias is not None:
        votes = votes + (layer.conv.bias.view(-1, J * D) if not layer.shared else layer.conv.bias)[..., None]
    return votes.view(len(poses), I, J, D, *after)


def at_positions(votes: Tensor) -> Tensor:
    """``[B, I, J, D, *spatial]`` to ``[B S, I, J, D]``."""
    return votes.flatten(4).permute(0, 4, 1, 2, 3).flatten(0, 1)


def to_image(value: Tensor, after: tuple[int, ...]) -> Tensor:
    return value.unflatten(0, (B, -1)).movedim(1, -1).unflatten(-1, after)


def gradients(found: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(2)
    seeds = [torch.randn(each.shape, dtype=each.dtype) for each in found]
    got = torch.autograd.grad(found, leaves, seeds, allow_unused=True)
    return [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(leaves, got, strict=True)]


def poses_of(axes: int, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(B, I, K, *SIZE[axes], dtype=dtype).requires_grad_()


WINDOWS: dict[str, tuple[type[nn.Module], dict[str, Any], dict[str, Any]]] = {
    "2d": (SlimConvCaps2d, {}, {}),
    "2d 1x1": (SlimConvCaps2d, {"kernel_size": 1}, {}),
    "2d all": (
        SlimConvCaps2d,
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 2), "dilation": (2, 1), "conv_bias": True},
        {},
    ),
    "2d own kernels": (SlimConvCaps2d, {"shared": False, "padding": 1, "stride": 2, "conv_bias": True}, {}),
    "2d to one": (SlimConvCaps2d, {"kernel_size": SIZE[2]}, {}),
    "3d to one": (SlimConvCaps3d, {"kernel_size": SIZE[3]}, {}),
    "3d": (SlimConvCaps3d, {"kernel_size": (2, 3, 1), "stride": (1, 2, 1), "padding": (1, 0, 1)}, {}),
    "3d own kernels": (SlimConvCaps3d, {"kernel_size": 2, "dilation": (2, 1, 1), "shared": False}, {}),
    "up": (SlimConvTransposeCaps2d, {}, {}),
    "up all": (
        SlimConvTransposeCaps2d,
        {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2), "dilation": (1, 2)},
        {},
    ),
    "up own kernels": (SlimConvTransposeCaps2d, {"kernel_size": 2, "padding": 0, "shared": False}, {}),
    "up to a size": (SlimConvTransposeCaps2d, {"kernel_size": 3}, {"size": (10, 7)}),
    "up 3d": (SlimConvTransposeCaps3d, {"kernel_size": (1, 2, 2), "stride": (1, 2, 1), "padding": 0}, {}),
}


@on_cpu
@pytest.mark.parametrize(
    "options", [{}, {"bias": True, "learned_logits": True, "squash": "exp"}, {"softmax": "in"}], ids=str
)
@pytest.mark.parametrize("window", WINDOWS)
def test_is_a_loop_over_positions(by: Backend, window: str, options: dict[str, Any]) -> None:
    kind, given, of_call = WINDOWS[window]
    torch.manual_seed(0)
    layer = kind(I, J, K, D, **given, **options, backend=by.name, dtype=torch.float64)
    randomize(layer)
    poses = poses_of(2 if layer.conv.weight.dim() == 4 else 3)
    leaves = [poses, *layer.parameters()]
    v, c = layer(poses, return_coupling=True, **of_call)
    after = tuple(v.shape[3:])
    assert after == (of_call.get("size") or layer.grid(poses.shape[3:]))
    routing = layer.routing
    votes = looped_votes(layer, poses, after)
    assert_same(layer.votes(poses, **of_call), votes)
    wanted, wanted_c = plain.route(
        at_positions(votes), 3, routing.logits, routing.bias, routing.softmax, routing.squash
    )
    assert_same(v, to_image(wanted, after))
    assert_same(c, to_image(wanted_c, after))
    assert_same(gradients((v,), leaves), gradients((to_image(wanted, after),), leaves))
    with recorded_ops() as ops:
        gradients((layer(poses, **of_call),), leaves)
    assert_path(by, "route_votes", ops)


@on_cpu
@pytest.mark.parametrize(
    "given",
    [{}, {"bias": True, "learned_logits": True, "squash": "unit", "num_iterations": 2}, {"out_types": 1}],
    ids=str,
)
def test_softmax_over_all_positions(by: Backend, given: dict[str, Any]) -> None:
    """Rajasegaran et al. 2019."""
    given = {"out_types": J} | given
    layer = SlimConvCaps2d(I, in_dim=K, out_dim=D, softmax="everywhere", backend=by.name, dtype=torch.float64, **given)
    randomize(layer)
    poses = poses_of(2)
    v, c = layer(poses, return_coupling=True)
    votes = layer.votes(poses)
    routing = layer.routing
    logits = torch.zeros_like(votes[:, :, :, 0])
    if routing.logits is not None:
        logits = logits + routing.logits[..., None, None]
    for _ in range(routing.num_iterations):
        wanted_c = logits.flatten(2).softmax(2).view_as(logits)
        s = torch.einsum("bijyx,bijdyx->bjdyx", wanted_c, votes)
        s = s if routing.bias is None else s + routing.bias[..., None, None]
        wanted = capsfast.squash(s, 2, kind=routing.squash)
        logits = logits + torch.einsum("bijdyx,bjdyx->bijyx", votes, wanted)
    assert_same((v, c), (wanted, wanted_c))
    assert_same(c.sum((2, 3, 4)), torch.ones(B, I, dtype=torch.float64))
    leaves = [poses, *layer.parameters()]
    assert_same(gradients((v,), leaves), gradients((wanted,), leaves))
    assert_same(layer(poses), v)


@each_name
@pytest.mark.parametrize("window", ["2d own kernels", "2d to one", "3d own kernels", "3d to one", "up"])
def test_every_routing_at_every_position(name: str, window: str) -> None:
    kind, given, _ = WINDOWS[window]
    torch.manual_seed(0)
    if not ROWS[name].of_votes:
        with pytest.raises(ValueError, match="input capsules"):
            kind(I, J, K, D, **given, routing=name)
        return
    layer = kind(I, J, K, D, **given, routing=name, dtype=torch.float64)
    randomize(layer)
    poses = poses_of(2 if layer.conv.weight.dim() == 4 else 3)
    after = layer.grid(poses.shape[3:])
    votes = at_positions(looped_votes(layer, poses, after))
    if name == "dynamic":
        wanted = ROWS[name].definition(votes, torch.ones(1), layer.routing, poses)[0]
        assert_same(layer(poses), to_image(wanted, after))
        return
    activation = torch.rand(B, I, *poses.shape[3:], dtype=torch.float64).requires_grad_()
    found = layer(poses, activation)
    means = at_positions(mean_activation(layer, activation, after)[:, :, None, None])[:, :, 0, 0]
    wanted = tuple(to_image(each, after) for each in ROWS[name].definition(votes, means, layer.routing, poses))
    assert_same(tuple(found), wanted)
    leaves = [poses, activation, *layer.parameters()]
    assert_same(gradients(tuple(found), leaves), gradients(wanted, leaves))


@each_of_votes
@pytest.mark.parametrize("window", ["2d all", "up all"])
def test_votes_that_are_of_no_position(name: str, window: str) -> None:
    """They are 0, as are their activations, where a window lies in the padding or no kernel reaches."""
    kind, given, _ = WINDOWS[window]
    layer = kind(I, J, K, D, **{**given, "conv_bias": False}, routing=name)
    poses, activation = poses_of(2, torch.float32), torch.rand(B, I, *SIZE[2]).requires_grad_()
    nowhere = ~(layer.votes(poses) != 0).any(1).any(1).any(1)
    assert nowhere.any()
    found = layer(poses) if name == "dynamic" else layer(poses, activation)
    found = (found,) if name == "dynamic" else tuple(found)
    everything = (*found, *gradients(found, [poses, activation, *layer.parameters()]))
    assert all(each.isfinite().all() for each in everything)


def mean_activation(layer: Any, activation: Tensor, after: tuple[int, ...]) -> Tensor:
    """``[B, I, *spatial]``, of the positions that a vote is of; 0 where there is none."""
    of: dict[tuple[int, ...], list[Tensor]] = {}
    for source, target, _ in meetings(layer, tuple(activation.shape[2:]), after):
        of.setdefault(target, []).append(activation[(..., *source)])
    nothing = activation.new_zeros(activation.shape[:2])
    each = [
        torch.stack(of[target]).mean(0) if target in of else nothing for target in itertools.product(*map(range, after))
    ]
    return torch.stack(each, 2).view(*activation.shape[:2], *after)


class Weighted(Routing):
    """The mean vote, weighted by the activations, which are looked at."""

    uses_activation = True

    def route(self, votes: Any, activation: Tensor | None) -> tuple[Tensor, Tensor]:
        moments = votes.moments(activation=activation)
        return moments.first, moments.mass


@pytest.mark.parametrize("window", ["2d all", "3d", "up", "up all", "up to a size"])
def test_activations_are_means_over_the_window(window: str) -> None:
    kind, given, of_call = WINDOWS[window]
    layer = kind(I, J, K, D, **given, routing=Weighted, dtype=torch.float64)
    poses = poses_of(2 if layer.conv.weight.dim() == 4 else 3)
    activation = torch.rand(B, I, *poses.shape[3:], dtype=torch.float64).requires_grad_()
    found = layer(poses, activation, **of_call)
    after = tuple(found.poses.shape[3:])
    means = mean_activation(layer, activation, after)
    wanted = (means[:, :, None, None] * layer.votes(poses, **of_call)).sum(1) / J
    mass = (means.sum(1, keepdim=True) / J).expand(-1, J, *after)
    assert_same(tuple(found), (wanted, mass))
    leaves = [poses, activation, *layer.parameters()]
    assert_same(gradients(tuple(found), leaves), gradients((wanted, mass), leaves))
    assert layer(poses, **of_call).activations.shape == (B, J, *after)
