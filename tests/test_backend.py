"""Which backend serves a call: backends(), use_backend(), CAPSFAST_BACKEND, backend=, and refusals."""

import contextlib
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import capsfast
from capsfast import backend as choice
from capsfast import native, toolchain
from capsfast.arguments import Call
from capsfast.ops import define

from .support.backends import ALL_DTYPES, Backend, Shape, assert_path, named, recorded_ops
from .support.problems import Case, call, make

SHAPE = Shape(2, 3, 4, 5, 6)
ROOT = Path(capsfast.__file__).parent.parent


@pytest.fixture(autouse=True)
def _nothing_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_forced", None)


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> str:
    """An installation without the extension that has not warned yet. Returns the reason."""
    monkeypatch.setattr(native, "why_absent", "no compiler was found")
    monkeypatch.setattr(choice, "_warned", False)
    return "no compiler was found"


def routed(backend: str | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Routes on the device of the backend."""
    problem = make(SHAPE, Case(coupling=False), dtype=dtype, device=named(backend).device if backend else "cpu")
    return call(problem, problem.inputs, backend)


def ops_of(backend: str | None = None) -> list[str]:
    with recorded_ops() as ops:
        routed(backend)
    return ops


def test_backends_says_what_there_is_and_why_not(no_extension: str) -> None:
    states = capsfast.backends()
    assert list(states)[-1] == "reference"
    assert states["reference"] == (True, "", ("any",)) and states["cpp"] == (False, no_extension, ("cpu",))
    assert all(state.available == (not state.reason) for state in states.values())


def test_a_backend_that_no_gpu_can_run_is_not_available(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(toolchain, "too_old_for_triton", lambda device: "" if device.index else "it is too old")
    assert capsfast.backends()["triton"].available
    monkeypatch.setattr(toolchain, "too_old_for_triton", lambda device: f"{device} is too old")
    assert capsfast.backends()["triton"] == (False, "cuda:0 is too old", ("cuda",))
    assert capsfast.backends()["cuda"].available


def test_the_fastest_available_is_the_default() -> None:
    # The interpreter of GPU kernels never serves the CPU by default.
    fused = {name for name in ops_of() if name.startswith("capsfast::")}
    assert fused == ({"capsfast::dynamic_routing"} if capsfast.backends()["cpp"].available else set())


def test_ways_to_choose(backend: Backend) -> None:
    """An argument goes before use_backend(), the inner context before the outer one."""

    def ran(name: str | None = None) -> None:
        problem = make(SHAPE, Case(coupling=False), dtype=torch.float32, device=backend.device)
        with recorded_ops() as ops:
            call(problem, problem.inputs, name)
        assert_path(backend, "dynamic_routing", ops, backward=False)

    before = ops_of()
    capsfast.use_backend(backend.name)
    ran()
    capsfast.use_backend(None)
    assert ops_of() == before
    with capsfast.use_backend("reference"):
        ran(backend.name)
        with contextlib.suppress(KeyError), capsfast.use_backend(backend.name):
            ran()
            raise KeyError  # ends the context too
        assert choice._forced == "reference"
    assert choice._forced is None
    layer = capsfast.DynamicRouting(3, 4, 6, 5, backend=backend.name).to(backend.device)
    with recorded_ops() as ops:
        layer(torch.randn(2, 3, 6, device=backend.device))
    assert_path(backend, "dynamic_routing", ops, backward=False)


@pytest.mark.parametrize("name", ["gpu", "Reference", ""])
def test_use_backend_rejects_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match=rf"capsfast.use_backend: backend must be one of .*'reference', got '{name}'"):
        capsfast.use_backend(name)
    assert choice._forced is None


def test_a_demanded_backend_that_is_absent_is_an_error(no_extension: str) -> None:
    with pytest.raises(RuntimeError, match=rf"dynamic_routing: backend 'cpp' cannot serve this call: {no_extension}"):
        routed("cpp")
    with pytest.raises(RuntimeError, match=rf"capsfast.use_backend: backend 'cpp' is not available: {no_extension}"):
        capsfast.use_backend("cpp")
    assert choice._forced is None


@pytest.mark.parametrize("asked", ALL_DTYPES, ids=str)
def test_a_dtype_is_served_or_refused(backend: Backend, asked: torch.dtype) -> None:
    if asked in backend.dtypes:
        assert routed(backend.name, asked).dtype == asked
        return
    served = r"float32, bfloat16 and float16, got float64"
    with pytest.raises(RuntimeError, match=f"backend '{backend}' cannot serve this call: it serves {served}"):
        routed(backend.name, asked)


GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that there is a GPU and all kernels for it."""
    monkeypatch.setattr(toolchain, "interpreting", lambda: False)
    for module, name in ((toolchain, "why_no_triton"), (native, "why_no_cuda")):
        monkeypatch.setattr(module, name, lambda: "")
    for module, name in ((toolchain, "too_old_for_triton"), (native, "why_not_on")):
        monkeypatch.setattr(module, name, lambda device: "")
    monkeypatch.setattr(choice, "_warned", False)


def on_gpu(call: Call) -> Call:
    """The same call, as if its tensors were on the GPU."""
    u: Any = SimpleNamespace(device=GPU, dtype=call.u.dtype, shape=call.u.shape, dim=call.u.dim)
    return replace(call, u=u)


@pytest.fixture
def chosen(gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records which backend serves each later call, as if its tensors were on that GPU."""
    found = []

    def choose_there(call: Call, backend: str | None) -> str:
        found.append(choice.choose(on_gpu(call), backend))
        return "reference"

    monkeypatch.setattr(define, "choose", choose_there)
    return found


def layer(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """u and the weight of a layer of this shape."""
    B, I, J, D, K = shape
    return torch.randn(B, I, K, dtype=dtype), torch.randn(I, J, D, K, dtype=dtype)


def test_triton_goes_first_wherever_it_serves(chosen: list[str]) -> None:
    u, weight = layer(*SHAPE)
    capsfast.dynamic_routing(u, weight)
    capsfast.dynamic_routing(u.bfloat16(), weight.bfloat16())
    capsfast.dynamic_routing(u, weight[:, :1], bias=torch.zeros(4, 5))
    capsfast.dynamic_routing(torch.randn(2, 3, 4, 4), torch.randn(3, 4, 4, 4))  # pose matrices
    capsfast.route_votes(torch.randn(2, 3, 4, 5))
    capsfast.routing_pass(u, weight)
    capsfast.votes_pass(torch.randn(2, 3, 4, 5))
    assert chosen == ["triton"] * 7


def test_float64_on_a_gpu_is_not_for_triton(chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    capsfast.dynamic_routing(*layer(*SHAPE, dtype=torch.float64))
    monkeypatch.setattr(native, "why_no_cuda", lambda: "not built")
    with pytest.warns(RuntimeWarning, match="slow reference backend: not built"):
        capsfast.dynamic_routing(*layer(*SHAPE, dtype=torch.float64))
    assert chosen == ["cuda", "reference"]


def test_who_asks_for_a_backend_gets_it_whatever_goes_first(chosen: list[str]) -> None:
    small, large = layer(*SHAPE), layer(2, 3, 13, 5, 6)
    for name in ("triton", "cuda", "reference"):
        capsfast.dynamic_routing(*small, backend=name)
        with capsfast.use_backend(name):
            capsfast.dynamic_routing(*large)
    assert chosen == ["triton", "triton", "cuda", "cuda", "reference", "reference"]


@pytest.mark.parametrize(("module", "lacking"), [(toolchain, "why_no_triton"), (toolchain, "too_old_for_triton")])
def test_without_triton_the_cuda_kernels_serve(
    chosen: list[str], module: Any, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, lacking, lambda *device: "no triton here")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capsfast.dynamic_routing(*layer(*SHAPE))
    assert chosen == ["cuda"]
    monkeypatch.setattr(native, "why_not_on", lambda device: "no kernels for this GPU")
    with pytest.warns(RuntimeWarning, match="slow reference backend: no triton here"):
        capsfast.dynamic_routing(*layer(*SHAPE))
    assert chosen == ["cuda", "reference"]


class Graphs:
    """A backend of torch.compile that keeps the routing op of each graph, and runs none."""

    def __init__(self) -> None:
        self.ops: list[str] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        targets = (str(node.target) for node in module.graph.nodes)
        self.ops += [target.split(".")[1] for target in targets if target.startswith("capsfast.")]
        return lambda *tensors: (torch.zeros(()),)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_a_compiled_call_chooses_once_for_all_sizes(dynamic: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton's refusals, for tensors on the CPU.
    monkeypatch.setitem(choice.BACKENDS, "cpp", choice.BACKENDS["triton"]._replace(devices=("cpu",)))
    torch.compiler.reset()
    graphs = Graphs()
    compiled = torch.compile(capsfast.dynamic_routing, fullgraph=True, dynamic=dynamic, backend=graphs)
    for B in (3, 18, 5, 40):
        compiled(*layer(B, 7, 4, 5, 6))
    # dynamic=True: the first graph serves all sizes. Else the second batch size makes one graph for all others.
    assert len(graphs.ops) == (1 if dynamic else 2)
    if dynamic:
        for shape in ((3, 9, 12, 16, 15), (3, 7, 13, 5, 6), (18, 9, 40, 7, 8)):
            compiled(*layer(*shape))
        assert len(graphs.ops) == 1


@pytest.mark.parametrize("votes", [False, True])
def test_without_extension_the_reference_warns_the_caller_once(no_extension: str, votes: bool) -> None:
    def called() -> None:
        capsfast.votes_pass(torch.randn(2, 3, 4, 5)) if votes else capsfast.dynamic_routing(*layer(*SHAPE))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        routed("reference")
        with capsfast.use_backend("reference"):
            called()
    with pytest.warns(RuntimeWarning, match=f"slow reference backend: {no_extension}") as caught:
        _ = [called(), called()]
    assert [(entry.category, entry.filename) for entry in caught] == [(RuntimeWarning, __file__)]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("reference", "forced: reference"),
        ("quick", "ValueError: CAPSFAST_BACKEND: backend must be one of .*got 'quick'"),
    ],
)
def test_environment_variable(value: str, said: str) -> None:
    code = "from capsfast import backend; print('forced:', backend._forced)"
    environment = os.environ | {"CAPSFAST_BACKEND": value, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert re.search(said, ran.stdout + ran.stderr)
