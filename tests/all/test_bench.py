"""capsfast.bench: sweeps, the gate, timing, memory, records and the report."""

import contextlib
import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from capsfast import native
from capsfast.bench import measure as measuring
from capsfast.bench import memory, overhead, record, report, roofline
from capsfast.bench.cases import AXES, CANONICAL, OPS, SWEEPS, Case, sweep
from capsfast.bench.contenders import BROADCAST, COMPILED, EAGER, OURS, TUNED, Contender, contender, contenders
from capsfast.bench.deadline import deadline
from capsfast.bench.floors import floor
from capsfast.bench.gate import Gate
from capsfast.bench.graphs import LEAST_CALLS, Replay
from capsfast.bench.inputs import ROTATED_BYTES, input_set, input_sets, rotated_bytes
from capsfast.bench.limits import limits
from capsfast.bench.measure import Row, measure, without_paths
from capsfast.bench.plots import bars, batch_plot
from capsfast.bench.results import Results, shares
from capsfast.bench.targets import BOTH, HALF, LARGE, TARGETS, WIDE, Evidence, findings
from capsfast.bench.timing import Timing, interleave

CPU = torch.device("cpu")
TINY = Case(B=5, I=12, J=3, D=4, K=2, r=2)
TINY_BOTH = dataclasses.replace(TINY, direction="forward+backward")
TINY_VOTES = dataclasses.replace(TINY_BOTH, op="route_votes", K=0)


@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize("op", OPS)
def test_sweeps_are_finite_distinct_and_of_their_op(name: str, op: str) -> None:
    cases = sweep(name, op)
    assert cases
    assert len(set(cases)) == len(cases)
    assert {case.op for case in cases} == {op}


def test_each_axis_varies_around_the_canonical_layer() -> None:
    canonical = {CANONICAL, dataclasses.replace(CANONICAL, direction="forward+backward")}
    for name in set(AXES) - {"corners"}:
        assert canonical <= set(sweep(name))


@pytest.mark.parametrize(
    "wrong", [{"dtype": "int8"}, {"direction": "backward"}, {"op": "squash"}, {"K": 0}, {"op": "route_votes"}]
)
def test_case_rejects_what_it_does_not_know(wrong: dict[str, str | int]) -> None:
    with pytest.raises(ValueError, match="Case: "):
        dataclasses.replace(CANONICAL, **wrong)


def test_every_available_fused_backend_is_a_contender() -> None:
    from capsfast import backends

    fused = [OURS + name for name, status in backends().items() if status.available and name != "reference"]
    assert [each.name for each in contenders()] == [*fused, COMPILED, EAGER, BROADCAST]


def test_contender_is_skipped_where_it_would_need_too_much_memory() -> None:
    wide = dataclasses.replace(CANONICAL, I=18432, direction="forward+backward")
    assert "GiB, the limit is 8.0 GiB" in contender(BROADCAST).why_not(wide, CPU)
    assert contender(BROADCAST).why_not(TINY, CPU) == ""
    assert "the limit is 0.0 GiB" in contender(EAGER).why_not(CANONICAL, CPU, free=2**20)
    # Inputs and gradients count against what is free alone.
    longest = sweep("long")[-1]
    assert contender("capsfast cpp").why_not(longest, CPU, free=22 * 2**30) == ""
    assert "the limit is 6.0 GiB" in contender("capsfast cpp").why_not(longest, CPU, free=8 * 2**30)
    elsewhere = Contender("elsewhere", lambda case: torch.neg, lambda case: 0, ("cuda",))
    assert elsewhere.why_not(TINY, CPU) == "runs on cuda only"


def test_inputs_depend_on_the_seed_and_outgrow_the_caches() -> None:
    one, same, other = (input_set(TINY, CPU, seed) for seed in (3, 3, 4))
    assert torch.equal(one.tensors[0], same.tensors[0])
    assert not torch.equal(one.tensors[0], other.tensors[0])
    middle = dataclasses.replace(CANONICAL, B=1)
    assert len(input_sets(middle, CPU)) * middle.input_bytes >= ROTATED_BYTES


