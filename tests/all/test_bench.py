"""capsfast.bench: sweeps, the gate, timing, memory, records and the report."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from capsfast import backends, native
from capsfast.bench import checkout, memory, record, report, routings
from capsfast.bench.cases import AXES, CANONICAL, DIRECTIONS, OPS, ROUTING, SWEEPS, Case, sweep
from capsfast.bench.contenders import COMPILED, EAGER, OURS, Contender, contender, contenders, missing
from capsfast.bench.gate import Gate
from capsfast.bench.inputs import ROTATED_BYTES, input_set, input_sets
from capsfast.bench.measure import CPP, Row, executed_flops, measure, without_paths
from capsfast.bench.plots import batch_plot
from capsfast.bench.results import RATE, Results
from capsfast.bench.timing import Timing, interleave
from capsfast.nn import ROUTINGS

CPU = torch.device("cpu")
TINY = Case(B=5, I=12, J=3, D=6, K=6, r=2)
TINY_BOTH = dataclasses.replace(TINY, direction="forward+backward")
TINY_VOTES = dataclasses.replace(TINY_BOTH, op="route_votes", K=0)
ROUTED = {
    name: dataclasses.replace(TINY_BOTH, op=ROUTING, routing=name, r=2 if routings.takes_iterations(name) else 0)
    for name in ROUTINGS
}
LIMITS = {RATE: 4e11}
QUICK = [each.name for each in contenders() if each.name not in (COMPILED, OURS + "triton")]


@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize("op", [*OPS, "em"])
def test_sweeps_are_finite_distinct_and_of_their_op(name: str, op: str) -> None:
    cases = sweep(name, ROUTING, routing=op) if op == "em" else sweep(name, op)
    assert cases and len(set(cases)) == len(cases)
    assert {case.routing or case.op for case in cases} == {op}
    if op == "dynamic_routing" and name in AXES and name != "corners":
        assert {CANONICAL, dataclasses.replace(CANONICAL, direction="forward+backward")} <= set(cases)


def test_the_capsule_counts_that_pytest_compares() -> None:
    cases = sweep("capsules")
    assert {case.direction for case in cases} == set(DIRECTIONS)
    assert {case.I for case in cases} == {64, 256, 1152, 4608} and {case.J for case in cases} == {2, 10, 32, 320}
    # With these sizes the votes of every contender fit in memory.
    assert not any(each.why_not(case, CPU) for case in cases for each in contenders() if each.serves(CPU))


@pytest.mark.parametrize(
    "wrong", [{"dtype": "int8"}, {"direction": "backward"}, {"op": "squash"}, {"K": 0}, {"op": "route_votes"}]
)
def test_case_rejects_what_it_does_not_know(wrong: dict[str, str | int]) -> None:
    with pytest.raises(ValueError, match="Case: "):
        dataclasses.replace(CANONICAL, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="routing must be one of dynamic, "):
        sweep("quick", ROUTING, routing="magic")


def test_every_available_fused_backend_is_a_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = [OURS + name for name, status in backends().items() if status.available and name != "reference"]
    assert [each.name for each in contenders()] == [*fused, COMPILED, EAGER]
    absent = {"cpp": SimpleNamespace(available=False, reason="no compiler", devices=("cpu",))}
    monkeypatch.setattr("capsfast.bench.contenders.backends", lambda: absent)
    assert missing(CPU) == {"cpp": "no compiler"} and missing(torch.device("cuda")) == {}


def test_contender_is_skipped_where_it_would_need_too_much_memory() -> None:
    wide = dataclasses.replace(CANONICAL, I=18432, direction="forward+backward")
    assert "GiB, the limit is 8.0 GiB" in contender(EAGER).why_not(wide, CPU)
    assert contender(EAGER).why_not(TINY, CPU) == ""
    assert "the limit is 0.0 GiB" in contender(EAGER).why_not(CANONICAL, CPU, free=2**20)
    # Inputs and gradients only count against the free memory.
    longest = sweep("long")[-1]
    assert contender(CPP).why_not(longest, CPU, free=22 * 2**30) == ""
    assert "the limit is 6.0 GiB" in contender(CPP).why_not(longest, CPU, free=8 * 2**30)
    elsewhere = Contender("elsewhere", lambda case: torch.neg, lambda case: 0, ("cuda",))
    assert elsewhere.why_not(TINY, CPU) == "runs on cuda only"


def test_inputs_depend_on_the_seed_and_outgrow_the_caches() -> None:
    one, same, other = (input_set(TINY, CPU, seed) for seed in (3, 3, 4))
    assert torch.equal(one.tensors[0], same.tensors[0]) and not torch.equal(one.tensors[0], other.tensors[0])
    middle = dataclasses.replace(CANONICAL, B=1)
    assert len(input_sets(middle, CPU)) * middle.input_bytes >= ROTATED_BYTES


@pytest.mark.parametrize("case", [TINY, TINY_BOTH, TINY_VOTES, *ROUTED.values()], ids=lambda case: case.name)
def test_gate_passes_contenders(case: Case) -> None:
    gate = Gate(case, input_set(case, CPU))
    names = {*case.outputs, *(f"d{each}" for each in case.shapes if case.backward)}
    for each in (contender(name) for name in QUICK):
        if each.serves(CPU):
            verdict = gate.check(each.make(case))
            assert (verdict.reason, set(verdict.errors)) == ("", names)


def test_the_einsum_form_of_a_routing_compiles_as_a_whole() -> None:
    torch._dynamo.reset()
    case = dataclasses.replace(ROUTED["em"], direction="forward")
    forward, tensors = contender(EAGER).make(case), input_set(case, CPU).tensors
    compiled = torch.compile(forward, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(tuple(compiled(*tensors)), tuple(forward(*tensors)))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_gate_finds_what_is_wrong(dtype: str) -> None:
    case = dataclasses.replace(TINY_BOTH, dtype=dtype)
    gate, right = Gate(case, input_set(case, CPU)), contender(EAGER).make(case)
    assert gate.check(right).reason == ""
    wrong = {
        "v has relative error": lambda u, weight: 1.5 * right(u, weight),
        "dweight has": lambda u, weight: right(u, 0.5 * weight + 0.5 * weight.detach()),
        "v is not finite": lambda u, weight: right(u, weight) * float("nan"),
    }
    for reason, forward in wrong.items():
        assert reason in gate.check(forward).reason


def test_gate_uses_a_slice_of_a_large_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capsfast.bench.gate.TRUTH_BYTES", 2 * TINY.I * TINY.J * TINY.D * 8)
    gate, right = Gate(TINY_BOTH, input_set(TINY_BOTH, CPU)), contender(EAGER).make(TINY_BOTH)
    assert gate.chosen.tolist() == [0, TINY.B - 1]
    assert gate.check(right).reason == ""

    def wrong_in_the_last_sample(u: Tensor, weight: Tensor) -> Tensor:
        v = right(u, weight)
        return torch.cat([v[:-1], 1.01 * v[-1:]])

    def mixes_samples(u: Tensor, weight: Tensor) -> Tensor:
        return right(u, weight) + 1e-9 * right(u.roll(1, 0), weight)

    assert "v has relative error" in gate.check(wrong_in_the_last_sample).reason
    assert "du is not zero" in gate.check(mixes_samples).reason


@pytest.mark.parametrize("case", [TINY_BOTH, TINY_VOTES], ids=lambda case: case.op)
def test_the_gate_takes_the_first_capsules_of_what_is_too_large(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capsfast.bench.gate.TRUTH_INPUTS", case.input_bytes // 4 - 1)
    gate, right = Gate(case, input_set(case, CPU)), contender(EAGER).make(case)
    assert gate.case == dataclasses.replace(case, I=case.I - 1)
    assert gate.check(right).reason == ""
    assert "v has relative error" in gate.check(lambda *tensors: 1.01 * right(*tensors)).reason

    def only_short(*tensors: Tensor) -> Tensor:
        if tensors[0].shape[1] == case.I:
            raise RuntimeError("too long")
        return right(*tensors)

    failing = dataclasses.replace(contender(EAGER), make=lambda case: only_short)
    (row,) = measure(case, [failing], CPU, seconds=0, least_rounds=1, with_memory=False)
    assert row.status == "failed" and row.reason == "RuntimeError: too long"


def test_wrong_and_failing_contenders_are_not_timed() -> None:
    def fails(*tensors: Tensor) -> Tensor:
        raise RuntimeError("no file /some/where/kernel.so here\nsecond line")

    def wrong(u: Tensor, weight: Tensor) -> Tensor:
        return torch.zeros(u.shape[0], *weight.shape[1:3])

    able = [
        contender(EAGER),
        Contender("wrong", lambda case: wrong, lambda case: 0),
        Contender("failing", lambda case: fails, lambda case: 0),
        Contender("large", lambda case: wrong, lambda case: 2**40),
    ]
    rows = measure(TINY, able, CPU, seconds=0.01, with_memory=False)
    assert [row.status for row in rows] == ["ok", "wrong", "failed", "skipped"]
    assert [bool(row.seconds) for row in rows] == [True, False, False, False]
    assert rows[2].reason == "RuntimeError: no file kernel.so here"


def test_steps_take_turns_and_none_always_follows_the_same() -> None:
    seen: list[str] = []
    steps = {name: lambda name=name: seen.append(name) for name in "abc"}  # type: ignore[misc]
    timings = interleave(steps, CPU, seconds=0.0, least_rounds=3)
    turns = [name for n, name in enumerate(seen) if n == 0 or seen[n - 1] != name]
    assert "".join(turns) == "abcbcacab"
    # The first call of each turn does not count.
    assert {name: timing.calls for name, timing in timings.items()} == {name: seen.count(name) - 3 for name in "abc"}


def test_a_gpu_is_timed_by_do_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    testing = pytest.importorskip("triton.testing")

    def do_bench(step: Callable[[], object], return_mode: str, **times: int) -> list[float]:
        assert return_mode == "all" and step() == "called"
        return [2.0, 4.0, 6.0]

    monkeypatch.setattr(testing, "do_bench", do_bench)
    found = interleave({"one": lambda: "called"}, torch.device("cuda"), seconds=0.0, least_rounds=2)["one"]
    assert (found.least, found.median, found.calls) == (2e-3, 4e-3, 6)


@pytest.mark.skipif(bool(memory.why_not()), reason=memory.why_not() or "measurable")
def test_memory_growth_finds_the_votes() -> None:
    case = Case(B=16, I=256, J=10, D=16, K=8, r=2)
    growth, reason = memory.peak_growth(case, contender(EAGER), CPU)
    assert reason == "" and growth is not None
    assert case.votes_bytes <= growth <= 4 * case.votes_bytes


CPUS = [
    (("AuthenticAMD", 23, 1, 2), "Zen"),  # EPYC 7001
    (("AuthenticAMD", 23, 8, 2), "Zen+"),  # Ryzen 2000
    (("AuthenticAMD", 25, 33, 0), "Zen 3"),  # Ryzen 5000
    (("AuthenticAMD", 25, 17, 1), "Zen 4"),  # EPYC 9004
    (("AuthenticAMD", 26, 2, 1), "Zen 5"),  # EPYC 9005
    (("GenuineIntel", 6, 85, 4), "Skylake-SP"),
    (("GenuineIntel", 6, 85, 7), "Cascade Lake"),
    (("GenuineIntel", 6, 207, 2), "Emerald Rapids"),
    (("GenuineIntel", 6, 42, 7), None),
    (("AuthenticAMD", 26, 255, 0), None),
    (("HygonGenuine", 23, 1, 2), None),
]


@pytest.mark.parametrize(("cpu", "name"), CPUS, ids=str)
def test_generation_of_the_first_cpu(cpu: tuple[str, int, int, int], name: str | None) -> None:
    keys = ("vendor_id", "cpu family", "model", "stepping")
    text = "\n".join(f"{key}\t: {value}" for key, value in zip(keys, cpu, strict=True))
    assert record.microarchitecture(f"{text}\n\nvendor_id : GenuineIntel\ncpu family : 6\n") == name
    assert record.microarchitecture("") is None


def test_a_record_is_named_after_its_machine_and_what_is_in_it() -> None:
    found = {"cpu": "Intel(R) Xeon(R) Platinum 8488C", "microarchitecture": "Sapphire Rapids", "threads": 8}
    stem = "intel-xeon-platinum-8488c-sapphire-rapids-8-threads"
    assert record.name(found, "both") == record.machine_name(found) == stem
    assert record.name(found, "route_votes", "batch") == f"{stem}-route-votes"
    assert record.name(found, "both", "long") == f"{stem}-long"
    assert record.name(found, "", "routings", "all") == f"{stem}-routings"
    assert record.name(found, "", "routings", "em") == f"{stem}-routing-em"
    assert record.machine_name({**found, "gpu": "NVIDIA H200"}) == "nvidia-h200"


def test_an_environment_has_machine_versions_and_commit_and_no_paths() -> None:
    found = record.environment(CPU)
    assert found["machine"]["threads"] == torch.get_num_threads() and found["versions"]["torch"] == torch.__version__
    assert found["commit"] is None or len(found["commit"]["hash"]) == 40
    assert not any(part.startswith("/") for part in str(found).replace("'", " ").split())
    assert without_paths("cannot open /a/b-c/d.e/file.so: and/or 1/2") == "cannot open file.so: and/or 1/2"


def row(case: Case, name: str, seconds: float, flops: float | None = None, size: int | None = 2**20) -> Row:
    return Row(case, name, "ok", "", dataclasses.asdict(Timing.of([seconds])), {"v": 1e-7}, size, flops)


def rows_of(cases: list[Case]) -> list[Row]:
    """Rows in which capsfast takes a millisecond a sample."""
    factors = {CPP: 1.0, COMPILED: 3.0, EAGER: 6.0}
    return [row(case, name, factor * case.B * 1e-3, 1e9) for case in cases for name, factor in factors.items()]


def test_records_are_whole_and_older_ones_are_read(tmp_path: Path) -> None:
    path, rows = tmp_path / "deep" / "record.json", rows_of(sweep("smoke"))
    record.save(path, record.environment(CPU), rows)
    assert record.load(path) == (record.environment(CPU), rows)
    assert [each.name for each in path.parent.iterdir()] == ["record.json"]
    fields = {**dataclasses.asdict(Row(CANONICAL, EAGER, "ok")), "clock": "host", "event_seconds": {}}
    del fields["flops"], fields["case"]["routing"]
    path.write_text(json.dumps({"format": 1, "environment": {}, "rows": [fields]}))
    assert record.load(path)[1] == [Row(CANONICAL, EAGER, "ok")]
    for other in ("{}", '{"format": 1, "environment": {}, "rows": [{"ms": 1}]}'):
        path.write_text(other)
        with pytest.raises(ValueError, match=r"record\.json is not"):
            record.load(path)


def test_report_shows_the_record(tmp_path: Path) -> None:
    cases = [*sweep("I")[:4], *sweep("routings", ROUTING, routing="em"), TINY_VOTES]
    rows = [*rows_of(cases), Row(cases[0], "broadcast", "skipped", "would need about 9.0 GiB")]
    record.save(tmp_path / "record.json", {**record.environment(CPU), "limits": LIMITS}, rows)
    page = report.page([tmp_path / "record.json"])
    found = [line for line in page.splitlines() if line.startswith("| B=128 I=64 |")]
    assert found[0] == "| B=128 I=64 | 128 | 384 | 768 | skipped | 3.0x | 6.0x | 1.0 | 1.0 | 1.0 | 2 % |"
    assert "400 GFLOP/s (multiply-adds on registers)" in page and "### Routing em, forward+backward" in page
    assert page.count("| B=64 | 64.00 | 192 | 384 | ") == 2
    assert "| B=5 I=12 J=3 D=6 r=2 | 5.00 | 15.00 | 30.00 |" in page.partition("### route_votes, forward+backward")[2]
    assert f"* broadcast, skipped: would need about 9.0 GiB ({cases[0].name})" in page


def test_report_draws_what_the_page_links_to(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "record.json"
    record.save(path, record.environment(CPU), rows_of([*sweep("J"), *sweep("batch")]))
    text = report.write([path], tmp_path / "docs").read_text()
    images = {image.name for image in (tmp_path / "docs" / "images").iterdir()}
    assert images == {f"record-dynamic_routing-{each}.png" for each in ("speedup", "memory", "batch")}
    assert all(f"(images/{name})" in text for name in images)
    drawn = tmp_path / "docs" / "images" / "record-dynamic_routing-batch.png"
    assert b"'capsfast': [(1, 1.0), (16, 16.0), (128, 128.0), (512, 512.0)]" in drawn.read_bytes()
    forgotten = [row(case, name, 1.0, size=None) for case in sweep("batch") for name in (CPP, COMPILED, EAGER)]
    assert batch_plot(Results(forgotten), "dynamic_routing", tmp_path, "machine") is None


def test_the_page_of_the_docs_is_the_report_of_the_records() -> None:
    root = checkout.checkout()
    if root is None:
        pytest.skip("an installed copy has no records")
    page = (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    # A new record may not be in the report yet.
    records = [path for path in (root / "benchmarks" / "results").glob("*.json") if f"## {path.stem}\n" in page]
    assert records
    without_pictures = "".join(block for block in page.split("\n\n") if not block.startswith("!["))
    assert without_pictures == report.page(records).replace("\n\n", "")


@pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")
@pytest.mark.parametrize("op", OPS)
def test_share_of_the_multiply_adds(op: str) -> None:
    forward, both = sweep("smoke", op)[:2]
    executed = executed_flops(forward, CPP)
    assert executed is not None and (executed_flops(both, CPP) or 0) > 2 * executed
    assert executed_flops(forward, EAGER) is None and executed_flops(ROUTED["em"], CPP) is None
    (found,) = measure(forward, [contender(CPP)], CPU, seconds=0, least_rounds=1, with_memory=False)
    assert found.flops == executed
    results = Results([row(forward, CPP, 0.01, 1e9)])
    assert results.share(forward, LIMITS) == pytest.approx(0.25)
    assert results.share(forward, {}) is None and results.share(both, LIMITS) is None
