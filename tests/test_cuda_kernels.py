"""The CUDA kernels through the emulator: which of them serve a call, and the shapes that only they treat apart.

What every backend must do is tested where the backends are; here are the sides of these kernels' tiles.
"""

from dataclasses import replace

import pytest
import torch

from .emulator import backend as emulator
from .support.accuracy import check
from .support.backends import ALL_DTYPES, Backend, Shape
from .support.problems import LOADED, LOADED_OUT, PLAIN, Case, make, run

BACKEND = Backend(emulator.NAME, "cpu", ALL_DTYPES, fused=True, max_work=20_000, prefix=emulator.PREFIX)
# The options that a tile kernel treats, all at once and one by one.
TILED = (
    PLAIN,
    LOADED_OUT,
    Case(gradient="last", logits="BIJ"),
    Case(num_iterations=1),
    Case(shared=True, mask=True),
    Case(num_iterations=2, leaky=True, out_mask=True, coupling=False),
)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    emulator.install()


def launches(shape: Shape, case: Case, op: str = "dynamic_routing", dtype: torch.dtype = torch.float32) -> set[str]:
    emulator.take_launches()
    run(make(shape, case, op, dtype), emulator.NAME)
    return set(emulator.take_launches())


@pytest.mark.parametrize("case", TILED, ids=str)
@pytest.mark.parametrize(
    "shape",
    # One row tile and two of them, batches that fill the last one and that do not, one warp, many, outputs that end
    # within a warp's columns; K and D of every kernel.
    [
        Shape(1, 5, 10, 16, 8),
        Shape(17, 3, 5, 8, 4),
        Shape(33, 3, 3, 32, 16),
        Shape(16, 9, 4, 8, 8),
        Shape(32, 2, 7, 16, 4),
        Shape(3, 17, 2, 32, 8),
        Shape(2, 3, 20, 8, 16),
        Shape(20, 2, 3, 16, 16),
        Shape(4, 2, 5, 32, 4),
        Shape(70, 2, 3, 8, 4),
    ],
    ids=str,
)
def test_tiles(shape: Shape, case: Case) -> None:
    emulator.take_launches()
    check(make(shape, case, dtype=torch.float32), BACKEND)
    ran = emulator.take_launches()
    assert ran["TileArgs"] == case.num_iterations + (case.num_iterations - 1 if case.gradient == "full" else 0)
    assert "FinalArgs" not in ran
    assert ran["TileFinalArgs"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [PLAIN, LOADED_OUT], ids=str)
@pytest.mark.parametrize("shape", [Shape(5, 9, 10, 16, 8), Shape(18, 3, 4, 8, 16), Shape(2, 3, 5, 32, 4)], ids=str)
def test_tiles_in_sixteen_bits(shape: Shape, case: Case, dtype: torch.dtype) -> None:
    check(make(shape, case, dtype=dtype), BACKEND)
    assert "TileArgs" in launches(shape, case, dtype=dtype)


@pytest.mark.parametrize("case", [PLAIN, LOADED_OUT], ids=str)
@pytest.mark.parametrize("shape", [Shape(2, 3, 33, 8, 16), Shape(18, 2, 10, 32, 4), Shape(1, 2, 16, 32, 8)], ids=str)
def test_wide_layers_take_the_general_last_pass_where_shared_memory_is_small(shape: Shape, case: Case) -> None:
    check(make(shape, case, dtype=torch.float32), BACKEND)
    ran = launches(shape, case)
    assert {"TileArgs", "FinalArgs"} <= ran
    assert "TileFinalArgs" not in ran


def test_more_iterations_than_shared_memory_holds_take_the_general_last_pass() -> None:
    shape, case = Shape(2, 3, 10, 16, 8), Case(num_iterations=12)
    check(make(shape, case, dtype=torch.float32), BACKEND)
    ran = launches(shape, case)
    assert "FinalArgs" in ran
    assert "TileFinalArgs" not in ran


