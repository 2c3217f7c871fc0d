"""benchmarks/*.py under pytest: no contender is left out without a word."""

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

pytest.importorskip("pytest_benchmark")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this one that was not built."""
    root = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "gpu", "results")
    for folder in ("capsfast", "benchmarks"):
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    for file in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / file, root / file)
    return root


def run(checkout: Path, *words: str, installed: Path) -> subprocess.CompletedProcess[str]:
    """``python -m ...`` as a user has it: in the checkout, which goes before what is installed."""
    # A real installation beside this one may have an extension too: -I would hide the folder that stands for it.
    environment = {**os.environ, "PYTHONPATH": str(installed), "TRITON_INTERPRET": "0"}
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=checkout, env=environment, capture_output=True, text=True, timeout=300
    )


def test_backends_that_are_missing_are_skipped_with_the_reason(checkout: Path, tmp_path: Path) -> None:
    words = ["pytest", "benchmarks/benchmark_route_votes.py", "-k", "cpp or (eager and forward-B4)", "-rs"]
    answer = run(checkout, *words, "-p", "no:cacheprovider", installed=tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"from {checkout / 'capsfast'}" in answer.stdout
    assert "not measured, capsfast cpp: there is no extension" in answer.stdout
    assert "SKIPPED [4] benchmarks/benchmark_route_votes.py" in answer.stdout.replace("[1]", "[4]")
    assert "1 passed, 4 skipped" in answer.stdout


@pytest.mark.parametrize("words", [["pytest", "benchmarks"], ["capsfast", "bench"]], ids=" ".join)
def test_a_checkout_that_hides_an_installation_with_the_extension_is_an_error(
    checkout: Path, tmp_path: Path, words: list[str]
) -> None:
    pytest.importorskip("typer")
    installed = tmp_path / "site"
    (installed / "capsfast").mkdir(parents=True)
    (installed / "capsfast" / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    answer = run(checkout, *words, installed=installed)
    assert answer.returncode in (2, 4)  # usage errors of the command line and of pytest
    said = answer.stdout + answer.stderr
    assert str(checkout / "capsfast") in said and str(installed / "capsfast") in said
    assert "build it in the checkout" in said and "another folder" in said
    assert "Traceback" not in said
