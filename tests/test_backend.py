"""Which backend serves a call: backends(), use_backend(), CAPSFAST_BACKEND, backend=, and refusals."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import capsfast
from capsfast import backend as choice
from capsfast import native, ops, toolchain

from .support.backends import ALL_DTYPES, Backend, Shape, assert_path, named, recorded_ops
from .support.problems import Case, call, make

SHAPE = Shape(2, 3, 4, 5, 6)


@pytest.fixture(autouse=True)
def _nothing_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_forced", None)


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> str:
    """An installation without the extension, that has not warned yet."""
    monkeypatch.setattr(native, "why_absent", "no compiler was found")
    monkeypatch.setattr(choice, "_warned", False)
    return "no compiler was found"


def routed(backend: str | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """On the device of that backend."""
    problem = make(SHAPE, Case(coupling=False), dtype=dtype, device=named(backend).device if backend else "cpu")
    return call(problem, problem.inputs, backend)


def ops_of(backend: str | None = None) -> list[str]:
    with recorded_ops() as ops:
        routed(backend)
    return ops


def test_backends_says_what_there_is() -> None:
    states = capsfast.backends()
    assert list(states)[-1] == "reference"
    assert states["reference"] == (True, "", ("any",))
    for name, state in states.items():
        assert state.available == (not state.reason), name


def test_backends_names_the_reason_of_an_absence(no_extension: str) -> None:
    state = capsfast.backends()["cpp"]
    assert not state.available
    assert state.reason == no_extension
    assert state.devices == ("cpu",)


def test_the_fastest_available_is_the_default() -> None:
    # An interpreter of GPU kernels is not what serves the CPU.
    fused = {name for name in ops_of() if name.startswith("capsfast::")}
    assert fused == ({"capsfast::dynamic_routing"} if capsfast.backends()["cpp"].available else set())


def test_backend_argument(backend: Backend) -> None:
    assert_path(backend, "dynamic_routing", ops_of(backend.name), backward=False)


def forced_ops(backend: Backend) -> list[str]:
    """What runs where no call names a backend."""
    problem = make(SHAPE, Case(coupling=False), dtype=torch.float32, device=backend.device)
    with recorded_ops() as ops:
        call(problem, problem.inputs, None)
    return ops


def test_use_backend_as_a_function(backend: Backend) -> None:
    before = ops_of()
    capsfast.use_backend(backend.name)
    assert_path(backend, "dynamic_routing", forced_ops(backend), backward=False)
    capsfast.use_backend(None)
    assert ops_of() == before


def test_use_backend_as_a_context(backend: Backend) -> None:
    with capsfast.use_backend("reference"):
        with capsfast.use_backend(backend.name):
            assert_path(backend, "dynamic_routing", forced_ops(backend), backward=False)
        assert choice._forced == "reference"
    assert choice._forced is None


def test_use_backend_context_ends_with_an_error() -> None:
    with pytest.raises(KeyError), capsfast.use_backend("reference"):
        raise KeyError
    assert choice._forced is None


def test_an_argument_goes_before_use_backend(backend: Backend) -> None:
    with capsfast.use_backend("reference"):
        assert_path(backend, "dynamic_routing", ops_of(backend.name), backward=False)


def test_a_module_passes_its_backend_on(backend: Backend) -> None:
    layer = capsfast.DynamicRouting(3, 4, 6, 5, backend=backend.name).to(backend.device)
    with recorded_ops() as ops:
        layer(torch.randn(2, 3, 6, device=backend.device))
    assert_path(backend, "dynamic_routing", ops, backward=False)


@pytest.mark.parametrize("name", ["gpu", "Reference", ""])
def test_use_backend_rejects_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match=rf"capsfast.use_backend: backend must be one of .*'reference', got '{name}'"):
        capsfast.use_backend(name)
    assert choice._forced is None


def test_use_backend_rejects_an_absent_backend(no_extension: str) -> None:
    with pytest.raises(RuntimeError, match=rf"capsfast.use_backend: backend 'cpp' is not available: {no_extension}"):
        capsfast.use_backend("cpp")
    assert choice._forced is None


def test_a_demanded_backend_that_is_absent_is_an_error(no_extension: str) -> None:
    with pytest.raises(RuntimeError, match=rf"dynamic_routing: backend 'cpp' cannot serve this call: {no_extension}"):
        routed("cpp")


@pytest.mark.parametrize("asked", ALL_DTYPES, ids=str)
def test_a_dtype_is_served_or_refused(backend: Backend, asked: torch.dtype) -> None:
    if asked in backend.dtypes:
        assert routed(backend.name, asked).dtype == asked
        return
    served = r"float32, bfloat16 and float16, got float64"
    with pytest.raises(RuntimeError, match=f"backend '{backend}' cannot serve this call: it serves {served}"):
        routed(backend.name, asked)


def test_float64_on_a_gpu_is_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one, new enough for Triton."""
    monkeypatch.setattr(toolchain, "interpreting", lambda: False)
    monkeypatch.setattr(toolchain, "why_no_triton", lambda: "")
    monkeypatch.setattr(toolchain, "too_old_for_triton", lambda device: "")
    chosen = []

    def select_there(op: str, device: torch.device, *rest: Any) -> str:
        chosen.append(choice.select(op, torch.device("cuda", 0), *rest))
        return "reference"

    # That the reference is slow is said once a process, and not the matter here.
    monkeypatch.setattr(choice, "_warned", True)
    monkeypatch.setattr(ops.dynamic_routing, "select", select_there)
    for dtype in (torch.float32, torch.float64):
        problem = make(SHAPE, Case(coupling=False), dtype=dtype)
        call(problem, problem.inputs, None)
    assert chosen == ["triton", "reference"]


