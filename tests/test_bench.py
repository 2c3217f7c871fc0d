"""capsfast.bench: sweeps, the gate, timing, memory, records and the report."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from capsfast.bench import memory, record, report
from capsfast.bench.cases import AXES, CANONICAL, OPS, SWEEPS, Case, sweep
from capsfast.bench.contenders import BROADCAST, COMPILED, EAGER, OURS, Contender, contender, contenders
from capsfast.bench.gate import Gate
from capsfast.bench.inputs import ROTATED_BYTES, input_set, input_sets
from capsfast.bench.measure import Row, measure, without_paths
from capsfast.bench.plots import bars
from capsfast.bench.results import Results, shares
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


def test_import_of_capsfast_loads_nothing_of_this() -> None:
    code = "import sys, capsfast; print([n for n in sys.modules if n.split('.')[0] in ('typer', 'rich', 'matplotlib') "
    code += "or n.startswith(('capsfast.bench', 'capsfast.cli'))])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
