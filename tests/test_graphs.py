"""capsfast.graphed. Without a GPU a stand-in plays torch.cuda.make_graphed_callables, with fixed memory as a graph has.

tests/test_gpu.py has the same comparison with real graphs.
"""

import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import capsfast
from capsfast import graphs

from .support.graphs import assert_graphed_like_eager, layers


class Played(torch.autograd.Function):
    """Forward and backward of the stand-in: inputs, results and gradients lie in the same memory in every call."""

    @staticmethod
    def forward(ctx: Any, graph: "Graph", *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.graph = graph
        with torch.no_grad():
            for static, value in zip(graph.inputs, inputs, strict=True):
                if static.data_ptr() != value.data_ptr():
                    static.copy_(value)
        graph.run()
        return tuple(value.detach() for value in graph.results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.graph.back(gradients)


class Graph:
    """Stands for the two graphs of a function."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], warmup: int) -> None:
        self.function, self.inputs = function, inputs
        for _ in range(warmup):
            function(*inputs)
        self.outputs = function(*inputs)
        self.results = [value.detach().clone() for value in self.outputs]
        self.gradients = [torch.empty_like(value) if value.requires_grad else None for value in inputs]

    def run(self) -> None:
        with torch.enable_grad():
            self.outputs = self.function(*self.inputs)
        for result, value in zip(self.results, self.outputs, strict=True):
            result.copy_(value.detach())

    def back(self, gradients: tuple[Tensor, ...]) -> list[Tensor | None]:
        pairs = [(value, g) for value, g in zip(self.outputs, gradients, strict=True) if value.requires_grad]
        wanted = [value for value in self.inputs if value.requires_grad]
        outputs, given = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, given, allow_unused=True, retain_graph=True))
        for static in self.gradients:
            if static is not None and (gradient := next(found)) is not None:
                static.copy_(gradient)
        return [static if static is None else static.detach() for static in self.gradients]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(function: Any, inputs: Any, *, num_warmup_iters: int, allow_unused_input: bool) -> Any:
        assert allow_unused_input
        graph = Graph(function, inputs, num_warmup_iters)
        return lambda *values: Played.apply(graph, *values)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(graphs, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", made)
    monkeypatch.setattr(torch.cuda, "device", entered)


class entered:
    """Stands for torch.cuda.device. devices: those that were current."""

    devices: ClassVar[list[torch.device]] = []

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.devices.append(self.device)

    def __exit__(self, *error: object) -> None:
        self.devices.append(torch.device("meta"))


U = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))


ELSEWHERE = nn.Parameter(torch.ones(6, 5, 8, 4))


def layer() -> capsfast.DynamicRouting:
    return capsfast.DynamicRouting(6, 5, 4, 8, bias=True)


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("name", layers("cpu"))
def test_a_graph_computes_what_the_layer_computes(name: str) -> None:
    assert_graphed_like_eager(*layers("cpu")[name])


@pytest.mark.usefixtures("played")
def test_results_and_gradients_outlive_the_next_call() -> None:
    eager = layer()
    graph = capsfast.graphed(eager, U)
    first, second = graph(U), graph(2 * U)
    assert torch.equal(first, eager(U)) and torch.equal(second, eager(2 * U))
    for n in range(2):  # gradients of two calls add up
        graph(U * (n + 1)).sum().backward()
    got = [value.grad.clone() for value in eager.parameters()]  # type: ignore[union-attr]
    eager.zero_grad()
    (eager(U).sum() + eager(2 * U).sum()).backward()
    for value, wanted in zip(got, eager.parameters(), strict=True):
        torch.testing.assert_close(value, wanted.grad)


@pytest.mark.usefixtures("played")
def test_the_capture_moves_no_statistics_and_a_call_does() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(6), capsfast.DynamicRouting(6, 5, 4, 8))

    eager, captured = model(), model()
    graph = capsfast.graphed(captured, U)
    for name, value in captured.state_dict().items():
        assert torch.equal(value, eager.state_dict()[name]), name
    assert torch.equal(graph(U), eager(U))
    for name, value in captured.state_dict().items():
        assert torch.equal(value, eager.state_dict()[name]), name


@pytest.mark.usefixtures("played")
def test_a_backward_after_another_call_is_refused() -> None:
    graph = capsfast.graphed(layer(), U.clone().requires_grad_())
    u = U.clone().requires_grad_()
    v = graph(u)
    with torch.no_grad():
        graph(u)
    with pytest.raises(RuntimeError, match="a call has one backward, before the next call"):
        v.sum().backward()
    v = graph(u)
    v.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a call has one backward, before the next call"):
        v.sum().backward()
    first, second = graph(u), graph(u)
    for v in (first, second):  # the refused backward has been replayed
        with pytest.raises(RuntimeError, match="a call has one backward, before the next call"):
            v.sum().backward()


def moved(module: nn.Module) -> None:
    for value in module.parameters():
        value.data = value.data.clone()


CALLS: dict[str, tuple[Callable[[nn.Module], object], Callable[[Any], object], type[Exception], str]] = {
    "shape": (lambda m: None, lambda graph: graph(U[:1]), ValueError, "argument 0 must be a float32 tensor [3, 6, 4]"),
    "dtype": (lambda m: None, lambda graph: graph(U.double()), ValueError, "got a float64 tensor"),
    "gradient": (lambda m: None, lambda graph: graph(U.clone().requires_grad_()), ValueError, "not require a gradient"),
    "none": (lambda m: None, lambda graph: graph(), TypeError, "takes 1 arguments by position, got 0"),
    "list": (lambda m: None, lambda graph: graph([1.0]), TypeError, "argument 0 must be a tensor"),
    "mode": (lambda m: m.eval(), lambda graph: graph(U), RuntimeError, "training modes and autocast must be those"),
    "part": (lambda m: m.routing.eval(), lambda graph: graph(U), RuntimeError, "training modes and autocast must"),
    "hook": (lambda m: m.routing.register_forward_hook(print), lambda graph: graph(U), ValueError, "runs no hooks"),
    "weight": (moved, lambda graph: graph(U), RuntimeError, "the parameters must stay as they are"),
    "frozen": (lambda m: m.requires_grad_(False), lambda graph: graph(U), RuntimeError, "must stay as they are"),
}


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_the_graph_would_compute_wrongly_are_refused(name: str) -> None:
    change, call, error, message = CALLS[name]
    module = layer()
    graph = capsfast.graphed(module, U)
    change(module)
    with pytest.raises(error, match=re.escape(message)):
        call(graph)


@pytest.mark.usefixtures("played")
def test_autocast_must_be_that_of_the_capture() -> None:
    graph = capsfast.graphed(layer(), U)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast must be those"):
        graph(U)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="cache_enabled=False"):
        capsfast.graphed(layer(), U)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert capsfast.graphed(layer(), U)(U).dtype == torch.bfloat16


def hooked() -> nn.Module:
    module = nn.Sequential(layer())
    module[0].register_forward_hook(lambda *_: None)
    return module


def with_hook_on_weight() -> nn.Module:
    module = layer()
    next(module.parameters()).register_hook(lambda gradient: 2 * gradient)
    return module


REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "no function": (3, U, TypeError, "layer must be a module or a function of tensors, got 3"),
    "no example": (layer(), (), ValueError, "example must be a tensor or a tuple of tensors, got none"),
    "a number": (layer(), (U, 3), TypeError, "got 3 of type int; fix other arguments with functools.partial"),
    "another device": (layer(), U.to("meta"), ValueError, "must be on one CUDA device, got a tensor on meta"),
    "the layer elsewhere": (layer().to("meta"), U, ValueError, "the layer must be on cpu"),
    "hooks": (hooked(), U, ValueError, "a replay runs no hooks"),
    "hooks of a parameter": (with_hook_on_weight(), U, ValueError, "would run the hooks of a parameter twice"),
    "a weight from elsewhere": (
        lambda u: capsfast.dynamic_routing(u, ELSEWHERE),
        U,
        ValueError,
        "must be an argument or a parameter of a module, got a float32 tensor [6, 5, 8, 4] from elsewhere",
    ),
}


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused(name: str) -> None:
    function, example, error, message = REFUSED[name]
    with pytest.raises(error, match=re.escape(message)) as raised:
        capsfast.graphed(function, example)
    assert str(raised.value).startswith("capsfast.graphed: ")


@pytest.mark.usefixtures("played")
def test_an_error_of_the_capture_says_what_a_graph_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with ...")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", refused)
    with pytest.raises(
        RuntimeError, match=r"must not wait for the GPU.*got CUDA error: .* is capturing; call the layer"
    ):
        capsfast.graphed(layer(), U)


@pytest.mark.usefixtures("played")
def test_an_error_of_the_layer_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match=r"capsfast.DynamicRouting|capsfast.dynamic_routing"):
        capsfast.graphed(layer(), U[:, :5].clone())
    with pytest.raises(RuntimeError, match="of the layer"):
        capsfast.graphed(raising, U)


def raising(u: Tensor) -> Tensor:
    raise RuntimeError("of the layer")


@pytest.mark.usefixtures("played")
def test_the_device_of_the_example_is_current_at_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.cuda.make_graphed_callables
    current: list[torch.device] = []

    def recorded(*args: Any, **options: Any) -> Any:
        current.append(entered.devices[-1])
        return made(*args, **options)

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", recorded)
    capsfast.graphed(layer(), U)
    assert current == [U.device]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_graph() -> None:
    with pytest.raises(RuntimeError, match="a CUDA graph needs a CUDA device, got none; call the layer itself"):
        capsfast.graphed(layer(), U)
