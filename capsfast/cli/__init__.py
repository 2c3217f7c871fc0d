"""The command line, ``python -m capsfast``."""

import atexit
import importlib.util
import os
import sys
from typing import NoReturn

from ..environment.install import in_the_checkout

NEEDED = ("typer", "rich")


def main() -> None:
    """Runs the command line, or says in one line what to install for it."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"capsfast: the command line needs {' and '.join(missing)}; {in_the_checkout('cli')}")
    from .app import app

    try:
        app(prog_name="capsfast")
    except SystemExit as end:
        distributed = sys.modules.get("torch.distributed")
        in_a_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
        if in_a_group and not isinstance(end.code, str):  # the interpreter prints a text
            _leave(int(end.code or 0))
        raise


def _leave(status: int) -> NoReturn:
    """Ends a process of a group without the cleanup of the interpreter.

    A thread of gloo may free the tensors of the last collective operation during that cleanup; then the process aborts
    ("terminate called without an active exception"), and its launcher kills the others, which may still be writing.
    destroy_process_group() does not wait for such a thread.
    """
    atexit._run_exitfuncs()  # loggers finish their runs here
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
