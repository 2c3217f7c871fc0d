"""The recipes of examples/recipes run, stay short, and their table holds recorded numbers."""

import ast
import json
import re
import statistics
from importlib import import_module
from pathlib import Path

import pytest

from ..test_docs import ROOT, table_rows
from .test_examples import run

RECIPES = ROOT / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.py") if path.stem not in ("recipe", "__main__"))
RECORD = json.loads((ROOT / "docs" / "records" / "recipes.json").read_text(encoding="utf-8"))
OWN_LINES = 40


@pytest.fixture(autouse=True)
def _beside_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("typer", "sklearn"):
        pytest.importorskip(needed)
    monkeypatch.syspath_prepend(RECIPES)


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


# Steps, a number, and a bound between what guessing gives and what these steps give.
BETTER = {
    "anomaly": (150, "capsules", 0.6),
    "distillation": (100, "teacher", 0.7),
    "few_shot": (60, "capsules", 0.5),
    "series": (60, "capsules", 0.3),
}


def test_every_recipe_is_listed_and_short() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", (RECIPES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == NAMES == sorted(BETTER)
    assert {name: lines for name in NAMES if (lines := own_lines(RECIPES / f"{name}.py")) > OWN_LINES} == {}


@pytest.mark.parametrize("name", NAMES)
def test_is_better_than_guessing(name: str) -> None:
    steps, what, bound = BETTER[name]
    numbers = import_module("recipe").run(import_module(name).main, steps=steps)
    assert numbers[what] > bound, numbers
    assert set(RECORD[name]["numbers"]) == set(numbers)


def test_runs_as_a_command() -> None:
    done = run("recipes/distillation", "--steps", "20")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^teacher: 0\.\d+$", done.stdout, re.MULTILINE)


def test_the_table_holds_what_was_recorded() -> None:
    for name, _, said in table_rows(RECIPES / "README.md", "| recipe |"):
        numbers = RECORD[name.strip("`")]["numbers"]
        assert said == "; ".join(f"{what} {statistics.mean(values):.4g}" for what, values in numbers.items())
