"""The compiled extension: its build information, every instruction set, and the reasons why it does not load."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import capsfast
from capsfast import native

from .support.backends import Shape
from .test_routing import SHAPES

ROOT = Path(__file__).parent.parent
needs_extension = pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")


def plan(shape: Shape | tuple[int, ...], **more: Any) -> dict[str, Any]:
    assert native.extension is not None
    return native.extension.launch_plan(*shape, **more)  # type: ignore[no-any-return]


@needs_extension
def test_build_info() -> None:
    assert native.extension is not None
    info = native.extension.build_info()
    assert info["instruction_set"] in info["instruction_sets"]
    assert tuple(map(int, info["torch_target"].split("."))) == native.MINIMUM_TORCH
    assert info["compiler"]
    assert info["version"] == capsfast.__version__
    assert native.extension.peak_flops() > 1e6  # an emulated processor reaches 3e7


# The inputs are one number in memory. A result takes 4 MiB, scratch memory takes 16 votes.
NO_MEMORY = """
import resource, torch, capsfast
torch.set_num_threads(1)
votes = torch.zeros(1).expand(1, 16, 1, 2**20)
bias = torch.zeros(1, 2**20, requires_grad=True)
before = capsfast.route_votes(votes, bias=bias, backend="cpp").sum()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 28 * 2**20,) * 2)
for call in (lambda: capsfast.route_votes(votes, 1, backend="cpp"), before.backward):
    try:
        call()
    except MemoryError as error:
        print(error)
