"""How commands end that can't go on: one line on the error stream that says why."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

INTERRUPTED = 130  # what a shell reports for a process that Ctrl-C has ended
# Faults of the place that was written to or read from, which a traceback does not explain any better.
PLACES = frozenset(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EFBIG", "ENOTDIR", "EISDIR", "EEXIST", "ENAMETOOLONG")
)


def stop(message: str, code: int = 1) -> typer.Exit:
    """Says on the error stream why a command ends."""
    Console(stderr=True, soft_wrap=True).print(message, markup=False, highlight=False)
    return typer.Exit(code)


@contextmanager
def one_line(command: str, kept: str | Callable[[], str] = "") -> Iterator[None]:
    """Ctrl-C and a full, read-only or forbidden folder end the command in one line instead of a traceback.

    Args:
        command: its name, ``"bench"``.
        kept: what an interruption leaves and how to go on, for the end of the line; a function is asked then.
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
