"""Helpers of the commands for networks: errors in one line, devices."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from .._install import in_the_checkout
from .endings import one_line, stop

if TYPE_CHECKING:
    from ..train import Learner

NEEDED = ("jsonargparse", "lightning", "matplotlib", "torchvision")


@contextmanager
def plain_errors(command: str) -> Iterator[None]:
    """Prints errors of the package, missing extras and the errors of :func:`one_line` in one line.

    Other errors keep their traceback.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise stop(f"capsfast: this command needs {' and '.join(missing)}; {in_the_checkout('train')}")
    try:
        with one_line(command):
            yield
    except (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError, RuntimeError) as error:
        if not str(error).startswith("capsfast"):
            raise
        raise stop(str(error)) from None


def on_command_line(context: typer.Context, name: str) -> bool:
    """Whether an option was given on the command line. name: its argument in the command's function."""
    return str(context.get_parameter_source(name)).endswith("COMMANDLINE")


def say(text: str) -> None:
    Console(soft_wrap=True).print(text, markup=False, highlight=False)


def to_accelerator(learner: "Learner", accelerator: str) -> None:
    """Moves the network to the first device of a Lightning accelerator."""
    from lightning.fabric import Fabric

    try:
        device = Fabric(accelerator=accelerator, devices=1).device
    except (ValueError, RuntimeError) as error:
        raise stop(f"capsfast: --accelerator {accelerator}: {error}") from None
    learner.to(device)
