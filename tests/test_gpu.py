"""The fused GPU backends, as far as only a GPU can show: streams, graphs, threads, devices, precision, sizes, memory.

They also run the shared tests of every backend; these tests have no counterpart on the CPU.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import capsfast
from capsfast import backend as backend_choice
from capsfast.bench.cases import CANONICAL
from capsfast.bench.contenders import EAGER, OURS, contender
from capsfast.bench.inputs import input_set, step
from capsfast.bench.memory import cuda_growth

from .support.accuracy import relative_l2
from .support.backends import Backend, Shape, assert_path, available, named, recorded_ops
from .support.graphs import assert_graphed_like_eager, layers, own_routing
from .support.on_gpu import (
    assert_as_accurate_as_einsum,
    assert_replays,
    assert_same_bits,
    drawn,
)
from .support.problems import LOADED, LOADED_OUT, Case, Problem, make, registered, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).resolve().parent.parent
OPS = ("dynamic_routing", "route_votes")
QUIET = Case(coupling=False)
CASES = (QUIET, LOADED, LOADED_OUT)
# Clusters of blocks, eight tiles of samples each.
LAYER = Shape(128, 1152, 10, 16, 8)
SMALL = Shape(33, 63, 10, 16, 8)
GIB = 2**30
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(params=[backend for backend in available() if backend.device == "cuda"], ids=str)
def gpu(request: pytest.FixtureRequest) -> Backend:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("op", OPS)
def test_the_backend_that_goes_first(op: str) -> None:
    """tests/test_backend.py has the whole order."""
    there = {backend.name: backend for backend in available() if backend.device == "cuda"}
    if len(there) < 2:
        pytest.skip("needs both backends for GPUs")
    recorded = torch.cuda.get_device_capability() in backend_choice.RECORDED
    with recorded_ops() as ops:
        run(make(SMALL, QUIET, op, torch.float32, "cuda"), None)
    assert_path(there["cuda" if recorded and op == "dynamic_routing" else "triton"], op, ops)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("op", "shape"), [*((op, SMALL) for op in OPS), ("dynamic_routing", LAYER)], ids=str)
def test_a_graph_replays_on_new_inputs(gpu: Backend, op: str, case: Case, shape: Shape, backward: bool) -> None:
    """The larger shape takes launches of clusters."""
    problems = [make(shape, case, op, torch.float32, "cuda", seed=seed) for seed in range(2)]
    assert_replays(problems, gpu.name, None if backward else ())


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_work_goes_to_the_current_stream(gpu: Backend, op: str, case: Case) -> None:
    problem = make(SMALL, case, op, torch.float32, "cuda")
    wanted = run(problem, gpu.name)
    late = problem.copied()
    for value in late.tensors:
        value.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        # A tenth of a second: a kernel on another stream would read the zeros.
        torch.cuda._sleep(2 * 10**8)
        late.overwrite(problem)
        got = run(late, gpu.name)
    torch.cuda.synchronize()
    assert_same_bits(got, wanted)


@NEEDS_TWO
@pytest.mark.parametrize("op", OPS)
def test_work_goes_to_the_device_of_the_tensors(gpu: Backend, op: str) -> None:
    problem = make(SMALL, LOADED, op, torch.float32, "cuda:1")
    assert torch.cuda.current_device() == 0
    got = run(problem, gpu.name)
    assert {value.device for value in got.values()} == {torch.device("cuda:1")}
    assert torch.cuda.current_device() == 0
    wanted = run(problem.to(torch.float32, "cuda:0"), gpu.name)
    assert_same_bits({name: value.to("cuda:0") for name, value in got.items()}, wanted)


@NEEDS_TWO
@pytest.mark.parametrize("op", OPS)
def test_tensors_on_two_devices_are_refused_by_the_op_itself(op: str) -> None:
    arguments = registered(make(SMALL, LOADED, op, torch.float32, "cuda"))
    moved = [
        value.to("cuda:1") if isinstance(value, torch.Tensor) and value.dim() == 2 else value for value in arguments
    ]
    with pytest.raises(RuntimeError, match="tensors must be on one device, got cuda:0 and cuda:1"):
        named("cuda").op(op)(*moved)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("default")  # the compiler's advice
def test_compiled_with_cuda_graphs(gpu: Backend) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.utils.counters.clear()
    layer = capsfast.DynamicRouting(63, 10, 8, 16, learned_logits=True, bias=True, backend=gpu.name).cuda()
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for _ in range(6):
        u = torch.randn(33, 63, 8, device="cuda")
        found = []
        for function in (layer, compiled):
            torch.compiler.cudagraph_mark_step_begin()
            leaf = u.clone().requires_grad_()
            v = function(leaf)
            gradients = torch.autograd.grad(v.square().sum(), [leaf, *layer.parameters()])
            found.append([v.detach().clone(), *(gradient.clone() for gradient in gradients)])
        for eager, got in zip(*found, strict=True):
            torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-6)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("name", layers("cpu"))
def test_graphed_like_eager(gpu: Backend, name: str) -> None:
    """tests/test_graphs.py has what is refused."""
    with capsfast.use_backend(None if name == "em" else gpu.name):  # "cuda" serves no EM routing
        assert_graphed_like_eager(*layers("cuda")[name])


def test_what_waits_for_the_gpu_cannot_be_captured() -> None:
    with pytest.raises(RuntimeError, match="must not wait for the GPU"):
        capsfast.graphed(lambda u: u * u.sum().item(), torch.ones(3, device="cuda"))


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("default")  # the compiler's advice
def test_an_own_routing_compiled_with_cuda_graphs(gpu: Backend) -> None:
    compiled = torch.compile(own_routing, mode="reduce-overhead", fullgraph=True)
    _, example = layers("cuda")["passes"]
    for _ in range(6):
        args = [torch.randn_like(value).requires_grad_() for value in example]
        found = []
        with capsfast.use_backend(gpu.name):
            for function in (own_routing, compiled):
                torch.compiler.cudagraph_mark_step_begin()
                v, label, _ = function(*args)
                gradients = torch.autograd.grad(v.square().sum(), args)
                found.append([value.detach().clone() for value in (v, label, *gradients)])
        for eager, got in zip(*found, strict=True):
            torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-5)


def test_tf32_only_where_torch_allows_it(gpu: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make(LAYER, QUIET, dtype=torch.float32, device="cuda")
    truth = run(problem.to(torch.float64, "cuda"), "reference")
    errors = []
    for allowed in (False, True, False):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
        got = run(problem, gpu.name)
        errors.append({name: relative_l2(value.double(), truth[name]) for name, value in got.items()})
    exact, rounded, again = errors
    assert exact == again
    for name, error in exact.items():
        assert error < 1e-5, name
        assert 5 * error < rounded[name] < 1e-2, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [Case(), *CASES], ids=str)
def test_fifty_runs_give_the_same_bits(gpu: Backend, case: Case, dtype: torch.dtype) -> None:
    problem = make(LAYER, case, dtype=dtype, device="cuda")
    first = run(problem, gpu.name)
    for _ in range(49):
        assert_same_bits(run(problem, gpu.name), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(4096, 64, 10, 16, 8),
        Shape(8, 64, 1000, 16, 8),
        Shape(1, 9216, 10, 16, 8),
        Shape(2, 10**6, 2, 16, 8),
        LAYER,
        LAYER._replace(B=1024),
        LAYER._replace(B=1),
        LAYER._replace(B=100),  # a partial tile, and a warp without a tile
        Shape(8, 20_000, 10, 16, 8),  # one tile of samples; clusters share its input capsules
        Shape(40, 2000, 5, 8, 4),
        Shape(130, 1500, 10, 16, 16),
    ],
    ids=str,
)
def test_accuracy_of_large_layers(gpu: Backend, shape: Shape, dtype: torch.dtype) -> None:
    for op in OPS if shape == LAYER else OPS[:1]:
        assert_as_accurate_as_einsum(drawn(shape, dtype, op), gpu.name)


def needs_free(count: int) -> None:
    free = torch.cuda.mem_get_info()[0]
    if free < count:
        pytest.skip(f"needs {count / GIB:.0f} GiB, {free / GIB:.0f} are free")


def test_votes_beyond_two_to_the_31_elements() -> None:
    """Triton refuses them by name, because 32 samples reach too far; without backend= the CUDA kernels serve them."""
    there = {backend.name: backend for backend in available() if backend.device == "cuda"}
    needs_free(40 * GIB)
    problem = drawn(Shape(3, 700_000, 64, 16, 0), torch.bfloat16, "route_votes")
    votes = problem.inputs["votes"]
    assert votes.numel() > 2**31
    if "triton" in there:
        with pytest.raises(RuntimeError, match=r"'triton' cannot serve this call: it serves .* less than 2\*\*31"):
            run(problem, "triton")
    if "cuda" not in there:
        pytest.skip("needs the CUDA kernels")
    with recorded_ops() as ops:
        got = run(problem, None)
    assert_path(there["cuda"], "route_votes", ops)
    last = slice(2, 3)
    alone = run(replace(problem, inputs={"votes": votes[last].clone()}, gradients={"v": problem.dv[last]}), "cuda")
    assert bool(got["dvotes"].isfinite().all())
    for name in ("v", "dvotes"):
        assert relative_l2(got[name][last].float(), alone[name].float()) < 0.02, name


def test_a_weight_beyond_two_to_the_31_elements(gpu: Backend) -> None:
    needs_free(80 * GIB)
    problem = drawn(Shape(2, 10**6, 17, 16, 8), torch.bfloat16)
    assert problem.inputs["weight"].numel() > 2**31
    got = run(problem, gpu.name)
    wanted = run(problem.to(torch.float32, "cuda"), "reference")
    for name, value in got.items():
        assert relative_l2(value.float(), wanted[name]) < 0.03, name
        # The far end of the tensor, which wrapped addresses would miss.
        end = value.shape[1] * 9 // 10 if name == "du" else value.shape[0] * 9 // 10
        part = (slice(None), slice(end, None)) if name == "du" else slice(end, None)
        assert relative_l2(value[part].float(), wanted[name][part]) < 0.03, name


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_the_host_never_waits(gpu: Backend, op: str, case: Case) -> None:
    problem = make(SMALL, case, op, torch.float32, "cuda")
    run(problem, gpu.name)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(problem, gpu.name)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Peak memory beyond inputs and gradients as a share of the votes (90 MiB), which einsum stores; a copy of the votes
# would add 1, in 16 bits 0.5. Measured on an H200: Triton 0.12 and 0.50, CUDA 0.03 and 0.30.
#
# Triton has partial sums of s from 128 splits (0.11); its backward stores c and db of two iterations (0.25), adds
# partial sums of G and V, ds of all iterations. CUDA has fewer parts of s; its backward has four parts of dW (0.25).
SHARES = {"triton": (0.15, 0.6), "cuda": (0.05, 0.4)}


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_peak_memory_is_below_the_votes(gpu: Backend, direction: str) -> None:
    case, found = replace(CANONICAL, direction=direction), {}
    for name in (OURS + gpu.name, EAGER):
        call = step(contender(name).make(case), case, [input_set(case, torch.device("cuda"))])
        call()
        found[name] = cuda_growth(call, case, torch.device("cuda"))
    assert found[EAGER] > case.votes_bytes
    assert found[OURS + gpu.name] <= SHARES[gpu.name][case.backward] * case.votes_bytes


NEEDS_KERNELS = pytest.mark.skipif(not capsfast.backends()["cuda"].available, reason="needs the CUDA kernels")


@pytest.mark.parametrize("kernels", [pytest.param("cuda", marks=NEEDS_KERNELS), "triton"])
def test_two_threads_on_two_streams(kernels: str) -> None:
    """Each launch of CUDA needs the whole device, and shapes need different limits of shared memory."""
    problems = [
        make(LAYER, QUIET, dtype=torch.float32, device="cuda"),
        make(Shape(33, 700, 5, 8, 4), LOADED, dtype=torch.bfloat16, device="cuda"),
    ]
    wanted = [run(problem, kernels) for problem in problems]
    torch.cuda.synchronize()
    start = threading.Barrier(2)

    def work(problem: Problem, want: dict[str, torch.Tensor]) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            start.wait(60)
            for _ in range(50):
                assert_same_bits(run(problem, kernels), want)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, *each) for each in zip(problems, wanted, strict=True)]:
            done.result(100)


def write_results(path: str, backend: str) -> None:
    """For a separate process: writes results of several problems, of the second run, which C++ launches."""
    problems = [
        make(LAYER, QUIET, dtype=torch.float32, device="cuda"),
        make(LAYER, QUIET, dtype=torch.bfloat16, device="cuda"),
        make(LAYER, LOADED, dtype=torch.float32, device="cuda"),
        make(SMALL, LOADED_OUT, dtype=torch.float32, device="cuda"),
        make(Shape(2, 6000, 10, 16, 16), QUIET, dtype=torch.float16, device="cuda"),
        make(Shape(17, 21, 320, 16, 8), LOADED_OUT, dtype=torch.float32, device="cuda"),
    ]
    if backend == "triton":  # it compiles all kernels for each value of the variable
        problems = problems[:2]
    for problem in problems:
        run(problem, backend)
    torch.save([{name: value.cpu() for name, value in run(problem, backend).items()} for problem in problems], path)


@pytest.mark.parametrize(
    ("kernels", "variable", "values"),
    [
        pytest.param("cuda", "CAPSFAST_COOPERATIVE", ("1", "0"), marks=NEEDS_KERNELS),
        pytest.param("cuda", "CAPSFAST_PDL", ("1", "0"), marks=NEEDS_KERNELS),
        ("triton", "CAPSFAST_PDL", ("1", "0")),
        ("triton", "CAPSFAST_PLANS", ("", "python")),
    ],
)
def test_how_kernels_are_launched_changes_no_bit(
    tmp_path: Path, kernels: str, variable: str, values: tuple[str, str]
) -> None:
    """A process reads the variable once. test_cuda_rows.py counts the launches."""
    found = []
    for value in values:
        path = tmp_path / f"{variable}{value}.pt"
        code = f"from tests.test_gpu import write_results; write_results({str(path)!r}, {kernels!r})"
        # Of the CUDA kernels only the columns family starts early, and only the rows family cooperates.
        environment = {**os.environ, variable: value, "CAPSFAST_COLUMNS": str(int(variable == "CAPSFAST_PDL"))}
        answer = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
        )
        assert answer.returncode == 0, answer.stderr
        found.append(torch.load(path))
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)
