"""capsfast.bench: sweeps, the gate, timing, memory, records and the report."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import capsfast
from capsfast import backends
from capsfast.bench import measure as measuring
from capsfast.bench import memory, record, report, routings, timing
from capsfast.bench.cases import CANONICAL, IMAGES, OPS, ROUTING, SWEEPS, Case, sweep
from capsfast.bench.contenders import COMPILED, CPP, EAGER, OURS, Contender, contender, contenders, missing
from capsfast.bench.gate import Gate
from capsfast.bench.inputs import input_set, input_sets, step
from capsfast.bench.layers import LAYERS
from capsfast.bench.measure import Row, measure, without_paths
from capsfast.bench.results import RATE, Results
from capsfast.bench.timing import Timing
from capsfast.nn import ROUTINGS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TINY = Case(B=5, I=12, J=3, D=6, K=6, r=2)
BOTH = dataclasses.replace(TINY, direction="forward+backward")
VOTES = dataclasses.replace(BOTH, op="route_votes", K=0)
ROUTED = [
    dataclasses.replace(BOTH, op=ROUTING, routing=name, r=2 if routings.takes_iterations(name) else 0)
    for name in ROUTINGS
]
LAYER_CASES = [case for case in sweep("smoke", "layers") if case.backward]


@pytest.mark.parametrize("op", [*OPS, "em"])
def test_sweeps_have_distinct_cases_of_their_op_and_unknown_ops_are_refused(op: str) -> None:
    for name in SWEEPS:
        cases = sweep(name, op)
        assert cases and len(set(cases)) == len(cases) and {case.routing or case.op for case in cases} == {op}
    # With the sizes of `pytest benchmarks` the votes of every contender fit in memory.
    assert not any(each.why_not(case, CPU) for case in sweep("capsules") for each in contenders() if each.serves(CPU))
    for name in IMAGES:
        assert [case.layer for case in sweep(name, "layers") if case.backward and case.size in (6, 14, 16)] == [*LAYERS]
    with pytest.raises(ValueError, match="sweep must be one of images, smoke, got 'batch'"):
        sweep("batch", "SlimConvCaps2d")
    with pytest.raises(ValueError, match=r"op must be one of .* em, .* ConvCaps2d, .* layers, got 'magic'"):
        sweep("quick", "magic")


def test_contenders_are_the_available_backends_with_enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = [OURS + name for name, status in backends().items() if status.available and name != "reference"]
    assert [each.name for each in contenders()] == [*fused, COMPILED, EAGER]
    wide = dataclasses.replace(CANONICAL, I=18432, direction="forward+backward")
    assert "GiB, the limit is 8.0 GiB" in contender(EAGER).why_not(wide, CPU)
    assert "the limit is 0.0 GiB" in contender(EAGER).why_not(CANONICAL, CPU, free=2**20)
    absent = {"cpp": SimpleNamespace(available=False, reason="no compiler", devices=("cpu",))}
    monkeypatch.setattr("capsfast.bench.contenders.backends", lambda: absent)
    assert missing(CPU) == {"cpp": "no compiler"} and missing(CUDA) == {}


@pytest.mark.parametrize("case", [TINY, BOTH, VOTES, *ROUTED, *LAYER_CASES], ids=lambda case: case.name)
def test_gate_passes_contenders(case: Case) -> None:
    gate = Gate(case, input_set(case, CPU))
    names = {*case.outputs, *(f"d{shape}" for shape in case.shapes if case.backward)}
    for each in contenders():
        if each.serves(CPU) and each.name not in (COMPILED, OURS + "triton"):
            verdict = gate.check(each.make(case))
            assert (verdict.reason, set(verdict.errors)) == ("", names)


@pytest.mark.parametrize("case", [ROUTED[list(ROUTINGS).index("em")], *LAYER_CASES], ids=lambda case: case.name)
def test_the_einsum_form_of_a_module_compiles_as_a_whole(case: Case) -> None:
    case = dataclasses.replace(case, direction="forward")
    forward, tensors = contender(EAGER).make(case), input_set(case, CPU).tensors
    compiled = torch.compile(forward, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), forward(*tensors))


@pytest.mark.parametrize("limit", ["", "TRUTH_BYTES", "TRUTH_INPUTS"])
def test_gate_finds_what_is_wrong(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it compares only some samples, or only the first input capsules."""
    few = {"TRUTH_BYTES": 2 * TINY.I * TINY.J * TINY.D * 8, "TRUTH_INPUTS": BOTH.input_bytes // 4 - 1}
    if limit:
        monkeypatch.setattr(f"capsfast.bench.gate.{limit}", few[limit])
    gate, right = Gate(BOTH, input_set(BOTH, CPU)), contender(EAGER).make(BOTH)
    assert gate.check(right).reason == ""
    wrong: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "v has relative error": lambda u, weight: torch.cat([right(u, weight)[:-1], 1.01 * right(u, weight)[-1:]]),
        "dweight has": lambda u, weight: right(u, 0.5 * weight + 0.5 * weight.detach()),
        "v is not finite": lambda u, weight: right(u, weight) * float("nan"),
        "du is not zero where" if limit == "TRUTH_BYTES" else "du has": lambda u, weight: (
            right(u, weight) + 1e-2 * right(u.roll(1, 0), weight)
        ),
    }
    for reason, forward in wrong.items():
        assert reason in gate.check(forward).reason


