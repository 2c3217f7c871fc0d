"""``python -m capsfast bench`` and ``report``: what they print and keep, and how they end that can't go on."""

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import time
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
from capsfast.bench.executed import CPP
from capsfast.bench.measure import Row
from capsfast.bench.roofline import RATE
from capsfast.bench.timing import Timing
from capsfast.cli import measuring
from capsfast.cli.app import app
from capsfast.nn import ROUTINGS

RUN = CliRunner()
LIMITS = {"copy_bytes_per_second": 1e10, "matmul_flops_per_second": 1e11, RATE: 4e11}
SMALL = [Case(B=2, I=8, J=3, D=4, K=2, r=2), Case(B=2, I=8, J=3, D=4, K=2, r=2, direction="forward+backward")]


class Measured:
    """In the place of measure(): rows at once; the calls that were made."""

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
    monkeypatch.setattr(measuring, "limits", lambda device: dict(LIMITS))
    monkeypatch.setattr(measuring, "why_not_this_one", lambda command: "")
    monkeypatch.setattr(measuring, "measure", measured)
    return measured


def bench(*words: str | Path) -> Any:
    return RUN.invoke(app, ["bench", *map(str, words)])


@pytest.mark.parametrize("op", OPS)
def test_bench_prints_and_writes(tmp_path: Path, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    # A compiler or an interpreter of kernels would take seconds for each case.
    able = [each for each in contenders.contenders() if each.name in (CPP, EAGER, contenders.BROADCAST)]
    cases = [dataclasses.replace(case, op=op, K=case.K if op == OPS[0] else 0) for case in SMALL]
    monkeypatch.setattr(measuring, "contenders", lambda op: able)
    monkeypatch.setattr(measuring, "sweep", lambda name, op, **more: cases)
    monkeypatch.setattr(measuring, "limits", lambda device: dict(LIMITS))
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


@pytest.mark.parametrize("words", [["--record", "--json", "x.json"], ["--resume"]], ids=str)
def test_options_that_contradict_each_other(words: list[str], quick: Measured) -> None:
    result = bench(*words)
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
    asked = []
    monkeypatch.setattr(measuring, "contenders", lambda op: asked.append(op) or [ours])
    result = bench("--routing", "dynamic", "--record")
    assert result.exit_code == 0, result.output
    assert quick.cases == sweep("routings", ROUTING, routing="dynamic") and set(asked) == {ROUTING}
    assert all(how["with_memory"] for _, how in quick.calls)
    quick.calls.clear()
    result = bench("--routing", "all", "--sweep", "smoke", "--record")
    assert result.exit_code == 0, result.output
    assert list(dict.fromkeys(case.routing for case in quick.cases)) == list(ROUTINGS)
    stems = sorted(each.stem for each in (tmp_path / "benchmarks" / "results").iterdir())
    assert [stem.partition("threads-")[2] for stem in stems] == ["routing-dynamic", "routings"]
    assert all(bench("--routing", *words).exit_code == 2 for words in (["magic"], ["dynamic", "--op", "route_votes"]))


def test_memory_where_the_report_shows_it(monkeypatch: pytest.MonkeyPatch, quick: Measured) -> None:
    monkeypatch.setattr(measuring, "sweep", sweep)

    def remembered(*words: str) -> list[bool]:
        quick.calls.clear()
        assert bench(*words).exit_code == 0
        return [how["with_memory"] for _, how in quick.calls]

    assert remembered("--op", "both") == [False, False, False, True] * 2
    assert all(remembered("--sweep", "batch"))
    assert not any(remembered("--sweep", "batch", "--no-memory"))
    assert remembered("--sweep", "dtype") == [True, True, False, False]


def test_without_baselines_capsfast_alone_is_measured(quick: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = contenders.Contender(CPP, lambda case: torch.neg, lambda case: 0, ("cpu",))
    monkeypatch.setattr(measuring, "contenders", lambda op: [ours, contenders.contender(EAGER)])
    assert bench().exit_code == 0
    assert quick.names == [CPP, EAGER]
    assert bench("--no-baselines").exit_code == 0
    assert quick.names == [CPP]
    monkeypatch.setattr(measuring, "contenders", lambda op: [contenders.contender(EAGER)])
    assert bench("--no-baselines").exit_code == 2


def test_the_roofline_sweep_ends_with_its_table(monkeypatch: pytest.MonkeyPatch, quick: Measured) -> None:
    monkeypatch.setattr(measuring, "sweep", sweep)
    ours = contenders.Contender(CPP, lambda case: torch.neg, lambda case: 0, ("cpu",))
    monkeypatch.setattr(measuring, "contenders", lambda op: [ours])
    result = bench("--sweep", "roofline")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.strip().startswith("64, 256, 320, 16, 8, 3")]
    assert [line.split()[6:] for line in lines] == [
        ["forward", "1.00", "0.10", "100", "25", "%"],
        ["forward+backward", "1.00", "0.10", "100", "25", "%"],
    ]
    assert result.output.count("capsfast cpp 1.00 ms (25 % of the multiply-adds)") == 14


def test_a_log_file_gets_a_line_when_a_case_begins_and_its_table_when_it_ends(quick: Measured) -> None:
    output = bench().output
    begun = [output.index(f"[0:00] {n} of 2 done; timing: {case.name}") for n, case in enumerate(SMALL)]
    assert begun[0] < output.index("eager einsum") < begun[1] < output.rindex("eager einsum")


def test_missing_fused_backends_are_named(monkeypatch: pytest.MonkeyPatch, quick: Measured, tmp_path: Path) -> None:
    monkeypatch.setattr(measuring, "missing", lambda device: {"cpp": "there is no [extension]"})
    result = bench()
    assert result.exit_code == 0
    assert "capsfast cpp is not measured: there is no [extension]" in result.output
    # A record without the package it is about would replace one that has it.
    monkeypatch.setattr(measuring, "contenders", lambda op: [contenders.contender(EAGER)])
    monkeypatch.setattr(measuring, "_results", lambda: tmp_path)
    result = bench("--record")
    assert result.exit_code == 2 and "--record needs a fused backend for cpu: there is no [ext" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_hidden_installation_is_an_error(monkeypatch: pytest.MonkeyPatch, quick: Measured) -> None:
    monkeypatch.setattr(measuring, "why_not_this_one", lambda command: f"{command}: imported is another")
    result = bench()
    assert (result.exit_code, quick.calls) == (2, [])
    assert result.output == "capsfast bench: imported is another\n"


def test_record_goes_into_the_checkout(monkeypatch: pytest.MonkeyPatch, quick: Measured, tmp_path: Path) -> None:
    ours = contenders.Contender(CPP, lambda case: torch.neg, lambda case: 0, ("cpu",))
    monkeypatch.setattr(measuring, "contenders", lambda op: [ours])
    monkeypatch.setattr(measuring, "checkout", lambda: tmp_path)
    result = bench("--record")
    assert result.exit_code == 0, result.output
    (path,) = (tmp_path / "benchmarks" / "results").iterdir()
    surroundings, rows = record.load(path)
    assert path.stem == record.machine_name(surroundings["machine"])
    assert [row.case for row in rows] == SMALL
    # A record is measured for longer than a first look.
    assert (quick.calls[0][1]["seconds"], quick.calls[0][1]["least_rounds"]) == (2.0, 5)
    monkeypatch.setattr(measuring, "checkout", lambda: None)
    result = bench("--record")
    assert result.exit_code == 2 and "installed copy" in result.output


def test_interruption_keeps_what_is_finished_and_resume_goes_on(quick: Measured, tmp_path: Path) -> None:
    path = tmp_path / "record.json"

    def interrupt(n: int) -> None:
        if n == 1:
            raise KeyboardInterrupt

    quick.before = interrupt
    result = bench("--json", path)
    assert result.exit_code == 130
    assert result.output.splitlines()[-1] == (
        f"capsfast bench: interrupted; {path} holds 1 of 2 cases; the same command with --resume goes on"
    )
    assert {row.case for row in record.load(path)[1]} == {SMALL[0]}

    quick.before = lambda n: None
    quick.calls.clear()
    assert bench("--json", path, "--resume").exit_code == 0
    assert quick.cases == SMALL[1:]
    assert {row.case for row in record.load(path)[1]} == set(SMALL)


def test_interruption_before_the_first_case_or_without_a_record(quick: Measured, tmp_path: Path) -> None:
    def interrupt(n: int) -> None:
        raise KeyboardInterrupt

    quick.before = interrupt
    path = tmp_path / "record.json"
    result = bench("--json", path)
    assert result.exit_code == 130 and f"no case was finished, {path} is as it was" in result.output
    assert list(tmp_path.iterdir()) == []
    result = bench()
    assert result.exit_code == 130 and "nothing is kept; --record or --json PATH" in result.output


def test_resume_refuses_another_machine_and_what_is_no_record(quick: Measured, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    surroundings = record.environment(torch.device("cpu"))
    record.save(path, {**surroundings, "machine": {**surroundings["machine"], "threads": 99}, "limits": LIMITS}, [])
    content = path.read_text()
    result = bench("--json", path, "--resume")
    assert result.exit_code == 2 and "machine threads was 99, is " in result.output
    assert path.read_text() == content
    path.write_text("half a rec")
    result = bench("--json", path, "--resume")
    assert result.exit_code == 1 and "record.json is not a capsfast measurement" in result.output
    assert quick.calls == []


def test_a_place_that_cannot_be_written_to_is_found_before_measuring(quick: Measured, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for option, path in (("--json", tmp_path / "file" / "x.json"), ("--json", tmp_path), ("--png", Path("/dev/full"))):
        result = bench(option, path)
        assert result.exit_code == 1, result.output
        assert f"capsfast bench: {path} can't be written: " in result.output and "nothing was meas" in result.output
    assert quick.calls == []
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_is_full_at_the_beginning(quick: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("capsfast.files.os.fsync", full)
    result = bench("--json", tmp_path / "record.json")
    assert result.exit_code == 1 and result.output.endswith("No space left on device; nothing was measured\n")
    assert quick.calls == [] and list(tmp_path.iterdir()) == []


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


SLOW = f"""
from capsfast.bench import contenders
from capsfast.cli import main, measuring
measuring.limits = lambda device: {LIMITS!r}
measuring.contenders = lambda op: [contenders.contender(contenders.EAGER)]
measuring.why_not_this_one = lambda command: ""
measuring._remembered = lambda name, cases: {{cases[1]}}
main()
"""


def _children(of: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name_and_rest = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(name_and_rest[1]) == of and name_and_rest[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_no_process_is_left_and_the_record_is_whole(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "record.json"
    words = ["bench", "--sweep", "smoke", "--seconds", "0", "--rounds", "1", "--json", str(path)]
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        # A second case has begun: the record holds the first, and peak memory is measured by a process.
        assert any("1 of 4 done" in line for line in child.stdout)
        end = time.monotonic() + 60
        while not (measuring_memory := _children(child.pid)):
            assert child.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        os.kill(child.pid, number)
        _, errors = child.communicate(timeout=60)
    assert len(record.load(path)[1]) == 1
    if number == signal.SIGINT:
        assert child.returncode == 130
        assert errors == (
            f"capsfast bench: interrupted; {path} holds 1 of 4 cases; the same command with --resume goes on\n"
        )
    end = time.monotonic() + 30
    while any(Path(f"/proc/{each}").exists() for each in measuring_memory):
        assert time.monotonic() < end, "the process that measures memory goes on"
        time.sleep(0.05)


def test_report_of_the_checkout_and_of_named_records(
    quick: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    results = tmp_path / "benchmarks" / "results"
    monkeypatch.setattr(measuring, "checkout", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    result = RUN.invoke(app, ["report"])
    assert result.exit_code == 1 and "bench --record makes one" in result.output

    assert bench("--json", results / "machine.json").exit_code == 0
    for words, page in (
        ([], "docs/benchmarks.md"),
        ([str(results / "machine.json")], "out/report/benchmarks.md"),
        ([str(results / "machine.json"), "--out", "there"], "there/benchmarks.md"),
    ):
        result = RUN.invoke(app, ["report", *words])
        assert result.exit_code == 0, result.output
        assert SMALL[1].name in (tmp_path / page).read_text()
        assert result.output.replace("\n", "").endswith(page)


def test_report_of_what_is_no_record_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "odd.json").write_text("[]")
    result = RUN.invoke(app, ["report", str(tmp_path / "odd.json"), "--out", str(tmp_path / "docs")])
    assert result.exit_code == 1
    assert result.output == "capsfast report: odd.json is not a capsfast measurement of format 1\n"
    result = RUN.invoke(app, ["report", str(tmp_path / "none.json"), "--out", str(tmp_path / "docs")])
    assert result.exit_code == 1 and "none.json" in result.output and result.output.count("\n") == 1
    assert not (tmp_path / "docs").exists()
