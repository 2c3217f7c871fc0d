"""Ends commands that fail: one line on the error stream with the reason."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

INTERRUPTED = 130  # the exit status that a shell reports after Ctrl-C
# Errors of a disk or folder, for which a traceback is of no use.
PLACES = frozenset(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EFBIG", "ENOTDIR", "EISDIR", "EEXIST", "ENAMETOOLONG")
)


def stop(message: str, code: int = 1) -> typer.Exit:
    """Prints on the error stream why a command ends, and returns the exception to raise."""
    Console(stderr=True, soft_wrap=True).print(message, markup=False, highlight=False)
    return typer.Exit(code)


@contextmanager
def one_line(command: str, kept: str | Callable[[], str] = "") -> Iterator[None]:
    """Ctrl-C and a full, read-only or forbidden folder end the command in one line instead of a traceback.

    Args:
        command: name of the command, such as ``"bench"``.
        kept: end of the line after an interruption: the files that are left, and how to go on; or a function for it.
    """
    try:
        yield
    except KeyboardInterrupt:
        left = kept() if callable(kept) else kept
        raise stop(f"capsfast {command}: interrupted{f'; {left}' if left else ''}", INTERRUPTED) from None
    except OSError as error:
        if error.errno not in PLACES:
            raise
        where = f": {error.filename}" if error.filename else ""
        raise stop(f"capsfast {command}: {os.strerror(error.errno or 0)}{where}") from None
