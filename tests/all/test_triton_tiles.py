"""How Triton kernels are cut: tiles, splits, the table of tile sizes, and tune, which measures others."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from capsfast import toolchain

from ..support.passes import QUADRATIC
from ..support.problems import PLAIN, Case, make, run

pytestmark = pytest.mark.skipif(
    bool(toolchain.why_no_triton()) or not toolchain.interpreting(), reason="runs with Triton's interpreter"
)

if not toolchain.why_no_triton():
    from capsfast.triton import config, occupancy, replay, tune
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
            # 16 rows a warp, or all rows and whole outputs.
            across = cut.JT * cut.LANES // 4
            assert across * cut.BB == 16 * cut.warps
            assert across == 1 or cut.BB == 16
            assert cut.DP >= 2 * cut.LANES
            assert cut.KP * itemsize >= 32
        assert across <= given.warps
        if given.columns * across >= columns:
            assert given.columns * across >= cut.NT * columns


@pytest.mark.parametrize("kernel", ["accumulate", "accumulate_gradient", "gradient", "gradient once"])
@pytest.mark.parametrize(("J", "D"), [(10, 16), (11, 16), (21, 16), (100, 16), (7, 32), (10, 8)])
def test_a_warp_has_whole_outputs_where_that_takes_little_padding(J: int, D: int, kernel: str) -> None:
    """Else their dot products would go through shared memory, one after the other."""
    cut = config.tiles(kernel, config.Layer(J, D, 8, 4), config.TABLE[kernel])
    assert cut.LANES <= 4
    # The gradient pass has wider tiles rather than more of them.
    assert cut.NT * cut.JT * cut.groups * cut.DP <= (1.2 if kernel == "gradient" else 1.15) * J * D


def test_partial_sums_are_bounded() -> None:
    u = torch.empty(1, 1, 64).expand(1, 100_000, 64)
    weight = torch.empty(1, 1000, 16, 64)
    call = Call(u, weight, None, None, None, None, None)  # type: ignore[arg-type]
    assert call.split("accumulate", 4096)[0] <= 256
    chunks, _, splits, _ = call.split_gradient("gradient", 4096)
    assert 4 * weight.numel() * chunks * splits <= 256 * 1024**2
    # A grid has no more programs along its second axis.
    call = Call(
        torch.empty(1, 1, 8).expand(1, 10**6, 8), torch.empty(1, 10, 16, 8).expand(10**6, -1, -1, -1), *(None,) * 5
    )  # type: ignore[arg-type]
    assert call.split_gradient("gradient", 4096)[0] <= 65535


@pytest.mark.parametrize("I", [1, 7, 1152, 1_000_000])
@pytest.mark.parametrize("B", [1, 128, 320, 480, 2048, 4096])
@pytest.mark.parametrize("shared", [False, True])
def test_splits_cover_all_input_capsules(B: int, I: int, shared: bool) -> None:
    u = torch.empty(1, 1, 8).expand(B, I, 8)
    weight = torch.empty(1, 10, 16, 8).expand(1 if shared else I, -1, -1, -1)
    call = Call(u, weight, None, None, None, None, None)  # type: ignore[arg-type]
    for kernel in ("accumulate", "accumulate_gradient", "row_norm"):
        splits, chunk = call.split(kernel, 528)
        assert (splits - 1) * chunk < I <= splits * chunk
        assert splits <= 256
        # No more programs than fit at once, unless the batch alone has more: the rest would take as long again.
        assert splits == 1 or splits * -(-B // call.tiles(kernel).BB) <= 528
    chunks, chunk, splits, each = call.split_gradient("gradient", 528)
    batch_tiles = -(-B // call.tiles("gradient").BB)
    assert (chunks - 1) * chunk < I <= chunks * chunk
    assert (splits - 1) * each < batch_tiles <= splits * each
    assert splits == 1 or chunks * splits <= 528
    # Partial dW: at most a few times the weight, or what the device has programs for.
    assert chunks * splits <= 528 if shared else splits * I <= max(4 * I, 2 * 528 * 8)


@pytest.mark.parametrize("least", [8, 16])
@pytest.mark.parametrize("kernel", ["accumulate", "gradient", "gradient once"])
def test_a_warp_has_columns_enough_for_a_product_over_them(
    kernel: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of du, in which Triton up to 3.8 sums over no fewer than 16 float32 numbers: outputs may have fewer of them."""
    monkeypatch.setattr(config, "SMALLEST_K", {4: least, 2: 16})
    try:
        for J, D, itemsize in itertools.product((1, 2, 3, 10, 40), (1, 2, 4, 8, 16, 64), (2, 4)):
            config.tiles.cache_clear()
            cut = config.tiles(kernel, Layer(J, D, 8, itemsize), config.TABLE[kernel])
            columns = 4 * cut.DP // cut.LANES
            assert columns >= least, (J, D, cut)
    finally:
        config.tiles.cache_clear()


