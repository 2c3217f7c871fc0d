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

    def __call__(self, case: Case, able: list[contenders.Contender], device: torch.device, **how: Any) -> list[Row]:
        self.before(len(self.calls))
        self.calls.append((case, how))
        seconds = dataclasses.asdict(Timing.of([1e-3]))
        return [Row(case, each.name, "ok", "", seconds, {"v": 1e-7}) for each in able]

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
    able = [each for each in contenders.contenders() if each.name in (CPP, EAGER)]
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
    result = ran("bench", "--sweep", "roofline", "--no-baselines")
    shown = [line.split()[:3] for line in result.output.splitlines()]
    assert shown.count(["capsfast", "cpp", "1.00"]) == 14 and EAGER not in result.output


def test_a_place_that_cannot_be_written_to_is_found_before_measuring(quick: Measured, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x.json", tmp_path):
        result = ran("bench", "--json", path)
        assert result.exit_code == 1 and f"capsfast bench: File exists: {tmp_path}" in result.output, result.output
    assert quick.calls == [] and [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("how", ["Ctrl-C", "a full disk"])
def test_an_end_in_the_middle_keeps_what_is_finished(
    quick: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def before(n: int) -> None:
        if n == 1 and how == "Ctrl-C":
            raise KeyboardInterrupt
        if n == 1:
            monkeypatch.setattr("capsfast.storage.files.os.fsync", full)

    quick.before = before
    path = tmp_path / "record.json"
    result = ran("bench", "--json", path)
    code, said = {
        "Ctrl-C": (130, f"interrupted; {path} holds 1 of 2 cases"),
        "a full disk": (1, f"No space left on device: {path}"),
    }[how]
    assert result.exit_code == code and result.output.splitlines()[-1].startswith(f"capsfast bench: {said}")
    assert {row.case for row in record.load(path)[1]} == {SMALL[0]}
    assert [each.name for each in tmp_path.iterdir()] == ["record.json"]


@pytest.fixture
def on_gpu(quick: Measured, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command with a GPU whose contenders take microseconds; "lost" in the list loses the GPU after a case."""
    surroundings, events = record.environment(torch.device("cpu")), list[str]()
    ours = contenders.Contender("capsfast triton", lambda case: torch.neg, lambda case: 0)

    def measure(case: Case, able: list[contenders.Contender], device: torch.device, **how: Any) -> list[Row]:
        if "raises" in events:
            raise RuntimeError("capsfast triton: CUDA error: an illegal memory access was encountered")
        rows = quick(case, able, device, **how)
        return [dataclasses.replace(row, host=2e-4, graph=g) for row, g in zip(rows, (9.04e-5, 4e-4), strict=True)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "environment", lambda device: surroundings)
    monkeypatch.setattr(measuring, "contenders", lambda: [ours, contenders.contender(EAGER)])
    monkeypatch.setattr(measuring, "missing", lambda device: {})
    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(measuring, "lost", lambda device: "lost" in events)
    return events


def test_on_a_gpu_the_times_are_graph_eager_and_host(quick: Measured, on_gpu: list[str]) -> None:
    result = ran("bench", "--device", "cuda")
    assert result.exit_code == 0 and {how["seconds"] for _, how in quick.calls} == {0.0}
    lines = [line.split() for line in result.output.splitlines()]
    assert ["contender", "graph", "µs", "eager", "µs", "host", "µs", "over", "capsfast", "error"] in lines
    assert ["capsfast", "triton", "90.4", "1000", "200", "1.0x", "1e-07"] in lines
    assert ["eager", "einsum", "400", "1000", "200", "4.4x", "1e-07"] in lines


def test_the_loss_of_a_gpu_ends_the_command_and_keeps_the_record(on_gpu: list[str], tmp_path: Path) -> None:
    on_gpu += ["raises", "lost"]
    path = tmp_path / "record.json"
    result = ran("bench", "--device", "cuda", "--json", path)
    last = f"capsfast bench: the GPU refuses every call after {SMALL[0].name}; {path} holds 1 of 2 cases"
    assert result.exit_code == 1 and result.output.splitlines()[-1] == last
    assert {row.reason for row in record.load(path)[1]} == {
        "RuntimeError: capsfast triton: CUDA error: an illegal memory access was encountered"
    }


def test_report_of_records(quick: Measured, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "machine.json"
    assert ran("report").exit_code == 2 and ran("bench", "--json", path).exit_code == 0
    result = ran("report", path)
    assert result.exit_code == 0 and result.output.startswith("# Measurements")
    assert "| B=2 I=8 J=3 D=4 K=2 r=2 | 1.00 |" in result.output
    assert {each for each in tmp_path.rglob("*") if each.is_file()} == {path}
    result = ran("report", path, "--out", tmp_path / "there")
    assert result.exit_code == 0 and "| B=2 I=8 J=3 D=4 K=2 r=2 | 1.00 |" in (
        tmp_path / "there" / "benchmarks.md"
    ).read_text(encoding="utf-8")
    (tmp_path / "odd.json").write_text("[]")
    for name in ("odd.json", "none.json"):
        result = ran("report", tmp_path / name, "--out", tmp_path / "docs")
        assert result.exit_code == 1 and name in result.output and result.output.count("\n") == 1
    assert not (tmp_path / "docs").exists()
