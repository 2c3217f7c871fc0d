"""capsfast.bench: which CPU, how near its rate of multiply-adds, which capsfast is measured."""

import dataclasses
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from capsfast import native
from capsfast.backend import BackendStatus
from capsfast.bench import checkout, record, report, roofline
from capsfast.bench.cases import CANONICAL, OPS, Case, sweep
from capsfast.bench.contenders import EAGER, contenders, missing
from capsfast.bench.executed import CPP, executed_flops
from capsfast.bench.measure import Row, measure
from capsfast.bench.microarchitecture import AMD, INTEL, microarchitecture, of_cpuinfo
from capsfast.bench.results import Results
from capsfast.bench.timing import Timing

CPU = torch.device("cpu")
BOTH = dataclasses.replace(CANONICAL, direction="forward+backward")
LIMITS = {"copy_bytes_per_second": 1e10, "matmul_flops_per_second": 1e11, roofline.RATE: 4e11}
needs_extension = pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")

CPUS = [
    ((AMD, 23, 1, 2), "Zen"),  # EPYC 7001
    ((AMD, 23, 8, 2), "Zen+"),  # Ryzen 2000
    ((AMD, 23, 49, 0), "Zen 2"),  # EPYC 7002
    ((AMD, 25, 1, 1), "Zen 3"),  # EPYC 7003
    ((AMD, 25, 33, 0), "Zen 3"),  # Ryzen 5000
    ((AMD, 25, 17, 1), "Zen 4"),  # EPYC 9004
    ((AMD, 25, 97, 2), "Zen 4"),  # Ryzen 7000
    ((AMD, 26, 2, 1), "Zen 5"),  # EPYC 9005
    ((INTEL, 6, 85, 4), "Skylake-SP"),
    ((INTEL, 6, 85, 7), "Cascade Lake"),
    ((INTEL, 6, 85, 11), "Cooper Lake"),
    ((INTEL, 6, 106, 6), "Ice Lake-SP"),
    ((INTEL, 6, 143, 8), "Sapphire Rapids"),
    ((INTEL, 6, 207, 2), "Emerald Rapids"),
    ((INTEL, 6, 173, 1), "Granite Rapids"),
    ((INTEL, 6, 42, 7), None),
    ((AMD, 26, 255, 0), None),
    (("HygonGenuine", 23, 1, 2), None),
]


@pytest.mark.parametrize(("cpu", "name"), CPUS, ids=[f"{cpu}" for cpu, _ in CPUS])
def test_generations(cpu: tuple[str, int, int, int], name: str | None) -> None:
    assert microarchitecture(*cpu) == name


def test_generation_from_cpuinfo() -> None:
    one = "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nstepping\t: 1\n"
    assert of_cpuinfo(f"processor\t: 0\n{one}\nprocessor\t: 1\n{one.replace('25', '26')}") == "Zen 4"
    assert of_cpuinfo("") is None
    assert of_cpuinfo("vendor_id : ARM\nmodel : unknown\n") is None


def test_machine_is_named_after_the_kind_of_cpu() -> None:
    found = {"cpu": "AMD EPYC", "threads": 2}
    assert record.machine_name(found) == "amd-epyc-2-threads"
    assert record.machine_name({**found, "microarchitecture": None}) == "amd-epyc-2-threads"
    assert record.machine_name({**found, "microarchitecture": "Zen 5"}) == "amd-epyc-zen-5-2-threads"
    intel = {"cpu": "Intel(R) Xeon(R) Platinum 8488C", "microarchitecture": "Sapphire Rapids", "threads": 8}
    assert record.machine_name(intel) == "intel-xeon-platinum-8488c-sapphire-rapids-8-threads"
    assert record.machine_name({**intel, "gpu": "NVIDIA H200"}) == "nvidia-h200"
    assert record.name(found, "both") == "amd-epyc-2-threads"
    assert record.name(found, "route_votes") == "amd-epyc-2-threads-route-votes"
    assert record.name(found, "both", "long") == "amd-epyc-2-threads-long"
    assert "microarchitecture" in record.machine(CPU)


def test_records_of_the_checkout_are_named_after_their_machine() -> None:
    root = checkout.checkout()
    if root is None:
        pytest.skip("an installed copy has no records")
    # Those that the page shows; one that was measured just now may wait for the report.
    page = (root / "docs" / "benchmarks.md").read_text()
    records = [path for path in (root / "benchmarks" / "results").glob("*.json") if f"## {path.stem}\n" in page]
    assert records
    for path in records:
        surroundings, rows = record.load(path)
        ops = {row.case.op for row in rows}
        # Records from before the generation of a CPU was kept have it in their name alone.
        if "microarchitecture" in surroundings["machine"]:
            op = ops.pop() if len(ops) == 1 else "both"
            long = {row.case for row in rows} <= set(sweep("long"))
            routings = {row.case.routing for row in rows} - {""}
            routing = routings.pop() if len(routings) == 1 else "all" if routings else ""
            assert record.name(surroundings["machine"], op, "long" if long else "all", routing) == path.stem


@needs_extension
@pytest.mark.parametrize("op", OPS)
def test_executed_flops_are_those_of_the_plan(op: str) -> None:
    forward, both = (dataclasses.replace(case, op=op, K=8 if op == OPS[0] else 0) for case in (CANONICAL, BOTH))
    executed = executed_flops(forward, CPP)
    assert executed is not None and executed >= forward.forward_flops - 2 * 128 * 1152 * 10 * 16 * forward.K
    assert (executed_flops(both, CPP) or 0) > 2 * executed
    assert executed_flops(forward, EAGER) is None


