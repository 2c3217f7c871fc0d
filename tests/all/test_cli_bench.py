"""``python -m capsfast bench`` and ``report``: what they print and write, and how they end if they cannot go on."""

import dataclasses
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from capsfast.bench import contenders, record
from capsfast.bench.cases import OPS, ROUTING, Case, sweep
from capsfast.bench.contenders import EAGER
from capsfast.bench.measure import CPP, Row
from capsfast.bench.results import RATE
from capsfast.bench.timing import Timing
from capsfast.cli import measuring
from capsfast.cli.app import app
from capsfast.nn import ROUTINGS

RUN = CliRunner()
LIMITS = {RATE: 4e11}
SMALL = [Case(B=2, I=8, J=3, D=4, K=2, r=2), Case(B=2, I=8, J=3, D=4, K=2, r=2, direction="forward+backward")]


class Measured:
    """Replaces measure(): returns rows at once and records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Case, dict[str, Any]]] = []
        self.names: list[str] = []
        self.before: Callable[[int], None] = lambda n: None

    def __call__(self, case: Case, able: list[contenders.Contender], device: torch.device, **how: Any) -> list[Row]:
        self.before(len(self.calls))
        self.calls.append((case, how))
        self.names = [each.name for each in able]
        how["on_step"]("timing")
        seconds = dataclasses.asdict(Timing.of([1e-3]))
        return [Row(case, each.name, "ok", "", seconds, {"v": 1e-7}, flops=1e8) for each in able]

    @property
    def cases(self) -> list[Case]:
        return [case for case, _ in self.calls]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Two small cases in every sweep, no limits to measure, no checks of this installation, rows at once."""
    measured = Measured()
    monkeypatch.setattr(measuring, "sweep", lambda name, op, **more: SMALL)
    monkeypatch.setattr(measuring, "multiply_adds", lambda: dict(LIMITS))
    monkeypatch.setattr(measuring, "why_not_this_one", lambda command: "")
    monkeypatch.setattr(measuring, "measure", measured)
    return measured


def bench(*words: str | Path) -> Any:
    return RUN.invoke(app, ["bench", *map(str, words)])


