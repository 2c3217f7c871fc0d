"""Which backend serves a call: backends(), use_backend(), CAPSFAST_BACKEND, backend=, and refusals."""

import contextlib
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import capsfast
from capsfast import backend as choice
from capsfast.bench import record
from capsfast.bench.cases import CANONICAL
from capsfast.bench.results import Results
from capsfast.calls.arguments import Call, RoutingParameters, unchecked
from capsfast.calls.options import Options
from capsfast.environment import native, toolchain
from capsfast.ops import define, dynamic_routing

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


def test_an_op_without_kernels_of_the_backend_does_not_run_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of backends that promises kernels which an op lacks is a defect, not a slow call."""
    monkeypatch.setattr(define, "choose", lambda *args: "cpp")
    monkeypatch.delitem(dynamic_routing.OP.kernels, "cpp")
    with pytest.raises(KeyError, match="cpp"):
        routed()


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
    """Pretends that there is a GPU and all kernels for it, of which no record has times."""
    monkeypatch.setattr(toolchain, "interpreting", lambda: False)
    for module, name in ((toolchain, "why_no_triton"), (native, "why_no_cuda")):
        monkeypatch.setattr(module, name, lambda: "")
    for module, name in ((toolchain, "too_old_for_triton"), (native, "why_not_on")):
        monkeypatch.setattr(module, name, lambda device: "")
    monkeypatch.setattr(choice, "_is_timed", lambda gpu: False)
    monkeypatch.setattr(choice, "_warned", False)


@pytest.fixture
def timed_gpu(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, but a record has times of this GPU."""
    monkeypatch.setattr(choice, "_is_timed", lambda gpu: True)


def on_gpu(call: Call) -> Call:
    """The same call, as if its tensors were on the GPU."""
    same = {name: getattr(call.u, name) for name in ("dtype", "shape", "dim", "stride")}
    u: Any = SimpleNamespace(device=GPU, **same)
    return replace(call, u=u)