@pytest.mark.parametrize("case", [TINY, TINY_BOTH, TINY_VOTES], ids=lambda case: case.name)
@pytest.mark.parametrize("name", [each.name for each in contenders() if each.name != COMPILED])
def test_gate_passes_contenders(case: Case, name: str) -> None:
    verdict = Gate(case, input_set(case, CPU)).check(contender(name).make(case))
    assert verdict.reason == ""
    assert set(verdict.errors) == ({"v"} | {f"d{each}" for each in case.shapes} if case.backward else {"v"})


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_gate_knows_the_rounding_of_the_dtype(dtype: str) -> None:
    case = dataclasses.replace(TINY_BOTH, dtype=dtype)
    gate = Gate(case, input_set(case, CPU))
    assert gate.check(contender(BROADCAST).make(case)).reason == ""
    right = contender(EAGER).make(case)
    assert "dweight has" in gate.check(lambda u, weight: right(u, 0.5 * weight + 0.5 * weight.detach())).reason


def test_gate_uses_a_slice_of_a_large_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capsfast.bench.gate.TRUTH_BYTES", 2 * TINY.I * TINY.J * TINY.D * 8)
    gate = Gate(TINY_BOTH, input_set(TINY_BOTH, CPU))
    assert gate.chosen.tolist() == [0, TINY.B - 1]
    right = contender(EAGER).make(TINY_BOTH)
    assert gate.check(right).reason == ""

    def wrong_in_the_last_sample(u: Tensor, weight: Tensor) -> Tensor:
        v = right(u, weight)
        return torch.cat([v[:-1], 1.01 * v[-1:]])

    assert "v has relative error" in gate.check(wrong_in_the_last_sample).reason

    def mixes_samples(u: Tensor, weight: Tensor) -> Tensor:
        v = right(u, weight)
        return v + 1e-9 * right(u.roll(1, 0), weight)

    assert "du is not zero" in gate.check(mixes_samples).reason


