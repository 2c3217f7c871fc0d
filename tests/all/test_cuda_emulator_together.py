"""The emulator's clusters, cooperative launches, asynchronous copies and devices."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from ..emulator import backend as emulator
from ..emulator.backend import take_questions
from ..emulator.planted import (
    check_found,
    check_right,
    device,
    max_active_blocks,
    max_active_clusters,
    run,
    run_meanwhile,
    settings,
)
from ..support.backends import Shape
from ..support.problems import PLAIN, make
from ..support.problems import run as run_op

NUMBERS = np.arange(1, 65, dtype=np.float32)
BLOCKS = np.arange(1, 513, dtype=np.float32).reshape(8, 64)
PAIRS = BLOCKS[:4].reshape(2, 2, 64).sum(1).repeat(2, 0)
RIGHT = {
    "pass": np.roll(BLOCKS.reshape(2, 4, 64), -1, axis=1),
    "pass in a block": BLOCKS,
    "collect": np.vstack((BLOCKS[0:4:2] + BLOCKS[1:4:2], np.full((2, 64), np.nan))),
    "rounds": 4 * PAIRS,
    "gather": np.tile(4 * BLOCKS[:4].sum(0), (4, 1)),
    "both": PAIRS + 1000 * PAIRS[::-1],
    "ahead": np.roll(NUMBERS, -1) + np.roll(NUMBERS, -5),
    "ahead remote": BLOCKS[1::-1],
    "bulk": 2 * np.roll(NUMBERS, -1),
}


@pytest.mark.parametrize("kernel", RIGHT)
def test_right_kernels_give_right_results(kernel: str) -> None:
    check_right(kernel, RIGHT[kernel])


@pytest.mark.parametrize(
    ("kernel", "fault", "message"),
    [
        ("pass", "missing barrier", "race: "),
        ("pass", "barrier of the block", "race: "),
        ("pass", "barrier of another kind", "race: "),
        ("pass", "overwritten too soon", "race: "),
        ("pass", "missing barrier at the end", "leaves while another may read its shared memory"),
        ("pass", "a block leaves early", "thread 0 has left the kernel"),
        ("pass", "a thread leaves early", "thread 3 has left the kernel"),
        ("pass", "two barriers", "threads wait for each other: block ("),
        ("pass", "wrong rank", "block 4 of a cluster of 4"),
        ("pass", "negative rank", "block -1 of a cluster of 4"),
        ("pass", "wrong index", "index 64 of 64 elements in shared memory"),
        ("pass in a block", "wrong rank", "block 1 of a cluster of 1"),
        ("collect", "missing barrier at the end", "leaves while another may read its shared memory"),
        ("rounds", "one buffer", "race: "),
        ("gather", "a block leaves early", "thread 0 has left the kernel"),
        ("gather", "two barriers", "at the barrier of the grid of line"),
        ("gather alone", "", "a barrier of the grid in a launch that is not cooperative"),
    ],
)
def test_faults_between_blocks_are_found(kernel: str, fault: str, message: str) -> None:
    check_found(kernel, fault, message, size=512)


@pytest.mark.parametrize(
    ("kernel", "fault", "message"),
    [
        ("ahead", "read on its way", "read of shared memory that belongs to a copy that was not waited for"),
        ("ahead", "waited for too late", "read of shared memory that belongs to a copy that was not waited for"),
        ("ahead", "overwritten on its way", "write of shared memory that belongs to a copy that was not waited for"),
        ("ahead", "copied twice", "overwriting of shared memory that belongs to a copy that was not waited for"),
        ("ahead", "copies overlap", "race: copy to shared memory that thread"),
        ("ahead", "one thread does not wait", "read of shared memory that belongs to a copy that was not waited for"),
        ("ahead", "waited for after the barrier", "shared memory that "),  # is written, read, or is for the copies
        ("ahead", "missing barrier", "shared memory that "),
        ("ahead", "copied over too soon", "shared memory that "),
        ("ahead", "written just before", "race: copy to shared memory that thread"),
        ("ahead", "left on its way", "a block leaves with a copy that was not waited for"),
        ("ahead", "source overwritten", "the source of a copy changes on its way"),
        ("ahead", "source not aligned", "a copy that is not aligned to 16 bytes"),
        ("ahead", "destination not aligned", "a copy that is not aligned to 16 bytes"),
        ("ahead", "beyond the source", "index 61 of 64 elements in memory"),
        ("ahead", "before the source", "index -4 of 64 elements in memory"),
        ("ahead", "beyond the destination", "index 64 of 64 elements in shared memory"),
        ("bulk", "not released", "copy to shared memory that thread"),
        ("bulk", "begins without a barrier", "an Arrival that begins without a barrier before its use"),
        ("bulk", "too few bytes", "a thread waits for copies that do not arrive"),
        ("bulk", "beyond the source", "index 16 of 256 elements in memory"),
        ("bulk", "nobody waits", "read of shared memory that belongs to a copy that was not waited for"),
        ("bulk", "wrong turn", "read of shared memory that belongs to a copy that was not waited for"),
        ("bulk", "copied over too soon", "race: copy to shared memory that thread"),
        ("ahead remote", "waited for after the barrier", "belonged to a copy that was not waited for at the last"),
    ],
)
def test_faults_of_copies_are_found(kernel: str, fault: str, message: str) -> None:
    check_found(kernel, fault, message, size=RIGHT[kernel].size)


def test_a_missing_barrier_of_the_grid_shows() -> None:
    results = [run("gather", "missing barrier before the read", size=256)[1] for _ in range(4)]
    assert all(np.isnan(result).any() for result in results)
    results = [run("gather", "missing barrier before the write", size=256)[1] for _ in range(4)]
    assert len({result.tobytes() for result in results}) == 2
    # A barrier of the cluster is not enough.
    results = [run("both", "barrier of the cluster alone", size=256)[1] for _ in range(4)]
    assert any(np.isnan(result).any() for result in results)


@pytest.mark.parametrize(
    ("kernel", "given", "message"),
    [
        ("clusters of 3", {}, "clusters of 3 blocks, 1, 2, 4 and 8 are possible"),
        ("part of a cluster", {}, "clusters of 4 blocks do not divide a grid of (6, 1, 1)"),
        ("pass", {"clusters": False}, "clusters of 4 blocks on a device without clusters"),
        ("pass", {"multiprocessors": 1}, "clusters of 4 blocks do not fit the device"),
        ("clusters of 8", {}, "clusters of 8 blocks do not fit the device"),
        ("clusters of 8", {"multiprocessors": 4}, ""),
        ("many blocks", {}, "a cooperative launch of 8 blocks, the device runs 4 at a time"),
        ("many blocks", {"multiprocessors": 4}, ""),
        ("many blocks", {"multiprocessors": 4, "cooperative": False}, "a cooperative launch on a device without"),
        ("many blocks", {"multiprocessors": 7, "shared_bytes": 1024}, "a cooperative launch of 8 blocks"),
        ("both", {"clusters": False}, "clusters of 2 blocks on a device without clusters"),
        ("rotate", {"shared_bytes": 1023}, "1024 bytes of shared memory, a block can have 1023"),
    ],
)
def test_a_device_refuses_launches(kernel: str, given: dict[str, int], message: str) -> None:
    with device(**given):
        found, _ = run(kernel, size=512)
    assert (message in found) if message else found == ""
    assert run("pass", size=512)[0] == ""


def test_launches_are_counted_by_how_their_blocks_run() -> None:
    emulator.take_launches(kernels="planted")
    for kernel, times in (("rotate", 2), ("pass", 1), ("gather", 3), ("both", 2), ("clusters of 3", 1)):
        for _ in range(times):
            run(kernel, size=512)
    ways = {"Args": 2, "Args cluster4": 1, "Args cooperative": 3, "Args cluster2 cooperative": 2}
    assert emulator.take_launches(ways=True, kernels="planted") == ways  # one was refused
    run("pass", size=512)
    run("rotate")
    assert emulator.take_launches(kernels="planted") == {"Args": 2}
    assert emulator.take_launches(kernels="planted") == {}


def test_how_much_runs_at_a_time() -> None:
    with device(multiprocessors=6, shared_bytes=100_000, shared_bytes_together=150_000):
        assert [max_active_blocks(kib * 1024) for kib in (0, 72, 73, 97, 98)] == [2, 2, 1, 1, -1]
        assert [max_active_clusters(size, 1024) for size in (1, 2, 4, 8)] == [12, 6, 3, 1]
        assert [max_active_clusters(size, 97 * 1024) for size in (1, 2, 4, 8)] == [6, 3, 1, 0]
    with device(clusters=False):
        assert max_active_blocks(1024) == 2
        assert max_active_clusters(2, 1024) == 0


@pytest.mark.parametrize("kib", [47, 48, 49, 99])
def test_a_launch_may_ask_for_all_that_a_block_can_have(kib: int) -> None:
    with device():
        assert max_active_blocks(kib * 1024) > 0
        assert run_meanwhile(much=99 * 1024, less=kib * 1024) == ""
    with device():  # in the other order
        assert run_meanwhile(much=kib * 1024, less=99 * 1024) == ""


def test_threads_that_each_set_what_they_need_take_it_from_others() -> None:
    wanted, allowed = 90 * 1024, 60 * 1024
    message = f"{wanted} bytes of shared memory, the kernel may ask for {allowed}"
    with device():
        assert message in run_meanwhile(wanted, allowed, own=True)
    with device():
        assert "the kernel may ask for 49152" in run_meanwhile(wanted, 1024, own=True)


def test_the_device_is_asked_once() -> None:
    sizes = [1024, 60 * 1024, 99 * 1024]
    with device():
        take_questions(kernels="planted")
        first = [max_active_blocks(size) for size in sizes] + [max_active_clusters(2, size) for size in sizes]
        assert take_questions(kernels="planted") == 2 * 3 + 2  # and the limits of a block and of the kernel
        again = [max_active_blocks(size) for size in sizes] + [max_active_clusters(2, size) for size in sizes]
        assert take_questions(kernels="planted") == 0
        assert first == again == [2, 1, 1, 2, 1, 1]
    with device(shared_bytes=60 * 1024):  # another device
        assert max_active_blocks(60 * 1024) == 1
        assert take_questions(kernels="planted") == 3


def test_threads_ask_the_device_once() -> None:
    sizes = list(range(1, 401))
    with device(), ThreadPoolExecutor(4) as pool:
        take_questions(kernels="planted")
        answers = list(pool.map(max_active_blocks, sizes * 4))
        assert answers == [2] * len(answers)
        assert take_questions(kernels="planted") == len(sizes) + 1  # and the limit of a block


def test_answers_do_not_pile_up() -> None:
    with device():
        for size in range(3000):
            max_active_blocks(size)
        take_questions(kernels="planted")
        max_active_blocks(2999)
        assert take_questions(kernels="planted") == 0
        max_active_blocks(0)
        assert take_questions(kernels="planted") == 1


def test_a_device_is_restored() -> None:
    usual = settings()
    with device():
        assert settings() == usual  # settings without arguments are the defaults
    with device(multiprocessors=3, cooperative=False):
        assert settings()[:6] == [3, 99 * 1024, 100 * 1024, 1, 0, 0]
        with device(shared_bytes=1000, shared_bytes_together=5000, clusters=False):
            assert settings()[:6] == [2, 1000, 5000, 0, 1, 0]
        assert settings()[:6] == [3, 99 * 1024, 100 * 1024, 1, 0, 0]
    with pytest.raises(RuntimeError, match="within"), device(multiprocessors=3):
        raise RuntimeError("within")
    assert settings() == usual


@pytest.mark.parametrize(
    "given", [{"multiprocessors": 0}, {"shared_bytes": 2000, "shared_bytes_together": 3000}], ids=str
)
def test_no_device_is_like_that(given: dict[str, int]) -> None:
    usual = settings()
    with pytest.raises(ValueError, match="no device has"), device(**given):
        pass
    assert settings() == usual


def test_ops_run_on_the_emulated_device() -> None:
    emulator.install()
    problem = make(Shape(3, 5, 10, 16, 8), PLAIN, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="a block can have 1024"), emulator.device(shared_bytes=1024):
        run_op(problem, emulator.NAME)
    emulator.take_launches()
    run_op(problem, emulator.NAME)
    assert emulator.take_launches()["rows::AccumulateArgs"] > 0


def test_ops_ask_the_device_at_the_first_call_alone() -> None:
    emulator.install()
    problem = make(Shape(1, 200, 10, 16, 8), PLAIN, dtype=torch.float32)
    with emulator.device(multiprocessors=4):
        emulator.take_questions()
        run_op(problem, emulator.NAME)
        assert emulator.take_questions() > 0
        run_op(problem, emulator.NAME)
        assert emulator.take_questions() == 0
