"""The emulator that runs the CUDA kernels in other tests: right kernels pass, planted faults and launches are found."""

import ctypes
import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ..emulator import backend as emulator
from ..emulator.build import library
from ..support.backends import Shape
from ..support.problems import Case, make
from ..support.problems import run as run_op

ROOT = Path(__file__).resolve().parent.parent.parent
Floats = NDArray[np.float32]
NUMBERS = np.arange(1, 65, dtype=np.float32)
MORE = np.arange(1, 129, dtype=np.float32)
BLOCKS = np.arange(1, 513, dtype=np.float32).reshape(8, 64)
RIGHT = {
    "rotate": np.roll(NUMBERS, -1),
    "sum": np.stack([2 * NUMBERS.reshape(2, 16, 2).sum((1, 2))] * 32, 1) / 2,
    "pass": np.roll(BLOCKS.reshape(2, 4, 64), -1, axis=1),
    "gather": np.tile(BLOCKS[:4].sum(0), (4, 1)),
    "ahead": np.roll(NUMBERS, -1) + np.roll(NUMBERS, -5),
    "bulk": 2 * np.roll(NUMBERS, -1),
    "meet": MORE.reshape(2, 2, 32)[:, ::-1] + 3,
    "chain": np.tile((MORE[:32] + MORE[1:33]).reshape(16, 2).sum(1).repeat(2), 4),
    "take": 3 * NUMBERS,
    "product_bf16": 2 * MORE.reshape(16, 8) @ MORE[64:].reshape(8, 8),
    "product_f16": 2 * MORE.reshape(16, 8) @ MORE[64:].reshape(8, 8),
}
KIB = 1024


@functools.cache
def planted() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library("planted")))
    loaded.capsfast_run_planted.restype = ctypes.c_char_p
    loaded.capsfast_run_planted_meanwhile.restype = ctypes.c_char_p
    loaded.capsfast_planted_max_active.restype = ctypes.c_int64
    return loaded


def run(kernel: str, fault: str = "", size: int = 512, given: Floats | None = None) -> tuple[str, Floats]:
    """The fault that the emulator found, and the result. Without ``given`` the kernel gets 1, 2, 3 ..."""
    given = np.arange(1, size + 1, dtype=np.float32) if given is None else given
    out = np.full(size, np.nan, dtype=np.float32)
    pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (given, out))
    found = planted().capsfast_run_planted(kernel.encode(), fault.encode(), *pointers, size)
    return found.decode(), out


def device(**settings: Any) -> AbstractContextManager[None]:
    return emulator.device(kernels="planted", **settings)


def active(size: int, shared_bytes: int) -> int:
    """Blocks of a multiprocessor (size 0) or clusters of the device that run together; -1 if the emulator faults."""
    return int(planted().capsfast_planted_max_active(size, shared_bytes))


def questions() -> int:
    return emulator.take_questions(kernels="planted")


@pytest.mark.parametrize("kernel", RIGHT)
def test_right_kernels_give_right_results(kernel: str) -> None:
    for _ in range(4):  # forwards and backwards
        found, out = run(kernel, size=RIGHT[kernel].size)
        assert found == ""
        np.testing.assert_array_equal(out, RIGHT[kernel].flatten())


