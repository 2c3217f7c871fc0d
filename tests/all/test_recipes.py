"""The recipes of examples/recipes run, stay short, and their table holds recorded numbers."""

import ast
import json
import re
import statistics
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from ..support.commands import is_png
from ..test_docs import ROOT, table_rows
from .test_examples import run

RECIPES = ROOT / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.py") if path.stem not in ("recipe", "__main__"))
RECORD = json.loads((ROOT / "docs" / "records" / "recipes.json").read_text(encoding="utf-8"))
OWN_LINES = 40


@pytest.fixture(autouse=True)
def _beside_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("typer", "sklearn", "lightning", "torchvision"):
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


# Steps, and what these steps reach with seed 0: more than guesses do, and where it can be told, than before training.
# The mean image explains 0.48 of the hidden pixels of "masked"; the Chamfer distance of "points" begins at 1.5.
BETTER: dict[str, tuple[int, Callable[[dict[str, float]], bool]]] = {
    "adversarial": (
        60,
        lambda n: n["capsules, adversarial training, attacked"] > n["capsules, clean training, attacked"] + 0.05,
    ),
    "anomaly": (150, lambda n: n["capsules"] > 0.7),
    "backbone": (60, lambda n: n["capsules"] > 0.4),
    "contrastive": (40, lambda n: n["capsules"] > n["capsules before pretraining"] + 0.02),
    "detection": (220, lambda n: n["capsules"] > 0.06),
    "discriminator": (300, lambda n: n["capsules"] > 0.15),
    "distillation": (100, lambda n: n["teacher"] > 0.7),
    "few_shot": (60, lambda n: n["capsules"] > 0.5),
    "graphs": (100, lambda n: n["capsules"] > 0.6),
    "hierarchy": (30, lambda n: n["capsules, digits"] > 0.5 and n["capsules, groups"] > 0.6),
    "int8": (100, lambda n: n["accuracy int8"] > 0.7 and n["largest error of a length"] < 0.05),
    "masked": (300, lambda n: n["capsules, hidden pixels"] > 0.55),
    "points": (60, lambda n: n["capsules"] > 0.5 and n["capsules, Chamfer distance"] < 0.8),
    "pruning": (60, lambda n: n["capsules without 50%, tuned"] > 0.5),
    "series": (60, lambda n: n["capsules"] > 0.3),
    "text": (70, lambda n: n["capsules"] > 0.35),
    "transforming": (60, lambda n: n["capsules, shift"] > 0.4),
    "uncertainty": (80, lambda n: n["capsules, mean"] > 0.68 and n["capsules, errors"] < 0.4),
    "vit": (40, lambda n: n["capsules"] > 0.4),
}


def test_every_recipe_is_listed_and_short() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", (RECIPES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == NAMES == sorted(BETTER)
    assert {name: lines for name in NAMES if (lines := own_lines(RECIPES / f"{name}.py")) > OWN_LINES} == {}


@pytest.mark.parametrize("name", NAMES)
def test_is_better_than_guessing(name: str) -> None:
    steps, learned = BETTER[name]
    numbers = import_module("recipe").run(import_module(name).main, steps=steps)
    assert learned(numbers), numbers
    assert set(RECORD[name]["numbers"]) == set(numbers)


def test_runs_as_a_command(tmp_path: Path) -> None:
    done = run("recipes/anomaly", "--steps", "20", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^plain: 0\.\d+$", done.stdout, re.MULTILINE)
    assert is_png(tmp_path / "anomaly.png")


def test_the_table_holds_what_was_recorded() -> None:
    for name, _, said in table_rows(RECIPES / "README.md", "| recipe |"):
        numbers = RECORD[name.strip("`")]["numbers"]
        assert said == "; ".join(f"{what} {statistics.mean(values):.4g}" for what, values in numbers.items())
