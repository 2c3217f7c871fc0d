"""Slim convolutional capsules against a loop over types, windows and positions; memory and arguments."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from capsfast.environment import native
from capsfast.nn import SlimConvCaps2d, SlimConvCaps3d, SlimConvTransposeCaps2d, SlimConvTransposeCaps3d, _blocks
from capsfast.nn.routing.base import Routing

from .support import plain
from .support.backends import Backend, assert_path, recorded_ops
from .support.plain import assert_alike, assert_same, gradients, on_cpu
from .support.routings import ROUTINGS as ROWS
from .support.routings import randomize

B, I, J, K, D = 2, 3, 4, 3, 5
SIZE = {2: (5, 4), 3: (3, 4, 3)}
OF_VOTES = [name for name, row in ROWS.items() if row.of_votes]
each_of_votes = pytest.mark.parametrize("name", OF_VOTES)


def kernel_of(layer: Any, i: int, offset: tuple[int, ...]) -> Tensor:
    """The matrix ``[J D, K]`` of input type i at one place of the window."""
    weight = layer.conv.weight[(..., *offset)]
    if isinstance(layer, SlimConvTransposeCaps2d):
        rows = weight if layer.shared else weight[i * K : (i + 1) * K]
        return rows.T
    return weight if layer.shared else weight[i * J * D : (i + 1) * J * D]


def meetings(layer: Any, before: tuple[int, ...], after: tuple[int, ...]) -> list[Any]:
    """All triples (position before, position after, place of the window)."""
    # A convolution steps through its output, a transposed one through its input.
    if isinstance(layer, SlimConvTransposeCaps2d):
        return plain.meetings(layer, after, before)
    return [(source, target, offset) for target, source, offset in plain.meetings(layer, before, after)]


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
    return plain.at_samples(votes, votes.dim() - 4)


def to_image(value: Tensor, after: tuple[int, ...]) -> Tensor:
    return plain.to_image(value, B, after)


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
        {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 0), "dilation": (1, 2)},
        {"size": (10, 14)},
    ),
    "up own kernels": (SlimConvTransposeCaps2d, {"kernel_size": 2, "padding": 0, "shared": False}, {}),
    "up 3d": (SlimConvTransposeCaps3d, {"kernel_size": (1, 2, 2), "stride": (1, 2, 1), "padding": 0}, {}),
}


OPTIONS: tuple[dict[str, Any], ...] = ({}, {"bias": True, "learned_logits": True, "squash": "exp"}, {"softmax": "in"})


@on_cpu
@pytest.mark.parametrize(
    ("window", "options"),
    [
        (window, options)
        for n, window in enumerate(WINDOWS)
        for options in (OPTIONS if "all" in window else (OPTIONS[n % len(OPTIONS)],))
    ],
    ids=str,
)
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
    votes, held = looped_votes(layer, poses, after), layer.routing
    assert_same(layer.votes(poses, **of_call), votes)
    wanted, wanted_c = plain.route(at_positions(votes), 3, held.logits, held.bias, held.softmax, held.squash)
    assert_same(c, to_image(wanted_c, after))
    assert_alike(v, to_image(wanted, after), leaves)
    with recorded_ops() as ops:
        gradients((layer(poses, **of_call),), leaves)
    assert_path(by, "route_votes", ops)


@on_cpu
@pytest.mark.parametrize(
    "given",
    [{}, {"bias": True, "learned_logits": True, "squash": "unit", "num_iterations": 2}, {"out_types": 1}],
    ids=str,
)
def test_softmax_and_squash_over_all_positions(by: Backend, given: dict[str, Any]) -> None:
    given = {"out_types": J} | given
    layer = SlimConvCaps2d(I, in_dim=K, out_dim=D, softmax="everywhere", backend=by.name, dtype=torch.float64, **given)
    randomize(layer)
    poses, routing = poses_of(2), layer.routing
    v, c = layer(poses, return_coupling=True)
    options = (routing.num_iterations, routing.logits, routing.bias, routing.squash)
    wanted, wanted_c = plain.route_everywhere(layer.votes(poses), *options)
    assert_same((v, c), (wanted, wanted_c))
    assert_alike(layer(poses), wanted, [poses, *layer.parameters()])


def mean_activation(layer: Any, activation: Tensor, after: tuple[int, ...]) -> Tensor:
    """``[B, I, *spatial]``, the mean over the positions that make a vote; 0 if there is none."""
    of: dict[tuple[int, ...], list[Tensor]] = {}
    for source, target, _ in meetings(layer, tuple(activation.shape[2:]), after):
        of.setdefault(target, []).append(activation[(..., *source)])
    nothing = [activation.new_zeros(activation.shape[:2])]
    each = [torch.stack(of.get(target, nothing)).mean(0) for target in itertools.product(*map(range, after))]
    return torch.stack(each, 2).view(*activation.shape[:2], *after)


class Weighted(Routing):
    """The mean vote, weighted by the activations."""

    uses_activation = True

    def route(self, votes: Any, activation: Tensor | None) -> tuple[Tensor, Tensor]:
        moments = votes.moments(activation=activation)
        return moments.first, moments.mass


def weighted(votes: Tensor, a: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return (a[..., None, None] * votes).sum(1) / J, (a.sum(1, keepdim=True) / J).expand(-1, J)


@pytest.mark.rows(12)
@pytest.mark.parametrize(
    ("routing", "window"),
    [
        *itertools.product(OF_VOTES, ["2d own kernels", "3d to one", "up"]),
        *itertools.product([Weighted], ["2d all", "3d", "up all"]),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_routing_at_every_position(routing: Any, window: str) -> None:
    """The activation of a vote is the mean over its window."""
    kind, given, of_call = WINDOWS[window]
    torch.manual_seed(0)
    layer = kind(I, J, K, D, **given, routing=routing, dtype=torch.float64)
    randomize(layer)
    poses = poses_of(2 if layer.conv.weight.dim() == 4 else 3)
    after = of_call.get("size") or layer.grid(poses.shape[3:])
    votes = at_positions(looped_votes(layer, poses, after))
    activation = torch.rand(B, I, *poses.shape[3:], dtype=torch.float64).requires_grad_()
    means = plain.at_samples(mean_activation(layer, activation, after), len(after))
    definition = weighted if routing is Weighted else ROWS[routing].definition
    wanted = tuple(to_image(each, after) for each in definition(votes, means, layer.routing, poses))
    if routing == "dynamic":
        assert_same(layer(poses), wanted[0])
    else:
        assert_alike(layer(poses, activation, **of_call), wanted, [poses, activation, *layer.parameters()])


@each_of_votes
@pytest.mark.parametrize("window", ["2d all", "up all"])
def test_votes_that_are_of_no_position(name: str, window: str) -> None:
    """Votes and activations are 0 if a window lies in the padding, or if no kernel reaches the position."""
    kind, given, _ = WINDOWS[window]
    layer = kind(I, J, K, D, **{**given, "conv_bias": False}, routing=name)
    poses, activation = poses_of(2, torch.float32), torch.rand(B, I, *SIZE[2]).requires_grad_()
    nowhere = ~(layer.votes(poses) != 0).any(1).any(1).any(1)
    assert nowhere.any()
    found = layer(poses) if name == "dynamic" else layer(poses, activation)
    found = (found,) if name == "dynamic" else tuple(found)
    everything = (*found, *gradients(found, [poses, activation, *layer.parameters()]))
    assert all(tensor.isfinite().all() for tensor in everything)


class Stored(TorchDispatchMode):
    """How many numbers each operation in the block wrote to new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Any] = {}  # keeps tensors alive, so that no address is reused
        self.numel: list[tuple[int, str]] = []

    def _new(self, values: Any) -> Iterator[Tensor]:
        for leave in tree_leaves(values):
            if isinstance(leave, Tensor) and leave.untyped_storage().data_ptr() not in self.seen:
                self.seen[leave.untyped_storage().data_ptr()] = leave.untyped_storage()
                yield leave

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        list(self._new((args, kwargs)))
        found = func(*args, **(kwargs or {}))
        for tensor in self._new(found):
            self.numel.append((tensor.untyped_storage().nbytes() // tensor.element_size(), str(func)))
        return found

    def larger_than(self, numel: float) -> list[str]:
        return [name for size, name in self.numel if size > numel]


@pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")
@pytest.mark.parametrize("window", ["2d", "2d own kernels", "3d", "up", "up 3d"])
def test_votes_are_in_memory_once(window: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides votes less than a twentieth, and in the backward their gradient once; positions after or before types."""
    monkeypatch.setattr(_blocks, "limits", lambda poses: _blocks.Limits(2**30, 2**30))  # all positions in one block
    kind, given, _ = WINDOWS[window]
    layer = kind(30, J, K, D, **given)
    axes = layer.conv.weight.dim() - 2
    forms = [torch.contiguous_format]
    if layer.shared:  # otherwise types are joined to the channels, which copies the poses
        forms.append(torch.channels_last if axes == 2 else torch.channels_last_3d)
    for form in forms:
        maps = torch.randn(2 * 30, K, *(9, 8, 7)[:axes]).contiguous(memory_format=form)
        poses = maps.unflatten(0, (2, 30)).requires_grad_()
        with Stored() as forward:
            v = layer(poses)
        votes = 30 * v.numel()
        conv, *more = forward.larger_than(votes / 20)
        assert "convolution" in conv and not more
        assert sum(size for size, _ in forward.numel) < 1.05 * votes
        with Stored() as backward:
            v.sum().backward()
        own = [each for each in backward.larger_than(votes / 20) if "convolution" not in each]
        assert len(own) == 1 and "dynamic_routing_backward" in own[0]


@each_of_votes
def test_every_routing_reads_the_votes_in_place(name: str) -> None:
    I = 60  # what EM keeps for a backward does not grow with I
    layer = SlimConvCaps2d(I, J, K, D, routing=name)
    poses, activation = torch.randn(2, I, K, 9, 8), torch.rand(2, I, 9, 8)
    with Stored() as stored, torch.no_grad():
        layer(poses, None if name == "dynamic" else activation)
    conv, *more = stored.larger_than(2 * I * J * D * 7 * 6 / 4)
    assert "convolution" in conv and not more


def test_starts_with_poses_of_about_the_same_length() -> None:
    torch.manual_seed(0)
    for layer in (
        SlimConvCaps2d(6, 5, 8, 16, 3, padding=1, squash="identity", num_iterations=1),
        SlimConvCaps2d(6, 5, 8, 16, 3, padding=1, squash="identity", num_iterations=1, softmax="in"),
        SlimConvCaps3d(6, 5, 8, 16, 3, padding=1, squash="identity", num_iterations=1),
        SlimConvTransposeCaps2d(6, 5, 8, 16, squash="identity", num_iterations=1),
    ):
        poses = torch.randn(2, 6, 8, *(6,) * (layer.conv.weight.dim() - 2))
        before, after = (torch.linalg.vector_norm(each, dim=2).mean() for each in (poses, layer(poses)))
        assert 1 < after / before < 3


def test_text_and_state() -> None:
    layer = SlimConvCaps2d(I, J, K, D, (3, 2), 2, bias=True, learned_logits=True, softmax="everywhere", shared=False)
    assert "3, 4, 3, 5, kernel_size=(3, 2), stride=(2, 2), shared=False, softmax='everywhere'" in repr(layer)
    assert "num_iterations=3, learned_logits=True, bias=True" in repr(layer)
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {
        "conv.weight": (I * J * D, K, 3, 2),
        "routing.logits": (I, J),
        "routing.bias": (J, D),
    }
    assert layer.routing.bias.tolist() == [[pytest.approx(0.1)] * D] * J
    assert SlimConvTransposeCaps2d(I, J, K, D).conv.weight.shape == (K, J * D, 4, 4)
    assert sum(parameter.numel() for parameter in SlimConvCaps3d(I, J, K, D).parameters()) == J * D * K * 27