@pytest.mark.parametrize("op", OPS)
def test_bench_prints_and_writes(tmp_path: Path, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    # Compiling or interpreting kernels would take seconds for each case.
    able = [each for each in contenders.contenders() if each.name in (CPP, EAGER)]
    cases = [dataclasses.replace(case, op=op, K=case.K if op == OPS[0] else 0) for case in SMALL]
    monkeypatch.setattr(measuring, "contenders", lambda: able)
    monkeypatch.setattr(measuring, "sweep", lambda name, op, **more: cases)
    monkeypatch.setattr(measuring, "multiply_adds", lambda: dict(LIMITS))
    png, json = tmp_path / "plot.png", tmp_path / "record.json"
    result = bench("--sweep", "dims", "--op", op, "--seconds", "0", "--no-memory", "--png", png, "--json", json)
    assert result.exit_code == 0, result.output
    assert "eager einsum" in result.output
    assert png.read_bytes().startswith(b"\x89PNG")
    surroundings, rows = record.load(json)
    assert {row.status for row in rows} == {"ok"}
    assert [row.case for row in rows] == [case for case in cases for _ in able]
    assert surroundings["limits"] == LIMITS


@pytest.mark.parametrize("wrong", [["--sweep", "none"], ["--op", "none"], ["--device", "tpu"]], ids=str)
def test_bench_names_the_choices(wrong: list[str]) -> None:
    result = bench(*wrong)
    assert result.exit_code == 2
    assert "must be" in result.output


def test_two_places_for_a_record_are_refused(quick: Measured) -> None:
    result = bench("--record", "--json", "x.json")
    assert result.exit_code == 2 and "--json" in result.output
    assert quick.calls == []


def test_both_ops_and_what_measuring_is_told(monkeypatch: pytest.MonkeyPatch, quick: Measured) -> None:
    monkeypatch.setattr(measuring, "sweep", lambda name, op, **more: sweep("smoke", op))
    result = bench("--sweep", "smoke", "--op", "both", "--seconds", "0.5", "--rounds", "7", "--threads", "1")
    assert result.exit_code == 0, result.output
    assert quick.cases == [*sweep("smoke"), *sweep("smoke", "route_votes")]
    for _, how in quick.calls:
        assert (how["seconds"], how["least_rounds"], how["with_memory"]) == (0.5, 7, True)


def test_routings_are_measured_by_name(monkeypatch: pytest.MonkeyPatch, quick: Measured, tmp_path: Path) -> None:
    monkeypatch.setattr(measuring, "sweep", sweep)
    monkeypatch.setattr(measuring, "checkout", lambda: tmp_path)
    ours = contenders.Contender(CPP, lambda case: torch.neg, lambda case: 0, ("cpu",))
    monkeypatch.setattr(measuring, "contenders", lambda: [ours])
    result = bench("--routing", "dynamic", "--record")
    assert result.exit_code == 0, result.output
    assert quick.cases == sweep("routings", ROUTING, routing="dynamic")
    assert all(how["with_memory"] for _, how in quick.calls)
    quick.calls.clear()
    result = bench("--routing", "all", "--sweep", "smoke", "--record")
    assert result.exit_code == 0, result.output
    assert list(dict.fromkeys(case.routing for case in quick.cases)) == list(ROUTINGS)
    stems = sorted(each.stem for each in (tmp_path / "benchmarks" / "results").iterdir())
    assert [stem.partition("threads-")[2] for stem in stems] == ["routing-dynamic", "routings"]
    assert all(bench("--routing", *words).exit_code == 2 for words in (["magic"], ["dynamic", "--op", "route_votes"]))


def test_a_long_sweep_has_a_line_for_each_case(monkeypatch: pytest.MonkeyPatch, quick: Measured) -> None:
    monkeypatch.setattr(measuring, "sweep", sweep)
    ours = contenders.Contender(CPP, lambda case: torch.neg, lambda case: 0, ("cpu",))
    monkeypatch.setattr(measuring, "contenders", lambda: [ours, contenders.contender(EAGER)])
    result = bench("--sweep", "roofline", "--no-baselines")
    assert result.exit_code == 0, result.output
    assert result.output.count("capsfast cpp 1.00 ms (25 % of the multiply-adds)") == 14 and quick.names == [CPP]
    monkeypatch.setattr(measuring, "contenders", lambda: [contenders.contender(EAGER)])
    assert bench("--no-baselines").exit_code == 2


def test_missing_fused_backends_are_named(monkeypatch: pytest.MonkeyPatch, quick: Measured, tmp_path: Path) -> None:
    monkeypatch.setattr(measuring, "missing", lambda device: {"cpp": "there is no [extension]"})
    result = bench()
    assert result.exit_code == 0
    assert "capsfast cpp is not measured: there is no [extension]" in result.output
    # A record without capsfast would replace a record with it.
    monkeypatch.setattr(measuring, "contenders", lambda: [contenders.contender(EAGER)])
    monkeypatch.setattr(measuring, "_results", lambda: tmp_path)
    result = bench("--record")
    assert result.exit_code == 2 and "--record needs a fused backend for cpu: there is no [ext" in result.output
    assert list(tmp_path.iterdir()) == []


def test_record_goes_into_the_checkout(monkeypatch: pytest.MonkeyPatch, quick: Measured, tmp_path: Path) -> None:
    ours = contenders.Contender(CPP, lambda case: torch.neg, lambda case: 0, ("cpu",))
    monkeypatch.setattr(measuring, "contenders", lambda: [ours])
    monkeypatch.setattr(measuring, "checkout", lambda: tmp_path)
    result = bench("--record")
    assert result.exit_code == 0, result.output
    (path,) = (tmp_path / "benchmarks" / "results").iterdir()
    surroundings, rows = record.load(path)
    assert path.stem == record.machine_name(surroundings["machine"])
    assert [row.case for row in rows] == SMALL
    # A record takes longer measurements than a first look.
    assert (quick.calls[0][1]["seconds"], quick.calls[0][1]["least_rounds"]) == (2.0, 5)
    monkeypatch.setattr(measuring, "checkout", lambda: None)
    result = bench("--record")
    assert result.exit_code == 2 and "records lie in a checkout" in result.output


def test_interruption_keeps_what_is_finished(quick: Measured, tmp_path: Path) -> None:
    path = tmp_path / "record.json"

    def interrupt(n: int) -> None:
        if n == 1:
            raise KeyboardInterrupt

    quick.before = interrupt
    result = bench("--json", path)
    assert result.exit_code == 130
    assert result.output.splitlines()[-1] == f"capsfast bench: interrupted; {path} holds 1 of 2 cases"
    assert {row.case for row in record.load(path)[1]} == {SMALL[0]}


def test_a_place_that_cannot_be_written_to_is_found_before_measuring(quick: Measured, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for option, path in (("--json", tmp_path / "file" / "x.json"), ("--json", tmp_path), ("--png", Path("/dev/full"))):
        result = bench(option, path)
        assert result.exit_code == 1, result.output
        assert f"capsfast bench: {path} can't be written: " in result.output and "nothing was meas" in result.output
    assert quick.calls == []
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_fills_up_leaves_the_record_whole(
    quick: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill(n: int) -> None:
        if n == 1:
            monkeypatch.setattr("capsfast.files.os.fsync", full)

    quick.before = fill
    result = bench("--json", path)
    assert result.exit_code == 1
    last = result.output.splitlines()[-1]
    assert last.startswith(f"capsfast bench: {path} can't be written: No space left on device; ")
    assert {row.case for row in record.load(path)[1]} == {SMALL[0]}
    assert [each.name for each in tmp_path.iterdir()] == ["record.json"]


def test_report_of_the_checkout_and_of_named_records(
    quick: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "benchmarks" / "results"
    monkeypatch.setattr(measuring, "checkout", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    result = RUN.invoke(app, ["report"])
    assert result.exit_code == 1 and "bench --record makes one" in result.output

    path = results / "machine.json"
    assert bench("--json", path).exit_code == 0
    for words in ([], [str(path)]):
        result = RUN.invoke(app, ["report", *words])
        assert result.exit_code == 0 and result.output.startswith("# Measurements")
        assert "| B=2 I=8 J=3 D=4 K=2 r=2 | 1.00 |" in result.output
    assert {each for each in tmp_path.rglob("*") if each.is_file()} == {path}
    pytest.importorskip("matplotlib")
    result = RUN.invoke(app, ["report", "--out", "there"])
    assert (result.exit_code, result.output) == (0, "wrote there/benchmarks.md\n")
    assert "| B=2 I=8 J=3 D=4 K=2 r=2 | 1.00 |" in (tmp_path / "there" / "benchmarks.md").read_text()
    monkeypatch.setattr(measuring, "checkout", lambda: None)
    result = RUN.invoke(app, ["report"])
    assert result.exit_code == 2 and "records lie in a checkout" in result.output


def test_report_of_what_is_no_record_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "odd.json").write_text("[]")
    result = RUN.invoke(app, ["report", str(tmp_path / "odd.json"), "--out", str(tmp_path / "docs")])
    assert result.exit_code == 1
    assert result.output == "capsfast report: odd.json is not a capsfast measurement of format 1\n"
    result = RUN.invoke(app, ["report", str(tmp_path / "none.json"), "--out", str(tmp_path / "docs")])
    assert result.exit_code == 1 and "none.json" in result.output and result.output.count("\n") == 1
    assert not (tmp_path / "docs").exists()
