"""Models outside Python: exported programs, packages run by C++, ONNX, traces."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import capsfast
from capsfast.environment import native
from capsfast.export import decompositions, program, to_onnx, to_package
from capsfast.ops import factored_routing

from .support.backends import Shape, named
from .support.passes import CASES as PASS_CASES
from .support.passes import EVERYTHING
from .support.problems import CASES, OPS, PASS_OPS, Case, Op, registered

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "serve"
needs_extension = pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    # capsfast compares sizes during a trace. For users capsfast/calls/checks.py has the filter.
    pytest.mark.filterwarnings("ignore::torch.jit._trace.TracerWarning"),
]


class Served(nn.Module):
    """Images ``[B, 1, 8, 8]`` to the results of four layers, which use all fused ops and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2)
        options: dict[str, Any] = {"learned_logits": True, "bias": True, "leaky": True, "squash": "exp", "eps": 1e-7}
        self.caps = capsfast.DynamicRouting(18, 3, 4, 5, backend="cpp", **options)
        self.low = capsfast.DynamicRouting(18, 3, 4, 5, num_iterations=2, softmax="in", backend="cpp").bfloat16()
        self.weight = nn.Parameter(torch.randn(3, 2, 4, 5))
        nn.init.normal_(self.caps.logits)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        poses = self.conv(images).unflatten(1, (2, 4))
        u = capsfast.squash(poses.movedim(2, -1).flatten(1, 3))  # [B, 18, 4]
        v, coupling = self.caps(u, mask=u[..., 0] > 0, return_coupling=True)
        passed = capsfast.routing_pass(v, self.weight, normalize="in", second=True, return_lse=True, backend="cpp")
        moments = capsfast.votes_pass(poses[:, :, None], prior=v[..., 0], backend="cpp")
        routed = capsfast.route_votes(poses.flatten(3).movedim(-1, 1), 2, backend="cpp")
        assert passed.second is not None and passed.lse is not None
        return v, coupling, self.low(u.bfloat16()), passed.second, passed.lse, moments.first, routed


@pytest.fixture(scope="module")
def served() -> Served:
    torch.manual_seed(0)
    return Served().eval()


@pytest.fixture(scope="module")
def exported(served: Served) -> torch.export.ExportedProgram:
    return program(served, torch.rand(3, 1, 8, 8))


@torch.no_grad()
def assert_same(got: Any, model: Callable[..., Any], *inputs: Tensor) -> None:
    wanted = model(*inputs)
    pairs = list(zip(got, wanted, strict=True)) if isinstance(wanted, tuple) else [(got, wanted)]
    for value, want in pairs:
        value = torch.as_tensor(value)
        assert value.shape == want.shape
        tolerance = 2e-2 if want.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(value.to(want.dtype), want, rtol=tolerance, atol=tolerance)


def calls(exported: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in exported.graph.nodes if "capsfast" in str(node.target)]


@needs_extension
def test_the_program_holds_the_fused_ops(served: Served, exported: torch.export.ExportedProgram) -> None:
    assert {name.split(".")[1] for name in calls(exported)} == {"dynamic_routing", "routing_pass"}
    strict = torch.export.export(
        served, (torch.rand(3, 1, 8, 8),), dynamic_shapes=({0: torch.export.Dim("B")},), strict=True
    )
    assert sorted(calls(strict)) == sorted(calls(exported))
    for B in (2, 7):
        images = torch.rand(B, 1, 8, 8)
        for each in (exported, strict):
            assert_same(each.module()(images), served, images)


@pytest.mark.parametrize("competition", ["window", "child"])
@pytest.mark.parametrize(
    ("kind", "size", "routing", "strict"),
    [
        (capsfast.nn.ConvCaps1d, (6,), "em", True),
        (capsfast.nn.ConvCaps2d, (5, 5), "dynamic", True),
        (capsfast.nn.ConvCaps2d, (5, 5), "em", False),
        (capsfast.nn.ConvCaps3d, (2, 3, 4), "dynamic", False),
    ],
)
def test_convolutional_capsules_export(
    kind: type[capsfast.nn.ConvCaps2d], size: tuple[int, ...], routing: str, strict: bool, competition: Any
) -> None:
    model = nn.Sequential(kind(2, 3, 4, 4, 3, padding=1, routing=routing, competition=competition)).eval()
    poses = torch.rand(3, 2, 4, *size)
    found = torch.export.export(model, (poses,), dynamic_shapes=({0: torch.export.Dim("B")},), strict=strict)
    for B in (2, 7):
        poses = torch.rand(B, 2, 4, *size)
        assert_same(found.module()(poses), model, poses)


@pytest.mark.parametrize("strict", [True, False])
def test_a_shared_weight_exports_for_every_batch(strict: bool) -> None:
    """Whether a pass without votes pays depends on the batch, which must not limit the program."""
    model = nn.Sequential(capsfast.DynamicRouting(6, 4, 3, 5, shared_weight=True)).eval()
    u = torch.rand(3, 6, 3)
    found = torch.export.export(model, (u,), dynamic_shapes=({0: torch.export.Dim("B")},), strict=strict)
    assert_same(found.module()(u[:2]), model, u[:2])


