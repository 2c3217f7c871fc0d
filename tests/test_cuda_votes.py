"""The CUDA kernels for votes, through the emulator: which calls they serve, and what only they treat apart.

What every backend must do with votes is tested in test_routing.py and test_route_votes.py.
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
VOTES = {"VotesForwardArgs", "VotesBackwardArgs"}
GENERAL = {"AccumulateArgs", "GradientArgs"}
CASES = (
    PLAIN,
    LOADED,
    LOADED_OUT,
    Case(gradient="last", logits="BIJ"),
    Case(num_iterations=1, softmax="in", coupling=False),
    Case(num_iterations=5, mask=True, logits="IJ", squash="unit", eps=1e-3, squash_last=False),
)
# Softmaxes within a warp: a row of it or many, some lanes or one a vote, lanes and threads without any.
IN_WARPS = (
    Shape(2, 7, 10, 16, 1),
    Shape(3, 5, 32, 16, 1),
    Shape(2, 9, 3, 48, 1),
    Shape(2, 70, 1, 16, 1),
    Shape(1, 3, 2, 128, 1),
)
# Through shared memory: few elements a lane, more outputs than a warp has lanes, than a lane has scores at a time.
IN_BLOCKS = (
    Shape(2, 9, 10, 8, 1),
    Shape(1, 5, 33, 16, 1),
    Shape(2, 3, 140, 4, 1),
    Shape(2, 41, 3, 12, 1),
    Shape(1, 2, 5, 100, 1),
    Shape(1, 1, 512, 4, 1),
)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    emulator.install()


def votes_of(shape: Shape | tuple[int, ...], case: Case = PLAIN, dtype: torch.dtype = torch.float32) -> Problem:
    return make(Shape(*shape, 1) if len(shape) == 4 else shape, case, OP, dtype)


def launches(problem: Problem, ways: bool = False) -> set[str]:
    emulator.take_launches()
    run(problem, emulator.NAME)
    return {name for name in emulator.take_launches(ways) if name.startswith(("Votes", "Accumulate", "Gradient"))}


def check_votes(problem: Problem, slack: float = 2) -> None:
    """On a device whose blocks hold a sample."""
    with emulator.device(shared_bytes=227 * KIB):
        assert launches(problem) == VOTES
        check(problem, BACKEND, slack)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("shape", [*IN_WARPS, *IN_BLOCKS], ids=str)
@pytest.mark.usual(case=CASES[1:4])
def test_shapes(shape: Shape, case: Case) -> None:
    check_votes(votes_of(shape, case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [PLAIN, LOADED, LOADED_OUT], ids=str)
@pytest.mark.parametrize("shape", [(2, 29, 10, 16), (3, 200, 4, 4), (2, 9, 2, 96), (2, 40, 5, 12)], ids=str)
def test_sixteen_bits(shape: tuple[int, ...], case: Case, dtype: torch.dtype) -> None:
    check_votes(votes_of(shape, case, dtype))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("shape", "kib", "forward", "backward"),
    [
        ((9, 80, 4, 16), 99, 1, 1),
        ((9, 80, 4, 16), 64, 2, 2),
        ((9, 80, 4, 16), 47, 4, 4),
        ((9, 80, 4, 16), 44, 8, 4),
        ((9, 80, 4, 16), 39, 1, 8),  # no two blocks of whatever cluster fit: the smallest that holds a sample
        ((9, 80, 4, 16), 30, 2, 2),
        ((2, 130, 4, 32), 66, 8, 8),
        ((3, 900, 5, 4), 57, 8, 4),
        ((9, 25, 40, 16), 60, 4, 2),
    ],
)
@pytest.mark.usual(case=CASES[:3])
def test_clusters(shape: tuple[int, ...], kib: int, forward: int, backward: int, case: Case) -> None:
    problem = votes_of(shape, case)
    ways = {
        f"Votes{args}Args" + (f" cluster{size}" if size > 1 else "")
        for args, size in (("Forward", forward), ("Backward", backward))
    }
    with emulator.device(multiprocessors=8, shared_bytes=kib * KIB):
        ran = launches(problem, ways=True)
        assert case != PLAIN or ran == ways
        check(problem, BACKEND)


def test_idle_multiprocessors_get_blocks() -> None:
    # Half of the input capsules for each of two; a quarter would be less than a chunk.
    problem = votes_of((1, 300, 4, 16))
    with emulator.device(multiprocessors=8, shared_bytes=99 * KIB, shared_bytes_together=228 * KIB):
        assert launches(problem, ways=True) == {f"{name} cluster2" for name in VOTES}
        check(problem, BACKEND)
    with emulator.device(multiprocessors=1, shared_bytes=99 * KIB, shared_bytes_together=228 * KIB):
        assert launches(problem, ways=True) == VOTES


def test_a_device_without_room_for_a_cluster_gets_a_smaller_one() -> None:
    problem = votes_of((9, 80, 4, 16))
    device = {"shared_bytes": 55 * KIB, "shared_bytes_together": 56 * KIB}
    with emulator.device(multiprocessors=2, **device):
        assert "VotesForwardArgs cluster4" in launches(problem, ways=True)
    with emulator.device(multiprocessors=1, **device):
        assert launches(problem, ways=True) == {"VotesForwardArgs", "VotesBackwardArgs cluster2"}
        check(problem, BACKEND)


@pytest.mark.parametrize("case", [PLAIN, LOADED, LOADED_OUT], ids=str)
def test_blocks_without_input_capsules(case: Case) -> None:
    # Nine of them, two for each of eight blocks: the last three have none.
    problem = votes_of((2, 9, 25, 64), case)
    for kib, args in ((42, "VotesForwardArgs"), (75, "VotesBackwardArgs")):
        with emulator.device(multiprocessors=8, shared_bytes=kib * KIB):
            assert case == LOADED_OUT or f"{args} cluster8" in launches(problem, ways=True)
            check(problem, BACKEND)


@pytest.mark.parametrize("case", [LOADED_OUT, replace(LOADED, logits="IJ")], ids=str)
@pytest.mark.parametrize("shape", [(70, 5, 3, 16), (70, 9, 5, 4)], ids=str)
def test_a_cluster_has_many_samples_where_they_share_their_logits(shape: tuple[int, ...], case: Case) -> None:
    check_votes(votes_of(shape, case))


@pytest.mark.parametrize("case", [PLAIN, LOADED, LOADED_OUT], ids=str)
@pytest.mark.parametrize("shape", [(3, 37, 4, 16), (3, 50, 5, 8)], ids=str)
@pytest.mark.parametrize("layout", ["sliced", "transposed"])
def test_strides(layout: str, shape: tuple[int, ...], case: Case) -> None:
    check_votes(votes_of(shape, case).laid_out(layout))


def moved(votes: Tensor, by: int) -> Tensor:
    """In memory that begins `by` elements off alignment."""
    room = torch.full((votes.numel() + by,), math.nan, dtype=votes.dtype)
    room[by:] = votes.flatten()
    return room[by:].view(votes.shape)


def padded(votes: Tensor, axis: int, by: int) -> Tensor:
    """With gaps along an axis: aligned still where `by` fills whole vectors."""
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
@pytest.mark.usual(dtype=[torch.bfloat16])
def test_alignment(lay_out: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    for shape in ((2, 29, 4, 16), (2, 49, 3, 4)):
        problem = votes_of(shape, PLAIN, dtype)
        problem.inputs["votes"] = lay_out(problem.inputs["votes"])
        check_votes(problem)


@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("shape", [(3, 29, 4, 16), (3, 49, 5, 4)], ids=str)
def test_what_a_mask_takes_out_may_hold_anything(shape: tuple[int, ...], softmax: str) -> None:
    problem = votes_of(shape, Case(softmax=softmax, mask=True, out_mask=True, logits="BIJ"))
    dead = ~problem.masks["mask"][:, :, None] | ~problem.masks["out_mask"][:, None, :]
    problem.inputs["votes"][dead] = 0
    with emulator.device(shared_bytes=227 * KIB):
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
@pytest.mark.parametrize("shape", [(3, 29, 4, 16), (3, 49, 4, 4)], ids=str)
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


@pytest.mark.parametrize("case", [PLAIN, LOADED, LOADED_OUT], ids=str)
@pytest.mark.parametrize("shape", [(5, 61, 4, 16), (5, 61, 5, 4)], ids=str)
def test_repeats_are_bitwise_equal(shape: tuple[int, ...], case: Case) -> None:
    problem = votes_of(shape, case)
    with emulator.device(shared_bytes=227 * KIB):
        results = [run(problem, emulator.NAME) for _ in range(3)]  # the emulator turns around at every launch
    for name, value in results[0].items():
        assert all(torch.equal(value, other[name]) for other in results[1:]), name


@pytest.mark.parametrize("need", [("votes",), ("logits",), ("bias",), ()], ids="+".join)
@pytest.mark.parametrize("case", [Case(logits="IJ", bias=True), Case(softmax="in", logits="BIJ", bias=True)], ids=str)
def test_only_some_inputs_need_a_gradient(case: Case, need: tuple[str, ...]) -> None:
    problem = votes_of((3, 37, 4, 16), case)
    with emulator.device(shared_bytes=227 * KIB):
        everything, some = run(problem, emulator.NAME), run(problem, emulator.NAME, need)
    assert some.keys() == {"v", "c", *(f"d{name}" for name in need)}
    for name, value in some.items():
        torch.testing.assert_close(value, everything[name], rtol=0, atol=0)


@pytest.mark.parametrize("case", [Case(num_iterations=1, bias=True), Case(gradient="last", bias=True)], ids=str)
def test_the_bias_alone_needs_no_votes(case: Case) -> None:
    problem = votes_of((3, 37, 4, 16), case)
    with emulator.device(shared_bytes=227 * KIB):
        everything, some = run(problem, emulator.NAME), run(problem, emulator.NAME, ("bias",))
    torch.testing.assert_close(some["dbias"], everything["dbias"])


@pytest.mark.parametrize("case", [PLAIN, LOADED], ids=str)
def test_sums_are_as_exact_as_einsum(case: Case) -> None:
    check_votes(votes_of((2, 350, 10, 16), case), slack=1)


def check_general(problem: Problem, forward: bool = False, **device: Any) -> None:
    """No launch of the kernels for votes but, with ``forward``, that of the forward."""
    with emulator.device(**device):
        assert launches(problem) == GENERAL | ({"VotesForwardArgs"} if forward else set())
        check(problem, BACKEND)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 3, 4, 16), torch.float64),
        ((2, 3, 4, 6), torch.float32),
        ((2, 3, 4, 132), torch.float32),
        ((1, 2, 513, 4), torch.float32),
        ((1, 2, 65, 20), torch.float32),  # lanes for 32 elements
        ((2, 3, 4, 6), torch.bfloat16),
        ((2, 3, 4, 9), torch.float16),
    ],
    ids=str,
)
def test_what_they_do_not_serve_goes_to_the_general_kernels(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_general(votes_of(shape, PLAIN, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usual(dtype=[torch.float32], case=CASES[:2])
def test_a_sample_too_large_for_a_block_goes_to_the_general_kernels(case: Case, dtype: torch.dtype) -> None:
    problem = votes_of((2, 40 * 1024 // dtype.itemsize // 16, 4, 16), case, dtype)
    check_general(problem, clusters=False)
    check_general(problem.laid_out("transposed"), clusters=False)


def test_a_sample_too_large_for_a_cluster_goes_to_the_general_kernels() -> None:
    check_general(votes_of((1, 1300, 10, 16)))


# The backward keeps V and ds of all iterations beside the votes.
@pytest.mark.parametrize(("case", "kib"), [(PLAIN, 138), (LOADED, 144), (LOADED_OUT, 138)], ids=str)
def test_a_backward_too_large_for_a_block_goes_to_the_general_kernels(case: Case, kib: int) -> None:
    check_general(votes_of((2, 100, 20, 16), case), forward=True, shared_bytes=kib * KIB, clusters=False)


def test_more_iterations_than_shared_memory_holds_go_back_through_the_general_kernels() -> None:
    check_general(votes_of((2, 9, 20, 16), Case(num_iterations=40)), forward=True)
