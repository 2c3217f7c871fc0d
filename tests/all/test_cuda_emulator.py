"""The emulator that runs the CUDA kernels in other tests: right kernels pass, planted faults are found."""

import numpy as np
import pytest

from ..emulator.planted import check_found, check_right, run

NUMBERS = np.arange(1, 65, dtype=np.float32)
RIGHT = {
    "rotate": np.roll(NUMBERS, -1),
    "sum": np.repeat([NUMBERS[:32].sum(), NUMBERS[32:].sum()], 32),
    "warp": np.stack((NUMBERS[1::2], NUMBERS[0::2] * 2 + NUMBERS[1::2]), axis=1),
    "reread": np.where(np.arange(64) % 32 < 6, 1, 7),
    "vectors": NUMBERS[::-1],
    "diverge": NUMBERS,
}


@pytest.mark.parametrize("kernel", RIGHT)
def test_right_kernels_give_right_results(kernel: str) -> None:
    check_right(kernel, RIGHT[kernel])


@pytest.mark.parametrize(
    ("kernel", "fault", "message"),
    [
        ("rotate", "missing barrier", "race: "),
        ("rotate", "missing barrier in a warp", "race: "),
        ("rotate", "overwritten too soon", "race: "),
        ("rotate", "wrong index", "index 64 of 64 elements in memory"),
        ("rotate", "wrong shared index", "index 64 of 64 elements in shared memory"),
        ("rotate", "before shared memory", "256 bytes of shared memory from -8 on, of 1024"),
        ("rotate", "beyond shared memory", "256 bytes of shared memory from 1016 on, of 1024"),
        ("warp", "missing barrier of the warp", "race: "),
        ("warp", "overwritten too soon", "race: "),
        ("warp", "read too soon", "race: "),
        ("reread", "read by another warp", "race: write of shared memory that thread"),
        ("vectors", "missing barrier", "race: "),
        ("vectors", "wrong index", "index 61 of 64 elements in shared memory"),
        ("vectors", "misaligned", "a vector access that is not aligned"),
        ("vectors", "misaligned in memory", "an access to memory that is not aligned"),
        ("sum", "half a warp", "threads wait for each other: thread 0 in the exchange of its warp"),
        ("sum", "lane out of range", "shuffle from lane 32"),
        ("diverge", "two barriers", "threads wait for each other: thread 0 at the barrier of line"),
        ("diverge", "early exit", "thread 7 has left the kernel"),
        ("odd block", "", "a block has whole warps"),
    ],
)
def test_planted_faults_are_found(kernel: str, fault: str, message: str) -> None:
    check_found(kernel, fault, message)


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
    # The tensor core multiplies numbers of 11 bits exactly.
    values = np.random.default_rng(0).integers(-1000, 1000, 128)
    found, out = run("product", size=128, values=values)
    assert found == ""
    left, right = values.reshape(16, 8), values[:64].reshape(8, 8)
    np.testing.assert_array_equal(out.reshape(16, 8), left @ right)


def test_sums_of_tensor_cores_are_cut_off() -> None:
    values = np.zeros(128)
    values[0], values[1], values[8] = 1, 1.5 * 2.0**-12, 2.0**-12  # 1 + 1.5 / 2^24 is nearer to 1 + 2 / 2^24
    assert run("product", size=128, values=values)[1].reshape(16, 8)[0, 0] == 1.0


def test_tensor_core_products_have_ten_bits_of_mantissa() -> None:
    values = np.zeros(128)
    values[0] = 1 + 2.0**-11 + 2.0**-12  # between two numbers of 10 bits, nearer to the larger one
    values[1:8] = 0
    exact = np.outer(values[:1], values[:8])
    dropped = run("product", size=128, values=values)[1].reshape(16, 8)[0, 0]
    rounded = run("product", "rounded", size=128, values=values)[1].reshape(16, 8)[0, 0]
    assert dropped == 1.0
    assert rounded == 1 + 2.0**-10
    assert exact[0, 0] != dropped
