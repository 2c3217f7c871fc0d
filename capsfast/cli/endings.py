"""What commands say, and one line on the error stream if they fail."""

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from ..environment.install import in_the_checkout

if TYPE_CHECKING:
    from ..data import Sets

INTERRUPTED = 130  # the exit status that a shell reports after Ctrl-C
NEEDED = ("jsonargparse", "lightning", "matplotlib", "torchvision")


def say(text: str, error: bool = False) -> None:
    Console(stderr=error, soft_wrap=True).print(text, markup=False, highlight=False)


def say_parts(sets: "Sets") -> None:
    """Says which folders are the parts, if their names decide it, or that images are held out."""
    parts = {"to train on": sets.train, "for validation": sets.val, "for tests": sets.test}
    names = {use: part.source.name for use, part in parts.items() if part is not None}
    if len({*names.values()}) > 1:
        say("; ".join(f"images {use}: {name}" for use, name in names.items()))
    if sets.test is sets.val:
        say("there are no images for tests: the images for validation are used")


def stop(message: str, code: int = 1) -> typer.Exit:
    """Prints on the error stream why a command ends, and returns the exception to raise."""
    say(message, error=True)
    return typer.Exit(code)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Prints warnings of the package without the place in its code that gave them."""
    before = warnings.formatwarning

    def formatted(message: Warning | str, *place: Any, **line: Any) -> str:
        return f"{message}\n" if str(message).startswith("capsfast") else before(message, *place, **line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextmanager
def one_line(command: str, kept: Callable[[], str] = str) -> Iterator[None]:
    """Ctrl-C and a full, read-only or forbidden folder end the command in one line instead of a traceback.

    Args:
        command: name of the command, such as ``"bench"``.
        kept: gives the end of the line after an interruption: the files that are left, and how to go on.
    """
    try:
        yield
    except KeyboardInterrupt:
        left = kept()
        raise stop(f"capsfast {command}: interrupted{f'; {left}' if left else ''}", INTERRUPTED) from None
    except OSError as error:
        if error.errno is None:
            raise
        where = f": {error.filename}" if error.filename else ""
        raise stop(f"capsfast {command}: {os.strerror(error.errno)}{where}") from None


@contextmanager
def plain_errors(command: str) -> Iterator[None]:
    """Prints errors of the package, missing extras and the errors of :func:`one_line` in one line.

    Other errors keep their traceback.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise stop(f"capsfast: this command needs {' and '.join(missing)}; {in_the_checkout('train')}")
    try:
        with one_line(command), plain_warnings():
            yield
    except (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError, RuntimeError) as error:
        if not str(error).startswith("capsfast"):
            raise
        raise stop(str(error)) from None
