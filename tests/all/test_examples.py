"""Runs the examples as a user does."""

import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import capsfast

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FASTEST = next(name for name, status in capsfast.backends().items() if status.available)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "digits.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def imported(name: str = "digits") -> Any:
    for needed in ("typer", "matplotlib", "sklearn"):
        pytest.importorskip(needed)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_digits_compares_the_backends_and_writes_pictures(tmp_path: Path) -> None:
    done = run("--epochs", "1", "--out", str(tmp_path / "new" / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in (tmp_path / "new" / "out").iterdir()} == {"curve.png", "reconstructions.png"}
    compared = "the same curve" if FASTEST != "reference" else "Only the reference backend ran"
    assert compared in " ".join(done.stdout.split())


@pytest.mark.slow
def test_digits_reaches_97_percent() -> None:
    digits = imported()
    assert digits.train(FASTEST, 8, 0, digits.load()).accuracy[-1] >= 0.97


def test_digits_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C in a step; and before training, if it cannot write."""
    digits = imported()
    from typer.testing import CliRunner

    def ctrl_c(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(digits, "training_step", ctrl_c)
    app = digits.typer.Typer()
    app.command()(digits.main)
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "out")])
    assert (result.exit_code, result.stderr) == (130, "capsfast digits: interrupted\n")
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "file" / "out")])
    assert (result.exit_code, result.stderr) == (1, f"capsfast digits: Not a directory: {tmp_path}/file/out\n")


def test_digits_says_which_backends_there_are() -> None:
    done = run("--backend", "nothing")
    assert done.returncode == 2
    assert "reference" in done.stderr


def test_interest_capsules_hit_more_often_than_the_mean(capsys: pytest.CaptureFixture[str]) -> None:
    found = imported("interests").compare(users=3000, epochs=15, dim=8, seed=0)
    assert found["interest capsules"][0] > 1.25 * found["mean pooling"][0] > 0.1
    assert "interest capsules: hit rate@10" in capsys.readouterr().out


def test_demo_ends_with_what_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers of training and record, the pictures, and commands that exist."""
    from typer.main import get_command

    from capsfast.bench import record
    from capsfast.bench.cases import CANONICAL, DIRECTIONS
    from capsfast.bench.contenders import COMPILED, EAGER, OURS
    from capsfast.bench.measure import Row
    from capsfast.bench.timing import Timing
    from capsfast.cli.app import app

    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("COLUMNS", "200")
    demo = imported("demo")
    monkeypatch.chdir(tmp_path)

    def bench(json: Path, **_: Any) -> None:
        times = {OURS + "cpp": 1e-3, COMPILED: 7e-3, EAGER: 25e-3}
        cases = [dataclasses.replace(CANONICAL, direction=each) for each in DIRECTIONS]
        seconds = {name: dataclasses.asdict(Timing.of([time])) for name, time in times.items()}
        rows = [Row(case, name, "ok", "", seconds[name], {"v": 0.0}) for case in cases for name in times]
        record.save(json, record.environment(torch.device("cpu")), rows)

    outcome = demo.digits.Outcome({"cpp": 0.9917, "reference": 0.9889}, {"cpp": 3.25, "reference": 15.5})
    monkeypatch.setattr(demo.digits, "compare", lambda *_, **__: outcome)
    monkeypatch.setattr(demo, "bench", bench)
    demo.main()
    said = capsys.readouterr().out
    for shown in (
        "cpp 99.17%; reference 98.89%",
        "cpp 3.2 s; reference 15.5 s",
        "forward 7.0x torch.compile einsum, 25.0x eager einsum; forward+backward 7.0x",
        "out/curve.png, out/reconstructions.png, out/speed.png",
    ):
        assert shown in said, said
    lines = [
        line.split("capsfast ", 1)[1].split("  ")[0].split() for line in said.splitlines() if line.startswith("  ")
    ]
    assert len(lines) >= 3
    for name, *words in lines:
        get_command(app).commands[name].make_context(name, words)  # type: ignore[attr-defined]
