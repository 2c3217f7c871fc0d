"""Where the package comes from: the checkout it may lie in, and an installation that this checkout hides."""

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
    """A capsfast with an extension, further back in ``sys.path`` than this one, which has none."""
    if has_extension(PACKAGE):
        return None
    packages = (Path(entry or ".").resolve() / "capsfast" for entry in sys.path)
    return next((each for each in packages if each != PACKAGE and has_extension(each)), None)


def why_not_this_one(command: str) -> str:
    """Why ``command`` would not measure the capsfast that is meant, and the remedy; "" if it would."""
    hidden = hidden_installation()
    if hidden is None:
        return ""
    return (
        f"{command}: imported is {PACKAGE}, which has no extension, and not the installed {hidden}, which has one: "
        f"build it {in_the_checkout()}, or start from another folder to measure the "
        f"installed one; this one can't be measured because {native.why_absent}"
    )
