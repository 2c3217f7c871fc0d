"""Imports only point downwards, in the order that docs/contributing.md gives."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "capsfast"
PAGE = ROOT / "docs" / "contributing.md"


def imported(file: Path) -> set[str]:
    """The parts of the package, such as "nn" and "checks", that a file imports, also inside of functions."""
    here = file.relative_to(PACKAGE).parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            names = [*here[: len(here) - node.level + 1], *(node.module or "").split(".")]
            first = next(filter(None, names), "")
            found |= {first} if first else {alias.name for alias in node.names}
    return found


def graph() -> dict[str, set[str]]:
    parts = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    parts -= {"__init__", "__main__", "__pycache__"}
    found: dict[str, set[str]] = {part: set() for part in parts}
    for file in PACKAGE.rglob("*.py"):
        part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part in parts:
            found[part] |= imported(file) & parts - {part}
    return found


def test_imports_make_no_circle() -> None:
    TopologicalSorter(graph()).prepare()


def test_imports_follow_the_order_of_the_page() -> None:
    order = re.findall(r"^capsfast/(\w+)(?:/|\.py) ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    below = graph()
    assert len(order) >= 15 and set(order) <= below.keys()
    wrong = [f"{low} imports {high}" for n, high in enumerate(order) for low in order[n:] if high in below[low]]
    assert wrong == []


def test_paths_of_the_page_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:capsfast|csrc|tests|benchmarks|docs|examples)/[\w/.*]*)`", text))
    assert len(paths) >= 20
    assert [path for path in sorted(paths) if not list(ROOT.glob(path))] == []
