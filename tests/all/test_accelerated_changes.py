"""Layers that change after capsfast.accelerate fused them: they compute what the changed layer computes."""

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

from capsfast.adopt.state import LeftAloneError, State
from capsfast.adopt.trial import relative

from ..support import published_layers as layers
from ..support.adopted import Plain, accelerate, example, undone_copy, variant


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
    """A layer with options in every place where a layer can have options."""

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
        self.softmax = functools.partial(torch.softmax, dim=2)
        self.scale: Any = 1.0
        self.last = self.squash

    def squash(self, s: Tensor) -> Tensor:
        return self.activation(s)

    def forward(self, u: Tensor) -> Tensor:
        votes = self.votes(u).unflatten(2, (4, 5))
        several = (self.cfg.iterations, self.settings.iterations, self.options["iterations"], self.way.value)
        b = u.new_zeros(votes.shape[:3])
        for _ in range(min(*several, self.most)):
            v = self.squash((self.softmax(b).unsqueeze(3) * votes).sum(1))
            b = b + (votes * v.unsqueeze(1)).sum(3)
        return self.scale * v


@pytest.fixture(scope="module")
def optioned() -> Optioned:
    """A fused layer. Tests must not change it."""
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
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, backend=keep, fullgraph=True)
    with torch.no_grad():
        before = compiled(u)
        assert any("capsfast" in str(node.target) for node in graphs[0].graph.nodes)
        torch.testing.assert_close(before, layer(u))
        CHANGES[name](layer)
        v = compiled(u)
        torch.testing.assert_close(v, layer(u))
        assert relative(v, before) > 1e-2


def test_values_that_cannot_be_compared_are_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    values = (object(), "a object"), ([1, {2: torch.ones(1)}], "a Tensor"), ([nn.ReLU()], "a ReLU"), (circle, "a list")
    for held, words in values:
        layer = nn.Module()
        layer.held = held
        with pytest.raises(LeftAloneError, match=f"its `held` holds {words}"):
            State.of(layer)


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


def test_a_mapping_that_is_an_argument_may_change() -> None:
    layer, u, options = (
        variant(forward=lambda self, u, options: Plain.forward(self, u, options["r"])),
        example(),
        {"r": 2},
    )
    report = accelerate(layer, (u, options))
    assert report.fused == ("",) and "argument 2 counts as a constant" in str(report)
    options["r"] = 1
    torch.testing.assert_close(layer(u, options), undone_copy(layer)(u, options), rtol=0, atol=0)


class Doubles(layers.Router):
    def __call__(self, *given: Any) -> Any:
        return 2 * super().__call__(*given)


class Counts(layers.Router):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, u: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
        return super().forward(u)


class Caches(layers.Router):
    kept: Any = None

    def forward(self, u: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.weight * 1
        return super().forward(u) + 0 * self.kept.sum()


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Doubles, "a __call__ of its own"), (Counts, "keeps seen"), (Caches, "")],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_layers_that_do_more_outside_of_a_plain_forward(kind: type[nn.Module], said: str) -> None:
    layer = kind(7, 4, 6, 5, 2).eval()
    report = accelerate(layer, torch.randn(3, 7, 6))
    assert report.fused == () and said in report.left_alone[""]
