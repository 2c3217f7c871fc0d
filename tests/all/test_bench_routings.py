"""capsfast.bench of the routings of capsfast.nn: cases, inputs, contenders, the gate, records and the report."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from capsfast.bench import record, report, routings
from capsfast.bench.cases import DIRECTIONS, ROUTING, Case, sweep
from capsfast.bench.contenders import BROADCAST, COMPILED, EAGER, OURS, contender, contenders
from capsfast.bench.executed import CPP, executed_flops
from capsfast.bench.floors import floor
from capsfast.bench.gate import Gate
from capsfast.bench.inputs import input_set
from capsfast.bench.measure import Row, measure
from capsfast.bench.results import Results, differing, shares
from capsfast.bench.timing import Timing
from capsfast.nn import ROUTINGS, Capsules

CPU = torch.device("cpu")
TINY = Case(B=5, I=12, J=3, D=6, K=6, r=2, direction="forward+backward", op=ROUTING, routing="dynamic")


def tiny(name: str) -> Case:
    return dataclasses.replace(TINY, routing=name, r=2 if routings.takes_iterations(name) else 0)


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_gate_passes_every_routing(name: str) -> None:
    case = tiny(name)
    inputs = input_set(case, CPU)
    assert [tuple(each.shape) for each in inputs.tensors] == list(case.shapes.values())
    assert ("activation" in case.shapes) == ROUTINGS[name].uses_activation
    able = [each for each in contenders(ROUTING) if each.name not in (COMPILED, OURS + "triton")]
    for each in able:
        verdict = Gate(case, inputs).check(each.make(case))
        assert verdict.reason == ""
        assert set(verdict.errors) == {"poses", "activations"} | {f"d{each}" for each in case.shapes}


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_einsum_form_compiles_as_a_whole(name: str) -> None:
    torch._dynamo.reset()
    case = dataclasses.replace(tiny(name), direction="forward")
    forward = contender(EAGER).make(case)
    tensors = input_set(case, CPU).tensors
    compiled = torch.compile(forward, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(tuple(compiled(*tensors)), tuple(forward(*tensors)))


def test_the_gate_finds_a_wrong_activation_and_a_mixed_sample() -> None:
    gate = Gate(TINY, input_set(TINY, CPU))
    right = contender(EAGER).make(TINY)

    def scaled(*tensors: Tensor) -> Capsules:
        poses, activations = right(*tensors)
        return Capsules(poses, 1.01 * activations)

    assert "activations has relative error" in gate.check(scaled).reason

    def detached(u: Tensor, weight: Tensor) -> Capsules:
        return Capsules(*right(u, 0.5 * weight + 0.5 * weight.detach()))

    assert "dweight has relative error" in gate.check(detached).reason


def test_a_case_names_its_routing() -> None:
    assert TINY.name == "routing dynamic forward+backward B=5 I=12 J=3 D=6 K=6 r=2 float32"
    assert "r=" not in dataclasses.replace(TINY, r=0).name
    for wrong in ({"op": "dynamic_routing"}, {"routing": ""}, {"K": 0}):
        with pytest.raises(ValueError, match="Case: "):
            dataclasses.replace(TINY, **wrong)
    with pytest.raises(ValueError, match="routing must be one of dynamic, "):
        sweep("quick", ROUTING, routing="magic")


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_sweep_of_a_routing(name: str) -> None:
    cases = sweep("routings", ROUTING, routing=name)
    assert [(case.B, case.direction) for case in cases] == [(B, d) for B in (1, 16, 64, 128) for d in DIRECTIONS]
    assert {(case.routing, bool(case.r)) for case in cases} == {(name, routings.takes_iterations(name))}


def test_what_belongs_to_dynamic_routing_as_an_op_is_left_out() -> None:
    assert BROADCAST not in [each.name for each in contenders(ROUTING)]
    limits = {"copy_bytes_per_second": 1e9, "matmul_flops_per_second": 1e9, "tf32_flops_per_second": 1e9}
    forward = dataclasses.replace(TINY, direction="forward")
    assert shares(forward, 1.0, {"copy_bytes_per_second": 1e9, "matmul_flops_per_second": 1e9}) is None
    assert floor(forward, limits) is None
    assert executed_flops(forward, CPP) is None


def test_measuring_a_routing_and_its_record(tmp_path: Path) -> None:
    (row,) = measure(TINY, [contender(EAGER)], CPU, seconds=0.0, least_rounds=1, with_memory=False)
    assert row.status == "ok" and row.seconds["calls"] >= 1
    record.save(tmp_path / "record.json", {}, [row])
    assert record.load(tmp_path / "record.json")[1] == [row]


def test_records_that_know_no_routings_are_read(tmp_path: Path) -> None:
    fields = Row(sweep("smoke")[0], EAGER, "ok").as_dict()
    del fields["case"]["routing"]
    (tmp_path / "old.json").write_text(json.dumps({"format": 1, "environment": {}, "rows": [fields]}))
    assert record.load(tmp_path / "old.json")[1] == [Row(sweep("smoke")[0], EAGER, "ok")]


def test_names_of_records() -> None:
    machine = {"cpu": "AMD EPYC", "microarchitecture": "Zen 4", "threads": 2}
    assert record.name(machine, "", "routings", "all") == "amd-epyc-zen-4-2-threads-routings"
    assert record.name(machine, "", "routings", "self_routing") == "amd-epyc-zen-4-2-threads-routing-self-routing"
    assert record.name(machine, "route_votes", "batch") == "amd-epyc-zen-4-2-threads-route-votes"
    assert record.name(machine, "dynamic_routing", "long") == "amd-epyc-zen-4-2-threads-long"


def test_a_report_has_a_table_for_each_routing_and_direction(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cases = [*sweep("routings", ROUTING, routing="dynamic"), *sweep("batch")]
    rows = [
        Row(case, name, "ok", "", dataclasses.asdict(Timing.of([seconds * case.B])), {"poses": 1e-7}, 2**20)
        for case in cases
        for name, seconds in ((CPP, 1e-3), (COMPILED, 8e-3), (EAGER, 2e-2))
    ]
    results = Results(rows)
    assert set(results.routings()) == {("dynamic", direction) for direction in DIRECTIONS}
    assert {axis.op for axis in results.axes()} == {"dynamic_routing"} and results.others(results.axes()) == []
    record.save(tmp_path / "record.json", record.environment(CPU), rows)
    page = report.write([tmp_path / "record.json"], tmp_path / "docs").read_text()
    section = page[page.index("### Routing dynamic\n") :]
    assert section.count("| B=64 | 64.00 | 512 | 1280 | 8.0x | 20.0x | 1.0 | 1.0 | 1.0 |") == 2
    assert "#### Routing dynamic: forward+backward" in section and "Other cases" not in page


def test_a_row_says_what_differs_from_the_canonical_layer() -> None:
    assert differing(dataclasses.replace(TINY, I=1152, D=16, K=8, r=3)) == "B=5 J=3"
    assert differing(Case(dtype="bfloat16")) == "B=128 bfloat16"
