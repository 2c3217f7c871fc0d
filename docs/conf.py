"""The documentation site, `make docs`: README.md, docs/*.md, and the API from the docstrings.

The source folder is the repository, so that relative links work on the site and on the repository's page.
"""

import json
import pkgutil
import posixpath
import re
import subprocess
import sys
from pathlib import Path

from docutils.nodes import Element, TextElement
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

import capsfast

ROOT = Path(__file__).resolve().parent.parent

project = "capsfast"
author = "The capsfast authors"
version = release = capsfast.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".rst": "restructuredtext", ".md": "markdown", ".ipynb": "markdown"}

root_doc = "README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "docs/*.md",
    "docs/api/*",
    "examples/*.ipynb",
]
# Folders that need not be searched for pages.
exclude_patterns = [".*", "build", "out", "dist", "capsfast", "csrc", "tests", "**/__pycache__"]

# Anchors of headings as on the repository's page.
myst_heading_anchors = 4
smartquotes = False

# Lightning's hooks are in Lightning's documentation.
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
# "in_channels, image_size: of the images" is one entry for two arguments.
napoleon_use_param = False
add_module_names = False
toc_object_entries_show_parents = "hide"

nitpicky = True
# Their pages are not here, and their inventories would need a network.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|collections|lightning|matplotlib|os|pathlib|torchmetrics|typing_extensions)(\..*)?"),
    ("py:class", r".*Keywords|capsfast\.graphs\.R"),
]

html_theme = "furo"
html_title = f"capsfast {version}"
html_copy_source = False
# Leads to the first page.
html_extra_path = ["index.html"]
html_show_sphinx = False
html_show_copyright = False


def contents() -> str:
    """The sections of docs/README.md, the only list of pages, as tables of contents."""
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    blocks = ["```{toctree}\n:hidden:\n\n/docs/README\n```"]
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        links = re.findall(r"^\* \[.*?\]\((.*?)\.(?:md|rst|ipynb)\)", section, re.MULTILINE)
        pages = [posixpath.normpath(posixpath.join("docs", link)) for link in links]
        entries = ["self" if page == root_doc else f"/{page}" for page in pages]
        lines = [f":caption: {section.splitlines()[0]}", ":hidden:", *entries]
        blocks.append("\n".join(["```{toctree}", *lines, "```"]))
    return "\n\n".join(blocks)


def commands() -> str:
    """The commands and their options as typer writes them, without its list of contents."""
    words = [sys.executable, "-m", "typer", "capsfast.cli.app", "utils", "docs", "--name", "capsfast"]
    text = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return text[text.index("\n## ") :]


def from_notebook(text: str) -> str:
    """A notebook as Markdown, with its stored outputs: what was printed, and pictures."""
    blocks = []
    for cell in json.loads(text)["cells"]:
        code = "".join(cell["source"])
        blocks.append(f"```python\n{code}\n```" if cell["cell_type"] == "code" else code)
        for output in cell.get("outputs", ()):
            picture = output.get("data", {}).get("image/png")
            printed = "".join(output.get("text", ())).rstrip()
            blocks.append(
                f"![picture](data:image/png;base64,{picture.strip()})" if picture else f"```text\n{printed}\n```"
            )
    return "\n\n".join(blocks)


def add_generated(app: Sphinx, page: str, source: list[str]) -> None:
    if Path(app.env.doc2path(page)).suffix == ".ipynb":
        source[0] = from_notebook(source[0])
    elif page == app.config.root_doc:
        source[0] += "\n\n" + contents()
    elif page == "docs/api/commands":
        source[0] += "\n" + commands()


def skip(app: Sphinx, what: str, name: str, thing: object, skipped: bool, options: object) -> bool | None:
    """Skips the fields of named tuples, whose docstrings say only "Alias for field number"."""
    return True if (thing.__doc__ or "").startswith("Alias for field number") else None


def link_pages(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Docstrings name the pages by their files, and call the tensors that a module owns its parameters."""
    lines[:] = [re.sub(r"(?<![\w/`])docs/([\w-]+)\.md", r":doc:`/docs/\1`", line) for line in lines]
    lines[:] = [re.sub(r"^:Parameters:", ":Arguments:", line) for line in lines]


def thing_of(name: str) -> object:
    try:
        return pkgutil.resolve_name(name)
    except (AttributeError, ImportError, ValueError):  # such as an attribute of instances
        return None


def find_by_last_name(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: TextElement) -> Element | None:
    """Resolves references to other names of a documented object, or without its module."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    found = env.get_domain("py").find_obj(env, None, None, target.rpartition(".")[2], None, searchmode=1)
    if "." in target:
        found = [each for each in found if thing_of(each[0]) is not None and thing_of(each[0]) is thing_of(target)]
    # capsfast.compat and capsfast.nn have classes with equal names: prefer the module of the reference.
    near = [each for each in found if each[0].startswith(f"{node.get('py:module')}.")]
    places = {(entry.docname, entry.node_id) for _, entry in near or found}
    if len(places) != 1:
        return None
    [(page, anchor)] = places
    return make_refnode(app.builder, node["refdoc"], page, anchor, text)


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_generated)
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", link_pages)
    app.connect("missing-reference", find_by_last_name)
