"""pytest benchmarks: one group for a case, a reason for every skipped contender, no wrong result timed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pytest_benchmark")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this checkout without a build."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "results")
    for folder in ("capsfast", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "benchmarks", "--sweep", "smoke", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "TRITON_INTERPRET": "0"}
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)


def test_contenders_of_a_case_are_one_group_and_missing_backends_are_named(checkout: Path) -> None:
    words = ["-k", "B4-I64-J10-fwd and not compiled", "-rs", "--benchmark-json", "found.json"]
    answer = run(checkout, *words)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"from {checkout / 'capsfast'}" in answer.stdout
    assert "cpp: there is no extension" in answer.stdout and "1 passed, 1 skipped" in answer.stdout
    (found,) = json.loads((checkout / "found.json").read_text())["benchmarks"]
    assert (found["group"], found["name"]) == ("B4-I64-J10-fwd", "test_routing[B4-I64-J10-fwd-eager]")
    assert found["extra_info"]["I"] == 64 and found["extra_info"]["errors"]["v"] < 1e-5
