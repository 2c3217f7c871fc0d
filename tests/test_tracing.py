"""torch.fx and torch.jit.trace: a function is one node, layers are leaves, and traces hold for every batch."""

import importlib
import inspect
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import capsfast
from capsfast.nn._layer import Layer

from .support.layers import EACH_KIND, Row, made, results
from .support.layers import LAYERS as OF_MODULES
from .support.plain import gradients

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit._trace.TracerWarning"),
]


def of_training(module: str) -> Any:
    """A module of capsfast.train, which takes seconds to import."""
    return importlib.import_module(f"capsfast.train.{module}")


def assert_same(traced: Any, model: Any, *inputs: Any) -> None:
    """Compares results and gradients."""
    found = []
    for each in (traced, model):
        given = [value.clone().requires_grad_() for value in inputs]
        values = results(each(*given))
        leaves = [*given, *getattr(each, "parameters", model.parameters)()]
        found.append([*values, *gradients([value for value in values if value.requires_grad], leaves)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


class Functions(nn.Module):
    """All functions, with positional and keyword arguments, in the forward of a user's module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(7, 4, 5, 6))
        self.linear = nn.Linear(6, 6)

    def forward(self, u: Tensor, prior: Tensor) -> Tensor:
        poses = self.linear(u)
        moments = capsfast.routing_pass(poses, self.weight, prior=prior, second=True)
        v, coupling = capsfast.dynamic_routing(u=poses, weight=self.weight, return_coupling=True)
        votes = coupling.unsqueeze(-1) * capsfast.squash(moments.first, kind="half").unsqueeze(1)
        routed = capsfast.route_votes(votes, 2, softmax="in")
        return v + routed + capsfast.votes_pass(votes, query=moments.second).first


def targets(traced: torch.fx.GraphModule, op: str) -> list[Any]:
    return [node.target for node in traced.graph.nodes if node.op == op]


def test_functions_are_nodes() -> None:
    model = Functions()
    traced = torch.fx.symbolic_trace(model)
    called = [target for target in targets(traced, "call_function") if target.__module__.startswith("capsfast")]
    assert called == [
        capsfast.routing_pass,
        capsfast.dynamic_routing,
        capsfast.squash,
        capsfast.route_votes,
        capsfast.votes_pass,
    ]
    for B in (2, 5):
        inputs = torch.randn(B, 7, 6), torch.randn(B, 4)
        assert_same(traced, model, *inputs)
    assert_same(torch.fx.Transformer(traced).transform(), model, *inputs)
    assert_same(torch.fx.Interpreter(traced).run, model, *inputs)


FUNCTIONS = ("dynamic_routing", "route_votes", "routing_pass", "votes_pass", "squash")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nodes_have_every_argument(name: str) -> None:
    function = getattr(capsfast, name)
    parameters = inspect.signature(function).parameters
    graph = torch.fx.Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    given = {parameter: torch.fx.Proxy(graph.placeholder(parameter), tracer) for parameter in parameters}
    node = function(**given).node
    assert node.target is function
    by_position = [
        parameter for parameter in parameters if parameters[parameter].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert [str(value) for value in node.args] == by_position
    bound = inspect.signature(function).bind(*node.args, **node.kwargs).arguments
    assert {each: str(value) for each, value in bound.items()} == {parameter: parameter for parameter in parameters}


# Further layers, with their inputs without the batch.
MORE: dict[str, Row] = {
    "plain": (lambda: capsfast.DynamicRouting(6, 4, 5, 3), (6, 5)),
    "reference": (lambda: capsfast.DynamicRouting(6, 4, 5, 3, backend="reference"), (6, 5)),
    "compat": (lambda: capsfast.compat.DigitCapsules(6, 5, 4, 3), (6, 5)),
    "flatten": (capsfast.nn.FlattenCaps, (2, 4, 3, 3)),
    "length": (capsfast.nn.Length, (4, 3)),
    "longest": (capsfast.nn.Mask, (4, 3)),
    "images": (lambda: of_training("normalize").Normalize("image", 2), (2, 4, 4)),
    "network": (lambda: capsfast.models.CapsNet(1, 14, 4, primary_groups=2), (1, 14, 14)),
}
LAYERS = {**OF_MODULES, **MORE}


class Two(nn.Module):
    """A layer of two inputs behind an activation."""

    def __init__(self, tanh: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.add_module("0", tanh)
        self.add_module("1", layer)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.get_submodule("1")(self.get_submodule("0")(x), y)


def test_every_layer_is_a_leaf() -> None:
    public = [getattr(capsfast.nn, name) for name in capsfast.nn.__all__]
    layers = {kind for kind in public if isinstance(kind, type) and issubclass(kind, nn.Module)}
    assert len(layers) > 30 and all(issubclass(kind, Layer) for kind in layers)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_leaves(name: str) -> None:
    layer, given = made(name, table=LAYERS)
    layer.eval()
    model = nn.Sequential(nn.Tanh(), layer) if len(given) == 1 else Two(nn.Tanh(), layer)
    runs: list[int] = []
    layer.register_forward_hook(lambda *_: runs.append(1))
    traced = torch.fx.symbolic_trace(model)
    assert targets(traced, "call_module") == ["0", "1"]
    assert traced.get_submodule("1") is layer and not runs
    assert_same(traced, model, *given)
    assert len(runs) == 2


def test_a_layer_alone_and_a_network_are_traced_through() -> None:
    layer = capsfast.DynamicRouting(6, 4, 5, 3, bias=True)
    traced = torch.fx.symbolic_trace(layer)
    assert targets(traced, "call_function") == [capsfast.dynamic_routing]
    assert {"W", "routing.bias"} == set(dict(traced.named_parameters())) == set(targets(traced, "get_attr"))
    u, mask = torch.randn(2, 6, 5), torch.rand(2, 6) > 0.3
    assert_same(traced, layer, u)
    torch.testing.assert_close(traced(u=u, mask=mask, return_coupling=True), layer(u, mask=mask, return_coupling=True))
    network = capsfast.models.CapsNet(1, 14, 4, primary_groups=2)
    parts = torch.fx.symbolic_trace(network, concrete_args={"labels": None})
    assert targets(parts, "call_module") == ["conv", "primary", "routing", "decoder"]
    assert_same(parts, network, torch.rand(2, 1, 14, 14))


def test_what_fx_cannot_trace_says_so() -> None:
    with pytest.raises(TypeError, match=r"got Proxy; torch.fx traces models that hold the layer, such as"):
        torch.fx.symbolic_trace(capsfast.nn.RoutedCaps(6, 4, 5, 3))


class Logged(Tensor):
    """A tensor that records the functions that it is passed to."""

    seen: tuple[str, ...] = ()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen = (*cls.seen, function.__name__)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_functions_ask_other_kinds_of_tensors() -> None:
    u, weight = torch.randn(2, 6, 5), torch.randn(6, 4, 3, 5)
    found = capsfast.dynamic_routing(u.as_subclass(Logged), weight)
    assert "dynamic_routing" in Logged.seen
    wanted = capsfast.dynamic_routing(u, weight)
    torch.testing.assert_close(found.as_subclass(Tensor), wanted)
    with torch.device("cpu"):  # a mode of functions
        torch.testing.assert_close(capsfast.dynamic_routing(u, weight), wanted)
    # torch rebuilds the named tuple.
    moments = capsfast.routing_pass(u.as_subclass(Logged), weight)
    torch.testing.assert_close(moments.first.as_subclass(Tensor), capsfast.routing_pass(u, weight).first)
    assert type(moments.first) is Logged
    assert moments.lse is None


@pytest.mark.rows(6)
@pytest.mark.parametrize("name", [*EACH_KIND, *MORE])
def test_traces_hold_for_every_batch(name: str, tmp_path: Path) -> None:
    """check_trace is on: it compares two traces of the layer node by node, and their values."""
    layer, given = made(name, table=LAYERS)
    model = Parts(layer.eval()) if name == "network" else layer.eval()
    traced = torch.jit.trace(model, tuple(given))
    if name == "plain" and capsfast.backends()["cpp"].available:
        assert [node.kind() for node in traced.inlined_graph.nodes()].count("capsfast::dynamic_routing") == 1
    torch.jit.save(traced, tmp_path / "traced.pt")
    loaded = torch.jit.load(tmp_path / "traced.pt")
    for B in (1, 2, 12):
        _, given = made(name, B, LAYERS)
        assert_same(loaded, model, *given)


class Parts(nn.Module):
    """A network whose result TorchScript can return: a tuple without names and without None."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.network(images))


def test_tracing_warns_of_numbers_that_become_constants_alone() -> None:
    code = """
import warnings, torch
warnings.simplefilter("error", torch.jit.TracerWarning)
import capsfast
torch.jit.trace(capsfast.nn.RoutedCaps(6, 4, 5, 3, routing="em"), torch.rand(3, 6, 5))
module = {"__name__": "capsfast.reading"}
exec("def read(x): return x * int(x.max())", module)
try:
    torch.jit.trace(module["read"], torch.ones(3))
except Exception as error:  # what becomes of a warning that is an error, in torch's code
    assert "Python integer" in f"{error} {error.__cause__}", error
else:
    raise SystemExit("a number that became a constant was not warned of")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_each_class_has_compiled_code_of_its_own() -> None:
    """torch.compile stops compiling code that many modules share, and guesses dynamic sizes from these modules."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return x.relu()

    def made(n: int) -> type[Layer]:
        code = forward.__code__.replace(co_name=f"forward{n}")
        return type(f"Layer{n}", (Layer,), {"forward": types.FunctionType(code, globals())})

    limit = torch._dynamo.config.recompile_limit
    for n in range(limit + 1):
        shape = torch.compile(made(n)(), fullgraph=True, backend="eager")(torch.zeros(2, n + 2)).shape
        assert shape == (2, n + 2)
