"""The command line, ``python -m capsfast``."""

import importlib.util
import sys

from .._install import in_the_checkout

NEEDED = ("typer", "rich")


def main() -> None:
    """Runs the command line, or says in one line what to install for it."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"capsfast: the command line needs {' and '.join(missing)}; {in_the_checkout('cli')}")
    from .app import app

    app(prog_name="capsfast")
