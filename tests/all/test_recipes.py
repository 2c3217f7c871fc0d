"""The recipes of examples/recipes learn something in few steps, stay short, and their table holds recorded numbers."""

import ast
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..test_docs import ROOT, table_rows

RECIPES = ROOT / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.py") if path.stem not in ("recipe", "__main__"))
RECORD = json.loads((ROOT / "docs" / "records" / "recipes.json").read_text(encoding="utf-8"))
OWN_LINES = 40


def imported(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # recipes import recipe.py by this name
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def _needs() -> None:
    for needed in ("typer", "sklearn", "matplotlib"):
        pytest.importorskip(needed)


def own_lines(path: Path) -> int:
    """Lines of code that are no import, no blank line and no docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    taken = set()
    for node in ast.walk(tree):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if text or isinstance(node, ast.Import | ast.ImportFrom):
            taken |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = path.read_text(encoding="utf-8").splitlines()
    return sum(bool(line.strip()) and number not in taken for number, line in enumerate(lines, 1))


# Steps, and a bound below which no number of this name may lie: what guessing gives, and a margin.
LEARNS = {
    "anomaly": (150, "capsules", 0.6),
    "distillation": (100, "teacher", 0.7),
    "few_shot": (60, "capsules", 0.5),
    "series": (60, "capsules", 0.3),
}


def test_every_recipe_is_listed_and_short() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", (RECIPES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == NAMES == sorted(LEARNS)
    assert {name: lines for name in NAMES if (lines := own_lines(RECIPES / f"{name}.py")) > OWN_LINES} == {}


@pytest.mark.parametrize("name", NAMES)
def test_learns_in_few_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "recipe", imported("recipe"))
    steps, what, bound = LEARNS[name]
    numbers = sys.modules["recipe"].run(imported(name).main, tmp_path, steps=steps)
    assert numbers[what] > bound, numbers
    assert set(RECORD[name]["numbers"]) == set(numbers)


def test_runs_as_a_command(tmp_path: Path) -> None:
    command = [sys.executable, str(RECIPES / "distillation.py"), "--steps", "20", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^teacher: 0\.\d+$", done.stdout, re.MULTILINE)


def test_the_table_holds_what_was_recorded() -> None:
    for name, _, said in table_rows(RECIPES / "README.md", "| recipe |"):
        numbers = RECORD[name.strip("`")]["numbers"]
        assert said == "; ".join(f"{what} {statistics.mean(values):.4g}" for what, values in numbers.items())
