"""How Triton kernels are cut: tiles, splits, and that the few interpreted shapes reach every way to cut."""

import itertools

import pytest
import torch

from capsfast.calls.arguments import PassParameters
from capsfast.environment import toolchain

from ..support.backends import Shape
from ..support.problems import EMULATED, OPS, PLAIN, Op, make

pytestmark = pytest.mark.skipif(
    bool(toolchain.why_no_triton()) or not toolchain.interpreting(), reason="runs with Triton's interpreter"
)

if not toolchain.why_no_triton():
    from capsfast.triton import config, launch
    from capsfast.triton.config import LayerSizes, Tiles
    from capsfast.triton.launch import KernelCall


LAYERS = [(10, 16, 8), (10, 17, 3), (1, 1, 1), (1000, 16, 8), (5, 8, 4), (4, 300, 64), (3, 512, 8), (257, 1, 33)]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_tiles_cover_every_output_once(shape: tuple[int, int, int], itemsize: int) -> None:
    J, D, K = shape
    for kernel, given in config.TABLE.items():
        votes = "votes" in kernel
        name = kernel.removesuffix(" quadratic").removesuffix(" votes")
        cut = config.tiles(name, LayerSizes(J, D, 0 if votes else K, itemsize), given)
        columns = cut.JT * cut.DP
        assert cut.DP >= D
        assert cut.sections * cut.NT * cut.JT >= J
        assert (cut.sections - 1) * cut.NT * cut.JT < J
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


def call_of(B: int, I: int, J: int = 10, D: int = 16, K: int = 8, rows: int = 1) -> "KernelCall":
    """A call whose tensors take no memory."""
    u, weight = torch.empty(1, 1, K).expand(B, I, K), torch.empty(1, J, D, K).expand(rows, -1, -1, -1)
    return KernelCall(u, weight, PassParameters(), PLAIN.options)  # type: ignore[arg-type]


def test_partial_sums_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "programs", lambda *_: 4096)
    call = call_of(1, 100_000, 1000, 16, 64)
    assert call.split("accumulate")[0] <= 1024
    chunks, _, splits, _ = call.split_gradient("gradient")
    assert 4 * 1000 * 16 * 64 * chunks * splits <= 256 * 1024**2
    # CUDA allows at most 65535 programs along the second axis of a grid.
    assert call_of(1, 10**6, rows=10**6).split_gradient("gradient")[0] <= 65535


def test_the_vectors_of_one_sample_take_a_whole_strip() -> None:
    call_of(1, 1, J=1_300_000).refuse_far()
    with pytest.raises(RuntimeError, match=r"V of all iterations would reach"):
        call_of(1, 1, J=1_500_000).refuse_far()


@pytest.mark.parametrize("I", [1, 7, 1152, 1_000_000])
@pytest.mark.parametrize("B", [1, 128, 320, 480, 2048, 4096])
@pytest.mark.parametrize("shared", [False, True])
def test_splits_cover_all_input_capsules(B: int, I: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "programs", lambda *_: 528)
    call = call_of(B, I, rows=1 if shared else I)
    for kernel in ("accumulate", "accumulate_gradient", "row_norm"):
        splits, chunk = call.split(kernel)
        assert (splits - 1) * chunk < I <= splits * chunk
        assert splits <= 1024
        # At most as many programs as run at once, unless the batch alone has more: a second round takes as long again.
        assert splits == 1 or splits * -(-B // call.tiles(kernel).BB) <= 528
    chunks, chunk, splits, each = call.split_gradient("gradient")
    batch_tiles = -(-B // call.tiles("gradient").BB)
    assert (chunks - 1) * chunk < I <= chunks * chunk
    assert (splits - 1) * each < batch_tiles <= splits * each
    assert splits == 1 or chunks * splits <= 528
    # Partial dW take at most a few times the weight's size; a shared weight has at most one part per program.
    assert chunks * splits <= 528 if shared else splits * I <= max(4 * I, 2 * 528 * 8)


def test_products_are_padded_if_the_rule_of_the_front_end_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "refuses_k8", lambda: True)
    assert config._smallest_k() == 8
    monkeypatch.delattr("triton.backends.nvidia.compiler.min_dot_size")
    with pytest.warns(RuntimeWarning, match="padded to 16"):
        assert config._smallest_k() == 16


@pytest.mark.parametrize("least", [8, 16])
@pytest.mark.parametrize("kernel", ["accumulate", "gradient"])
def test_a_warp_has_columns_enough_for_a_product_over_them(
    kernel: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product for du sums over columns. A Triton may need 16 float32 numbers; outputs may be smaller."""
    monkeypatch.setattr(config, "SMALLEST_K", {4: least, 2: 16})
    try:
        for J, D, itemsize in itertools.product((1, 2, 3, 10, 40), (1, 2, 4, 8, 16, 64), (2, 4)):
            config.tiles.cache_clear()
            cut = config.tiles(kernel, LayerSizes(J, D, 8, itemsize), config.TABLE[kernel])
            assert least <= 4 * cut.DP // cut.LANES, (J, D, cut)
    finally:
        config.tiles.cache_clear()


@pytest.mark.parametrize("op", OPS, ids=str)
@pytest.mark.parametrize("kernel", ["accumulate", "accumulate_gradient", "gradient"])
def test_interpreted_shapes_have_every_tile_and_section_of_outputs(op: Op, kernel: str) -> None:
    def tiles(shape: Shape, itemsize: int = 4) -> Tiles:
        votes = op.name == "route_votes"
        name = f"{kernel} votes" if votes else kernel
        return config.tiles(kernel, LayerSizes(shape.J, shape.D, 0 if votes else shape.K, itemsize), config.TABLE[name])

    found = [(shape, tiles(shape)) for shape in map(op.fit, EMULATED)]
    assert any(cut.NT > 1 and (cut.sections == 1 or kernel == "gradient") for _, cut in found)
    sectioned = [shape for shape, cut in found if cut.sections > 1]
    assert any(shape.I > 1 for shape in sectioned), "sums over input capsules in sections of outputs"
    assert any(shape.B > cut.BB for shape, cut in found if shape in sectioned), (
        "sections and several tiles of the batch"
    )
    assert any(cut.DP > shape.D > 16 for shape, cut in found)
    assert any(cut.JT * cut.NT * cut.sections > shape.J for shape, cut in found)
    if op.name == "dynamic_routing":
        assert {(shape.K > cut.KP) - (shape.K < cut.KP) for shape, cut in found} >= {1, -1}, "steps and padding of K"
        assert tiles(Shape(2, 2, 330, 3, 4), itemsize=2).sections > 1 or kernel == "gradient"


def test_interpreted_shapes_have_tiles_of_the_batch_and_of_input_capsules_in_one_program() -> None:
    cuts = []
    for shape in EMULATED:
        u, weight = make(shape).inputs.values()
        call = KernelCall(u.float(), weight.float(), PassParameters(), PLAIN.options)
        cuts.append(call.split_gradient("gradient"))
    assert any(chunk > 1 and tiles > 1 for _, chunk, _, tiles in cuts)
    assert any(splits > 1 for _, _, splits, _ in cuts)