@pytest.mark.parametrize("case", LAYER_CASES, ids=lambda case: case.layer)
def test_gate_compares_the_far_corner_of_a_large_image(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    half = case.votes_bytes // case.B  # of the votes of an image, in float64
    monkeypatch.setattr("capsfast.bench.gate.TRUTH_BYTES", half)
    gate, right = Gate(case, input_set(case, CPU)), contender(EAGER).make(case)
    assert 3 < gate.part.size < case.size and gate.check(right).reason == ""
    longer, unknown = torch.ones(case.grid), torch.zeros(case.grid)
    longer.view(-1)[-1], unknown.view(-1)[0] = 1.1, float("nan")
    wrong: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "v has relative error": lambda u, weight: right(u, weight) * longer,
        f"d{[*case.shapes][1]} has": lambda u, weight: right(u, 0.5 * weight + 0.5 * weight.detach()),
        "v is not finite": lambda u, weight: right(u, weight) + unknown,
        "du is not zero where": lambda u, weight: right(u, weight) + 1e-2 * right(u.flip(-1), weight),
    }
    for reason, forward in wrong.items():
        assert reason in gate.check(forward).reason


def wrong(u: Tensor, weight: Tensor) -> Tensor:
    return torch.zeros(u.shape[0], *weight.shape[1:3])


def fails(*tensors: Tensor) -> Tensor:
    raise RuntimeError("no file /some/where/kernel.so here\nsecond line")


def refuses(u: Tensor, weight: Tensor) -> Tensor:
    return capsfast.routing_pass(u, weight, backend="cuda").first


def test_wrong_and_failing_contenders_are_not_timed() -> None:
    able = [
        contender(EAGER),
        Contender("wrong", lambda case: wrong, lambda case: 0),
        Contender("failing", lambda case: fails, lambda case: 0),
        Contender("refusing", lambda case: refuses, lambda case: 0),
        Contender("large", lambda case: wrong, lambda case: 2**40),
        Contender("elsewhere", lambda case: wrong, lambda case: 0, ("cuda",)),
    ]
    rows = measure(TINY, able, CPU, seconds=0.01, with_memory=False)
    assert [row.status for row in rows] == ["ok", "wrong", "failed", "skipped", "skipped", "skipped"]
    assert [row.contender for row in rows if row.seconds] == [EAGER]
    assert rows[2].reason == "RuntimeError: no file kernel.so here" and rows[5].reason == "runs on cuda only"
    assert "backend 'cuda' cannot serve this call" in rows[3].reason


@pytest.mark.skipif(bool(memory.why_not()), reason=memory.why_not() or "measurable")
def test_memory_growth_finds_the_votes() -> None:
    case = Case(B=16, I=256, J=10, D=16, K=8, r=2)
    call = step(contender(EAGER).make(case), case, [input_set(case, CPU)])
    growth, reason = memory.peak_growth(case, contender(EAGER), CPU, call)
    assert growth is not None and case.votes_bytes <= growth <= 4 * case.votes_bytes, reason