ALONE = """
import sys, torch
folder, library, package = sys.argv[1:]
torch.ops.load_library(library)
images, wanted = torch.load(f"{folder}/case.pt")
for model in (torch.export.load(f"{folder}/model.pt2").module(), torch.jit.load(f"{folder}/traced.pt")):
    for value, want in zip(model(images), wanted, strict=True):
        torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-6)
assert "capsfast" not in sys.modules
# After it, the package finds the ops defined.
sys.path.insert(0, package)
import capsfast
assert capsfast.backends()["cpp"].available
"""


@pytest.mark.slow
@needs_extension
def test_saved_files_run_where_there_is_the_library_alone(
    served: Served, exported: torch.export.ExportedProgram, tmp_path: Path
) -> None:
    torch.export.save(exported, tmp_path / "model.pt2")
    torch.jit.save(torch.jit.trace(served, torch.rand(3, 1, 8, 8)), tmp_path / "traced.pt")
    images = torch.rand(5, 1, 8, 8)
    with torch.no_grad():
        torch.save((images, served(images)), tmp_path / "case.pt")
    command = [sys.executable, "-c", ALONE, str(tmp_path), str(capsfast.export.library()), str(EXAMPLE.parents[1])]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


@pytest.fixture(scope="module")
def package(exported: torch.export.ExportedProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and the program of examples/serve. Both compile at the same time."""
    assert shutil.which("make") and (os.environ.get("CXX") or shutil.which("g++")), "serving needs make and g++"
    folder = tmp_path_factory.mktemp("package")
    build = ["make", "-C", str(EXAMPLE), f"SERVE={folder}/serve", f"PYTHON={sys.executable}", "CXXFLAGS=-O0"]
    with subprocess.Popen(build, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as compiling:
        # The fastest compilation: no precompiled headers, and no optimised wrapper.
        quick = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
        to_package(exported, None, folder / "model.pt2", options=quick)
        said, _ = compiling.communicate()
    assert compiling.returncode == 0, said
    return folder


@pytest.mark.slow
@needs_extension
@pytest.mark.parametrize("B", [1, 6])
def test_a_package_runs_in_a_program_without_python(served: Served, package: Path, B: int) -> None:
    images = torch.rand(B, 1, 8, 8)
    (package / "input").write_bytes(images.numpy().tobytes())
    files = [capsfast.export.library(), package / "model.pt2", package / "input", package / "output"]
    command = [str(word) for word in (package / "serve", *files, *images.shape)]
    # The dynamic loader lists the libraries that it opens.
    ran = subprocess.run(command, capture_output=True, text=True, env={"LD_DEBUG": "files"})
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "libtorch_cpu" in ran.stderr and "libpython" not in ran.stderr and "libtorch_python" not in ran.stderr
    wrong = subprocess.run(command[:-1], capture_output=True, text=True)
    assert wrong.returncode != 0 and "as many numbers" in wrong.stderr
    shapes = [tuple(map(int, line.split())) for line in ran.stdout.splitlines()]
    numbers = torch.from_numpy(numpy.fromfile(package / "output", dtype=numpy.float32))
    parts = numbers.split([int(numpy.prod(shape)) for shape in shapes])
    assert_same(tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True)), served, images)


@needs_extension
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", [*OPS, *PASS_OPS], ids=str)
def test_decompositions_are_the_ops(op: Op, dtype: torch.dtype) -> None:
    """With every option. Compares only the outputs that functions return, not those for the backward."""
    decomposed, fused, tolerance = (
        decompositions(),
        named("cpp").op(op.name),
        3e-2 if dtype == torch.bfloat16 else 1e-10,
    )
    spatial = (Case(spatial=(3,)), replace(EVERYTHING, spatial=(3,), out_mask=False, prior=False))
    # The op does not make votes that all output capsules share.
    cases = [case for case in PASS_CASES if "J" not in case.shared]
    for case in filter(op.takes, (*CASES, *cases, *spatial)):
        arguments = registered(op.make(Shape(3, 7, 4, 5, 6), case, dtype))
        pairs = zip(decomposed[fused](*arguments), fused(*arguments), strict=True)
        for got, want in list(pairs)[: 2 if op in OPS else 5]:
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# Ops that are never part of a program (see the next test, test_em_update.py and test_em_routing.py).
STEMS = ("factored_routing", "em_update", "triton_em_update", "em_routing", "triton_em_routing")
IN_NO_PROGRAM = {f"capsfast::{stem}{end}" for stem in STEMS for end in ("", "_backward")}
IN_NO_PROGRAM |= {"capsfast::unfold_windows", "capsfast::fold_windows"}


def test_every_op_has_a_decomposition() -> None:
    def own(names: set[str]) -> set[str]:
        """Without the ops of the emulator, which another test in this process may have installed."""
        return {name for name in names if name.startswith("capsfast::") and "::emulated_" not in name}

    registered = own({name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()})
    replaced = own({str(op).replace(".default", "").replace(".", "::") for op in decompositions()})
    assert replaced == registered - IN_NO_PROGRAM
    backward = decompositions()[torch.ops.capsfast.dynamic_routing_backward.default]
    with pytest.raises(RuntimeError, match="for inference, got one with capsfast::dynamic_routing_backward"):
        backward(None)


class Interests(nn.Module):
    """Two routings with one matrix for all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = capsfast.nn.InterestCapsules(2, 5, 5, max_length=24, initial_logits="zero")
        self.weight = nn.Parameter(torch.randn(1, 1, 4, 5))

    def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        logits = u.new_zeros(u.shape[1], 2)
        return self.layer(u).vectors, capsfast.dynamic_routing(u, self.weight, logits=logits)


@needs_extension
@pytest.mark.parametrize("way", ["strict", "not strict", "trace"])
def test_programs_hold_no_op_of_the_cpu_alone(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Interests().eval()
    u, other = torch.randn(3, 24, 5), torch.randn(2, 24, 5)
    with monkeypatch.context() as patch:
        taken = []
        real = torch.ops.capsfast.factored_routing
        patch.setitem(factored_routing.OP.kernels, "cpp", lambda *args: taken.append(1) or real(*args))
        model(u)
        assert len(taken) == 2  # by eager calls
    if way == "trace":
        traced = torch.jit.trace(model, u)
        assert "factored_routing" not in str(traced.inlined_graph)
        assert_same(traced(other), model, other)
        return
    found = torch.export.export(model, (u,), dynamic_shapes=({0: torch.export.Dim("B")},), strict=way == "strict")
    assert set(calls(found)) <= {"capsfast.dynamic_routing.default"}
    assert not calls(found.run_decompositions(decompositions()))
    assert_same(found.module()(other), model, other)


class Wide(nn.Module):
    """Converts results to float32, because numpy has no bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.float() for value in self.model(images))


@pytest.mark.slow
@needs_extension
def test_onnx_runs_without_an_op_of_capsfast(served: Served, tmp_path: Path) -> None:
    import onnx
    import onnxruntime

    file = to_onnx(Wide(served).eval(), torch.rand(3, 1, 8, 8), tmp_path / "model.onnx", input_names=["images"])
    model = onnx.load(str(file))
    assert {node.domain for node in model.graph.node} == {""} and not model.functions
    session = onnxruntime.InferenceSession(str(file))
    for B in (1, 3, 6):
        images = torch.rand(B, 1, 8, 8)
        found = session.run(None, {"images": images.numpy()})
        assert_same(tuple(torch.from_numpy(value) for value in found), served, images)


@pytest.mark.parametrize("name", ["layer", "network"])
def test_named_tuples_are_saved(name: str, tmp_path: Path) -> None:
    if name == "layer":
        model, images = capsfast.nn.RoutedCaps(6, 4, 6, 5, routing="em"), torch.randn(3, 6, 6)
    else:
        model, images = capsfast.models.CapsNet(1, 20, 4, conv_channels=4, primary_groups=1), torch.rand(3, 1, 20, 20)
    model = model.eval()
    torch.export.save(program(model, images[:2]), tmp_path / "model.pt2")
    got = torch.export.load(tmp_path / "model.pt2").module()(images)
    assert type(got) is type(model(images))
    assert_same(got, model, images)


def test_parts_of_a_loss_are_saved(tmp_path: Path) -> None:
    given = ((torch.rand(2, 4), torch.rand(2, 4, 3), None), torch.rand(2, 1, 5, 5), torch.tensor([0, 3]))
    loss = capsfast.nn.CapsNetLoss()
    torch.export.save(torch.export.export(loss, given), tmp_path / "loss.pt2")
    got = torch.export.load(tmp_path / "loss.pt2").module()(*given)
    torch.testing.assert_close(got, loss(*given))


def test_torch_jit_script_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch.jit.script cannot compile RoutedCaps; use torch.export or torch"):
        torch.jit.script(nn.Sequential(capsfast.nn.RoutedCaps(6, 4, 6, 5)))


LAYER, U = capsfast.DynamicRouting(6, 4, 6, 5).eval(), torch.randn(2, 6, 6)


def test_one_sample_is_exported_without_a_batch() -> None:
    assert_same(program(LAYER, [U[:1]], dynamic_batch=False).module()(U[:1]), LAYER, U[:1])


def test_what_is_absent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ModuleNotFoundError, match=r"to_onnx: needs the packages onnx and onnxscript; pip install"):
            to_onnx(LAYER, U, tmp_path / "model.onnx")
    monkeypatch.setattr(native, "extension", None)
    monkeypatch.setattr(native, "why_absent", "it was not built")
    with pytest.raises(RuntimeError, match=r"capsfast.export.library: it was not built"):
        capsfast.export.library()
