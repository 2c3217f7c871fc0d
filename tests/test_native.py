"""The compiled extension: its build information, every instruction set, and the reasons why it does not load."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import capsfast
from capsfast.environment import native

from .support.accuracy import check
from .support.backends import Shape, named
from .support.problems import Case, PassCase, laid_out, make, run
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
    told = re.findall(r"^capsfast.route_votes: .* of (\d+) bytes \(.* GiB\); take a smaller batch.*$", ran.stdout, re.M)
    assert len(told) == 2 and min(map(int, told)) >= 4 * 2**20, ran.stdout


@pytest.mark.rows(1)
@needs_extension
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"B": 1},
        {"B": 5},
        {"op": "route_votes", "K": 0, "B": 64},
        pytest.param({"B": 4, "I": 1_000_000}, marks=pytest.mark.slow),
        {"B": 128},
    ],
    ids=str,
)
def test_peak_memory_is_far_below_the_votes(sizes: dict[str, Any], direction: str) -> None:
    """The canonical layer, whose votes take 94 MB at B=128 and einsum several times as much; and a weight of 5 GB."""
    from capsfast.bench import cases, contenders, memory

    if memory.why_not():
        pytest.skip(memory.why_not())
    case = cases.Case(**sizes, direction=direction)
    growth, reason = memory.peak_growth(case, contenders.contender("capsfast cpp"), torch.device("cpu"), lambda: None)
    assert growth is not None, reason
    assert growth <= 25 * 2**20


@pytest.mark.slow
@needs_extension
def test_an_instruction_set_that_is_not_there_is_an_error() -> None:
    command, environment = [sys.executable, "-c", "import capsfast"], os.environ | {"CAPSFAST_ISA": "mmx"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert re.search("ValueError: CAPSFAST_ISA: must be one of portable.*got 'mmx'", ran.stderr)


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
    says = "import capsfast; print(capsfast.environment.native.extension.build_info()['instruction_set'])"
    chosen = subprocess.run([sys.executable, "-c", says], env=environment, capture_output=True, text=True, cwd=ROOT)
    if chosen.stdout.strip() != name:
        pytest.skip(f"this machine has no {name}")
    names = ("native", "routing", "routing_edges", "factored_routing")
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    chosen_tests = "reach_every_part or every_option or every_shape or sixteen_bits or strides or expanded"
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


def fail(name: str) -> None:
    raise ImportError("undefined symbol: aoti_torch_new_empty")


HERE = SimpleNamespace(origin=str(Path(native.__file__).parents[1] / "_C.so"))
THERE = SimpleNamespace(origin="/elsewhere/_C.so", submodule_search_locations=["/elsewhere"])
# What is changed, and the reason that is given.
ABSENT: dict[str, tuple[list[tuple[Any, str, Any]], str]] = {
    "an old torch": ([(torch, "__version__", "2.9.1+cpu")], r"needs torch 2\.10 or newer, this is torch 2\.9\.1\+cpu"),
    # A library whose ops take other arguments would misread the arguments.
    "other sources": (
        [(native, "SCHEMAS", native.SCHEMAS[1:])],
        "built from older or newer sources than these; build it in the checkout",
    ),
    # An editable install offers its library to any package of this name, even if imported from elsewhere.
    "another checkout": ([(native.importlib.util, "find_spec", lambda name: THERE)], "^there is no extension"),
    "another libtorch": (
        [(native.importlib, "import_module", fail), (native.importlib.util, "find_spec", lambda name: HERE)],
        f"does not load into torch {re.escape(torch.__version__)}: undefined symbol",
    ),
}


@needs_extension
@pytest.mark.parametrize("case", ABSENT)
def test_why_it_is_absent(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, said = ABSENT[case]
    for change in changes:
        monkeypatch.setattr(*change)
    extension, reason = native._load()
    assert extension is None and re.search(said, reason), reason


@pytest.mark.parametrize("other", [True, False], ids=["a build for another Python", "no build"])
def test_what_lies_in_the_folder_is_named(other: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if other:
        (tmp_path / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(capsfast, "__path__", [str(tmp_path)])
    monkeypatch.setattr(capsfast.__spec__, "submodule_search_locations", [str(tmp_path)])
    reason = native._absent()
    if other:
        assert "_C.cpython-39-x86_64-linux-gnu.so" in reason
        assert f"this is Python {sys.version_info[0]}.{sys.version_info[1]}" in reason
    else:
        assert "there is no extension" in reason and "pip install" in reason


CPP = named("cpp")


@pytest.mark.slow
@needs_extension
@pytest.mark.parametrize("bias", [False, True])
def test_a_small_batch_keeps_what_the_caches_hold(bias: bool) -> None:
    """More votes than are kept at a time: groups of samples run one after the other, unless db is a sum over them."""
    shape = (5, 24_000, 10, 16, 4)
    assert plan(shape)["layout"] == "capsules"
    check(make(shape, Case(logits="BIJ", bias=bias, coupling=False), dtype=torch.float32), CPP)


@needs_extension
@pytest.mark.parametrize(
    ("shape", "case"),
    [
        ((1, 1024, 2, 2, 4), PassCase(precision=True, activation=True)),
        ((1, 9, 2, 2, 1), PassCase(activation=True, spatial=(40,))),
    ],
    ids=str,
)
def test_numbers_of_many_input_capsules_and_short_votes(shape: tuple[int, ...], case: PassCase) -> None:
    """Activations are copied before they go to lanes, in chunks larger than the votes of an input capsule."""
    for dtype in (torch.float32, torch.bfloat16):
        check(laid_out(make(shape, case, dtype=dtype), "sliced"), CPP)


@needs_extension
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_given_votes_of_every_length(dtype: torch.dtype) -> None:
    """If D is not a multiple of a vector, the last vector overlaps with the vector before."""
    quadratic = PassCase(query=True, precision=True, center=True, second=True)
    for D in (*range(1, 35), 65):
        for case in (Case(), Case(softmax="in"), quadratic):
            check(make((2, 19, 3, D, 1), case, "route_votes" if isinstance(case, Case) else "votes_pass", dtype), CPP)
        # Infinite: a repeated lane that is multiplied by zero, instead of cleared, gives NaN.
        problem = make((1, 19, 3, D, 1), PassCase(query=True, normalize="sigmoid"), "votes_pass", dtype)
        problem.inputs["query"][0, 0, -1] = float("inf")
        got, wanted = (run(problem, name, need=()) for name in ("cpp", "reference"))
        for name, value in got.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-5, msg=f"{name}, D={D}")
