"""Imports only point downwards, in the order that docs/contributing.md gives."""

import ast
import re
from collections.abc import Callable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from capsfast import backends

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "capsfast"
PAGE = ROOT / "docs" / "contributing.md"


@cache
def imported(file: Path) -> set[Path]:
    """The files of the package that a file imports, also inside functions and for types only."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            module = file.parents[node.level - 1] / (node.module or "").replace(".", "/")
            for alias in node.names:
                # The name is a module, or is defined in the module before it.
                paths = (module / alias.name, module)
                files = (each for path in paths for each in (path.with_suffix(".py"), path / "__init__.py"))
                found.add(next(filter(Path.is_file, files)))
    return found


def name(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def part(file: Path) -> str:
    """The part of the package, such as "nn" or "checks"."""
    return name(file).split("/")[0].removesuffix(".py")


def graph(node: Callable[[Path], str]) -> dict[str, set[str]]:
    """The imports of each node; nodes are files (`name`) or parts of the package (`part`)."""
    found: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        found.setdefault(node(file), set()).update({node(each) for each in imported(file)} - {node(file)})
    return found


@pytest.mark.parametrize("node", [part, name])
def test_imports_make_no_circle(node: Callable[[Path], str]) -> None:
    TopologicalSorter(graph(node)).prepare()


def test_imports_follow_the_order_of_the_page() -> None:
    order = re.findall(r"^capsfast/(\w+)(?:/|\.py) ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    below = graph(part)
    assert len(order) >= 15 and set(order) <= below.keys()
    wrong = [f"{low} imports {high}" for n, high in enumerate(order) for low in order[n:] if high in below[low]]
    assert wrong == []


def picture() -> str:
    """The parts of the package in rows. A part stands one row above the highest part that it imports."""
    below = {node: lower for node, lower in graph(part).items() if not node.startswith("__")}

    @cache
    def height(node: str) -> int:
        return 1 + max(map(height, below[node]), default=0)

    rows: dict[int, list[str]] = {}
    for node in sorted(below):
        rows.setdefault(height(node), []).append(node)
    return "\n".join(f"{row:2}  {'  '.join(rows[row])}" for row in sorted(rows, reverse=True))


def test_the_page_shows_the_imports() -> None:
    assert f"```text\n{picture()}\n```" in PAGE.read_text(encoding="utf-8")


def test_layers_reach_the_ops_by_public_functions() -> None:
    """nn calls capsfast/functional.py and capsfast/passes.py, which check and choose."""
    below = graph(name)
    layers = [file for file in below if file.startswith("nn/")]
    assert len(layers) >= 30
    assert [(file, op) for file in layers for op in below[file] if op.startswith("ops/")] == []


def names_of_backends_compared(file: Path) -> list[str]:
    """The comparisons with the name of a backend. "cuda" is also the type of a device."""
    comparisons = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            sides += [entry for side in sides for entry in getattr(side, "elts", ())]
            constants = {side.value for side in sides if isinstance(side, ast.Constant)}
            names = constants & {*backends()}
            if names - {"cuda"} or (names and "backend" in ast.unparse(node)):
                comparisons.append(f"{name(file)}: {ast.unparse(node)}")
    return comparisons


def test_backends_are_compared_by_name_in_one_place() -> None:
    """Elsewhere a table that lists what a backend can answers, so that a new backend is one row."""
    # A benchmark measures backends by their names.
    files = [file for file in PACKAGE.rglob("*.py") if part(file) != "bench"]
    assert [text for file in files if part(file) != "backend" for text in names_of_backends_compared(file)] == []
    assert names_of_backends_compared(PACKAGE / "backend.py")


def test_paths_of_the_page_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:capsfast|csrc|tests|benchmarks|docs|examples)/[\w/.*]*)`", text))
    assert len(paths) >= 20
    assert [path for path in sorted(paths) if not list(ROOT.glob(path))] == []


def test_the_page_names_tests_of_every_part() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("### I changed this file")[2].partition("\n## ")[0]
    changed = "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    parts = {node for node in graph(part) if not node.startswith("_")}
    assert sorted(node for node in parts if not re.search(rf"capsfast/{node}[/.`]", changed)) == []
    folders = {folder.name for folder in (ROOT / "csrc").iterdir() if folder.is_dir()}
    assert sorted(folder for folder in folders if f"csrc/{folder}/" not in changed) == []
