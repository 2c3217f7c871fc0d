"""Paths such as "my_module.MyRouting", by which command lines and checkpoints name a user's classes and functions."""

import inspect
import os
import pydoc
import sys
from collections.abc import Callable
from typing import Any


def search_here() -> None:
    """Adds the working directory to Python's path, permanently: a user's module may import its neighbours later."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def by_path(op: str, path: str) -> Callable[..., Any]:
    """The class or function at a path such as ``my_module.MyClass``. The working directory is searched too.

    Raises:
        ValueError: the path names no class or function, or its module can't be imported.
    """
    search_here()
    try:
        located = pydoc.locate(path)
    except pydoc.ErrorDuringImport as error:
        raise ValueError(f"{op}: {path} can't be imported: {error.value}") from error.value
    if not callable(located):
        raise ValueError(f"{op}: no class or function {path}; start in the folder of its module, or set PYTHONPATH")
    return located


def path_of(op: str, what: str, value: Any) -> str:
    """The dotted path under which another process finds a class or a function.

    Raises:
        ValueError: it has no such path, for example a class defined inside a function or typed into an interpreter.
    """
    path = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    module = sys.modules.get(getattr(value, "__module__", ""))
    if module is None or module.__name__ == "__main__" or getattr(module, path.rpartition(".")[2], None) is not value:
        kind = "class" if inspect.isclass(value) else type(value).__name__
        raise ValueError(
            f"{op}: {what} must be at the top of a module that another process can import, so that a checkpoint can be "
            f"opened again, got the {kind} {path}; move it into a file of its own"
        )
    return path
