"""Runs the examples as a user does."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import capsfast

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FASTEST = next(name for name, status in capsfast.backends().items() if status.available)


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
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
    done = run("digits", "--epochs", "1", "--out", str(tmp_path / "new" / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in (tmp_path / "new" / "out").iterdir()} == {"curve.png", "reconstructions.png"}
    compared = "the same curve" if FASTEST != "reference" else "Only the reference backend ran"
    assert compared in " ".join(done.stdout.split())


@pytest.mark.slow
def test_digits_reaches_97_percent() -> None:
    digits = imported()
    assert digits.train(FASTEST, 8, 0, digits.load()).accuracy[-1] >= 0.97


def test_digits_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C in a step; and before training, if it cannot write or does not have the backend."""
    digits = imported()
    from typer.testing import CliRunner

    def ctrl_c(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(digits, "training_step", ctrl_c)
    (tmp_path / "file").touch()
    app = digits.typer.Typer()
    app.command()(digits.main)
    for out, code, said in (("out", 130, "interrupted"), ("file/out", 1, f"Not a directory: {tmp_path}/file/out")):
        result = CliRunner().invoke(app, ["--out", str(tmp_path / out)])
        assert (result.exit_code, result.stderr) == (code, f"capsfast digits: {said}\n")
    result = CliRunner().invoke(app, ["--backend", "nothing"])
    assert result.exit_code == 2 and "reference" in result.stderr


def test_interest_capsules_hit_more_often_than_the_mean(capsys: pytest.CaptureFixture[str]) -> None:
    found = imported("interests").compare(users=3000, epochs=15, dim=8, seed=0)
    assert found["interest capsules"][0] > 1.25 * found["mean pooling"][0] > 0.1
    assert "interest capsules: hit rate@10" in capsys.readouterr().out


@pytest.mark.slow
def test_shapes_are_segmented_within_a_gigabyte(tmp_path: Path) -> None:
    """In a fresh process: peak of the resident set. A class that is said of every shape has a third of the union."""
    done = run("shapes", "--steps", "30", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "shapes.png").exists()
    scores = re.findall(r"mean IoU (\S+) before, (\S+) after 30 steps.* peak memory (\d+) MiB", done.stdout)
    assert len(scores) == 2
    assert all(float(peak) < 1024 for _, _, peak in scores)
    before, after, _ = map(float, scores[0])
    assert after > before + 0.1


@pytest.mark.slow
def test_clips_tell_the_direction_of_a_motion(tmp_path: Path) -> None:
    accuracy = imported("clips").compare(steps=300, seed=0, out=tmp_path)
    assert accuracy["capsules"] > 0.35
    assert (tmp_path / "clips.png").exists()
