"""Finds the checkout that the package was imported from, and its extension."""

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def checkout() -> Path | None:
    """The root of the checkout that the package was imported from, None for an installed copy."""
    root = PACKAGE.parent
    return root if (root / "setup.py").is_file() and (root / "benchmarks" / "README.md").is_file() else None


def has_extension(package: Path) -> bool:
    return any((package / f"_C{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)
