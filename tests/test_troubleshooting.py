"""docs/troubleshooting.md quotes messages of the library word for word."""

import ast
from pathlib import Path

from .test_docs import table_rows

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"


def texts(*files: Path) -> set[str]:
    """All strings of Python files, with … instead of values."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (each.value if isinstance(each, ast.Constant) else "…" for each in node.values)
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_quoted_messages_are_in_the_sources() -> None:
    said = texts(ROOT / "setup.py", *(ROOT / "capsfast").rglob("*.py"))
    quoted = [row[0].strip("`") for row in table_rows(PAGE, "| message |")]
    assert len(quoted) >= 25 and all(len(quote.replace("…", "")) > 12 for quote in quoted)
    assert [quote for quote in quoted if not any(quote in text for text in said)] == []