# Of a launch: how it is cut.
CUT = ("NT", "JT", "DP", "KP", "num_warps")
Launches = dict[str, tuple[Any, ...]]


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Tiles and grids of the latest launch of each kernel. Nothing is computed; grids are those of a GPU."""
    from triton.runtime.interpreter import GridExecutor

    found: Launches = {}

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        if "NT" in kwargs:
            found[self.fn.__name__.removesuffix("_kernel")] = (*(kwargs[name] for name in CUT), self.grid)

    monkeypatch.setattr(GridExecutor, "__call__", remember)
    monkeypatch.setattr(occupancy, "INTERPRETED", 16)
    return found


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        (PLAIN.options, ("accumulate", "accumulate_gradient", "gradient")),
        (QUADRATIC.options, ("accumulate quadratic", "accumulate_gradient quadratic", "gradient quadratic")),
    ],
    ids=["dynamic routing", "pass"],
)
def test_tune_measures_different_launches(options: Any, kernels: tuple[str, ...], cuts: Launches) -> None:
    """Each candidate has tiles and a grid of its own: those that its choice stands for."""
    u, weight = torch.randn(33, 200, 8), torch.randn(200, 10, 16, 8)
    defaults, measured = dict(config.TABLE), []

    def timer(function: Any) -> float:
        cuts.clear()
        function()
        measured.append((dict(config.TABLE), dict(cuts)))
        return 1.0

    tune.tune(u, weight, options, timer)
    different: dict[str, list[Any]] = {kernel: [] for kernel in kernels}
    for table, cut in measured:
        for kernel in kernels:
            name = kernel.removesuffix(" quadratic")
            tiles = config.tiles(name, Layer(10, 16, 8, 4), table[kernel])
            assert cut[name][:5] == (tiles.NT, tiles.JT, tiles.DP, tiles.KP, tiles.warps), table[kernel]
            if table[kernel] != defaults[kernel]:
                different[kernel].append(cut[name])
    # None was quicker than the defaults, so that one kernel at a time has another choice. No two launch the same.
    candidates = [tuple(sorted(cut.items())) for table, cut in measured if table != defaults]
    assert len(set(candidates)) == len(candidates) == sum(map(len, different.values()))
    for found in different.values():
        assert len(found) >= 5
        assert len({at[:2] for at in found}) > 1 and len({at[4] for at in found}) > 1
        assert len({at[5] for at in found}) > 3


def test_tune_keeps_what_was_fastest_and_its_table_is_used(
    cuts: Launches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = {
        "accumulate": Choice(80, 8, 2, 0, 2),
        "accumulate_gradient": Choice(160, 8, 3, 0, 1),
        "gradient": Choice(80, 8, 1, 4, 2),
    }

    def timer(function: Any) -> float:
        if config.TABLE["accumulate"].columns == 20:
            raise RuntimeError("out of resource: shared memory")
        function()
        assert replay._recordings
        pairs = [zip(config.TABLE[kernel], wanted, strict=True) for kernel, wanted in best.items()]
        return 1.0 + sum(one != other for pair in pairs for one, other in pair)

    u, weight = torch.randn(2, 300, 8), torch.randn(300, 10, 16, 8)
    defaults = dict(config.TABLE)
    rows = tune.tune(u, weight, PLAIN.options, timer)
    assert defaults == config.TABLE
    assert {row["kernel"]: row["choice"] for row in rows} == best
    said = capsys.readouterr().out
    assert "accumulate Choice(columns=20, warps=8, waves=1, chunk=0, down=2): RuntimeError" in said

    path = tmp_path / "table.json"
    tune.write(path, rows)
    tune.write(path, rows)
    assert len(json.loads(path.read_text())["rows"]) == len(rows)
    monkeypatch.setenv("CAPSFAST_TRITON_TABLE", str(path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "interpreter")
    layer, device = Layer(10, 16, 8, 4), torch.device("cuda")
    assert config.choice("gradient", layer, device) == best["gradient"]
    assert config.choice("row_norm", layer, device) == defaults["row_norm"]
    assert config.choice("gradient", layer._replace(J=4), device) == defaults["gradient"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU")
    assert config.choice("gradient", layer, device) == defaults["gradient"]


def test_the_tuned_tile_sizes_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make((17, 5, 6, 8, 4), Case(logits="IJ"), dtype=torch.float32)
    wanted = run(problem, "triton")
    for kernel, given in (
        ("accumulate", Choice(16, 2)),
        ("accumulate_gradient", Choice(16, 1)),
        ("gradient", Choice(16, 2, 3, 2)),
    ):
        monkeypatch.setitem(config.TABLE, kernel, given)
    for name, value in run(problem, "triton").items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)


def test_nothing_is_tuned_behind_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSFAST_TRITON_TABLE", "table.json")
    with pytest.raises(ValueError, match="unset CAPSFAST_TRITON_TABLE"):
        tune.tune(torch.randn(2, 9, 8), torch.randn(9, 3, 16, 8), PLAIN.options, lambda function: 1.0)


@pytest.mark.parametrize("text", ["", "{}", '{"rows": [{"device": "interpreter"}]}'])
def test_a_broken_table_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"CAPSFAST_TRITON_TABLE: .*table\.json is no table of tile sizes"):
        config.tuned(str(path), "interpreter")
    with pytest.raises(ValueError, match=r"CAPSFAST_TRITON_TABLE: .*missing is no table"):
        config.tuned(str(tmp_path / "missing"), "interpreter")