@pytest.mark.parametrize(
    ("kernel", "fault", "message"),
    [
        ("rotate", "missing barrier", "race: "),
        ("rotate", "barrier of a warp", "race: "),
        ("rotate", "overwritten too soon", "race: "),
        ("rotate", "wrong index", "index 64 of 64 elements in memory"),
        ("rotate", "wrong shared index", "index 64 of 64 elements in shared memory"),
        ("rotate", "beyond shared memory", "256 bytes of shared memory from 1016 on, of 1024"),
        ("rotate", "misaligned", "a vector access that is not aligned"),
        ("rotate", "two barriers", "threads wait for each other: thread 0 at the barrier of line"),
        ("rotate", "early exit", "thread 7 has left the kernel"),
        ("odd block", "", "a block has whole warps"),
        ("sum", "missing barrier of the warp", "race: "),
        ("sum", "overwritten without a barrier", "race: write of shared memory that thread"),
        ("sum", "half a warp", "threads wait for each other: thread 0 in the exchange of its warp"),
        ("pass", "missing barrier", "race: "),
        ("pass", "barrier of the block", "race: "),
        ("pass", "overwritten too soon", "race: "),
        ("pass", "missing barrier at the end", "leaves while another may read its shared memory"),
        ("pass", "a thread leaves early", "thread 3 has left the kernel"),
        ("pass", "wrong rank", "block 4 of a cluster of 4"),
        ("gather", "a block leaves early", "thread 0 has left the kernel"),
        ("gather alone", "", "a barrier of the grid in a launch that is not cooperative"),
        ("ahead", "read on its way", "read of shared memory that belongs to a copy that was not waited for"),
        ("ahead", "overwritten on its way", "write of shared memory that belongs to a copy that was not waited for"),
        ("ahead", "one thread does not wait", "read of shared memory that belongs to a copy that was not waited for"),
        ("ahead", "copies overlap", "race: copy to shared memory that thread"),
        ("ahead", "missing barrier", "shared memory that "),  # is written, read, or is for the copies
        ("ahead", "copied over too soon", "shared memory that "),
        ("ahead", "left on its way", "a block leaves with a copy that was not waited for"),
        ("ahead", "source overwritten", "the source of a copy changes on its way"),
        ("ahead", "source not aligned", "a copy that is not aligned to 16 bytes"),
        ("ahead", "beyond the source", "index 61 of 64 elements in memory"),
        ("ahead", "beyond the destination", "index 64 of 64 elements in shared memory"),
        ("bulk", "not released", "copy to shared memory that thread"),
        ("bulk", "begins without a barrier", "an Arrival that begins without a barrier before its use"),
        ("bulk", "too few bytes", "a thread waits for copies that do not arrive"),
        ("bulk", "beyond the source", "index 16 of 256 elements in memory"),
        ("bulk", "nobody waits", "read of shared memory that belongs to a copy that was not waited for"),
        ("bulk", "wrong turn", "read of shared memory that belongs to a copy that was not waited for"),
        ("bulk", "copied over too soon", "race: copy to shared memory that thread"),
        ("meet", "missing barrier", "race: "),
        ("meet", "barrier of a warp", "race: "),
        ("meet", "wrong pairs", "race: "),
        ("meet", "one buffer", "race: "),
        ("meet", "barrier 0", "named barrier 0: 1 to 15 are possible"),
        ("meet", "barrier 16", "named barrier 16: 1 to 15 are possible"),
        ("meet", "no threads", "of 0 threads: not whole warps of a block of 128"),
        ("meet", "part of a warp", "of 48 threads: not whole warps of a block of 128"),
        ("meet", "more than the block", "of 160 threads: not whole warps of a block of 128"),
        ("meet", "two counts", "named barrier 2 of "),
        ("meet", "one barrier", "named barrier 1 of 64 threads: more come"),
        ("meet", "one barrier, pairs in turns", "named barrier 1: a thread comes that does not know"),
        ("meet", "halves of warps", "threads wait for each other: thread 0 at named barrier 1 of line"),
        ("meet", "a warp leaves", "thread 0 has left the kernel; thread 96 at named barrier 2 of line"),
        ("take", "read too early", "a thread touches scratch memory before it waited for the launch before"),
        ("take", "written too early", "a thread touches scratch memory before it waited for the launch before"),
        ("take", "copied too early", "a thread touches scratch memory before it waited for the launch before"),
        (
            "take",
            "one thread does not wait",
            "leaves without waiting for the launch before [block (0, 0, 0), thread 9]",
        ),
        ("take", "nobody waits", "a thread touches scratch memory before it waited for the launch before"),
        ("take", "set to zero in between", "a launch that starts early is not directly behind another launch"),
        ("take without give", "", "a launch that starts early is not directly behind another launch"),
        ("chain", "broken chain", "race: write of shared memory that thread"),
        ("chain", "chain out of order", "race: write of shared memory that thread"),
    ],
)
def test_planted_faults_are_found(kernel: str, fault: str, message: str) -> None:
    for _ in range(4):
        found = run(kernel, fault, RIGHT[kernel].size if kernel in RIGHT else 512)[0]
        assert message in found, found
    assert run("rotate", size=64)[0] == run("gather")[0] == ""


@pytest.mark.parametrize(("kernel", "bits"), [("product_bf16", 8), ("product_f16", 11)])
def test_sums_of_products_of_16_bits_are_cut_off(kernel: str, bits: int) -> None:
    scale = 2.0 ** (bits - 1)
    numbers = np.floor(np.random.default_rng(0).uniform(1, 2, 128) * scale) / scale * 2.0 ** (np.arange(128) % 7)
    found, out = run(kernel, size=128, given=numbers.astype(np.float32))
    exact = 2 * numbers.reshape(16, 8) @ numbers[64:].reshape(8, 8)
    assert found == ""
    error = 1 - out.reshape(16, 8) / exact
    assert 0 < error.max() < 2.0**-20
    assert error.min() >= 0


