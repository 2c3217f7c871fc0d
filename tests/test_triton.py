"""What is Triton's own: tiles, TF32, offsets beyond 32 bits, the tuned table, what is said where it is absent."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import capsfast
from capsfast import backend as choice
from capsfast import toolchain

from .support import passes as support_passes
from .support.accuracy import relative_l2
from .support.passes import EVERYTHING, LINEAR, QUADRATIC, PassCase, normalized
from .support.problems import PLAIN, Case, make, run

pytestmark = pytest.mark.skipif(
    bool(toolchain.why_no_triton()) or not toolchain.interpreting(), reason="runs with Triton's interpreter"
)

if not toolchain.why_no_triton():
    import triton
    import triton.language as tl

    from capsfast.triton import config, replay, tune
    from capsfast.triton.config import Choice, Layer
    from capsfast.triton.kernels.stores import add_weight_gradient
    from capsfast.triton.launch import Call

    @triton.jit
    def store_weight_gradient(at, value_ptr, K: tl.constexpr) -> None:
        value = tl.load(value_ptr + tl.arange(0, 2)[:, None] * 8 + tl.arange(0, 8)[None, :])
        add_weight_gradient(at, value, 0, 0, 0, 2, 1, K, 2, 1, 0, 8, True)


LAYERS = [(10, 16, 8), (10, 17, 3), (1, 1, 1), (1000, 16, 8), (5, 8, 4), (4, 300, 64), (3, 512, 8), (257, 1, 33)]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_tiles_cover_every_output_once(shape: tuple[int, int, int], itemsize: int) -> None:
    J, D, K = shape
    for kernel, given in config.TABLE.items():
        votes = "votes" in kernel
        cut = config.tiles(kernel.split()[0], Layer(J, D, 0 if votes else K, itemsize), given)
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


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of the interpreter lose what tensor cores lose: operands all but 10 bits after the leading one, sums
    what is beyond float32, rounded towards zero."""
    from triton.runtime import interpreter

    plain = interpreter.interpreter_builder.create_dot

    def rounded(handle: Any) -> Any:
        data = handle.data
        if data.dtype == np.float32:
            data = (data.view(np.int32) & np.int32(-8192)).view(np.float32)
        return interpreter.TensorHandle(data, handle.dtype)

    def create_dot(a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        if a.data.dtype != np.float32:
            return plain(a, b, acc, *rest)
        a, b = rounded(a), rounded(b)
        exact = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + acc.data
        nearest = exact.astype(np.float32)
        cut = np.where(np.abs(nearest) > np.abs(exact), np.nextafter(nearest, np.float32(0)), nearest)
        return interpreter.TensorHandle(cut.astype(np.float32), acc.dtype.scalar)

    monkeypatch.setattr(interpreter.interpreter_builder, "create_dot", create_dot)


def errors(problem: Any, backend: str) -> dict[str, float]:
    truth = run(problem.to(torch.float64), "reference")
    return {name: relative_l2(value.double(), truth[name]) for name, value in run(problem, backend).items()}


def test_three_tf32_products_are_as_exact_as_float32(tensor_cores: None) -> None:
    problem = make((17, 9, 3, 16, 8), PLAIN, dtype=torch.float32)
    plain = errors(problem, "reference")
    for name, error in errors(problem, "triton").items():
        assert error < 2 * plain[name] + 5e-7, name


def test_a_pass_is_as_exact_as_float32(tensor_cores: None) -> None:
    problem = support_passes.make((17, 9, 3, 16, 8), QUADRATIC, dtype=torch.float32)
    plain = errors(problem, "reference")
    for name, error in errors(problem, "triton").items():
        assert error < 2 * plain[name] + 1e-6, name


@pytest.mark.parametrize("I", [250, 1200])
@pytest.mark.usual(I=[250])
def test_sums_over_many_input_capsules_do_not_drift(tensor_cores: None, I: int) -> None:
    problem = make((1, I, 2, 4, 3), Case(coupling=False), dtype=torch.float32)
    plain = errors(problem, "reference")
    for name, error in errors(problem, "triton").items():
        assert error < 2 * plain[name] + 5e-7, name


def test_a_large_coupling_does_not_take_digits_from_the_others() -> None:
    """Softmax over the input capsules: dc - sum_i c dc is formed of the votes about s, not of two large numbers."""
    problem = make((17, 64, 6, 16, 8), Case(softmax="in", logits="BIJ", coupling=False), dtype=torch.float32)
    problem.inputs["logits"] *= 20
    assert errors(problem, "triton")["dlogits"] < 1.5e-6


def test_no_input_capsules_and_k_in_steps() -> None:
    problem = make((2, 0, 3, 4, 70), Case(shared=True, bias=True), dtype=torch.float32)
    got = run(problem, "triton")
    assert not got["dweight"].any()
    torch.testing.assert_close(got["v"], capsfast.squash(problem.inputs["bias"]).expand(2, -1, -1))


@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def test_one_tf32_product_only_where_torch_is_told_so(tensor_cores: None, tf32_allowed: None) -> None:
    problem = make((17, 9, 3, 16, 8), PLAIN, dtype=torch.float32)
    found = errors(problem, "triton")
    for name in ("v", "du", "dweight"):
        assert 1e-5 < found[name] < 1e-2, (name, found[name])


def far_apart(size: tuple[int, ...], stride: tuple[int, ...], values: torch.Tensor) -> torch.Tensor:
    """The values in a tensor of these strides; memory between them is never touched."""
    reach = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    room = torch.from_numpy(np.empty(reach, np.float32))
    return room.as_strided(size, stride).copy_(values)


@pytest.mark.parametrize("op", ["dynamic_routing", "route_votes"])
def test_offsets_beyond_32_bits(op: str) -> None:
    problem = make((2, 2, 2, 4, 3), Case(coupling=False), op, torch.float32)
    wanted = run(problem, "triton")
    name = "votes" if op == "route_votes" else "u"
    values = problem.inputs[name]
    far = 2**31 + 16
    for stride in ((far, *values.stride()[1:]), (values.stride(0), far, *values.stride()[2:])):
        problem.inputs[name] = far_apart(values.shape, stride, values)
        got = run(problem, "triton")
        for key, value in wanted.items():
            assert torch.equal(got[key], value), (stride, key)


def test_offsets_beyond_32_bits_in_a_pass() -> None:
    problem = support_passes.make((2, 2, 2, 4, 3), normalized(EVERYTHING, "in"), dtype=torch.float32)
    wanted = run(problem, "triton")
    for name in ("u", "logits"):
        values = problem.inputs[name]
        problem.inputs[name] = far_apart(values.shape, (2**31 + 16, *values.stride()[1:]), values)
    for key, value in run(problem, "triton").items():
        assert torch.equal(value, wanted[key]), key


def launches(problem: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that a forward and a backward of the problem launch, with the mode of those that have one."""
    from triton.runtime.interpreter import GridExecutor

    found, launch = [], GridExecutor.__call__

    def remember(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(" ".join([self.fn.__name__, *filter(None, [kwargs.get("MODE")])]))
        return launch(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", remember)
        run(problem, "triton")
    return found


ACCUMULATE, MOMENTS, SUMS, GRADIENT = (
    "accumulate_kernel",
    "moments_kernel",
    "accumulate_gradient_kernel",
    "gradient_kernel",
)


@pytest.mark.parametrize(
    ("case", "J", "kernels"),
    [
        # Nothing to score with: all couplings are equal, and no gradient is a sum over the input capsules.
        (PassCase(center=True, second=True), 3, [f"{ACCUMULATE} uniform", MOMENTS, f"{GRADIENT} out"]),
        (LINEAR, 3, [f"{ACCUMULATE} out", MOMENTS, f"{SUMS} out", MOMENTS, f"{GRADIENT} out"]),
        # The given log-sum-exp is what row_norm would compute.
        (
            normalized(LINEAR, "lse"),
            3,
            [f"{ACCUMULATE} row_norm", MOMENTS, f"{SUMS} row_norm", MOMENTS, f"{GRADIENT} row_norm"],
        ),
        (
            LINEAR,
            330,
            [
                *("row_norm_kernel", f"{ACCUMULATE} row_norm", MOMENTS),
                *("row_norm_kernel", f"{SUMS} row_norm", MOMENTS, f"{GRADIENT} row_norm"),
            ],
        ),
    ],
    ids=str,
)
def test_what_a_pass_launches(case: PassCase, J: int, kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert launches(support_passes.make((2, 2, J, 3, 1), case, dtype=torch.float32), monkeypatch) == kernels


@pytest.mark.parametrize("op", ["route_votes", "votes_pass"])
def test_votes_of_all_outputs_in_groups(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradient is a sum over outputs that no program holds at once."""
    if op == "votes_pass":
        problem = support_passes.make((2, 2, 6, 3, 1), PassCase(query=True, second=True, shared="J"), op, torch.float32)
    else:
        problem = make((2, 2, 6, 3, 1), Case(logits="IJ"), op, torch.float32)
        problem.inputs["votes"] = problem.inputs["votes"][:, :, :1]
    wanted = run(problem.to(torch.float64), "reference")
    for name in config.TABLE:
        if name.split()[0] in ("accumulate", "accumulate_gradient", "gradient"):
            monkeypatch.setitem(config.TABLE, name, Choice(16, 1, chunk=1))
    assert "row_norm_kernel" in launches(problem, monkeypatch)
    for name, value in run(problem, "triton").items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("D", "what"), [(12, {"poses": 2}), (4, {"spatial": (5,)})], ids=str)
def test_outputs_in_groups(D: int, what: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pose matrices, and votes with positions, of more outputs than a program holds."""
    op = "routing_pass" if "poses" in what else "votes_pass"
    problem = support_passes.make((2, 2, 6, D, 2), replace(EVERYTHING, **what), op, torch.float32)
    wanted = run(problem.to(torch.float64), "reference")
    for name in config.TABLE:
        if name.split()[0] in ("accumulate", "accumulate_gradient", "gradient"):
            monkeypatch.setitem(config.TABLE, name, Choice(16, 1, chunk=1))
    assert "row_norm_kernel" in launches(problem, monkeypatch)
    for name, value in run(problem, "triton").items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=1e-4, atol=1e-5)


def test_offsets_beyond_32_bits_with_positions() -> None:
    case = replace(EVERYTHING, spatial=(3,))
    problem = support_passes.make((2, 2, 2, 3, 1), case, "votes_pass", torch.float32)
    wanted, votes = run(problem, "triton"), problem.inputs["votes"]
    for axis in (0, 2):
        stride = (*votes.stride()[:axis], 2**31 + 16, *votes.stride()[axis + 1 :])
        problem.inputs["votes"] = far_apart(votes.shape, stride, votes)
        for key, value in run(problem, "triton").items():
            assert torch.equal(value, wanted[key]), (axis, key)


def test_offsets_beyond_32_bits_within_a_weight() -> None:
    problem = make((2, 2, 2, 4, 3), Case(coupling=False), dtype=torch.float32)
    wanted, weight = run(problem, "triton"), problem.inputs["weight"]
    problem.inputs["weight"] = far_apart(weight.shape, (12, 2**31 + 16, 3, 1), weight)
    got = run(problem, "triton")
    for key, value in wanted.items():
        assert torch.equal(got[key], value), key


def test_one_tf32_product_rounds_to_the_nearest(tensor_cores: None, tf32_allowed: None) -> None:
    """Operands that are cut instead make all votes smaller, by 7e-4 of themselves."""
    problem = make((17, 9, 3, 16, 8), Case(num_iterations=1, squash="identity"), dtype=torch.float32)
    for value in problem.inputs.values():
        value.uniform_(0.5, 1.0)
    got, truth = run(problem, "triton")["v"].double(), run(problem.to(torch.float64), "reference")["v"]
    assert abs((got / truth - 1).mean()) < 5e-5
    assert not run(problem_with_nan(problem), "triton")["v"][0].isfinite().any()


def problem_with_nan(problem: Any) -> Any:
    """The NaN that GPUs make, all of whose bits are set."""
    problem.inputs["u"][0] = torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32)
    return problem


def test_offsets_beyond_32_bits_within_a_weight_gradient() -> None:
    """A contiguous dW of more numbers than 32 bits count: its second row, of which eight numbers are touched."""
    K = 2**31 + 16
    room, value = torch.from_numpy(np.empty(K + 8, np.float32)), torch.rand(2, 8)
    store_weight_gradient[(1,)](room, value, K)
    assert torch.equal(room[:8], value[0]) and torch.equal(room[K:], value[1])


def test_partial_sums_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "wanted_programs", lambda self, kernel: 4096)
    u = torch.empty(1, 1, 64).expand(1, 100_000, 64)
    weight = torch.empty(1, 1000, 16, 64)
    call = Call(u, weight, None, None, None, None, None)  # type: ignore[arg-type]
    assert call.split("accumulate")[0] <= 256
    chunks, _, splits, _ = call.split_gradient()
    assert 4 * weight.numel() * chunks * splits <= 256 * 1024**2
    # A grid has no more programs along its second axis.
    call = Call(
        torch.empty(1, 1, 8).expand(1, 10**6, 8), torch.empty(1, 10, 16, 8).expand(10**6, -1, -1, -1), *(None,) * 5
    )  # type: ignore[arg-type]
    assert call.split_gradient()[0] <= 65535


@pytest.mark.parametrize("I", [1, 7, 1152, 1_000_000])
@pytest.mark.parametrize("B", [1, 128, 4096])
@pytest.mark.parametrize("shared", [False, True])
def test_splits_cover_all_input_capsules(B: int, I: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "wanted_programs", lambda self, kernel: 528)  # 132 multiprocessors
    u = torch.empty(1, 1, 8).expand(B, I, 8)
    weight = torch.empty(1, 10, 16, 8).expand(1 if shared else I, -1, -1, -1)
    call = Call(u, weight, None, None, None, None, None)  # type: ignore[arg-type]
    for kernel in ("accumulate", "accumulate_gradient", "row_norm", "coupling"):
        splits, chunk = call.split(kernel)
        assert (splits - 1) * chunk < I <= splits * chunk
        assert splits <= 528
    chunks, chunk, splits, each = call.split_gradient()
    batch_tiles = -(-B // call.tiles("gradient").BB)
    assert (chunks - 1) * chunk < I <= chunks * chunk
    assert (splits - 1) * each < batch_tiles <= splits * each
    # Partial dW: at most a few times the weight, or what the device has programs for.
    assert chunks * splits <= 528 if shared else splits * I <= max(4 * I, 2 * 528 * 8)


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

    def wanted_programs(self: Any, kernel: str) -> int:
        return -(-4 * self.choice(kernel).resident // self.tiles(kernel).warps)

    monkeypatch.setattr(GridExecutor, "__call__", remember)
    monkeypatch.setattr(Call, "wanted_programs", wanted_programs)
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
        "accumulate": Choice(80, 8, 16, 0, 2),
        "accumulate_gradient": Choice(160, 8, 24, 0, 1),
        "gradient": Choice(80, 8, 8, 4, 2),
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
    assert (
        "accumulate Choice(columns=20, warps=8, resident=8, chunk=0, down=2): RuntimeError" in capsys.readouterr().out
    )

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
        ("gradient", Choice(16, 2, 16, 2)),
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


def test_absence_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state = capsfast.backends()["triton"]
    assert not state.available
    assert "there is no CUDA device" in state.reason
    assert state.devices == ("cuda",)
    monkeypatch.setattr(toolchain, "_why_not_installed", lambda: "the package triton is not installed")
    assert capsfast.backends()["triton"].reason == "the package triton is not installed"


def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    device = torch.device("cuda", 93)
    with pytest.raises(
        RuntimeError, match=r"'triton' cannot serve this call: .* capability 8\.0 or newer, .* has 7\.5"
    ):
        choice.select("capsfast.dynamic_routing", device, "triton")
    monkeypatch.setattr(choice, "_warned", False)
    with pytest.warns(RuntimeWarning, match=r"slow reference backend: .* capability 8\.0 or newer"):
        assert choice.select("capsfast.dynamic_routing", device, None) == "reference"


def test_the_interpreter_serves_only_who_asks() -> None:
    assert choice.select("capsfast.dynamic_routing", torch.device("cpu"), None) in ("cpp", "reference")


def test_too_large_capsules_are_refused() -> None:
    votes = torch.zeros(1, 1, 1, 513)
    with pytest.raises(RuntimeError, match=r"'triton' cannot serve this call: .* D up to 512, got 513"):
        capsfast.route_votes(votes, backend="triton")
    capsfast.route_votes(votes)
    u, weight = torch.zeros(1, 1, 33, 1), torch.zeros(1, 1, 1, 1)
    with pytest.raises(RuntimeError, match=r"'triton' cannot serve this call: .* up to 32 rows, got 33"):
        capsfast.dynamic_routing(u, weight, backend="triton")
