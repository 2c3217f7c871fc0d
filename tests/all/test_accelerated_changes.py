"""Layers that capsfast.accelerate fused and that are changed later: they do what they would have done."""

import argparse
import collections
import copy
import dataclasses
import enum
import functools
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capsfast.adopt.snapshot import MOST_VALUES, Snapshot, UnclearError, frozen
from capsfast.adopt.verification import relative

from ..support import published_layers as layers
from ..support.adopted import accelerate, undone_copy


class Way(enum.Enum):
    ONCE = 1
    OFTEN = 3


@dataclasses.dataclass
class Settings:
    iterations: int = 3


class Squash(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, s: Tensor) -> Tensor:
        return self.factor * layers.squash(s, 1e-8)


class Twice(Squash):
    def forward(self, s: Tensor) -> Tensor:
        return 2 * super().forward(s)


class Optioned(nn.Module):
    """A layer whose options stand in all places where options stand."""

    most = 3

    def __init__(self) -> None:
        super().__init__()
        self.votes = nn.Linear(6, 20, bias=False)
        self.activation = Squash()
        self.same = self.activation
        self.cfg = types.SimpleNamespace(iterations=3, inner={"softmax": [2]})
        self.settings = Settings()
        self.options = {"iterations": 3}
        self.way = Way.OFTEN
        self.parsed = argparse.Namespace(iterations=3)
        self.softmax = functools.partial(torch.softmax, dim=2)
        self.scale: Any = 1.0
        self.stop: Any = None
        self.last = self.squash
        self.register_buffer("shift", None)

    def squash(self, s: Tensor) -> Tensor:
        return self.activation(s)

    def forward(self, u: Tensor) -> Tensor:
        votes = self.votes(u).unflatten(2, (4, 5))
        several = (self.cfg.iterations, self.settings.iterations, self.options["iterations"], self.way.value)
        b = u.new_zeros(votes.shape[:3])
        for _ in range(min(*several, self.parsed.iterations, self.most)):
            v = self.squash((self.softmax(b).unsqueeze(3) * votes).sum(1))
            b = b + (votes * v.unsqueeze(1)).sum(3)
        v = v if self.stop is None else v * self.stop
        return self.scale * (v if self.shift is None else v + self.shift)


@pytest.fixture(scope="module")
def optioned() -> Optioned:
    """Fused. Not to be changed."""
    torch.manual_seed(0)
    layer = Optioned()
    with torch.no_grad():
        layer.votes.weight *= 3
    report = accelerate(layer, torch.randn(3, 7, 6))
    assert report.fused == ("",), report
    return layer


def squashes_not(self: nn.Module, s: Tensor) -> Tensor:
    return s


