"""Every routing by name: against plain code, and in every layer that takes a routing."""

import copy
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

import capsfast
from capsfast.calls import arguments
from capsfast.environment import native
from capsfast.models import CapsNet
from capsfast.nn import ROUTINGS, ConvCaps1d, ConvCaps2d, ConvCaps3d, DynamicRouting, RoutedCaps, Routing, couplings
from capsfast.nn.dynamic_routing import fully_connected
from capsfast.nn.routing.base import lengths
from capsfast.nn.routing.names import options_of
from capsfast.nn.routing.votes import STRIDE, Votes, votes_of

from .support import plain
from .support.backends import Backend, Largest
from .support.plain import gradients
from .support.routings import ALONE, cases, randomize
from .support.routings import ROUTINGS as ROWS

B, I, J, D, K = 5, 11, 4, 6, 6
CASES = cases()
IDS = [" ".join([name, *(f"{option}={value}" for option, value in options.items())]) for name, options in CASES]
each_case = pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
each_name = pytest.mark.parametrize("name", ROWS)


def layer_of(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> RoutedCaps:
    torch.manual_seed(0)
    layer = RoutedCaps(I, J, K, D, routing=name, init_std=0.5, dtype=dtype, **options)
    randomize(layer)
    return layer


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    u = torch.randn(B, I, K, dtype=dtype).requires_grad_()
    return u, (0.2 + 0.7 * torch.rand(B, I, dtype=dtype)).requires_grad_()


def definition(layer: RoutedCaps, name: str, u: Tensor, activation: Tensor) -> tuple[Tensor, Tensor]:
    return ROWS[name].definition(plain.votes(u, layer.W), activation, layer.routing, u)


def test_every_routing_has_a_row() -> None:
    assert set(ROWS) == set(ROUTINGS)


@pytest.mark.rows(2 * len(CASES))
@plain.on_cpu
@each_case
def test_is_its_definition(name: str, options: dict[str, Any], by: Backend) -> None:
    layer = layer_of(name, **options)
    u, activation = inputs()
    leaves = [u, activation, *layer.parameters()]
    with capsfast.use_backend(by.name):
        plain.assert_alike(layer(u, activation), definition(layer, name, u, activation), leaves)


OF_MOMENTS = [case for case in CASES if case[0] in ("em", "variational")]


@plain.on_cpu
@pytest.mark.parametrize(("name", "options"), OF_MOMENTS, ids=[IDS[CASES.index(moment)] for moment in OF_MOMENTS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients_of_inactive_capsules(name: str, options: dict[str, Any], dtype: torch.dtype, by: Backend) -> None:
    """With one active capsule every variance is 0 and rounding decides the sign. Its gradients are not 0."""
    layer = layer_of(name, **options)
    u, activation = inputs()[0], torch.zeros(B, I, dtype=torch.float64)
    activation[:, 3] = 0.7
    activation.requires_grad_()
    exact = gradients(definition(layer, name, u, activation), [activation, u])
    with capsfast.use_backend(by.name):
        found = layer.to(dtype)(u.to(dtype), activation.to(dtype))
        gradient = gradients([tensor.double() for tensor in found], [activation, u])
    tolerance = 1e-10 if dtype == torch.float64 else 5e-3
    for got, want in zip(gradient, exact, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance * float(want.abs().max()))


@each_case
@pytest.mark.skipif(native.extension is None, reason="the definitions form the votes")
def test_votes_are_not_in_memory(name: str, options: dict[str, Any]) -> None:
    layer = layer_of(name, torch.float32, **options)
    u, activation = (tensor.detach().repeat(6, *(1,) * (tensor.dim() - 1)).requires_grad_() for tensor in inputs())
    with Largest() as largest:
        found = layer(u.float(), activation.float())
        gradients(tuple(found), [u, activation, *layer.parameters()])
    # EM routing keeps 4 D + 2 numbers of each output capsule in each iteration, however many input capsules there are.
    kept = len(getattr(layer.routing, "inverse_temperatures", ())) * (4 * D + 2)
    assert 0 < largest.numel <= 6 * B * J * max(I * D - 1, kept)


OF_VOTES = [name for name, row in ROWS.items() if row.of_votes]
ONCE = [(name, {"num_iterations": 1}) for name in OF_VOTES if "num_iterations" in options_of(ROUTINGS[name])]


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in OF_VOTES), *ONCE, ("cosine", {"exact": True})], ids=str
)
@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 5, 1, 1), (2, 3, 4, 5, 1, 1, 1), (1, 1, 1, 2, 1), (3, 3, 3, 3, 3, 3)], ids=str
)
def test_sizes_that_coincide_with_those_of_positions(
    name: str, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    """Votes with axes of positions are routed as the same votes without such axes."""
    B, I, J, D, *spatial = shape
    torch.manual_seed(0)
    routing = ROUTINGS[name](I, J, K, D, dtype=torch.float64, **ALONE.get(name, {}), **options)
    randomize(routing)
    votes = torch.randn(shape, dtype=torch.float64).requires_grad_()
    activation = torch.rand(B, I, *spatial, dtype=torch.float64).requires_grad_()
    masks = {"mask": torch.rand(B, I, *spatial) < 0.8, "out_mask": torch.rand(B, J, *spatial) < 0.8}
    leaves = [votes, activation, *routing.parameters()]
    for given in ({}, masks):
        found = routing(votes, activation, **given)
        assert found.poses.shape == (B, J, D, *spatial) and found.activations.shape == (B, J, *spatial)
        found = tuple(plain.at_samples(each, len(spatial)) for each in found)
        flat = {each: plain.at_samples(mask, len(spatial)) for each, mask in given.items()}
        wanted = routing(plain.at_samples(votes, len(spatial)), plain.at_samples(activation, len(spatial)), **flat)
        plain.assert_alike(found, wanted, leaves)


@each_case
def test_masked_capsules_are_not_there(name: str, options: dict[str, Any]) -> None:
    layer = layer_of(name, **options)
    u, activation = inputs()
    mask, out_mask = torch.ones(B, I, dtype=torch.bool), torch.ones(B, J, dtype=torch.bool)
    mask[:, -2:], mask[0] = False, False
    out_mask[:, -1], out_mask[1] = False, False
    wild = u.detach().masked_fill(~mask[..., None], torch.nan).requires_grad_()
    # With activations, and with the lengths of the input capsules as activations.
    for given in ((activation,), ()):
        found, wanted = (layer.capsules(each, *given, mask=mask, out_mask=out_mask) for each in (wild, u))
        leaves = [wild, *given, *layer.parameters()]
        assert all(tensor.isfinite().all() for tensor in (*found, *gradients(found, leaves)))
        plain.assert_same(tuple(found), tuple(wanted))
        assert not found.poses[:, -1].any() and not found.poses[1].any() and not found.activations[1].any()


@each_case
def test_one_parent_one_child_and_nothing_there(name: str, options: dict[str, Any]) -> None:
    for in_caps, out_caps in ((1, 1), (1, J), (I, 1)):
        torch.manual_seed(0)
        layer = RoutedCaps(in_caps, out_caps, K, D, routing=name, **options)
        for u in (torch.randn(3, in_caps, K), torch.zeros(3, in_caps, K), 1e3 * torch.randn(3, in_caps, K)):
            for activation in (None, torch.zeros(3, in_caps), torch.rand(3, in_caps)):
                leaf = u.clone().requires_grad_()
                found = layer(leaf, activation)
                assert found.poses.shape == (3, out_caps, D) and found.activations.shape == (3, out_caps)
                everything = (*found, *gradients(found, [leaf, *layer.parameters()]))
                assert all(tensor.isfinite().all() for tensor in everything)


@each_name
def test_pose_matrices(name: str) -> None:
    """Matrices of 2 rows equal vectors with the block-diagonal weight."""
    torch.manual_seed(0)
    layer = RoutedCaps(I, J, K, D, routing=name, pose_rows=2, dtype=torch.float64)
    whole = RoutedCaps(I, J, K, D, routing=name, dtype=torch.float64)
    randomize(layer.routing)
    whole.routing.load_state_dict(layer.routing.state_dict())
    with torch.no_grad():
        whole.W.zero_()
        for row in range(2):  # [I, J, R, Q]
            whole.W[:, :, 3 * row : 3 * row + 3, 3 * row : 3 * row + 3] = layer.W.transpose(2, 3)
    plain.assert_same(tuple(layer(*inputs())), tuple(whole(*inputs())))


@each_name
@pytest.mark.parametrize("pose_rows", [None, 2])
@pytest.mark.parametrize(("kind", "size"), [(ConvCaps1d, (5,)), (ConvCaps2d, (4, 3)), (ConvCaps3d, (2, 3, 2))])
def test_convolution_is_a_layer_at_every_place(
    name: str, pose_rows: int | None, kind: type[ConvCaps2d], size: tuple[int, ...]
) -> None:
    """Where padding is in a window, it is masked."""
    torch.manual_seed(0)
    options: dict[str, Any] = {**ALONE.get(name, {}), "pose_rows": pose_rows, "dtype": torch.float64}
    conv = kind(2, J, K, D, 3, padding=1, routing=name, **options)
    randomize(conv.routing.routing)
    assert all(value.dtype == torch.float64 for value in conv.parameters())
    poses = torch.randn(2, 2, K, *size, dtype=torch.float64, requires_grad=True)
    activation = torch.rand(2, 2, *size, dtype=torch.float64, requires_grad=True)
    u, a, inside = (plain.windows(conv, image, size) for image in (poses, activation, torch.ones(2, 2, *size)))
    alone = [
        conv.routing(u[:, n], *() if name == "dynamic" else (a[:, n],), mask=inside[:, n].bool())
        for n in range(u.shape[1])
    ]
    leaves = [poses, activation, *conv.parameters()]
    if name == "dynamic":
        poses_alone = [pair if isinstance(pair, Tensor) else pair.poses for pair in alone]
        plain.assert_alike(conv(poses), plain.to_image(torch.stack(poses_alone, 1).flatten(0, 1), 2, size), leaves)
    else:
        parts = [torch.stack(part, 1).flatten(0, 1) for part in zip(*alone, strict=True)]
        plain.assert_alike(conv(poses, activation), [plain.to_image(part, 2, size) for part in parts], leaves)


@each_name
def test_couplings_of_every_pass(name: str) -> None:
    layer = layer_of(name)
    u, activation = inputs()
    found = couplings(layer, u, activation)
    assert found and all(tensor.shape == (B, I, J) and tensor.isfinite().all() for tensor in found)
    for coupling in couplings(layer, u, shares=True):
        plain.assert_same(coupling.sum(2), torch.ones(B, I, dtype=torch.float64))


@pytest.mark.parametrize("name", ["em", "variational"])
def test_far_votes_of_few_active_capsules_do_not_cancel(name: str) -> None:
    """Votes around 1000 with a deviation of 0.1, and few active capsules, none of which is in the chosen subset."""
    torch.manual_seed(0)
    I = 4 * STRIDE**2
    votes = 1000 + 0.1 * torch.randn(2, I, 3, 4)
    activation = torch.zeros(2, I)
    activation[:, 1 : STRIDE - 5] = 1
    options = {"floor": 5e-4} if name == "em" else ALONE[name]
    layer = ROUTINGS[name](I, 3, 4, 4, **options)
    exact = copy.deepcopy(layer).double()(votes.double(), activation.double())
    found = layer(votes, activation)
    assert (found.poses - exact.poses).abs().max() < 5e-3
    assert (found.activations - exact.activations).abs().max() < 5e-3


@pytest.mark.parametrize("name", ["em", "self", "variational"])
def test_lengths_of_an_image_of_capsules(name: str) -> None:
    torch.manual_seed(0)
    layer = capsfast.nn.ClassCaps2d(2, 3, 4, 4, size=(4, 4), routing=name)
    image = torch.randn(2, 2, 4, 4, 4)
    u = capsfast.nn.FlattenCaps()(image)
    torch.testing.assert_close(tuple(layer.capsules(image)), tuple(layer(u, lengths(u))))
    torch.testing.assert_close(couplings(layer, image), couplings(layer, u, lengths(u)))
    there = torch.rand(2, 2, 4, 4)
    torch.testing.assert_close(couplings(layer, image, there), couplings(layer, u, there.flatten(1)))
    assert "coupling entropy" in str(capsfast.diagnose(layer, image))


def test_a_routing_that_decides_nothing_has_no_coupling_to_record() -> None:
    class Given(Routing):
        def route(self, votes: Any, activation: Tensor | None) -> tuple[Tensor, Tensor]:
            poses = votes.moments(logits=torch.ones(votes.I, votes.J), normalize="none").first
            return poses, lengths(poses)

    layer = RoutedCaps(I, J, K, D, routing=Given)
    with capsfast.nn.recorded(layer), pytest.raises(RuntimeError, match="recorded: Given decides nothing"):
        layer(torch.randn(B, I, K))


class Mean(Routing):
    """The mean vote. Ignores activations."""

    def route(self, votes: Any, activation: Tensor | None) -> tuple[Tensor, Tensor]:
        poses = votes.moments().first / votes.I
        return poses, lengths(poses)


def test_a_routing_of_ones_own() -> None:
    for routing in (Mean, lambda *sizes, **factory_kwargs: Mean(*sizes, **factory_kwargs)):
        layer = RoutedCaps(I, J, K, D, routing=routing, dtype=torch.float64)
        u, _ = inputs()
        plain.assert_same(layer(u).poses, plain.votes(u, layer.W).mean(1) / J)
        assert CapsNet(1, 12, 5, conv_channels=4, routing=routing)(torch.rand(2, 1, 12, 12)).lengths.shape == (2, 5)


def test_the_fastest_layer_of_a_name() -> None:
    assert isinstance(fully_connected(I, J, K, D, "dynamic"), capsfast.DynamicRouting)
    assert isinstance(fully_connected(I, J, K, D, Mean), RoutedCaps)


class Bare(Mean):
    """A routing without the options that a layer adds."""

    def __init__(self, in_caps: int, out_caps: int, in_dim: int, out_dim: int, *, backend: str | None = None) -> None:
        super().__init__(in_caps, out_caps, in_dim, out_dim, backend=backend)


def test_a_routing_without_the_options_that_a_layer_adds() -> None:
    assert isinstance(RoutedCaps(I, J, K, D, routing=Bare, device=None).routing, Bare)
    message = r"has no option dtype; it has backend; its __init__ must take \*\*factory_kwargs and hand it on"
    with pytest.raises(TypeError, match=message):
        RoutedCaps(I, J, K, D, routing=Bare, dtype=torch.float64)


def routes(route: Callable[[Any], Any]) -> None:
    """Runs a user's route() over votes from a weight, and over votes of 2 by 3 positions."""

    class Own(Routing):
        def route(self, votes: Any, activation: Tensor | None) -> Any:
            return route(votes)

    with pytest.raises((TypeError, ValueError, AttributeError)) as made:
        RoutedCaps(3, 4, 5, 6, routing=Own)(torch.zeros(2, 3, 5))
    with pytest.raises(type(made.value)) as given:
        Own(3, 4, 5, 6)(torch.zeros(2, 3, 4, 6, 2, 3))
    assert str(given.value).replace("12", "2") == str(made.value)
    raise made.value


RETURNS: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "poses alone": (lambda v: v, TypeError, "a tensor [2, 4, 6]"),
    "no activations": (lambda v: (v, None), TypeError, "(a tensor [2, 4, 6], None)"),
    "a number": (lambda v: (v, 0.5), TypeError, "(a tensor [2, 4, 6], float)"),
    "nothing": (lambda v: None, TypeError, "None"),
    "other poses": (lambda v: (v.mT, lengths(v)), ValueError, "(a tensor [2, 6, 4], a tensor [2, 4])"),
    "an axis more": (lambda v: (v, v[..., :1]), ValueError, "(a tensor [2, 4, 6], a tensor [2, 4, 1])"),
    "no samples": (lambda v: (v, lengths(v)[0]), ValueError, "(a tensor [2, 4, 6], a tensor [4])"),
}