@needs_extension
def test_rows_of_the_cpp_backend_hold_their_flops() -> None:
    case = Case(B=5, I=12, J=3, D=4, K=2, r=2)
    able = [each for each in contenders() if each.name in (CPP, EAGER)]
    found = measure(case, able, CPU, seconds=0, with_memory=False)
    assert {row.contender: row.flops for row in found} == {CPP: executed_flops(case, CPP), EAGER: None}


def _row(case: Case, seconds: float, flops: float | None, name: str = CPP) -> Row:
    return Row(case, name, "ok", "", dataclasses.asdict(Timing.of([seconds])), {"v": 1e-7}, None, flops=flops)


def test_share_of_the_multiply_adds() -> None:
    row = _row(CANONICAL, 0.01, 1e9)
    assert roofline.share(row, LIMITS) == pytest.approx(0.25)
    assert roofline.share(row, {}) is None
    assert roofline.share(None, LIMITS) is None
    assert roofline.share(dataclasses.replace(row, flops=None), LIMITS) is None
    assert roofline.share(dataclasses.replace(row, status="failed", seconds={}), LIMITS) is None
    assert roofline.share(_row(dataclasses.replace(CANONICAL, dtype="float64"), 0.01, 1e9), LIMITS) is None


def test_roofline_table_has_the_layers_that_were_measured() -> None:
    layers = sweep("roofline")
    assert CANONICAL in layers and BOTH in layers
    assert set(layers) <= set(sweep("all"))
    rows = [_row(case, 0.01, 1e9) for case in layers[:3]] + [_row(CANONICAL, 0.1, None, EAGER)]
    assert roofline.table(Results(rows), OPS[0], LIMITS) == [
        ["128, 1152, 10, 16, 8, 1", "forward", "10.00", "1.00", "100", "25 %"],
        ["128, 1152, 10, 16, 8, 1", "forward+backward", "10.00", "1.00", "100", "25 %"],
        ["128, 1152, 10, 16, 8, 2", "forward", "10.00", "1.00", "100", "25 %"],
    ]
    assert roofline.table(Results(rows[:1]), OPS[0], LIMITS) == []
    assert roofline.table(Results(rows), OPS[0], {}) == []
    assert roofline.table(Results(rows), OPS[1], LIMITS) == []


def test_report_shows_shares_where_the_record_has_the_rate(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cases = [*sweep("iterations"), *sweep("roofline")]
    rows = [_row(case, 0.01, 1e9) for case in cases] + [_row(case, 0.1, None, EAGER) for case in cases]
    surroundings = record.environment(CPU)

    def page(name: str, limits: dict[str, float] | None, kept: list[Row]) -> str:
        record.save(tmp_path / name, {**surroundings, "limits": limits}, kept)
        return report.write([tmp_path / name], tmp_path / name[0]).read_text().partition("\n## ")[2]

    new = page("new.json", LIMITS, rows)
    assert "400 GFLOP/s (multiply-adds on registers)" in new
    assert "| of the multiply-adds |" in new and "25 %" in new
    assert "| 64, 256, 320, 16, 8, 3 | forward+backward | 10.00 | 1.00 | 100 | 25 % |" in new
    assert "### Other cases" not in new
    # As records were before they knew the rate.
    before = [dataclasses.replace(row, flops=None) for row in rows]
    old = page("old.json", {key: rate for key, rate in LIMITS.items() if key != roofline.RATE}, before)
    assert "multiply-adds" not in old
    assert "| r=3 | 10.00 |" in old
    assert "multiply-adds" not in page("bare.json", None, before)


def test_rows_of_older_records_load() -> None:
    fields = _row(CANONICAL, 0.01, None).as_dict()
    for newer in ("flops", "clock", "event_seconds"):
        del fields[newer]
    assert Row.from_dict(fields) == _row(CANONICAL, 0.01, None)


def test_fused_backends_that_are_missing_have_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {
        "cpp": BackendStatus(False, "no compiler", ("cpu",)),
        "cuda": BackendStatus(False, "no toolkit", ("cuda",)),
        "reference": BackendStatus(True, "", ("any",)),
    }
    monkeypatch.setattr("capsfast.bench.contenders.backends", lambda: states)
    assert missing(CPU) == {"cpp": "no compiler"}
    assert missing(torch.device("cuda")) == {"cuda": "no toolkit"}


def _package(folder: Path, with_extension: bool) -> Path:
    package = folder / "capsfast"
    package.mkdir(parents=True)
    if with_extension:
        (package / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    return package


def test_checkout_without_extension_does_not_hide_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare, built = _package(tmp_path / "checkout", False), _package(tmp_path / "site", True)
    for name in ("setup.py", "benchmarks/README.md"):
        (bare.parent / name).parent.mkdir(exist_ok=True)
        (bare.parent / name).touch()
    monkeypatch.setattr(sys, "path", [str(bare.parent), str(tmp_path / "none"), str(built.parent)])
    monkeypatch.setattr(checkout, "native", SimpleNamespace(why_absent="it was not built"))
    monkeypatch.setattr(checkout, "PACKAGE", bare)
    assert checkout.checkout() == bare.parent
    said = checkout.why_not_this_one("bench")
    assert said.startswith("bench: ") and str(bare) in said and str(built) in said and "it was not built" in said
    monkeypatch.setattr(checkout, "PACKAGE", built)
    assert checkout.why_not_this_one("bench") == ""
    assert checkout.checkout() is None
    monkeypatch.setattr(checkout, "PACKAGE", bare)
    monkeypatch.setattr(sys, "path", [str(bare.parent)])
    assert checkout.why_not_this_one("bench") == ""