"""


@needs_extension
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_no_memory_for_scratch_is_a_memory_error() -> None:
    ran = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    told = re.findall(r"^capsfast.route_votes: .* of ([\d.]+) MiB\); take a smaller batch .*$", ran.stdout, re.M)
    assert len(told) == 2 and min(map(float, told)) >= 4, ran.stdout


@needs_extension
@pytest.mark.parametrize("votes_given", [False, True])
@pytest.mark.parametrize("shape", [(1, 1152, 10, 16, 8), (128, 1152, 10, 16, 8), (2, 2, 1000, 3, 4)], ids=str)
def test_launch_plans(shape: tuple[int, ...], votes_given: bool) -> None:
    B, I, J, D, _ = shape
    found = plan(shape, votes_given=votes_given, threads=2)
    votes = 4 * B * I * J * D
    kept = votes if found["votes_kept"] else 0
    assert not (found["votes_kept"] and (votes_given or B == 128))
    if votes > 10**7:
        assert found["forward_scratch_bytes"] < kept + votes / 4
        assert found["backward_scratch_bytes"] < kept + votes / 4
    # Three weighted sums and two agreements, a multiplication and an addition each.
    assert found["forward_flops"] >= 5 * 2 * B * I * J * D
    assert found["backward_flops"] > found["forward_flops"]
    assert found["bytes"] > 4 * B * J * D


@pytest.mark.rows(1)
@needs_extension
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize(
    ("B", "I"), [(1, 1152), (5, 1152), (128, 1152), pytest.param(4, 1_000_000, marks=pytest.mark.slow)]
)
def test_peak_memory_is_far_below_the_votes(B: int, I: int, direction: str) -> None:
    """The canonical layer, whose votes take 94 MB at B=128 and einsum several times as much; and a weight of 5 GB."""
    from capsfast.bench.cases import Case
    from capsfast.bench.contenders import contender
    from capsfast.bench.memory import peak_growth, why_not

    if why_not():
        pytest.skip(why_not())
    growth, reason = peak_growth(Case(B=B, I=I, direction=direction), contender("capsfast cpp"), torch.device("cpu"))
    assert growth is not None, reason
    assert growth <= 25 * 2**20


@pytest.mark.slow
@needs_extension
def test_an_instruction_set_that_is_not_there_is_an_error() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import capsfast"],
        env=os.environ | {"CAPSFAST_ISA": "mmx"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert ran.returncode != 0
    assert "ValueError: CAPSFAST_ISA: must be one of portable" in ran.stderr
    assert "got 'mmx'" in ran.stderr


@needs_extension
def test_the_shapes_of_the_tests_reach_every_part_of_the_kernels() -> None:
    """Otherwise a layout, or a cut of the input or output capsules, would be untested."""
    plans = [(Shape._make(shape), plan(shape, threads=threads)) for shape in SHAPES for threads in (1, 2)]
    plans += [(Shape._make(shape), plan(shape, threads=2, votes_given=True)) for shape in SHAPES]
    assert {found["layout"] for _, found in plans} == {"lanes", "rows", "capsules"}
    assert {0 < found["small_batch"] < shape.B for shape, found in plans} == {False, True}
    assert {found["splits"] > 1 for _, found in plans} == {False, True}
    assert {found["tiles"] > 1 for _, found in plans} == {False, True}
    for layout in ("lanes", "rows"):
        mine = [(shape, found) for shape, found in plans if found["layout"] == layout]
        assert {found["out_tile"] < shape.J for shape, found in mine} == {False, True}, layout
    # dW in place, with vectors of rows from one output capsule and from several.
    in_place = {found["weight_in_place"] and shape.D % found["lanes"] == 0 for shape, found in plans}
    assert in_place == {False, True}
    assert any(found["weight_in_place"] and shape.D % found["lanes"] for shape, found in plans)


@needs_extension
@pytest.mark.parametrize("name", [pytest.param("portable", marks=pytest.mark.slow), "avx2"])
def test_narrower_instruction_sets(name: str, request: pytest.FixtureRequest) -> None:
    """The kernels of other machines. A process chooses once, so the tests of the ops run again in a new process."""
    assert native.extension is not None
    if name not in native.extension.build_info()["instruction_sets"]:
        pytest.skip(f"this build has no {name} kernels")  # not x86
    environment = os.environ | {"CAPSFAST_ISA": name}
    says = "import capsfast; print(capsfast.native.extension.build_info()['instruction_set'])"
    chosen = subprocess.run([sys.executable, "-c", says], env=environment, capture_output=True, text=True, cwd=ROOT)
    if chosen.stdout.strip() != name:
        pytest.skip(f"this machine has no {name}")
    names = ("native", "routing", "routing_edges", "factored_routing")
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    chosen_tests = "reach_every_part or every_option or every_shape or sixteen_bits or strides or orders or expanded"
    chosen_tests = f"({chosen_tests}) and not 100000 or masked_capsules or empty_sizes"
    chosen_tests += " or test_values_and_gradients or larger_than_the_cache"
    everything = ["--all"] if request.config.getoption("--all") else []
    command = [sys.executable, "-m", "pytest", *files, "--backends", "cpp", "-q", "-x", "-p", "no:cacheprovider"]
    command += everything
    ran = subprocess.run(
        [*command, "-k", chosen_tests], env=environment, capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    # If a test file moved, almost nothing would run.
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None
    assert int(passed[1]) > (300 if everything else 60)


def test_a_torch_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    extension, reason = native._load()
    assert extension is None
    assert "needs torch 2.10 or newer, this is torch 2.9.1+cpu" in reason


@needs_extension
def test_a_build_from_other_sources_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library whose ops take other arguments would misread the arguments."""
    monkeypatch.setattr(native, "SCHEMAS", native.SCHEMAS[1:])
    extension, reason = native._load()
    assert extension is None
    assert "built from older or newer sources than these; build it in the checkout" in reason


def test_a_build_for_another_python_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(capsfast, "__path__", [str(tmp_path)])
    monkeypatch.setattr(capsfast.__spec__, "submodule_search_locations", [str(tmp_path)])
    reason = native._absent()
    assert "_C.cpython-39-x86_64-linux-gnu.so" in reason
    assert f"this is Python {sys.version_info[0]}.{sys.version_info[1]}" in reason


def test_a_missing_build_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(capsfast.__spec__, "submodule_search_locations", [str(tmp_path)])
    reason = native._absent()
    assert "there is no extension" in reason
    assert "pip install" in reason


