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
from capsfast.bench.cases import Case, sweep
from capsfast.bench.contenders import CPP, EAGER
from capsfast.bench.measure import Row
from capsfast.bench.results import RATE
from capsfast.bench.timing import Timing
from capsfast.cli import measuring
from capsfast.cli.app import app
from capsfast.nn import ROUTINGS

SMALL = [Case(B=2, I=8, J=3, D=4, K=2, r=2), Case(B=2, I=8, J=3, D=4, K=2, r=2, direction="forward+backward")]
OURS = contenders.Contender(CPP, lambda case: torch.neg, lambda case: 0, ("cpu",))


class Measured:
    """Replaces measure(): returns rows of a millisecond at once and records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Case, dict[str, Any]]] = []
        self.before: Callable[[int], None] = lambda n: None
        self.more: dict[str, float] = {}

    def __call__(self, case: Case, able: list[contenders.Contender], device: torch.device, **how: Any) -> list[Row]:
        self.before(len(self.calls))
        self.calls.append((case, how))
        seconds = dataclasses.asdict(Timing.of([1e-3]))
        return [Row(case, contender.name, "ok", "", seconds, {"v": 1e-7}, **self.more) for contender in able]

    def taken(self) -> list[Case]:
        """The cases since the last question."""
        found, self.calls = [case for case, _ in self.calls], []
        return found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Two small cases in every sweep, two contenders, rows at once."""
    measured = Measured()
    monkeypatch.setattr(measuring, "sweep", lambda name, op: SMALL)
    monkeypatch.setattr(measuring, "contenders", lambda: [OURS, contenders.contender(EAGER)])
    monkeypatch.setattr(measuring, "multiply_adds", lambda: {RATE: 4e11})
    monkeypatch.setattr(measuring, "measure", measured)
    return measured


def ran(*words: str | Path) -> Any:
    return CliRunner().invoke(app, [*map(str, words)])


def test_bench_prints_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiling or interpreting kernels would take seconds for each case.
    able = [contender for contender in contenders.contenders() if contender.name in (CPP, EAGER)]
    monkeypatch.setattr(measuring, "contenders", lambda: able)
    monkeypatch.setattr(measuring, "sweep", lambda name, op: SMALL)
    json = tmp_path / "record.json"
    result = ran("bench", "--seconds", "0", "--no-memory", "--json", json)
    assert result.exit_code == 0 and "eager einsum" in result.output, result.output
    _, rows = record.load(json)
    assert {row.status for row in rows} == {"ok"} and [row.case for row in rows] == [
        case for case in SMALL for _ in able
    ]


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch, quick: Measured) -> None:
    monkeypatch.setattr(measuring, "sweep", sweep)
    assert ran("bench", "--sweep", "smoke", "--op", "both", "--seconds", "0.5").exit_code == 0
    assert all((how["seconds"], how["with_memory"]) == (0.5, True) for _, how in quick.calls)
    assert quick.taken() == [*sweep("smoke"), *sweep("smoke", "route_votes")]
    assert ran("bench", "--op", "dynamic").exit_code == 0
    assert quick.taken() == sweep("routings", "dynamic")
    assert ran("bench", "--op", "routings", "--sweep", "smoke").exit_code == 0
    assert list(dict.fromkeys(case.routing for case in quick.taken())) == list(ROUTINGS)
    assert ran("bench", "--op", "layers").exit_code == 0
    assert quick.taken() == sweep("images", "layers")
    assert ran("bench", "--op", "ConvCaps2d", "--sweep", "smoke").exit_code == 0
    assert quick.taken() == sweep("smoke", "ConvCaps2d")
    result = ran("bench", "--sweep", "roofline", "--no-baselines")
    shown = [line.split()[:3] for line in result.output.splitlines()]
    assert shown.count(["capsfast", "cpp", "1.00"]) == 14 and EAGER not in result.output


def ends(result: Any, code: int, line: str) -> None:
    assert (result.exit_code, result.output.splitlines()[-1]) == (code, f"capsfast bench: {line}"), result.output


def test_a_place_that_cannot_be_written_to_is_found_before_measuring(quick: Measured, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x.json", tmp_path):
        assert f"capsfast bench: File exists: {tmp_path}" in ran("bench", "--json", path).output
    assert quick.calls == [] and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_end_in_the_middle_keeps_what_is_finished(
    quick: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, a full disk, and the loss of a GPU, in the second case."""

    def ctrl_c(n: int) -> None:
        if n == 1:
            raise KeyboardInterrupt

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path, quick.before = tmp_path / "record.json", ctrl_c
    ends(ran("bench", "--json", path), 130, f"interrupted; {path} holds 1 of 2 cases")
    assert {row.case for row in record.load(path)[1]} == {SMALL[0]}
    quick.taken()
    quick.before = lambda n: monkeypatch.setattr("capsfast.storage.files.os.fsync", full) if n == 1 else None
    assert f"No space left on device: {path}" in ran("bench", "--json", path).output
    monkeypatch.undo()
    assert {row.case for row in record.load(path)[1]} == {SMALL[0]}
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_on_a_gpu(quick: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Times in a graph, of eager calls and of the host; a GPU that is lost ends the command, which keeps the record."""

    def lost(n: int) -> None:
        raise RuntimeError("capsfast triton: CUDA error: an illegal memory access was encountered")

    surroundings = record.environment(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "environment", lambda device: surroundings)
    monkeypatch.setattr(measuring, "missing", lambda device: {})
    monkeypatch.setattr(measuring, "lost", lambda device: quick.before is lost)
    monkeypatch.setattr(contenders.Contender, "serves", lambda self, device: True)
    quick.more = {"host": 2e-4, "graph": 9.04e-5}
    lines = [line.split() for line in ran("bench", "--device", "cuda").output.splitlines()]
    assert ["contender", "graph", "µs", "eager", "µs", "host", "µs", "over", "capsfast", "error"] in lines
    assert ["capsfast", "cpp", "90.4", "1000", "200", "1.0x", "1e-07"] in lines
    quick.before, path = lost, tmp_path / "record.json"
    result = ran("bench", "--device", "cuda", "--json", path)
    ends(result, 1, f"the GPU refuses every call after {SMALL[0].name}; {path} holds 1 of 2 cases")
    assert {row.reason for row in record.load(path)[1]} == {
        "RuntimeError: capsfast triton: CUDA error: an illegal memory access was encountered"
    }


def test_report_of_records(quick: Measured, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, line = tmp_path / "machine.json", "| B=2 I=8 J=3 D=4 K=2 r=2 | 1.00 |"
    assert ran("report").exit_code == 2 and ran("bench", "--json", path).exit_code == 0
    assert line in ran("report", path).output and [*tmp_path.iterdir()] == [path]
    assert ran("report", path, "--out", tmp_path / "there").exit_code == 0
    assert line in (tmp_path / "there" / "benchmarks.md").read_text(encoding="utf-8")
    (tmp_path / "odd.json").write_text("[]")
    for name in ("odd.json", "none.json"):
        result = ran("report", tmp_path / name, "--out", tmp_path / "docs")
        assert result.exit_code == 1 and name in result.output and result.output.count("\n") == 1
    assert not (tmp_path / "docs").exists()