@pytest.fixture
def chosen(gpu: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records which backend serves each later call, as if its tensors were on that GPU."""
    found = []

    def choose_there(call: Call, backend: str | None, with_coupling: bool = False) -> str:
        found.append(choice.choose(on_gpu(call), backend, with_coupling))
        return "reference"

    monkeypatch.setattr(define, "choose", choose_there)
    return found


def layer(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """u and the weight of a layer of this shape."""
    B, I, J, D, K = shape
    return torch.randn(B, I, K, dtype=dtype), torch.randn(I, J, D, K, dtype=dtype)


def call_each_function(*, coupling: bool = False) -> None:
    """Calls dynamic_routing() in two dtypes, with a weight that is not dense, with pose matrices; then the others."""
    u, weight = layer(*SHAPE)
    for inputs in (
        (u, weight),
        (u.bfloat16(), weight.bfloat16()),
        (u, weight[:, :1].expand(3, 4, 5, 6)),
        (torch.randn(2, 3, 4, 4), torch.randn(3, 4, 4, 4)),
    ):
        capsfast.dynamic_routing(*inputs, return_coupling=coupling)
    capsfast.dynamic_routing(u, weight[:, :1], bias=torch.zeros(4, 5), return_coupling=coupling)
    capsfast.route_votes(torch.randn(2, 3, 4, 5), return_coupling=coupling)
    capsfast.routing_pass(u, weight, return_weights=coupling)
    capsfast.votes_pass(torch.randn(2, 3, 4, 5), return_weights=coupling)


def test_without_times_of_the_gpu_triton_goes_first_wherever_it_serves(chosen: list[str]) -> None:
    call_each_function()
    assert chosen == ["triton"] * 8


@pytest.mark.usefixtures("timed_gpu")
def test_with_times_of_the_gpu_cuda_goes_first_where_its_rows_family_serves(chosen: list[str]) -> None:
    call_each_function()
    assert chosen == ["cuda"] * 2 + ["triton"] * 6
    chosen.clear()
    call_each_function(coupling=True)
    assert chosen == ["triton"] * 8


def first_on_gpu(
    B: int = 128, dtype: torch.dtype = torch.float32, J: int = 10, shared: bool = False, **options: Any
) -> str:
    """The backend that serves a routing on a GPU. shared: input capsules share the weight."""
    u, weight = layer(B, 3, J, 16, 8, dtype=dtype)
    weight = weight[:1] if shared else weight
    return choice.choose(on_gpu(unchecked(u, weight, RoutingParameters(), Options(**options))), None)


MIDDLE = (17, 128, 1023)


@pytest.mark.rows(99)
@pytest.mark.usefixtures("timed_gpu")
@pytest.mark.parametrize(
    ("compiled", "B", "dtype", "J", "first"),
    [
        *((compiled, B, torch.float32, 13, "triton") for compiled in (False, True) for B in (1, 128, 1024)),
        *((False, B, torch.float32, 12, "cuda") for B in (1, 16, *MIDDLE, 1024)),
        *((False, 128, dtype, 12, "cuda") for dtype in (torch.bfloat16, torch.float16)),
        *((True, B, dtype, 12, "triton") for dtype in (torch.bfloat16, torch.float16) for B in (1, *MIDDLE, 1024)),
        *((True, B, torch.float32, 12, "triton") for B in (1, 16)),
        *((True, B, torch.float32, 12, "triton") for B in (1024, 4096)),
        *((True, B, torch.float32, 12, "cuda") for B in MIDDLE),
    ],
)
def test_each_row_of_the_table_of_times(
    compiled: bool, B: int, dtype: torch.dtype, J: int, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    assert first_on_gpu(B, dtype, J) == first
    assert first_on_gpu(B, dtype, J, softmax="in") == "triton"
    assert first_on_gpu(B, dtype, J, shared=True) == "triton"
    monkeypatch.setattr(choice, "_is_timed", lambda gpu: False)
    assert first_on_gpu(B, dtype, J) == "triton"


@pytest.mark.usefixtures("timed_gpu")
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_makes_a_call_one_of_16_bits(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    assert first_on_gpu() == ("triton" if compiled else "cuda")


@pytest.mark.usefixtures("timed_gpu")
@pytest.mark.parametrize(("B", "dtype"), [(1, torch.float32), (128, torch.float32), (128, torch.bfloat16)], ids=str)
def test_a_captured_call_runs_the_kernels_that_ran_before(
    B: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        found.append(first_on_gpu(B, dtype))
    assert found == ["cuda", "cuda"]


@pytest.mark.usefixtures("timed_gpu")
def test_the_others_follow_where_the_first_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, lacking in ((native, "why_not_on"), (native, "why_no_cuda")):
        with monkeypatch.context() as patch:
            patch.setattr(module, lacking, lambda *device: "no CUDA kernels here")
            assert first_on_gpu() == "triton"
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "why_no_triton", lambda: "no triton here")
        assert first_on_gpu(J=13) == "cuda"
        patch.setattr(native, "why_not_on", lambda device: "no kernels for this GPU")
        with pytest.warns(RuntimeWarning, match="slow reference backend: no kernels for this GPU"):
            assert first_on_gpu() == "reference"


@pytest.mark.parametrize(
    ("capability", "built", "timed"),
    [
        ((9, 0), "8.0 9.0", True),
        ((9, 0), "7.5 8.0+PTX", True),
        ((9, 0), "7.5+PTX", False),  # without tensor cores, so without the rows family
        ((9, 0), "", False),
        ((8, 0), "8.0", False),
        ((10, 0), "9.0 10.0", False),
    ],
)
def test_which_gpus_the_times_hold_for(
    capability: tuple[int, int], built: str, timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "why_no_cuda", lambda: "" if built else "not built")
    monkeypatch.setattr(native, "_BUILD", {"cuda_architectures": built})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choice._is_timed.__wrapped__(GPU) == timed


@pytest.mark.usefixtures("timed_gpu")
def test_the_choice_is_the_faster_backend_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(record.load(ROOT / "benchmarks" / "results" / "nvidia-h200-graphs.json")[1])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(choice, "statically", lambda *comparisons: all(comparisons))
    slower, compared = [], 0
    for case in results.cases:
        times = {name: results.of(case, f"capsfast {name}", "graph") for name in ("triton", "cuda")}
        if case.routing or None in times.values():
            continue
        u, *weight = (torch.empty(shape, dtype=case.torch_dtype, device="meta") for shape in case.shapes.values())
        call = unchecked(u, weight[0] if weight else None, RoutingParameters(), Options())
        compared += 1
        if choice.choose(on_gpu(call), None) != min(times, key=times.__getitem__):
            slower.append(case)
    # The table does not ask for gradients: without them Triton takes 88 us for the canonical layer, CUDA 106.
    assert slower == [CANONICAL] and compared >= 20


def test_the_repository_has_a_record_of_each_gpu_with_times() -> None:
    files = (ROOT / "benchmarks" / "results").glob("*.json")
    machines = [json.loads(file.read_text())["environment"]["machine"] for file in files]
    recorded = {machine.get("compute_capability") for machine in machines}
    assert {".".join(map(str, capability)) for capability in choice.RECORDED} <= recorded


def test_float64_on_a_gpu_is_not_for_triton(chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    capsfast.dynamic_routing(*layer(*SHAPE, dtype=torch.float64))
    monkeypatch.setattr(native, "why_no_cuda", lambda: "not built")
    with pytest.warns(RuntimeWarning, match="slow reference backend: not built"):
        capsfast.dynamic_routing(*layer(*SHAPE, dtype=torch.float64))
    assert chosen == ["cuda", "reference"]


@pytest.mark.parametrize(("I", "stride", "first"), [(10**6, 16, "triton"), (10**7, 16, "cuda"), (3, 2**27, "cuda")])
def test_a_call_that_reaches_too_far_for_triton_runs_on_cuda(
    I: int, stride: int, first: str, chosen: list[str]
) -> None:
    """The votes of no call exist: their numbers share memory."""
    votes = torch.empty(1).as_strided((32, I, 4, 4), (0, 0, 0, 0))
    call = unchecked(votes, None, RoutingParameters(), Options())
    far: Any = on_gpu(call)
    far.u.stride = lambda axis: stride
    assert choice.choose(far, None) == first
    if first == "cuda":
        with pytest.raises(RuntimeError, match=r"'triton' cannot serve this call: it serves .* 2\*\*31 numbers"):
            choice.choose(far, "triton")


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


@contextlib.contextmanager
def fakes_on_gpu() -> Iterator[None]:
    """New tensors in the block lie on a GPU and have no values."""
    with FakeTensorMode(shape_env=ShapeEnv()), torch.device("cuda"):
        yield


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_a_compiled_call_chooses_once_for_all_sizes(
    dynamic: bool | None, timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_is_timed", lambda gpu: timed)
    torch.compiler.reset()
    graphs = Graphs()
    compiled = torch.compile(capsfast.dynamic_routing, fullgraph=True, dynamic=dynamic, backend=graphs)
    with fakes_on_gpu():
        inputs = [layer(B, 7, 4, 5, 6) for B in (128, 18, 5, 40, 2000)]
        others = [layer(*shape) for shape in ((3, 9, 12, 16, 15), (3, 7, 13, 5, 6), (18, 9, 40, 7, 8))]
    for value in inputs:
        compiled(*value)
    # dynamic=True: the first graph serves all sizes. Else the second batch size makes one graph for all others.
    any_size = "triton_dynamic_routing"
    sized = [] if dynamic else ["dynamic_routing" if timed else any_size]
    assert graphs.ops == [*sized, any_size]
    if dynamic:
        for other in others:
            compiled(*other)
        assert graphs.ops == [any_size]


@pytest.mark.usefixtures("timed_gpu")
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_exported_program_holds_cuda_where_its_sizes_are_known(dynamic: bool) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # No parameter: with one a torch without CUDA aborts in the autograd of a tensor on a GPU.
            self.register_buffer("weight", torch.randn(7, 4, 16, 8))

        def forward(self, u: torch.Tensor) -> torch.Tensor:
            return capsfast.dynamic_routing(u, self.weight)

    with fakes_on_gpu():
        model, example = Model().eval(), torch.randn(128, 7, 8)
    program = capsfast.export.program(model, example, dynamic_batch=dynamic)
    ops = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("capsfast.")]
    assert ops == [f"capsfast.{'triton_' if dynamic else ''}dynamic_routing.default"]
    for batch in program.range_constraints.values():  # the choice does not limit the batch
        assert batch.lower <= 2 and batch.upper > 10**6


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