@pytest.mark.parametrize("case", RETURNS)
def test_what_route_returns_is_looked_at(case: str) -> None:
    result, error, got = RETURNS[case]
    rule = "Own: route must return a pair of tensors, poses [B, J, D] = [2, 4, 6] and activations [B, J] = [2, 4]"
    with pytest.raises(error, match=re.escape(f"{rule}, got {got}; where lengths are the activations, return poses, ")):
        routes(lambda votes: result(votes.moments().first))


def test_what_votes_lack_is_named() -> None:
    with pytest.raises(AttributeError, match="Votes' object has no attribute 'moment'"):
        votes_of("test", torch.zeros(2, 3, 4, 5)).moment()  # type: ignore[attr-defined]
    votes = votes_of("test", torch.zeros(2, 3, 4, 5, 3, 2))
    with pytest.raises(ValueError, match=r"capsfast.nn.Votes: query must have votes.B=12 rows, got \[2, 4, 5\]; every"):
        votes.moments(query=torch.zeros(2, 4, 5))


@pytest.mark.parametrize("routing", ["dynamic", "em"])
def test_a_layer_checks_its_arguments_once(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    real = arguments.of_product
    monkeypatch.setattr(arguments, "of_product", lambda op, *product: checked.append(op) or real(op, *product))
    layer = RoutedCaps(7, 4, 6, 5, routing=routing)
    for options in ({}, {"mask": torch.rand(3, 7) > 0.5, "activation": torch.rand(3, 7)}):
        checked.clear()
        layer(torch.randn(3, 7, 6), **options)
        assert checked == ["capsfast.nn.RoutedCaps"]


def replaces(owner: Any, name: str, seen: list[int]) -> Any:
    """Replaces a method of an object or a class; ``remove()`` of the result undoes that."""
    real = getattr(owner, name)
    replaced = patch.object(owner, name, lambda *args, **options: seen.append(1) or real(*args, **options))
    replaced.start()
    return SimpleNamespace(remove=replaced.stop)


def by_a_class_of_its_own(layer: RoutedCaps, seen: list[int]) -> None:
    class Watched(RoutedCaps):
        def votes(self, *args: Any) -> Votes:
            seen.append(1)
            return super().votes(*args)

    layer.__class__ = Watched


WATCHING = {
    "hook": lambda layer, seen: layer.routing.register_forward_hook(lambda *_: seen.append(1)),
    "hook before": lambda layer, seen: layer.routing.register_forward_pre_hook(lambda *_: seen.append(1)),
    "hook of all modules": lambda layer, seen: register_module_forward_hook(
        lambda module, *_: seen.extend([1] * (module is layer.routing))
    ),
    "forward": lambda layer, seen: replaces(layer.routing, "forward", seen),
    "route": lambda layer, seen: replaces(layer.routing, "route", seen),
    "options": lambda layer, seen: replaces(layer.routing, "options", seen),
    "votes": lambda layer, seen: replaces(layer, "votes", seen),
    "route of the class": lambda layer, seen: replaces(type(layer.routing), "route", seen),
    "votes of the class": lambda layer, seen: replaces(RoutedCaps, "votes", seen),
    "votes of a subclass": by_a_class_of_its_own,
}


@pytest.mark.parametrize("way", WATCHING)
def test_what_others_put_into_a_layer_runs_at_every_call(way: str) -> None:
    layer, u, seen = RoutedCaps(7, 4, 6, 5), torch.randn(3, 7, 6), list[int]()
    want = layer(u)
    handle = WATCHING[way](layer, seen)
    again = layer(u)
    if handle is not None:
        handle.remove()
    assert seen == [1] and torch.equal(again.poses, want.poses) and torch.equal(again.activations, want.activations)


@pytest.mark.skipif(native.extension is None, reason="the definition makes more calls")
@pytest.mark.parametrize(("call", "most"), [("function", 12), ("DynamicRouting", 22), ("RoutedCaps", 26)])
def test_a_small_call_makes_few_python_calls(call: str, most: int) -> None:
    """The host time of a small call is mostly the time of Python calls."""
    u, weight = torch.randn(2, I, K), torch.randn(I, J, D, K)
    layers = {"DynamicRouting": DynamicRouting, "RoutedCaps": RoutedCaps}
    run = (
        partial(capsfast.dynamic_routing, u, weight)
        if call == "function"
        else partial(layers[call](I, J, K, D).eval(), u)
    )
    calls: list[str] = []
    package = str(Path(capsfast.__file__).parent)

    def see(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")

    before = sys.getprofile()
    with torch.no_grad():
        run()  # the first call fills caches
        sys.setprofile(see)
        try:
            run()
        finally:
            sys.setprofile(before)
    assert 0 < len(calls) <= most, calls