class Gpu:
    """Stands for a GPU on which a call takes a millisecond; a replay takes as long as the calls that it captured."""

    def __init__(self) -> None:
        self.now, self.capturing, self.fails, self.said = 0.0, False, False, list[str]()

    def step(self) -> None:
        if self.capturing and self.fails:
            raise RuntimeError("no capture of a copy to the host")
        if self.capturing:
            self.captured += 1
        else:
            self.now += 1e-3

    def event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace()
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda other: 1e3 * (other.at - event.at)
        return event

    def graph(self) -> Any:
        return SimpleNamespace(replay=lambda: setattr(self, "now", self.now + 1e-3 * self.captured))

    def __enter__(self) -> None:
        self.capturing, self.captured = True, 0

    def __exit__(self, *error: object) -> None:
        self.capturing = False
        if error[0] is not None:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    fakes: dict[str, Any] = {"CUDAGraph": gpu.graph, "Stream": object, "graph_pool_handle": lambda: (0, 7)}
    fakes |= {"stream": nullcontext, "synchronize": lambda device=None: None, "current_device": lambda: 0}
    fakes |= {"graph": lambda graph, pool, stream: gpu, "Event": gpu.event}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("endAllocateToPool", "releasePool"):
        fake = lambda device, pool, name=name: gpu.said.append(f"{name} {pool}")  # noqa: E731
        monkeypatch.setattr(torch._C, f"_cuda_{name}", fake, raising=False)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: gpu.now)
    return gpu