@pytest.mark.parametrize("case", [TINY_BOTH, dataclasses.replace(TINY_BOTH, op="route_votes", K=0)], ids=str)
def test_the_gate_takes_the_first_capsules_of_what_is_too_large(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capsfast.bench.gate.TRUTH_INPUTS", case.input_bytes // 4 - 1)
    gate = Gate(case, input_set(case, CPU))
    assert gate.case == dataclasses.replace(case, I=case.I - 1)
    assert [tuple(tensor.shape) for tensor in gate.inputs.tensors] == list(gate.case.shapes.values())
    right = contender(EAGER).make(case)
    assert gate.check(right).reason == ""
    assert "v has relative error" in gate.check(lambda *tensors: 1.01 * right(*tensors)).reason
    (row,) = measure(case, [contender(EAGER)], CPU, seconds=0, least_rounds=1, with_memory=False)
    assert row.status == "ok" and row.case == case

    def only_short(*tensors: Tensor) -> Tensor:
        if tensors[0].shape[1] == case.I:
            raise RuntimeError("too long")
        return right(*tensors)

    failing = dataclasses.replace(contender(EAGER), make=lambda case: only_short)
    (row,) = measure(case, [failing], CPU, seconds=0, least_rounds=1, with_memory=False)
    assert row.status == "failed" and row.reason == "RuntimeError: too long"


def test_gate_finds_a_missing_gradient_and_nan() -> None:
    gate = Gate(TINY_BOTH, input_set(TINY_BOTH, CPU))
    right = contender(EAGER).make(TINY_BOTH)
    assert "dweight has" in gate.check(lambda u, weight: right(u, 0.5 * weight + 0.5 * weight.detach())).reason
    assert "not finite" in gate.check(lambda u, weight: right(u, weight) * float("nan")).reason


def test_wrong_and_failing_contenders_are_not_timed() -> None:
    def fails(*tensors: Tensor) -> Tensor:
        raise RuntimeError("no file /some/where/kernel.so here\nsecond line")

    def wrong(u: Tensor, weight: Tensor) -> Tensor:
        return torch.zeros(u.shape[0], *weight.shape[1:3])

    rows = measure(
        TINY,
        [
            contender(EAGER),
            Contender("wrong", lambda case: wrong, lambda case: 0),
            Contender("failing", lambda case: fails, lambda case: 0),
            Contender("large", lambda case: wrong, lambda case: 2**40),
        ],
        CPU,
        seconds=0.01,
        with_memory=False,
    )
    assert [row.status for row in rows] == ["ok", "wrong", "failed", "skipped"]
    assert [bool(row.seconds) for row in rows] == [True, False, False, False]
    assert rows[2].reason == "RuntimeError: no file kernel.so here"


def test_interleave_gives_every_step_its_turns() -> None:
    calls: dict[str, list[int]] = {"a": [], "b": []}
    timings = interleave({name: seen.append for name, seen in calls.items()}, CPU, seconds=0.0, least_rounds=3)
    for name, seen in calls.items():
        # The rotation of the inputs goes on over the turns.
        assert seen == list(range(len(seen)))
        assert timings[name].calls == len(seen) - 1 - 3


def test_timing_quantiles() -> None:
    timing = Timing.of([float(n) for n in range(11)])
    assert (timing.least, timing.p10, timing.median, timing.p90, timing.calls) == (0.0, 1.0, 5.0, 9.0, 11)


@pytest.mark.skipif(bool(memory.why_not()), reason=memory.why_not() or "measurable")
def test_memory_growth_finds_the_votes() -> None:
    case = Case(B=16, I=256, J=10, D=16, K=8, r=2)
    growth, reason = memory.peak_growth(case, contender(EAGER), CPU)
    assert reason == ""
    assert growth is not None
    assert case.votes_bytes <= growth <= 4 * case.votes_bytes


def test_paths_do_not_reach_records() -> None:
    assert without_paths("cannot open /a/b-c/d.e/file.so: and/or 1/2") == "cannot open file.so: and/or 1/2"
    surroundings = record.environment(CPU)
    assert not any(part.startswith("/") for part in str(surroundings).replace("'", " ").split())


def _rows() -> list[Row]:
    rows = []
    for case in (*sweep("I")[:4], *sweep("J")[:4], TINY_VOTES):
        for name, factor in ((OURS + "cpp", 1.0), (COMPILED, 3.0), (EAGER, 6.0)):
            seconds = dataclasses.asdict(Timing.of([factor * case.I * case.J * 1e-7]))
            rows.append(Row(case, name, "ok", "", seconds, {"v": 1e-7}, int(factor * 2**20)))
        rows.append(Row(case, BROADCAST, "skipped", "would need about 9.0 GiB, the limit is 8.0 GiB"))
    return rows


def test_record_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "record.json"
    surroundings = record.environment(CPU)
    record.save(path, surroundings, _rows())
    assert record.load(path) == (surroundings, _rows())
    assert [each.name for each in path.parent.iterdir()] == ["record.json"]
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"record\.json is not"):
        record.load(path)


def test_results_relate_contenders() -> None:
    results = Results(_rows())
    case = sweep("I")[0]
    assert results.ours(case) == OURS + "cpp"
    assert results.speedup(case, COMPILED) == pytest.approx(3.0)
    assert results.speedup(case, BROADCAST) is None
    assert [(axis.name, axis.direction) for axis in results.axes()] == [
        ("I", "forward"),
        ("I", "forward+backward"),
        ("J", "forward"),
        ("J", "forward+backward"),
    ]
    assert results.others(results.axes()) == [TINY_VOTES]


def test_shares_of_the_machine_limits() -> None:
    limits = {"copy_bytes_per_second": 1e9, "matmul_flops_per_second": 1e9}
    flops, moved = shares(CANONICAL, 1.0, limits) or (0.0, 0.0)
    # 377 MFLOP for the votes and 5 times 47 for sums and agreements; u and weight once, v once.
    assert flops == pytest.approx(0.613, rel=1e-2)
    assert moved == pytest.approx((128 * 1152 * 8 + 1152 * 10 * 16 * 8 + 128 * 160) * 4e-9)
    assert shares(TINY_BOTH, 1.0, limits) is None