def test_the_library_of_another_checkout_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An editable install offers its library to any package of this name, even if imported from elsewhere."""
    other = SimpleNamespace(origin=str(tmp_path / "_C.so"), submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: other)
    extension, reason = native._load()
    assert extension is None and reason.startswith("there is no extension")


def test_a_library_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("undefined symbol: aoti_torch_new_empty")

    monkeypatch.setattr(native.importlib, "import_module", fail)
    beside = SimpleNamespace(origin=str(Path(native.__file__).with_name("_C.so")))
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: beside)
    extension, reason = native._load()
    assert extension is None
    assert f"does not load into torch {torch.__version__}: undefined symbol" in reason


@needs_extension
@pytest.mark.parametrize("schema", native.SCHEMAS, ids=lambda schema: schema.split("(")[0])
def test_the_library_defines_the_ops(schema: str) -> None:
    name = schema.split("(")[0]
    found = getattr(torch.ops.capsfast, name).default
    assert str(found._schema) == str(torch._C.parse_schema(f"capsfast::{schema}"))
    assert not found._defined_in_python
    if "factored_routing" not in name:
        assert getattr(torch.ops.capsfast, f"triton_{name}").default._defined_in_python


ALONE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
u, weight = torch.randn(3, 5, 4), torch.randn(5, 2, 6, 4)
options = (None, 3, "out", "full", False, "paper", 1e-8, True, False, False)
v = torch.ops.capsfast.dynamic_routing(u, weight, None, None, None, None, *options)[0]
assert "capsfast" not in sys.modules
# After it, the package finds the ops defined.
sys.path.insert(0, sys.argv[2])
import capsfast
torch.testing.assert_close(v, capsfast.dynamic_routing(u, weight, 3, backend="reference"))
assert torch.equal(v, capsfast.dynamic_routing(u, weight, 3, backend="cpp"))
"""