def test_a_graph_has_several_calls_and_a_failed_capture_leaves_the_allocator(gpu: Gpu) -> None:
    assert timing.graph_seconds(gpu.step) == pytest.approx(1e-3)
    assert gpu.captured == timing.TURN_SECONDS / 1e-3 and gpu.said == []
    gpu.fails = True
    with pytest.raises(RuntimeError, match="no capture of a copy to the host"):
        timing.capture(gpu.step)
    assert gpu.said == ["endAllocateToPool (0, 7)", "releasePool (0, 7)"]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """measure() on the device cuda, with inputs on the CPU and times at once. Returns the order of what is measured."""
    order: list[str] = []

    def took(what: str, value: Any) -> Any:
        order.append(what)
        return value

    def graph_seconds(step: Any) -> float:
        order.append("graph")
        if step() is None or order.count("graph") == 1:
            raise RuntimeError("the step copies to the host")
        return 1e-3

    fakes: dict[str, Any] = {
        "input_sets": lambda case, device: input_sets(case, CPU),
        "free_bytes": lambda device: None,
        "lost": lambda device: False,
        "interleave": lambda steps, device, seconds: {name: took("eager", Timing.of([3e-3])) for name in steps},
        "host_seconds": lambda step, device: took("host", 2e-3),
        "graph_seconds": graph_seconds,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(measuring, name, fake)
    monkeypatch.setattr(memory, "cuda_growth", lambda call, case, device: took("memory", 2**20))
    return order


def test_on_a_gpu_graphs_are_last_and_a_contender_without_a_graph_keeps_its_other_times(on_gpu: list[str]) -> None:
    first, second = measure(TINY, [dataclasses.replace(contender(EAGER), name=name) for name in "ab"], CUDA)
    assert on_gpu == ["eager"] * 2 + ["memory"] * 2 + ["host", "graph"] * 2
    for row, graph in ((first, None), (second, 1e-3)):
        assert (row.status, row.seconds["median"], row.host, row.memory_bytes) == ("ok", 3e-3, 2e-3, 2**20)
        assert row.graph == graph
    assert first.reason == "no CUDA graph: RuntimeError: the step copies to the host" and second.reason == ""


def test_an_error_that_ends_the_use_of_a_gpu_names_its_contender(
    on_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "lost", lambda device: True)
    able = [contender(EAGER), Contender("bad", lambda case: fails, lambda case: 0), contender(EAGER)]
    with pytest.raises(RuntimeError, match="bad: RuntimeError: no file"):
        measure(TINY, able, CUDA)
    assert on_gpu == []


def test_a_record_knows_its_machine_and_has_no_paths() -> None:
    surroundings = record.environment(CPU)
    assert record.machine_name({**surroundings["machine"], "gpu": "NVIDIA H200"}) == "nvidia-h200"
    assert surroundings["commit"] is None or len(surroundings["commit"]["hash"]) == 40
    assert not any(part.startswith("/") for part in str(surroundings).replace("'", " ").split())
    assert without_paths("cannot open /a/b-c/d.e/file.so: and/or 1/2") == "cannot open file.so: and/or 1/2"


def rows_of(cases: list[Case], **more: Any) -> list[Row]:
    """Rows in which capsfast takes a millisecond a sample."""
    factors = {CPP: 1.0, COMPILED: 3.0, EAGER: 6.0}
    timings = {name: dataclasses.asdict(Timing.of([1e-3 * factor])) for name, factor in factors.items()}
    scaled = {B: {name: {k: v * B for k, v in t.items()} for name, t in timings.items()} for B in {c.B for c in cases}}
    return [Row(case, name, "ok", "", scaled[case.B][name], {}, 2**20, **more) for case in cases for name in factors]


def test_records_are_whole_and_older_ones_are_read(tmp_path: Path) -> None:
    path, rows = tmp_path / "deep" / "record.json", rows_of(sweep("smoke"))
    record.save(path, record.environment(CPU), rows)
    assert record.load(path) == (record.environment(CPU), rows)
    assert [each.name for each in path.parent.iterdir()] == ["record.json"]
    fields = {**dataclasses.asdict(Row(CANONICAL, EAGER, "ok")), "clock": "host", "flops": 1e9}
    del fields["graph"], fields["case"]["routing"]
    path.write_text(json.dumps({"format": 1, "environment": record.environment(CPU), "rows": [fields]}))
    assert record.load(path)[1] == [Row(CANONICAL, EAGER, "ok")]
    for other in ("{}", '{"format": 1, "environment": {}, "rows": [{"ms": 1}]}'):
        path.write_text(other)
        with pytest.raises(ValueError, match=r"record\.json is not"):
            record.load(path)


def test_report_shows_and_draws_the_record(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cases = [*sweep("I")[:4], *sweep("batch"), *sweep("routings", "em"), *sweep("images", "ConvCaps2d"), VOTES]
    rows = [*rows_of(cases), Row(cases[0], "broadcast", "skipped", "would need about 9.0 GiB")]
    path = tmp_path / "record.json"
    record.save(path, {**record.environment(CPU), "limits": {RATE: 4e9}}, rows)
    page = report.write([path], tmp_path / "docs").read_text()
    # 128 · 64 · 10 · 16 votes of 2 · 28 FLOPs in 128 ms, of 4 GFLOP/s
    assert "\n| B=128 I=64 | 128 | 384 | 768 | skipped | 3.0x | 6.0x | 1.0 | 1.0 | 1.0 | 14 % |\n" in page
    assert "### Convolutional layers, forward+backward\n" in page
    assert "\n| ConvCaps2d 64^2 B=4 I=8 J=8 K=16 | 4.00 | 12.00 | 24.00 | 3.0x | 6.0x | 1.0 | 1.0 | 1.0 |" in page
    assert f"* broadcast, skipped (1), such as {cases[0].name}: would need about 9.0 GiB" in page
    images = {image.name for image in (tmp_path / "docs" / "images").iterdir()}
    assert images == {f"record-dynamic_routing-{each}.png" for each in ("speedup", "batch")}
    assert all(f"(images/{name})" in page for name in images)


def test_graphs_and_eager_calls_of_a_gpu_are_compared_apart() -> None:
    """The later of two rows counts; there is a speed-up only of one kind of time over the same kind."""
    graphs, cases = {OURS + "triton": 1e-4, OURS + "cuda": 2e-4, COMPILED: 3e-4}, sweep("batch")
    rows = [Row(case, name, "ok", graph=seconds) for case in cases for name, seconds in graphs.items()]
    results = Results([*rows, Row(cases[1], COMPILED, "ok", graph=5e-5), Row(cases[0], OURS + "cuda", "failed")])
    assert results.main(cases[0]) == "graph" and results.ours(cases[0], "graph") == OURS + "triton"
    assert [results.speedup(case, COMPILED, "graph") for case in cases[:2]] == pytest.approx([3, 0.5])
    assert results.speedup(cases[0], COMPILED) is None
    assert results.shown(cases[0], OURS + "cuda", "graph") == "failed"


def test_the_page_of_the_docs_is_the_report_of_the_records() -> None:
    """Which has every table, also of GPUs."""
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    # A new record may not be in the report yet.
    records = [path for path in (root / "benchmarks" / "results").glob("*.json") if f"## {path.stem}\n" in page]
    assert records
    without_pictures = "".join(block for block in page.split("\n\n") if not block.startswith("!["))
    assert without_pictures == report.page(records).replace("\n\n", "")


def test_flops_are_counted_as_the_kernels_execute_them() -> None:
    """The canonical layer: 1.3 GFLOP forward, 2.6 GFLOP backward."""
    votes = 2 * CANONICAL.B * CANONICAL.I * CANONICAL.J * CANONICAL.D
    assert CANONICAL.flops == votes * (3 * 8 + 2 * 2)
    assert dataclasses.replace(CANONICAL, direction="forward+backward").flops == votes * (28 + 25 + 2 * 15)
    assert dataclasses.replace(CANONICAL, op="route_votes", K=0).flops == votes * 5