def test_votes_on_tensor_cores_are_as_exact_as_einsum() -> None:
    # Three products in TF32: with one of them alone the error would be hundreds of times larger.
    check(make(Shape(2, 200, 10, 16, 8), PLAIN, dtype=torch.float32), BACKEND, slack=1)
    check(make(Shape(20, 20, 10, 16, 16), LOADED_OUT, dtype=torch.float32), BACKEND, slack=1)


@pytest.mark.parametrize(
    ("shape", "case", "op", "dtype"),
    [
        (Shape(2, 3, 4, 16, 8), LOADED, "dynamic_routing", torch.float32),  # softmax over the input capsules
        (Shape(2, 3, 4, 16, 8), PLAIN, "dynamic_routing", torch.float64),
        (Shape(2, 3, 4, 16, 5), PLAIN, "dynamic_routing", torch.float32),
        (Shape(2, 3, 4, 12, 8), PLAIN, "dynamic_routing", torch.float32),
        (Shape(2, 2, 65, 8, 4), PLAIN, "dynamic_routing", torch.float32),
        (Shape(1, 1, 20, 32, 4), PLAIN, "dynamic_routing", torch.float32),
        (Shape(2, 3, 4, 16, 1), PLAIN, "route_votes", torch.float32),
    ],
    ids=str,
)
def test_what_no_tile_serves_goes_to_the_general_kernels(shape: Shape, case: Case, op: str, dtype: torch.dtype) -> None:
    ran = launches(shape, case, op, dtype)
    assert "ReduceArgs" in ran
    assert "TileArgs" not in ran


def test_a_weight_in_another_order_goes_to_the_general_kernels() -> None:
    problem = make(Shape(2, 3, 4, 16, 8), PLAIN, dtype=torch.float32)
    problem.inputs["weight"] = problem.inputs["weight"].transpose(2, 3).contiguous().transpose(2, 3)
    emulator.take_launches()
    check(problem, BACKEND)
    assert "TileArgs" not in emulator.take_launches()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "case", [PLAIN, LOADED_OUT, LOADED, Case(gradient="last", logits="IJ"), Case(logits="BIJ", shared=True)], ids=str
)
@pytest.mark.parametrize(
    # More output capsules than a tile has, vectors and poses longer than a tile, several tiles of samples.
    "shape",
    [Shape(2, 3, 70, 2, 2), Shape(1, 2, 2, 300, 1), Shape(2, 3, 2, 3, 130), Shape(19, 5, 33, 3, 2)],
    ids=str,
)
def test_more_than_a_tile(shape: Shape, case: Case, dtype: torch.dtype) -> None:
    check(make(shape, case, dtype=dtype), BACKEND)
    if case.softmax == "out" and shape.J == 70:
        assert "RowsArgs" in launches(shape, case, dtype=dtype)


@pytest.mark.parametrize("op", ["dynamic_routing", "route_votes"])
@pytest.mark.parametrize("case", [PLAIN, LOADED, Case(shared=True)], ids=str)
def test_the_order_of_blocks_and_threads_does_not_matter(case: Case, op: str) -> None:
    problem = make(
        Shape(19, 23, 5, 8, 4), replace(case, shared=case.shared and op == "dynamic_routing"), op, torch.float32
    )
    results = [run(problem, emulator.NAME) for _ in range(3)]  # the emulator turns around at every launch
    for name, value in results[0].items():
        assert all(torch.equal(value, other[name]) for other in results[1:]), name


def test_a_shared_weight_is_not_copied() -> None:
    problem = make(Shape(2, 9, 3, 8, 4), Case(shared=True), dtype=torch.float32)
    assert "TileArgs" in launches(Shape(2, 9, 3, 8, 4), Case(shared=True))
    expanded = replace(problem, inputs=problem.inputs | {"weight": problem.inputs["weight"].expand(9, -1, -1, -1)})
    torch.testing.assert_close(run(expanded, emulator.NAME, need=())["v"], run(problem, emulator.NAME, need=())["v"])