@pytest.mark.slow
@needs_extension
def test_the_library_has_its_ops_without_the_package(tmp_path: Path) -> None:
    assert native.extension is not None and native.extension.__file__ is not None
    command = [sys.executable, "-c", ALONE, native.extension.__file__, str(ROOT)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


WITHOUT_PYTHON = r"""
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char** files) {
  for (int n = 1; n < count; ++n) {
    if (!dlopen(files[n], RTLD_NOW | RTLD_GLOBAL)) return printf("%s", dlerror());
  }
  if (dlsym(RTLD_DEFAULT, "Py_Initialize")) return printf("there is a Python");
  return 0;
}
"""


@needs_extension
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_library_loads_where_there_is_no_python(tmp_path: Path) -> None:
    assert native.extension is not None and native.extension.__file__ is not None
    (tmp_path / "load.c").write_text(WITHOUT_PYTHON)
    subprocess.run(["cc", "load.c", "-o", "load", "-ldl"], check=True, cwd=tmp_path)
    libraries = [str(Path(torch.__file__).parent / "lib" / "libtorch.so"), native.extension.__file__]
    ran = subprocess.run([tmp_path / "load", *libraries], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_extension
def test_a_small_batch_keeps_what_the_caches_hold() -> None:
    """More votes than are kept at a time: groups of samples run one after the other, without a visible difference."""
    B, I, J, D, K = 5, 24_000, 10, 16, 4
    assert plan((B, I, J, D, K))["votes_kept"]
    draw = torch.Generator().manual_seed(0)
    u = torch.randn(B, I, K, generator=draw)
    weight = 0.1 * torch.randn(I, J, D, K, generator=draw)
    logits = torch.randn(B, I, J, generator=draw)

    def run(part: slice, **more: torch.Tensor) -> list[torch.Tensor]:
        leaves = [u[part].clone().requires_grad_(), weight.clone().requires_grad_()]
        v = capsfast.dynamic_routing(*leaves, 3, logits=logits[part], **more, backend="cpp")
        return [v.detach(), *torch.autograd.grad(v.square().sum(), leaves)]

    v, du, dweight = run(slice(0, B))
    alone = [run(slice(n, n + 1)) for n in range(B)]
    torch.testing.assert_close(v, torch.cat([each[0] for each in alone]))
    torch.testing.assert_close(du, torch.cat([each[1] for each in alone]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(dweight, torch.stack([each[2] for each in alone]).sum(0), rtol=1e-5, atol=1e-6)
    # If another gradient is a sum over the batch, the samples stay together.
    bias = torch.zeros(J, D, requires_grad=True)
    leaves = (u.clone().requires_grad_(), weight.clone().requires_grad_(), bias)
    total = capsfast.dynamic_routing(*leaves[:2], 3, logits=logits, bias=bias, backend="cpp").square().sum()
    du_too, dweight_too, _ = torch.autograd.grad(total, leaves)
    torch.testing.assert_close(du_too, du, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(dweight_too, dweight, rtol=1e-5, atol=1e-6)


@needs_extension
def test_what_does_not_fill_a_tile_is_a_small_batch() -> None:
    """Also next to whole tiles, to whose gradients it adds. A nearly full tile counts as a tile."""
    I, J, D, K = 37, 3, 5, 4
    lanes = plan((64, I, J, D, K))["lanes"]
    small = [plan((B, I, J, D, K))["small_batch"] for B in (1, lanes - 1, lanes, lanes + 1, 2 * lanes - 1)]
    assert small == [1, 0, 0, 1, 0]
    draw = torch.Generator().manual_seed(0)
    u = torch.randn(lanes + 1, I, K, generator=draw)
    weight = torch.randn(I, J, D, K, generator=draw)
    g = torch.randn(lanes + 1, J, D, generator=draw)

    def run(part: slice) -> list[torch.Tensor]:
        leaves = [u[part].clone().requires_grad_(), weight.clone().requires_grad_()]
        v = capsfast.dynamic_routing(*leaves, 3, backend="cpp")
        return [v.detach(), *torch.autograd.grad(v, leaves, g[part])]

    v, du, dweight = run(slice(0, lanes + 1))
    tile, rest = run(slice(0, lanes)), run(slice(lanes, lanes + 1))
    # Each part gives the results that it gives alone. Only dW may differ, by rounding.
    assert torch.equal(v, torch.cat([tile[0], rest[0]]))
    assert torch.equal(du, torch.cat([tile[1], rest[1]]))
    torch.testing.assert_close(dweight, tile[2] + rest[2])


@needs_extension
def test_half_a_tile_of_samples_takes_half_wide_kernels() -> None:
    """If the votes of one sample are too many to be kept."""
    assert native.extension is not None
    name = native.extension.build_info()["instruction_set"]
    if name == "portable":
        pytest.skip("tiles of one narrow register are not halved")
    found = [plan((B, 1_000_000, 10, 16, 8)) for B in (1, 8, 9)]
    assert [each["layout"] for each in found] == ["lanes"] * 3
    assert [each["lanes"] for each in found] == [8, 8, 16]
    assert [each["instruction_set"] for each in found] == ["avx2", "avx2", name]
    # Lanes for the positions of a slice, here at most one tile: each of two threads has a sample.
    found = [plan((2, 5, 3, 6), positions=S, threads=2) for S in (1, 8, 9, 49)]
    assert [each["layout"] for each in found] == ["lanes"] * 4
    assert [each["lanes"] for each in found] == [8, 8, 16, 16]
    assert [each["instruction_set"] for each in found] == ["avx2", "avx2", name, name]


# The orders in which layers keep their weights, as permutations to [I, J, D, K].
ORDERS = ((0, 1, 3, 2), (1, 0, 2, 3), (1, 0, 3, 2), (0, 3, 1, 2), (3, 2, 1, 0))


@needs_extension
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_weights_that_are_permuted_views(order: tuple[int, ...], dtype: torch.dtype) -> None:
    back = [order.index(axis) for axis in range(4)]
    # A batch that keeps its votes, and a batch in lanes; J D, D and K below and above a vector.
    for B, I, J, D, K in (
        (3, 20, 5, 16, 8),
        (17, 20, 5, 16, 8),
        (2, 9, 3, 20, 11),
        (17, 9, 3, 20, 11),
        (1, 7, 4, 3, 5),
    ):
        draw = torch.Generator().manual_seed(0)
        u = torch.randn(B, I, K, generator=draw).to(dtype)
        weight = (0.3 * torch.randn(I, J, D, K, generator=draw)).to(dtype)
        view = weight.permute(order).contiguous().permute(back)
        assert view.stride() != weight.stride() and torch.equal(view, weight)
        results = []
        for each in (weight, view):
            leaves = [u.clone().requires_grad_(), each.detach().requires_grad_()]
            v = capsfast.dynamic_routing(*leaves, 3, backend="cpp")
            results.append([v.detach(), *torch.autograd.grad(v.float().square().sum(), leaves)])
        for got, wanted in zip(*results[::-1], strict=True):
            tight = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
            torch.testing.assert_close(got, wanted, rtol=tight, atol=tight * float(wanted.abs().max()))


@needs_extension
def test_numbers_of_many_input_capsules_and_short_votes() -> None:
    """Activations are copied before they go to lanes, in chunks larger than the votes of an input capsule."""
    draw = torch.Generator().manual_seed(0)
    u, weight = torch.randn(1, 1024, 4, generator=draw), torch.randn(1024, 2, 2, 4, generator=draw)
    precision, strided = torch.rand(1, 2, 2, generator=draw), torch.rand(1, 1024, 2, generator=draw)[..., 0]
    votes, numbers = torch.randn(1, 9, 2, 2, 40, generator=draw), torch.rand(1, 9, 40, generator=draw)

    def found(backend: str) -> list[torch.Tensor]:
        leaves = [u.clone().requires_grad_(), precision.clone().requires_grad_()]
        a = capsfast.routing_pass(leaves[0], weight, precision=leaves[1], activation=strided, backend=backend)
        given = votes.bfloat16().requires_grad_()
        b = capsfast.votes_pass(given, activation=numbers.bfloat16(), backend=backend)
        grads = torch.autograd.grad(a.first.square().sum(), leaves)
        return [a.mass, a.first, *grads, b.first, torch.autograd.grad(b.first.square().sum(), given)[0]]

    for name, got, wanted in zip(
        ("mass", "first", "du", "dprecision", "moments", "dvotes"), found("cpp"), found("reference"), strict=True
    ):
        torch.testing.assert_close(
            got,
            wanted,
            rtol=1e-2 if name == "dvotes" else 1e-4,
            atol=1e-4,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@needs_extension
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_given_votes_of_every_length(dtype: torch.dtype) -> None:
    """If D is not a multiple of a vector, the last vector overlaps with the vector before."""
    draw = torch.Generator().manual_seed(0)
    for D in (*range(1, 35), 65):
        votes = torch.randn(2, 19, 3, D, generator=draw, dtype=dtype)
        query, center = torch.randn(2, 2, 3, D, generator=draw, dtype=dtype)
        precision = torch.rand(2, 3, D, generator=draw, dtype=dtype)
        # Infinite: a repeated lane that is multiplied by zero, instead of cleared, gives NaN.
        query[0, 0, -1] = float("inf")

        def found(backend: str, votes: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
            leaves = [x.clone().requires_grad_() for x in (votes, *(x[1:] for x in given))]
            routed = capsfast.route_votes(leaves[0], 3, backend=backend)
            asked = dict(zip(("query", "precision", "center"), leaves[1:], strict=True))
            a = capsfast.votes_pass(leaves[0][1:], **asked, second=True, backend=backend)
            other = capsfast.route_votes(leaves[0], 3, softmax="in", backend=backend)
            loss = (
                routed.square().sum()
                + other.square().sum()
                + a.first.square().sum()
                + a.second.sum()
                + a.mass.square().sum()
            )
            sigmoid = capsfast.votes_pass(votes, query=given[0], normalize="sigmoid", backend=backend)
            return [
                routed,
                other,
                a.first,
                a.second,
                a.mass,
                sigmoid.first,
                sigmoid.mass,
                *torch.autograd.grad(loss, leaves),
            ]

        both = (found(backend, votes, query, precision, center) for backend in ("cpp", "reference"))
        for place, (got, wanted) in enumerate(zip(*both, strict=True)):
            near = 1e-5 if dtype == torch.float32 else 1e-12
            largest = wanted.detach()[wanted.isfinite()].abs().max().item()
            torch.testing.assert_close(
                got, wanted, rtol=near, atol=near * largest, msg=lambda text, at=(D, place): f"{at}: {text}"
            )