def test_report_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "record.json"
    record.save(path, record.environment(CPU), _rows())
    page = report.write([path], tmp_path / "docs").read_text()
    assert "| I=64 |" in page
    assert "| 3.0x | 6.0x |" in page
    assert "torch.compile einsum, MiB" in page
    assert page.count("would need about 9.0 GiB") == 1
    images = {image.name for image in (tmp_path / "docs" / "images").iterdir()}
    assert {name.rsplit("-", 1)[1] for name in images} == {"speedup.png", "memory.png"}
    assert all(f"(images/{name})" in page for name in images)
    bars(Results(_rows()), tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 0


def test_picture_of_the_batches_needs_time_and_memory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        Row(case, name, "ok", "", dataclasses.asdict(Timing.of([case.B * 1e-3])), {"v": 1e-7}, 2**20)
        for case in sweep("batch", directions=("forward+backward",))
        for name in (OURS + "cpp", COMPILED, EAGER)
    ]
    drawn = batch_plot(Results(rows), "dynamic_routing", tmp_path, "machine")
    assert drawn == tmp_path / "machine-dynamic_routing-batch.png"
    assert b"'capsfast': [(1, 1.0), (16, 16.0), (128, 128.0), (512, 512.0)]" in drawn.read_bytes()
    forgotten = [dataclasses.replace(row, memory_bytes=None) for row in rows]
    assert batch_plot(Results(forgotten), "dynamic_routing", tmp_path, "machine") is None


CUDA = torch.device("cuda")
GPU_LIMITS = {
    "copy_bytes_per_second": 4e12,
    "matmul_flops_per_second": 6e13,
    "tf32_flops_per_second": 45e13,
    "bf16_flops_per_second": 75e13,
}


