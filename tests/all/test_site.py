"""The documentation site: builds with warnings as errors, has every page and public name, and needs no network."""

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("sphinx")
pytest.importorskip("myst_parser")
pytest.importorskip("furo")
pytest.importorskip("sphinx_copybutton")
pytest.importorskip("lightning")

from sphinx.util.inventory import InventoryFile

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "capsfast"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make docs` writes."""
    folder = tmp_path_factory.mktemp("site")
    command = re.search(r"^docs:.*\n\t\$\(PY\) (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command is not None
    words = [sys.executable, *command[1].replace("build/", f"{folder}/").split()]
    assert {"-W", "--keep-going"} < set(words)
    ran = subprocess.run(words, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder / "docs"


def public_things() -> dict[str, object]:
    """The public objects of the modules of the package, by full name."""
    files = [file for pattern in ("*.py", "*/__init__.py") for file in sorted(PACKAGE.glob(pattern))]
    names = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in files
        if "\n__all__ = " in file.read_text(encoding="utf-8")
    ]
    modules = [importlib.import_module(name) for name in names]
    return {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in module.__all__}


def named(name: str) -> object:
    """The object of a dotted name, or None: attributes of instances have no object."""
    try:
        return pkgutil.resolve_name(name)
    except AttributeError:
        return None


def test_every_public_name_is_in_the_api(site: Path) -> None:
    public = public_things()
    assert "capsfast.nn.RoutedCaps" in public
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    entries = {name for kind, things in inventory.items() if kind.startswith("py:") for name in things}
    # An object with several names is listed under one of them.
    things = {id(thing) for thing in map(named, entries) if thing is not None}
    missing = [
        name
        for name, thing in public.items()
        if name not in entries and id(thing) not in things and not isinstance(thing, (ModuleType, str))
    ]
    assert not missing, f"on no page of docs/api: {', '.join(missing)}"


def test_every_page_is_found_by_the_search_without_a_server(site: Path) -> None:
    script = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(script[len("Search.setIndex(") : script.rindex(")")])
    patterns = ("README.md", "CHANGELOG.md", "SECURITY.md", "docs/*.md", "docs/api/*.rst", "examples/*.ipynb")
    pages = [page for pattern in patterns for page in ROOT.glob(pattern)]
    assert {str(page.relative_to(ROOT).with_suffix("")) for page in pages} <= set(index["docnames"])
    for page in site.rglob("*.html"):
        outside = re.findall(r"""<(?:script|link|img)\b[^>]*\b(?:src|href)="(?:https?:)?//""", page.read_text())
        assert not outside, f"{page.name} loads {outside}"
    target = re.search(r'href="([^"]+)"', (site / "index.html").read_text(encoding="utf-8"))
    assert target is not None and (site / target[1]).is_file()


def test_the_tutorial_has_code_to_copy_and_the_stored_outputs(site: Path) -> None:
    page = (site / "examples" / "tutorial.html").read_text(encoding="utf-8")
    cells = json.loads((ROOT / "examples" / "tutorial.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert page.count('<div class="highlight-python') == sum(cell["cell_type"] == "code" for cell in cells)
    assert page.count('<div class="highlight-text') == sum("text" in output for output in outputs) > 0
    pictures = re.findall(r'<img alt="picture" src="([^"]+)"', page)
    assert len(pictures) == sum("data" in output for output in outputs) > 0
    assert all(target.startswith("data:") or (site / "examples" / target).is_file() for target in pictures)
    assert "copybutton.js" in page