def adapt(layer: Any) -> None:
    class Adapted(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.more = nn.Parameter(torch.ones(20, 6))

        def forward(self, u: Tensor) -> Tensor:
            return self.inner(u) + u @ self.more.T

    layer.votes = Adapted(layer.votes)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a namespace": lambda layer: setattr(layer.cfg, "iterations", 1),
    "a dataclass": lambda layer: setattr(layer.settings, "iterations", 1),
    "a mapping": lambda layer: layer.options.update(iterations=1),
    "an enum": lambda layer: setattr(layer, "way", Way.ONCE),
    "a namespace of arguments": lambda layer: setattr(layer.parsed, "iterations", 1),
    "a partial": lambda layer: setattr(layer, "softmax", functools.partial(torch.softmax, dim=1)),
    "an attribute of the class": lambda layer: setattr(layer, "most", 1),
    "a patched method": lambda layer: setattr(layer, "squash", types.MethodType(squashes_not, layer)),
    "a patched forward inside": lambda layer: setattr(layer.activation, "forward", lambda s: s),
    "another module": lambda layer: setattr(layer, "activation", Twice()),
    "the class of a module": lambda layer: setattr(layer.activation, "__class__", Twice),
    "an option of a module": lambda layer: setattr(layer.activation, "factor", 0.5),
    "a bias of a module": lambda layer: setattr(layer.votes, "bias", nn.Parameter(torch.ones(20))),
    "a module around another": adapt,
    "a tensor for a number": lambda layer: setattr(layer, "scale", torch.full((5,), 2.0)),
    "a parameter for a number": lambda layer: (
        delattr(layer, "scale"),
        setattr(layer, "scale", nn.Parameter(torch.full((5,), 2.0))),
    ),
    "a tensor for None": lambda layer: setattr(layer, "stop", torch.zeros(4, 1)),
    "a buffer for None": lambda layer: setattr(layer, "shift", torch.ones(5)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_followed(change: Callable[[Any], Any], optioned: Optioned) -> None:
    layer, u = copy.deepcopy(optioned), torch.randn(3, 7, 6)
    before = layer(u)
    change(layer)
    plain = undone_copy(layer) if "forward" not in vars(layer.activation) else None
    v = layer(u)
    if plain is not None:
        torch.testing.assert_close(v, plain(u), rtol=0, atol=0)
    assert relative(v, before) > 1e-2


def test_what_is_gone_fails_as_it_would_have(optioned: Optioned) -> None:
    u = torch.randn(3, 7, 6)
    for change in (lambda each: delattr(each, "way"), lambda each: setattr(each, "activation", None)):
        layer = copy.deepcopy(optioned)
        change(layer)
        errors = []
        for each in (layer, undone_copy(layer)):
            with pytest.raises((AttributeError, TypeError)) as error:
                each(u)
            errors.append(str(error.value).replace("FusedOptioned", "Optioned"))
        assert errors[0] == errors[1]


def test_an_unchanged_layer_stays_fused_however_it_is_copied(optioned: Optioned, monkeypatch: Any) -> None:
    def fails(self: nn.Module, u: Tensor) -> Tensor:
        raise AssertionError("its own forward runs")

    monkeypatch.setattr(Optioned, "forward", fails)
    u = torch.randn(2, 7, 6)
    v = optioned(u)
    for layer in (copy.deepcopy(optioned), pickle.loads(pickle.dumps(optioned))):
        torch.testing.assert_close(layer(u), v, rtol=0, atol=0)
    layer.scale = 2.0
    with pytest.raises(AssertionError, match="own forward"):
        layer(u)
    layer.scale = 1.0
    layer(u)


@pytest.mark.parametrize(
    "name", ["a namespace", "an attribute of the class", "an option of a module", "a patched method", "a mapping"]
)
def test_a_compiled_layer_follows_too(name: str, optioned: Optioned) -> None:
    torch.compiler.reset()
    layer, u = copy.deepcopy(optioned), torch.randn(3, 7, 6)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        before = compiled(u)
        torch.testing.assert_close(before, layer(u), rtol=0, atol=0)
        CHANGES[name](layer)
        v = compiled(u)
        torch.testing.assert_close(v, layer(u))
        assert relative(v, before) > 1e-2


def test_what_cannot_be_compared_is_left_alone() -> None:
    class Holds(layers.Router):
        def __init__(self, held: Any) -> None:
            super().__init__(7, 4, 6, 5, 2)
            self.held = held

    class Config:
        iterations = 2

    u = torch.randn(3, 7, 6)
    circle: list[Any] = []
    circle.append(circle)
    for held, words in (
        (Config(), "a Config"),
        ([torch.ones(4)], "a Tensor"),
        ({"inner": nn.Linear(2, 2)}, "a Linear"),
        ([0] * MOST_VALUES, f"more than {MOST_VALUES} values"),
        (circle, f"more than {MOST_VALUES} values"),
    ):
        report = accelerate(Holds(held), u)
        assert report.fused == () and f"its `held` holds {words}, and a change" in report.left_alone[""]


def test_frozen_values_are_equal_where_the_values_are() -> None:
    point = collections.namedtuple("point", "x y")
    made: list[Callable[[], Any]] = [
        *(lambda: 1, lambda: True, lambda: 1.0, lambda: "1", lambda: [1], lambda: (1,), lambda: {1}, lambda: {1: 1}),
        *(lambda: [True], lambda: point(1, 2), lambda: (1, 2), lambda: torch.Size((1, 2)), lambda: frozenset({1})),
        *(lambda: collections.deque([1]), lambda: {True: 1}, lambda: Settings(), lambda: Settings(2), lambda: None),
        *(lambda: slice(1, 2), lambda: functools.partial(max, 1), lambda: functools.partial(max, key=abs)),
    ]
    for n, one in enumerate(made):
        assert [frozen(one()) == frozen(other()) for other in made] == [n == m for m in range(len(made))]
    with pytest.raises(UnclearError, match="a Tensor"):
        frozen([1, {2: torch.ones(2)}])


def test_a_module_under_two_names_and_one_of_them_replaced() -> None:
    model = nn.Module()
    model.one = model.two = nn.Linear(2, 2)
    taken = Snapshot.of(model)
    assert taken.holds(model) and taken.holds(copy.deepcopy(model))
    model.two = nn.Linear(2, 2)
    assert not taken.holds(model)


class Clones(layers.Router):
    def clone(self) -> nn.Module:
        return type(self)(self.in_caps, self.out_caps, 6, 5, self.iterations)

    def __reduce__(self) -> Any:
        return type(self), (self.in_caps, self.out_caps, 6, 5, self.iterations), vars(self)


def test_a_layer_that_makes_another_of_its_class() -> None:
    layer, u = Clones(7, 4, 6, 5, 3), torch.randn(3, 7, 6)
    assert accelerate(layer, u).fused == ("",)
    read = pickle.loads(pickle.dumps(layer))
    assert type(read) is type(layer)
    torch.testing.assert_close(read(u), layer(u), rtol=0, atol=0)
    clone: Any = layer.clone()
    plain = Clones(7, 4, 6, 5, 3)
    plain.load_state_dict(clone.state_dict())
    torch.testing.assert_close(clone(u), plain(u), rtol=0, atol=0)
    assert accelerate(clone, u).fused == ("",)
    torch.testing.assert_close(clone(u), plain(u), rtol=1e-4, atol=1e-5)


def test_a_device_without_autocast() -> None:
    layer = layers.CapsLayer(7, 6, 4, 5, layers.AgreementRouting(7, 4, 1))
    assert accelerate(layer, torch.randn(3, 7, 6)).fused == ("",)
    assert layer.to("meta")(torch.randn(2, 7, 6, device="meta")).shape == (2, 4, 5)


class Floats(layers.DenseCapsule):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


def test_other_dtypes_than_the_verified_ones_run_the_own_forward() -> None:
    layer, u = layers.DenseCapsule(7, 6, 4, 5), torch.randn(3, 7, 6)
    assert accelerate(layer, u).fused == ("",)
    plain = undone_copy(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        v = layer(u)
        torch.testing.assert_close(v, plain(u), rtol=0, atol=0)  # and of the same dtype
    layer = Floats(7, 6, 4, 5)
    assert accelerate(layer, u).fused == ("",)
    v = layer.to(torch.bfloat16)(u.bfloat16())
    torch.testing.assert_close(v, undone_copy(layer)(u.bfloat16()), rtol=0, atol=0)
    assert v.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_result_under_autocast_has_the_dtype_of_the_own_one(dtype: torch.dtype, monkeypatch: Any) -> None:
    layer, u = layers.VotesRouting(3), torch.randn(3, 7, 4, 5)
    own = layers.VotesRouting.forward
    calls: list[torch.dtype | None] = []

    def forward(self: Any, *given: Any) -> Tensor:
        calls.append(None)
        return own(self, *given)

    with torch.autocast("cpu", dtype=dtype):
        before = layer(u, 3)
        assert before.dtype == torch.float32
        assert accelerate(layer, (u, 3)).fused == ("",)
        monkeypatch.setattr(layers.VotesRouting, "forward", forward)
        v = layer(u, 3)
        assert not calls and v.dtype == torch.float32 and relative(v, before) < 2e-2
    torch.testing.assert_close(layer(u, 3), before)
    assert calls
