"""The CUDA kernels for votes in the emulator: the calls that they serve, and their special cases.

test_routing.py and test_routing_edges.py test what every backend must do with votes.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from .emulator import backend as emulator
from .support.accuracy import check
from .support.backends import ALL_DTYPES, Backend, Shape
from .support.problems import LOADED, LOADED_OUT, PLAIN, Case, Problem, make, run

OP = "route_votes"
BACKEND = Backend(emulator.NAME, "cpu", ALL_DTYPES, fused=True, max_work=20_000, prefix=emulator.PREFIX)
KIB = 1024
VOTES = {"votes::RoutingArgs"}
# All options of these kernels at once.
FULL = replace(LOADED_OUT, logits="BIJ")
CASES = (
    PLAIN,
    FULL,
    Case(gradient="last", logits="BIJ"),
    Case(num_iterations=1, mask=True, bias=True),
    Case(num_iterations=5, mask=True, logits="BIJ", squash="unit", eps=1e-3, squash_last=False),
)
# One row or many in a warp, one or several lanes a vote, idle lanes and idle warps, eight components a lane.
SHAPES = (
    Shape(2, 7, 10, 16, 1),
    Shape(3, 5, 32, 16, 1),
    Shape(2, 70, 1, 16, 1),
    Shape(1, 3, 2, 128, 1),
    Shape(2, 41, 3, 32, 1),
    Shape(1, 1, 1, 512, 1),
    Shape(2, 9, 10, 8, 1),
    Shape(2, 5, 32, 8, 1),
)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    emulator.install()


def votes_of(shape: Shape | tuple[int, ...], case: Case = PLAIN, dtype: torch.dtype = torch.float32) -> Problem:
    return make(Shape(*shape, 1) if len(shape) == 4 else shape, case, OP, dtype)


def launches(problem: Problem, ways: bool = False) -> set[str]:
    emulator.take_launches()
    run(problem, emulator.NAME)
    return {name for name in emulator.take_launches(ways) if name.startswith(("votes::", "Accumulate", "Gradient"))}


def families(problem: Problem) -> set[str]:
    """The kernels that must run on a device whose blocks hold a sample."""
    return {"AccumulateArgs", "GradientArgs"} if problem.case.softmax == "in" else VOTES


def check_votes(problem: Problem, slack: float = 2) -> None:
    """Checks the problem on a device whose blocks hold a sample."""
    with emulator.device(shared_bytes=227 * KIB):
        assert launches(problem) == families(problem)
        check(problem, BACKEND, slack)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: Shape, case: Case) -> None:
    check_votes(votes_of(shape, case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [PLAIN, FULL], ids=str)
@pytest.mark.parametrize("shape", [(2, 29, 10, 16), (3, 200, 4, 8), (2, 9, 2, 64)], ids=str)
def test_sixteen_bits(shape: tuple[int, ...], case: Case, dtype: torch.dtype) -> None:
    check_votes(votes_of(shape, case, dtype))


@pytest.mark.rows(4)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("shape", "kib", "cluster"),
    [
        ((9, 80, 4, 16), 99, 1),
        ((9, 80, 4, 16), 64, 2),
        ((9, 80, 4, 16), 39, 4),
        ((2, 130, 4, 32), 66, 4),
        ((3, 900, 5, 8), 78, 8),
        ((9, 300, 8, 16), 70, 4),  # two blocks never fit a multiprocessor: the smallest cluster that holds a sample
        ((2, 9, 10, 16), 99, 1),  # each row has its own threads: more blocks would not be faster
    ],
)
def test_clusters(shape: tuple[int, ...], kib: int, cluster: int, case: Case) -> None:
    problem = votes_of(shape, case)
    with emulator.device(multiprocessors=8, shared_bytes=kib * KIB):
        assert launches(problem, ways=True) == {"votes::RoutingArgs" + (f" cluster{cluster}" if cluster > 1 else "")}
        check(problem, BACKEND)


def test_idle_multiprocessors_get_blocks() -> None:
    problem = votes_of((1, 300, 4, 16))
    with emulator.device(multiprocessors=8, shared_bytes=99 * KIB, shared_bytes_together=228 * KIB):
        assert launches(problem, ways=True) == {"votes::RoutingArgs cluster8"}
        check(problem, BACKEND)
    with emulator.device(multiprocessors=1, shared_bytes=99 * KIB, shared_bytes_together=228 * KIB):
        assert launches(problem, ways=True) == VOTES


# The sums of 512 threads take 32 KiB, the sums of 256 threads half as much.
@pytest.mark.parametrize("case", [PLAIN, FULL], ids=str)
@pytest.mark.parametrize("inputs", [112, 134])
def test_a_sample_that_leaves_no_room_for_the_sums_of_more_threads(inputs: int, case: Case) -> None:
    problem = votes_of((2, inputs, 10, 16), case)
    with emulator.device(shared_bytes=99 * KIB, clusters=False):
        assert launches(problem) == VOTES
        check(problem, BACKEND)


def test_a_device_without_room_for_a_cluster_gets_a_smaller_one() -> None:
    problem = votes_of((9, 80, 4, 16))
    with emulator.device(multiprocessors=2, shared_bytes=40 * KIB):
        assert launches(problem, ways=True) == {"votes::RoutingArgs cluster4"}
    with emulator.device(multiprocessors=1, shared_bytes=40 * KIB):
        assert launches(problem, ways=True) == VOTES
        check(problem, BACKEND)


@pytest.mark.parametrize("case", [PLAIN, FULL], ids=str)
def test_blocks_with_one_input_capsule_more_than_others(case: Case) -> None:
    problem = votes_of((2, 9, 8, 64), case)
    with emulator.device(multiprocessors=8, shared_bytes=40 * KIB):
        assert launches(problem, ways=True) == {"votes::RoutingArgs cluster4"}
        check(problem, BACKEND)


@pytest.mark.parametrize("case", [PLAIN, FULL, LOADED], ids=str)
@pytest.mark.parametrize("shape", [(3, 37, 4, 16), (3, 50, 5, 8)], ids=str)
@pytest.mark.parametrize("layout", ["sliced", "transposed"])
def test_strides(layout: str, shape: tuple[int, ...], case: Case) -> None:
    check_votes(votes_of(shape, case).laid_out(layout))


def moved(votes: Tensor, by: int) -> Tensor:
    """Copies votes to memory that begins `by` elements off alignment."""
    room = torch.full((votes.numel() + by,), math.nan, dtype=votes.dtype)
    room[by:] = votes.flatten()
    return room[by:].view(votes.shape)


def padded(votes: Tensor, axis: int, by: int) -> Tensor:
    """Copies votes with gaps along an axis, which stay aligned if `by` fills whole vectors."""
    size = [n + by if n_axis == axis else n for n_axis, n in enumerate(votes.shape)]
    room = torch.full(size, math.nan, dtype=votes.dtype)
    view = room.narrow(axis, 0, votes.shape[axis])
    view.copy_(votes)
    return view


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "lay_out",
    [
        *(lambda votes, by=by: moved(votes, by) for by in (1, 2, 4, 8)),
        *(lambda votes, axis=axis, by=by: padded(votes, axis, by) for axis in (1, 2, 3) for by in (1, 4)),
        *(lambda votes, axis=axis: votes.narrow(axis, 0, 1).expand(votes.shape) for axis in range(4)),
    ],
    ids=[
        *(f"moved{by}" for by in (1, 2, 4, 8)),
        *(f"padded{axis}by{by}" for axis in (1, 2, 3) for by in (1, 4)),
        *(f"expanded{axis}" for axis in range(4)),
    ],
)
def test_alignment(lay_out: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    for shape in ((2, 29, 4, 16), (2, 49, 3, 8)):
        problem = votes_of(shape, PLAIN, dtype)
        problem.inputs["votes"] = lay_out(problem.inputs["votes"])
        check_votes(problem)


@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("shape", [(3, 29, 4, 16), (3, 49, 5, 8)], ids=str)
def test_what_a_mask_takes_out_may_hold_anything(shape: tuple[int, ...], softmax: str) -> None:
    problem = votes_of(shape, Case(softmax=softmax, mask=True, out_mask=True, logits="BIJ"))
    dead = ~problem.masks["mask"][:, :, None] | ~problem.masks["out_mask"][:, None, :]
    problem.inputs["votes"][dead] = 0
    with emulator.device(shared_bytes=227 * KIB):
        assert launches(problem) == families(problem)
        clean = run(problem, emulator.NAME)
        for bad in (math.nan, math.inf, -math.inf):
            problem.inputs["votes"][dead] = bad
            got = run(problem, emulator.NAME)
            for name, value in got.items():
                assert torch.equal(value, clean[name]), (name, bad)
    for name in ("dvotes", "dlogits", "c"):
        assert not clean[name][dead].any(), name


@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("shape", [(3, 29, 4, 16), (3, 49, 4, 8)], ids=str)
def test_logits_far_from_0(shape: tuple[int, ...], softmax: str, leaky: bool) -> None:
    problem = votes_of(shape, Case(softmax=softmax, logits="BIJ", leaky=leaky))
    logits = problem.inputs["logits"]
    logits[:, 0] = 1e4
    logits[:, 1] = -1e4
    logits[1, 2] = torch.tensor([1e4, -1e4, 0.0, 1e4])
    logits[:, 3] = torch.tensor([-math.inf, 0.0, -math.inf, 1.0])
    logits[:, 4] = torch.tensor([60.0, 50.0, -60.0, 45.0])
    logits[:, 5] = -math.inf
    check_votes(problem)


@pytest.mark.parametrize("case", [PLAIN, FULL, LOADED], ids=str)
@pytest.mark.parametrize("shape", [(5, 61, 4, 16), (5, 61, 5, 8)], ids=str)
def test_repeats_are_bitwise_equal(shape: tuple[int, ...], case: Case) -> None:
    problem = votes_of(shape, case)
    with emulator.device(shared_bytes=227 * KIB):
        results = [run(problem, emulator.NAME) for _ in range(3)]  # the emulator reverses its order at every launch
    for name, value in results[0].items():
        assert all(torch.equal(value, other[name]) for other in results[1:]), name


@pytest.mark.parametrize("need", [("votes",), ("logits",), ("bias",), ()], ids="+".join)
@pytest.mark.parametrize("case", [Case(logits="BIJ", bias=True), Case(logits="IJ", bias=True)], ids=str)
def test_only_some_inputs_need_a_gradient(case: Case, need: tuple[str, ...]) -> None:
    problem = votes_of((3, 37, 4, 16), case)
    with emulator.device(shared_bytes=227 * KIB):
        everything, some = run(problem, emulator.NAME), run(problem, emulator.NAME, need)
    assert some.keys() == {"v", "c", *(f"d{name}" for name in need)}
    for name, value in some.items():
        # Without the gradient of logits [I, J] other kernels run, with sums in another order.
        exact = {"rtol": 0, "atol": 0} if case.logits == "BIJ" or "logits" in need else {}
        torch.testing.assert_close(value, everything[name], **exact)


@pytest.mark.parametrize("case", [Case(num_iterations=1, bias=True), Case(gradient="last", bias=True)], ids=str)
def test_the_bias_alone_needs_no_votes(case: Case) -> None:
    problem = votes_of((3, 37, 4, 16), case)
    with emulator.device(shared_bytes=227 * KIB):
        everything = run(problem, emulator.NAME)
        emulator.take_launches()
        some = run(problem, emulator.NAME, ("bias",))
        assert emulator.take_launches() == {"votes::RoutingArgs": 1, "UpdateArgs": 1, "BiasArgs": 1}
    torch.testing.assert_close(some["dbias"], everything["dbias"])


@pytest.mark.parametrize("case", [PLAIN, FULL], ids=str)
def test_sums_are_as_exact_as_einsum(case: Case) -> None:
    check_votes(votes_of((2, 350, 10, 16), case), slack=1)


def check_general(problem: Problem, forward: bool = False, **device: Any) -> None:
    """The general kernels run; with ``forward`` only in the backward."""
    with emulator.device(**({"shared_bytes": 227 * KIB} | device)):
        ran = launches(problem)
        assert ("GradientArgs" in ran) and ("votes::RoutingArgs" in ran) == forward, ran
        assert forward or "AccumulateArgs" in ran, ran
        check(problem, BACKEND)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 3, 4, 16), torch.float64),
        ((2, 3, 4, 4), torch.float32),
        ((2, 3, 4, 12), torch.float32),
        ((2, 3, 4, 48), torch.float32),  # three lanes a vote
        ((1, 2, 33, 16), torch.float32),
        ((1, 2, 33, 8), torch.bfloat16),
        ((2, 3, 5, 128), torch.float16),
        ((1, 2, 1, 1024), torch.float32),
    ],
    ids=str,
)
def test_what_they_do_not_serve_goes_to_the_general_kernels(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_general(votes_of(shape, PLAIN, dtype))


@pytest.mark.parametrize("case", [LOADED, Case(softmax="in")], ids=str)
def test_a_softmax_over_the_input_capsules_goes_to_the_general_kernels(case: Case) -> None:
    check_general(votes_of((2, 9, 4, 16), case))


def test_a_sum_of_the_logits_over_samples_goes_to_the_general_kernels() -> None:
    check_general(votes_of((2, 9, 4, 16), LOADED_OUT), forward=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sample_too_large_for_a_block_goes_to_the_general_kernels(case: Case, dtype: torch.dtype) -> None:
    problem = votes_of((2, 40 * 1024 // dtype.itemsize // 16, 4, 16), case, dtype)
    check_general(problem, clusters=False, shared_bytes=99 * KIB)
    check_general(problem.laid_out("transposed"), clusters=False, shared_bytes=99 * KIB)


@pytest.mark.slow
def test_a_sample_too_large_for_a_cluster_goes_to_the_general_kernels() -> None:
    check_general(votes_of((1, 1300, 10, 16)), shared_bytes=99 * KIB)


# In shared memory V and ds of all iterations follow the votes.
@pytest.mark.slow
def test_many_iterations() -> None:
    problem = votes_of((2, 9, 20, 16), Case(num_iterations=40))
    check_votes(problem)
    check_general(problem, forward=True, shared_bytes=99 * KIB)
