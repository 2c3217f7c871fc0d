"""pytest benchmarks: one group for a case, a reason for every skipped contender, no wrong result timed."""

import json
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
    """A copy of this checkout without a build."""
    root = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "results")
    for folder in ("capsfast", "benchmarks"):
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    for file in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / file, root / file)
    return root


def run(checkout: Path, *words: str, installed: Path) -> subprocess.CompletedProcess[str]:
    """``python -m ...`` as a user runs it: in the checkout, which comes before an installed package."""
    # A real installation may have an extension too. -I would hide the folder that stands for it.
    environment = {**os.environ, "PYTHONPATH": str(installed), "TRITON_INTERPRET": "0"}
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=checkout, env=environment, capture_output=True, text=True, timeout=300
    )


def test_contenders_of_a_case_are_one_group_and_missing_backends_are_named(checkout: Path, tmp_path: Path) -> None:
    words = ["pytest", "benchmarks", "--sweep", "smoke", "-k", "B4-I64-J10-fwd and not compiled", "-rs"]
    answer = run(checkout, *words, "--benchmark-json", "found.json", "-p", "no:cacheprovider", installed=tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"from {checkout / 'capsfast'}" in answer.stdout
    assert "cpp: there is no extension" in answer.stdout and "1 passed, 1 skipped" in answer.stdout
    (found,) = json.loads((checkout / "found.json").read_text())["benchmarks"]
    assert (found["group"], found["name"]) == ("B4-I64-J10-fwd", "test_routing[B4-I64-J10-fwd-eager]")
    assert found["extra_info"]["I"] == 64 and found["extra_info"]["errors"]["v"] < 1e-5


def test_a_wrong_result_is_not_timed(checkout: Path, tmp_path: Path) -> None:
    (checkout / "sitecustomize.py").write_text(
        "from capsfast.bench import contenders\n"
        "right = contenders.einsum\n"
        "wrong = lambda case: lambda *inputs: 1.01 * right(case)(*inputs)\n"
        "one = [contenders.Contender('eager einsum', wrong, lambda case: 0)]\n"
        "contenders.contenders = lambda: one\n"
    )
    answer = run(checkout, "pytest", "benchmarks", "--sweep", "smoke", "-k", "B4-I64-J10-fwd", installed=checkout)
    assert answer.returncode == 1 and "v has relative error" in answer.stdout, answer.stdout


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
