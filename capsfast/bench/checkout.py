"""Finds the checkout that the package was imported from, and an installation that the checkout hides."""

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from .. import native
from .._install import in_the_checkout

PACKAGE = Path(__file__).resolve().parents[1]


def checkout() -> Path | None:
    """The root of the checkout that the package was imported from, None for an installed copy."""
    root = PACKAGE.parent
    return root if (root / "setup.py").is_file() and (root / "benchmarks" / "README.md").is_file() else None


def has_extension(package: Path) -> bool:
    return any((package / f"_C{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)


def hidden_installation() -> Path | None:
    """If this capsfast has no extension: another capsfast in ``sys.path`` that has one."""
    if has_extension(PACKAGE):
        return None
    packages = (Path(entry or ".").resolve() / "capsfast" for entry in sys.path)
    return next((each for each in packages if each != PACKAGE and has_extension(each)), None)


def why_not_this_one(command: str) -> str:
    """Why ``command`` would measure the wrong capsfast, and the remedy; "" if it would not."""
    hidden = hidden_installation()
    if hidden is None:
        return ""
    return (
        f"{command}: {PACKAGE} was imported, which has no extension, and not the installed {hidden}, which has one: "
        f"build it {in_the_checkout()}, or start from another folder to measure the "
        f"installed one; this one can't be measured because {native.why_absent}"
    )