class FakeGPU:
    """A clock in the place of a device: its steps take their time, graphs what was captured, the host none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.captured: list[float] | None = None
        self.allocated = self.peak = 1000
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.now

            def elapsed_time(self, other: "Event") -> float:
                return (other.at - self.at) * 1e3

        class CUDAGraph:
            def replay(self) -> None:
                gpu.now += sum(self.work)

        @contextlib.contextmanager
        def graph(into: CUDAGraph, stream: object) -> Iterator[None]:
            assert stream == "stream"
            gpu.captured = []
            try:
                yield
            finally:
                into.work, gpu.captured = gpu.captured, None

        fakes = {
            "Event": Event,
            "CUDAGraph": CUDAGraph,
            "graph": graph,
            "synchronize": lambda device=None: None,
            "current_stream": lambda device: "stream",
            "memory_allocated": lambda device: self.allocated,
            "reset_peak_memory_stats": lambda device: None,
            "max_memory_allocated": lambda device: self.peak,
            "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=50 * 2**20),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def step(self, cost: Callable[[int], float], growth: int = 0) -> Callable[[int], object]:
        def call(n: int) -> object:
            self.peak = self.allocated + growth
            if self.captured is None:
                self.now += cost(n)
            else:
                self.captured.append(cost(n))
            return None

        return call


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    return FakeGPU(monkeypatch)


@pytest.mark.parametrize("sets", [1, 3, 64])
def test_replays_time_every_input_set_alike(gpu: FakeGPU, sets: int) -> None:
    replay = Replay(gpu.step(lambda n: 1e-6 * (1 + n % sets)), sets, CUDA)
    assert replay.calls >= LEAST_CALLS and replay.calls % sets == 0
    seconds = replay(0, 2 * replay.calls + 1)
    assert len(seconds) == 3
    assert seconds == pytest.approx([1e-6 * (sets + 1) / 2] * 3)


def test_gpu_rows_hold_graph_event_and_memory(gpu: FakeGPU) -> None:
    def uncapturable(n: int) -> object:
        if gpu.captured is not None:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        gpu.now += 5e-5
        return None

    def fails(n: int) -> object:
        raise RuntimeError("out of memory")

    steps = {"fused": gpu.step(lambda n: 2e-5, growth=700), "odd": uncapturable, "large": fails}
    rows = {name: Row(TINY, name, "ok") for name in steps}
    found = measuring._time_on_gpu(TINY, rows, steps, 4, CUDA, seconds=0.01, with_memory=True)
    assert (found["fused"].clock, found["odd"].clock) == ("graph", "events")
    assert found["fused"].seconds["median"] == pytest.approx(2e-5)
    assert found["fused"].event_seconds["median"] == pytest.approx(2e-5)
    assert found["fused"].memory_bytes == 700
    assert found["odd"].seconds["median"] == pytest.approx(5e-5)
    assert found["odd"].event_seconds == {} and found["odd"].reason.startswith("no graph: RuntimeError: operation not")
    assert (found["large"].status, found["large"].reason) == ("failed", "RuntimeError: out of memory")


def test_gpu_memory_is_less_the_gradients(gpu: FakeGPU) -> None:
    call = gpu.step(lambda n: 0.0, growth=TINY_BOTH.gradient_bytes + 12)
    assert memory.cuda_growth(TINY_BOTH, call, CUDA) == 12


def test_inputs_outgrow_the_cache_of_a_gpu(gpu: FakeGPU) -> None:
    assert rotated_bytes(CUDA) == 200 * 2**20
    assert rotated_bytes(CPU) == ROTATED_BYTES


def test_limits_count_what_a_copy_and_a_product_do(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def interleaved(steps: dict[str, Callable[[int], object]], *rest: object, **more: object) -> dict[str, Timing]:
        seen.update(steps)
        return {name: Timing.of([0.5]) for name in steps}

    monkeypatch.setattr("capsfast.bench.limits.sizes", lambda device: (4096, 16))
    monkeypatch.setattr("capsfast.bench.limits.interleave", interleaved)
    rates = iter([3e9, 1e9, 2e9] * 3)
    monkeypatch.setattr(native, "extension", SimpleNamespace(peak_flops=lambda: next(rates)))
    assert limits(CPU) == {
        "copy_bytes_per_second": 2 * 4096 / 0.5,
        "matmul_flops_per_second": 2 * 16**3 / 0.5,
        roofline.RATE: 2e9,
    }
    monkeypatch.setattr(native, "extension", None)
    assert roofline.RATE not in limits(CPU)
    assert set(seen) == {"copy", "matmul"}
    assert not torch.backends.cuda.matmul.allow_tf32


def test_floor_of_the_canonical_layer() -> None:
    forward, both = floor(CANONICAL, GPU_LIMITS), floor(BOTH, GPU_LIMITS)
    assert forward is not None and both is not None
    pairs = 128 * 1152 * 10 * 16
    assert forward.copy == pytest.approx(4 * (128 * 1152 * 8 + 1152 * 1280 + 128 * 160) / 4e12)
    # Three evaluations of the votes, each three TF32 products; three weighted sums and two agreements.
    assert forward.tensor == pytest.approx(3 * 2 * pairs * 8 * 3 / 45e13)
    assert forward.vector == pytest.approx(5 * 2 * pairs / 6e13)
    assert forward.limiting == "tensor" and forward.seconds == forward.tensor
    # Three more evaluations, du and dW; G twice with two dot products each, five terms and four dot products at last.
    assert both.tensor == pytest.approx(8 * 2 * pairs * 8 * 3 / 45e13)
    assert both.vector == pytest.approx((5 + 15) * 2 * pairs / 6e13)
    half = floor(dataclasses.replace(CANONICAL, dtype="bfloat16"), GPU_LIMITS)
    assert half is not None and half.tensor == pytest.approx(3 * 2 * pairs * 8 / 75e13)
    votes = floor(TINY_VOTES, GPU_LIMITS)
    assert votes is not None and votes.tensor == 0
    assert floor(CANONICAL, {"copy_bytes_per_second": 1.0, "matmul_flops_per_second": 1.0}) is None
    assert floor(dataclasses.replace(CANONICAL, dtype="float64"), GPU_LIMITS) is None


def _evidence(microseconds: float) -> Evidence:
    def row(case: Case, name: str, us: float, growth: int) -> Row:
        return Row(case, name, "ok", "", dataclasses.asdict(Timing.of([us * 1e-6])), {}, growth)

    rows = [
        row(CANONICAL, OURS + "triton", microseconds, 10),
        row(CANONICAL, TUNED, 200.0, 100),
        row(BOTH, OURS + "triton", 100.0, 60),
        row(BOTH, EAGER, 2000.0, 1000),
        row(WIDE, OURS + "triton", 1000.0, 10),
    ]
    host = {"forward": {OURS + "triton": 30e-6, overhead.MATMUL: 10e-6}}
    return Evidence(Results(rows), GPU_LIMITS, host)


def test_targets_are_met_missed_or_not_measured() -> None:
    found = {each.target.text: each for each in findings(_evidence(40.0))}
    assert len(found) == len(TARGETS["triton"])
    assert found["B=128 forward"].met is True
    assert found["B=128 forward, faster than max-autotune"].value == pytest.approx(5.0)
    assert found["B=128 forward, faster than max-autotune"].met is True
    assert found["B=128 forward, faster than eager einsum"].met is None
    assert found["B=128 forward+backward, faster than eager einsum"].met is True
    assert found["B=128 forward+backward, peak memory of eager einsum's"].value == pytest.approx(6.0)
    assert found["B=128 forward+backward, peak memory of eager einsum's"].met is False
    assert found["forward, host time of torch.matmul's"].met is False
    wide = floor(WIDE, GPU_LIMITS)
    assert wide is not None
    assert found["B=64 I=18432 J=32 forward, of the limiting rate"].value == pytest.approx(100 * wide.seconds / 1e-3)
    slower = {each.target.text: each for each in findings(_evidence(40.1))}
    assert slower["B=128 forward"].met is False
    assert slower["B=128 forward, faster than max-autotune"].met is False


def test_targets_of_the_cuda_kernels() -> None:
    times = {CANONICAL: 29.0, HALF: 23.0, LARGE: 210.0}
    rows = [
        Row(case, OURS + "cuda", "ok", "", dataclasses.asdict(Timing.of([us * 1e-6]))) for case, us in times.items()
    ]
    rows.append(Row(HALF, TUNED, "ok", "", dataclasses.asdict(Timing.of([200e-6]))))
    found = {each.target.text: each for each in findings(Evidence(Results(rows)))}
    assert found["B=128 forward"].met is True
    assert found["B=128 forward, bfloat16"].met is False
    assert found["B=128 forward, bfloat16, faster than max-autotune"].value == pytest.approx(200 / 23)
    assert found["B=1024 forward, of the time of B=128"].value == pytest.approx(210 / 29)
    assert found["B=1024 forward, of the time of B=128"].met is False
    assert found["B=1024 forward+backward, of the time of B=128"].met is None


def test_deadline_stops_what_takes_longer() -> None:
    with pytest.raises(TimeoutError, match="the first call took more than 0 s"), deadline(0.05, "the first call"):
        time.sleep(5)
    with deadline(0.05, "nothing"):
        pass
    time.sleep(0.1)
    with deadline(None, "nothing"):
        pass


def test_a_contender_that_compiles_for_too_long_has_failed() -> None:
    def slow(*tensors: Tensor) -> Tensor:
        time.sleep(5)
        raise AssertionError

    stuck = Contender("slow", lambda case: slow, lambda case: 0)
    rows = measure(TINY, [stuck, contender(EAGER)], CPU, seconds=0.0, with_memory=False, first_call_seconds=0.3)
    assert [row.status for row in rows] == ["failed", "ok"]
    assert rows[0].reason == "TimeoutError: the first call took more than 0 s"


def test_tuned_contender_is_found_by_name() -> None:
    assert contender(TUNED).name == TUNED
    assert TUNED not in [each.name for each in contenders()]


def test_report_of_a_gpu_names_clock_and_floor(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [dataclasses.replace(row, clock="graph") for row in _rows()]
    surroundings = record.environment(CPU) | {"limits": GPU_LIMITS}
    record.save(tmp_path / "record.json", surroundings, rows)
    page = report.write([tmp_path / "record.json"], tmp_path / "docs").read_text()
    assert "CUDA graphs" in page and "of the floor's rate" in page and "TF32 matmul" in page
    assert "of matmul rate" not in page


def test_import_of_capsfast_loads_nothing_of_this() -> None:
    code = "import sys, capsfast; print([n for n in sys.modules if n.split('.')[0] in ('typer', 'rich', 'matplotlib') "
    code += "or n.startswith(('capsfast.bench', 'capsfast.cli'))])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