def test_without_extension_the_reference_warns_once(no_extension: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"slow reference backend: {no_extension}") as caught:
        routed()
    assert [entry.category for entry in caught] == [RuntimeWarning]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        routed()


def test_a_backend_that_is_absent_is_no_matter_where_another_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_warned", False)
    monkeypatch.setattr(toolchain, "interpreting", lambda: False)
    monkeypatch.setattr(toolchain, "why_no_triton", lambda: "triton is not installed")
    monkeypatch.setattr(native, "why_no_cuda", lambda: "")
    monkeypatch.setattr(native, "why_not_on", lambda device: "")
    device = torch.device("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choice.select("capsfast.dynamic_routing", device, None) == "cuda"
    monkeypatch.setattr(native, "why_not_on", lambda device: "no kernels for this GPU")
    with pytest.warns(RuntimeWarning, match="slow reference backend: triton is not installed"):
        assert choice.select("capsfast.dynamic_routing", device, None) == "reference"


def test_the_warning_points_at_the_caller(no_extension: str) -> None:
    u, weight = torch.randn(2, 3, 6), torch.randn(3, 4, 5, 6)
    with pytest.warns(RuntimeWarning) as caught:
        capsfast.dynamic_routing(u, weight)
    assert caught[0].filename == __file__


def test_a_demanded_reference_does_not_warn(no_extension: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        routed("reference")
        with capsfast.use_backend("reference"):
            routed()


@pytest.mark.parametrize("op", ["dynamic_routing", "route_votes"])
def test_share_batch_logits_runs_on_the_reference_with_a_warning(op: str) -> None:
    problem = make(SHAPE, Case(coupling=False), op)
    problem.overrides["share_batch_logits"] = True
    with pytest.warns(UserWarning, match="a sample's result depends on the others") as caught, recorded_ops() as ops:
        call(problem, problem.inputs, None)
    assert len(caught) == 1
    assert not [name for name in ops if name.startswith("capsfast::")]


@pytest.mark.parametrize("op", ["dynamic_routing", "route_votes"])
def test_share_batch_logits_is_refused_by_fused_backends(backend: Backend, op: str) -> None:
    problem = make(SHAPE, Case(coupling=False), op, torch.float32, backend.device)
    problem.overrides["share_batch_logits"] = True
    if not backend.fused:
        with pytest.warns(UserWarning, match="share_batch_logits"):
            call(problem, problem.inputs, backend.name)
        return
    message = f"capsfast.{op}: backend '{backend}' cannot serve this call: share_batch_logits is served by the"
    with pytest.raises(RuntimeError, match=message):
        call(problem, problem.inputs, backend.name)


def test_meta_tensors_keep_their_shapes(backend: Backend) -> None:
    u, weight = torch.empty(2, 3, 6, device="meta"), torch.empty(3, 4, 5, 6, device="meta")
    v, c = capsfast.dynamic_routing(u, weight, return_coupling=True, backend=backend.name)
    assert v.shape == (2, 4, 5)
    assert c.shape == (2, 3, 4)
    assert v.device.type == c.device.type == "meta"
    v, c = capsfast.route_votes(torch.empty(2, 3, 4, 5, device="meta"), return_coupling=True, backend=backend.name)
    assert v.shape == (2, 4, 5)
    assert c.shape == (2, 3, 4)


SCRIPT = """
import sys, torch, capsfast
from torch.utils._python_dispatch import TorchDispatchMode

class Print(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith("capsfast::"):
            print("ran a fused op")
        return func(*args, **(kwargs or {}))

with Print():
    device = sys.argv[1]
    capsfast.dynamic_routing(torch.randn(2, 3, 4, device=device), torch.randn(3, 2, 5, 4, device=device))
print("done")
"""


def in_a_new_process(name: str, device: str = "cpu") -> subprocess.CompletedProcess[str]:
    root = Path(capsfast.__file__).parent.parent
    environment = os.environ | {"CAPSFAST_BACKEND": name, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", SCRIPT, device]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_environment_variable(backend: Backend) -> None:
    ran = in_a_new_process(backend.name, backend.device)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n")[:-1] == ["ran a fused op"] * backend.fused + ["done"]


def test_environment_variable_with_an_unknown_name() -> None:
    ran = in_a_new_process("quick")
    assert ran.returncode != 0
    assert "ValueError: CAPSFAST_BACKEND: backend must be one of" in ran.stderr
    assert "got 'quick'" in ran.stderr
