"""How Triton kernels are cut: tiles, splits, the table of tile sizes."""

import itertools

import pytest
import torch

from capsfast import toolchain

from ..support.problems import Case, make, run

pytestmark = pytest.mark.skipif(
    bool(toolchain.why_no_triton()) or not toolchain.interpreting(), reason="runs with Triton's interpreter"
)

if not toolchain.why_no_triton():
    from capsfast.triton import config, launch, plan
    from capsfast.triton.config import Choice, Layer
    from capsfast.triton.launch import Call


LAYERS = [(10, 16, 8), (10, 17, 3), (1, 1, 1), (1000, 16, 8), (5, 8, 4), (4, 300, 64), (3, 512, 8), (257, 1, 33)]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_tiles_cover_every_output_once(shape: tuple[int, int, int], itemsize: int) -> None:
    J, D, K = shape
    for kernel, given in config.TABLE.items():
        votes = "votes" in kernel
        name = kernel.removesuffix(" quadratic").removesuffix(" votes")
        cut = config.tiles(name, Layer(J, D, 0 if votes else K, itemsize), given)
        columns = cut.JT * cut.DP
        assert cut.DP >= D
        assert cut.groups * cut.NT * cut.JT >= J
        assert (cut.groups - 1) * cut.NT * cut.JT < J
        if votes:
            across = cut.warps
            assert columns >= 16 * across
        else:
            # A warp has 16 rows; warps that share rows have no other warps below them.
            across = cut.JT * cut.LANES // 4
            assert across * cut.BB == 16 * cut.warps
            assert across == 1 or cut.BB == 16
            assert cut.DP >= 2 * cut.LANES
            assert cut.KP * itemsize >= 32
        assert across <= given.warps
        if given.columns * across >= columns:
            assert given.columns * across >= cut.NT * columns


@pytest.mark.parametrize("kernel", ["accumulate", "accumulate_gradient", "gradient"])
@pytest.mark.parametrize(("J", "D"), [(10, 16), (11, 16), (21, 16), (100, 16), (7, 32), (10, 8)])
def test_a_warp_has_whole_outputs_where_that_takes_little_padding(J: int, D: int, kernel: str) -> None:
    """Otherwise the dot products of an output would go through shared memory, one after the other."""
    cut = config.tiles(kernel, config.Layer(J, D, 8, 4), config.TABLE[kernel])
    assert cut.LANES <= 4
    # The gradient pass prefers wider tiles to more tiles.
    assert cut.NT * cut.JT * cut.groups * cut.DP <= (1.2 if kernel == "gradient" else 1.15) * J * D


def test_partial_sums_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "programs", lambda *_: 4096)
    u = torch.empty(1, 1, 64).expand(1, 100_000, 64)
    weight = torch.empty(1, 1000, 16, 64)
    call = Call(u, weight, None, None, None, None, None)  # type: ignore[arg-type]
    assert call.split("accumulate")[0] <= 256
    chunks, _, splits, _ = call.split_gradient("gradient")
    assert 4 * weight.numel() * chunks * splits <= 256 * 1024**2
    # CUDA allows at most 65535 programs along the second axis of a grid.
    call = Call(
        torch.empty(1, 1, 8).expand(1, 10**6, 8), torch.empty(1, 10, 16, 8).expand(10**6, -1, -1, -1), *(None,) * 5
    )  # type: ignore[arg-type]
    assert call.split_gradient("gradient")[0] <= 65535


@pytest.mark.parametrize("I", [1, 7, 1152, 1_000_000])
@pytest.mark.parametrize("B", [1, 128, 320, 480, 2048, 4096])
@pytest.mark.parametrize("shared", [False, True])
def test_splits_cover_all_input_capsules(B: int, I: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "programs", lambda *_: 528)
    u = torch.empty(1, 1, 8).expand(B, I, 8)
    weight = torch.empty(1, 10, 16, 8).expand(1 if shared else I, -1, -1, -1)
    call = Call(u, weight, None, None, None, None, None)  # type: ignore[arg-type]
    for kernel in ("accumulate", "accumulate_gradient", "row_norm"):
        splits, chunk = call.split(kernel)
        assert (splits - 1) * chunk < I <= splits * chunk
        assert splits <= 256
        # At most as many programs as run at once, unless the batch alone has more: a second round takes as long again.
        assert splits == 1 or splits * -(-B // call.tiles(kernel).BB) <= 528
    chunks, chunk, splits, each = call.split_gradient("gradient")
    batch_tiles = -(-B // call.tiles("gradient").BB)
    assert (chunks - 1) * chunk < I <= chunks * chunk
    assert (splits - 1) * each < batch_tiles <= splits * each
    assert splits == 1 or chunks * splits <= 528
    # Partial dW take at most a few times the weight's size; a shared weight has at most one part per program.
    assert chunks * splits <= 528 if shared else splits * I <= max(4 * I, 2 * 528 * 8)


@pytest.mark.parametrize("least", [8, 16])
@pytest.mark.parametrize("kernel", ["accumulate", "gradient"])
def test_a_warp_has_columns_enough_for_a_product_over_them(
    kernel: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product for du sums over columns. Triton up to 3.8 needs 16 float32 numbers; outputs may be smaller."""
    monkeypatch.setattr(config, "SMALLEST_K", {4: least, 2: 16})
    try:
        for J, D, itemsize in itertools.product((1, 2, 3, 10, 40), (1, 2, 4, 8, 16, 64), (2, 4)):
            config.tiles.cache_clear()
            cut = config.tiles(kernel, Layer(J, D, 8, itemsize), config.TABLE[kernel])
            columns = 4 * cut.DP // cut.LANES
            assert columns >= least, (J, D, cut)
    finally:
        config.tiles.cache_clear()


def test_other_tile_sizes_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make((17, 5, 6, 8, 4), Case(logits="IJ"), dtype=torch.float32)
    wanted = run(problem, "triton")
    for kernel, given in (
        ("accumulate", Choice(16, 2)),
        ("accumulate_gradient", Choice(16, 1)),
        ("gradient", Choice(16, 2, 3)),
    ):
        monkeypatch.setitem(config.TABLE, kernel, given)
    plan.forget()
    for name, value in run(problem, "triton").items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)
