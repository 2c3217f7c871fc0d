"""The examples, run as a user runs them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import capsfast

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FASTEST = next(name for name, status in capsfast.backends().items() if status.available)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "digits.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_digits_compares_the_backends_and_writes_pictures(tmp_path: Path) -> None:
    done = run("--epochs", "1", "--out", str(tmp_path / "new" / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in (tmp_path / "new" / "out").iterdir()} == {"curve.png", "reconstructions.png"}
    compared = "the same curve" if FASTEST != "reference" else "Only the reference backend ran"
    assert compared in " ".join(done.stdout.split())


@pytest.mark.slow
def test_digits_reaches_97_percent() -> None:
    pytest.importorskip("sklearn")
    spec = importlib.util.spec_from_file_location("digits", EXAMPLES / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
    assert digits.train(FASTEST, 8, 0, digits.load()).accuracy[-1] >= 0.97


def test_digits_says_which_backends_there_are() -> None:
    done = run("--backend", "nothing")
    assert done.returncode == 2
    assert "reference" in done.stderr
