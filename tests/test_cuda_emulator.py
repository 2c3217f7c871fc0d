"""The emulator that runs the CUDA kernels in the other tests: right kernels pass, planted faults are found."""

import ctypes
import functools

import numpy as np
import pytest
from numpy.typing import NDArray

from .emulator.build import library

Floats = NDArray[np.float32]


@functools.cache
def planted() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library("planted")))
    loaded.capsfast_run_planted.restype = ctypes.c_char_p
    return loaded


def run(kernel: str, fault: str = "", size: int = 64, values: Floats | None = None) -> tuple[str, Floats]:
    """What the emulator found, and the result."""
    given = np.arange(1, size + 1, dtype=np.float32) if values is None else values.astype(np.float32)
    out = np.full(size, np.nan, dtype=np.float32)
    pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (given, out))
    found = planted().capsfast_run_planted(kernel.encode(), fault.encode(), *pointers, size)
    return found.decode(), out


NUMBERS = np.arange(1, 65, dtype=np.float32)


def test_right_kernels_give_right_results() -> None:
    expected = {
        "rotate": np.roll(NUMBERS, -1),
        "sum": np.repeat([NUMBERS[:32].sum(), NUMBERS[32:].sum()], 32),
        "warp": NUMBERS.reshape(-1, 2)[:, ::-1].flatten(),
        "diverge": NUMBERS,
    }
    for kernel, wanted in expected.items():
        for _ in range(4):  # forwards and backwards
            found, out = run(kernel)
            assert found == "", kernel
            np.testing.assert_array_equal(out, wanted, err_msg=kernel)


@pytest.mark.parametrize(
    ("kernel", "fault", "message"),
    [
        ("rotate", "missing barrier", "race: "),
        ("rotate", "missing barrier in a warp", "race: "),
        ("rotate", "overwritten too soon", "race: "),
        ("rotate", "wrong index", "index 64 of 64 elements in memory"),
        ("rotate", "wrong shared index", "index 64 of 64 elements in shared memory"),
        ("warp", "missing barrier of the warp", "race: "),
        ("sum", "half a warp", "threads wait for each other: thread 0 in the exchange of its warp"),
        ("sum", "lane out of range", "shuffle from lane 32"),
        ("diverge", "two barriers", "threads wait for each other: thread 0 at the barrier of line"),
        ("diverge", "early exit", "thread 7 has left the kernel"),
        ("odd block", "", "a block has whole warps"),
    ],
)
def test_planted_faults_are_found(kernel: str, fault: str, message: str) -> None:
    for _ in range(4):
        found, _ = run(kernel, fault)
        assert message in found
    # And the emulator goes on working.
    assert run("rotate")[0] == ""


def test_a_wrong_shuffle_gives_a_wrong_sum() -> None:
    found, out = run("sum", "wrong mask")
    assert found == ""
    assert not np.array_equal(out, run("sum")[1])


def test_shared_memory_nobody_wrote_is_nan() -> None:
    found, out = run("rotate", "unwritten")
    assert found == ""
    assert np.isnan(out[2])
    assert np.isfinite(np.delete(out, 2)).all()


def test_a_result_that_depends_on_the_order_of_blocks_differs_from_launch_to_launch() -> None:
    assert {float(run("order")[1][0]) for _ in range(4)} == {0.0, 2.0}


def test_tensor_core_products() -> None:
    # Numbers of 11 bits are what the tensor core multiplies without loss.
    values = np.random.default_rng(0).integers(-1000, 1000, 128)
    found, out = run("product", size=128, values=values)
    assert found == ""
    left, right = values.reshape(16, 8), values[:64].reshape(8, 8)
    np.testing.assert_array_equal(out.reshape(16, 8), left @ right)


def test_tensor_core_products_have_ten_bits_of_mantissa() -> None:
    values = np.zeros(128)
    values[0] = 1 + 2.0**-11 + 2.0**-12  # below the last bit; nearer to the next number of 10 bits than to 1
    values[1:8] = 0
    exact = np.outer(values[:1], values[:8])
    dropped = run("product", size=128, values=values)[1].reshape(16, 8)[0, 0]
    rounded = run("product", "rounded", size=128, values=values)[1].reshape(16, 8)[0, 0]
    assert dropped == 1.0
    assert rounded == 1 + 2.0**-10
    assert exact[0, 0] != dropped