def test_shared_memory_nobody_wrote_is_nan() -> None:
    found, out = run("rotate", "unwritten", 64)
    assert found == ""
    assert list(np.flatnonzero(np.isnan(out))) == [2]


def test_a_result_that_depends_on_the_order_of_blocks_differs_from_launch_to_launch() -> None:
    # A barrier of the cluster is not enough for sums over the grid.
    assert len({run("gather", "barrier of the cluster alone")[1].tobytes() for _ in range(4)}) == 2


@pytest.mark.parametrize(
    ("kernel", "given", "message"),
    [
        ("clusters of 3", {}, "clusters of 3 blocks, 1, 2, 4 and 8 are possible"),
        ("part of a cluster", {}, "clusters of 4 blocks do not divide a grid of (6, 1, 1)"),
        ("pass", {"clusters": False}, "clusters of 4 blocks on a device without clusters"),
        ("pass", {"multiprocessors": 1}, "clusters of 4 blocks do not fit the device"),
        ("many blocks", {}, "a cooperative launch of 8 blocks, the device runs 4 at a time"),
        ("many blocks", {"multiprocessors": 4}, ""),
        ("many blocks", {"multiprocessors": 4, "cooperative": False}, "a cooperative launch on a device without"),
        ("rotate", {"shared_bytes": 1023}, "1024 bytes of shared memory, a block can have 1023"),
        ("take", {"architecture": 90}, ""),
        ("take", {"architecture": 89}, "a launch that starts early on a device of 89"),
        ("ahead", {"architecture": 75}, "an instruction of architecture 80 on a device of 75"),
    ],
)
def test_a_device_refuses_launches(kernel: str, given: dict[str, int], message: str) -> None:
    with device(**given):
        found, _ = run(kernel)
    assert (message in found) if message else found == ""
    assert run("pass")[0] == ""


@pytest.mark.parametrize("kib", [47, 48, 49, 99])
def test_a_launch_may_ask_for_all_that_a_block_can_have(kib: int) -> None:
    for order in ((99 * KIB, kib * KIB), (kib * KIB, 99 * KIB)):
        with device():
            assert planted().capsfast_run_planted_meanwhile(*order) == b""


def test_threads_ask_the_device_once() -> None:
    sizes = [KIB, 60 * KIB, 99 * KIB, *range(1, 401)]
    with device(), ThreadPoolExecutor(4) as pool:
        questions()
        answers = list(pool.map(functools.partial(active, 0), sizes * 4))
        assert answers == ([2, 1, 1] + [2] * 400) * 4
        assert questions() == len(sizes) + 2  # and the limits of a block and of the kernel
    with device(shared_bytes=60 * KIB):  # another device
        assert active(0, 60 * KIB) == 1
        assert questions() == 3


# Prints what a call with one early launch, and one with two launches of which the second is early, do on two devices.
EARLY = """
import ctypes

from tests.emulator import backend as emulator
from tests.emulator.build import library

touch = ctypes.CDLL(str(library("ops"))).capsfast_touch_scratch
touch.restype = ctypes.c_char_p
for architecture in (90, 80):
    with emulator.device(architecture=architecture):
        found = [touch(launches, waits).decode() for launches, waits in ((2, True), (2, False), (1, True))]
    print([text.split(" [")[0] for text in found], emulator.take_launches(ways=True))
"""


def test_the_device_and_the_environment_decide_whether_kernels_start_early() -> None:
    never = "['', '', ''] {'TouchArgs': 5}"
    early = (
        "['', 'a thread touches scratch memory before it waited for the launch before', "
        "'a launch that starts early is not directly behind another launch of its call'] "
        "{'TouchArgs': 2, 'TouchArgs early': 2}"
    )
    for variable, expected in (("1", [early, never]), ("0", [never, never])):
        environment = os.environ | {"CAPSFAST_PDL": variable}
        command = [sys.executable, "-c", EARLY]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=600)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.splitlines() == expected


def test_ops_run_on_the_emulated_device() -> None:
    emulator.install()
    problem = make(Shape(1, 200, 10, 16, 8), Case(coupling=False), dtype=torch.float32)
    with pytest.raises(RuntimeError, match="a block can have 1024"), emulator.device(shared_bytes=1024):
        run_op(problem, emulator.NAME)
    emulator.take_launches()
    with emulator.device(multiprocessors=4):
        emulator.take_questions()
        run_op(problem, emulator.NAME)
        assert emulator.take_questions() > 0
        run_op(problem, emulator.NAME)
        assert emulator.take_questions() == 0
    assert emulator.take_launches()["rows::AccumulateArgs"] > 0
    with pytest.raises(ValueError, match="no device has"), emulator.device(multiprocessors=0):
        pass
