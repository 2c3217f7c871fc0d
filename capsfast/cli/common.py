"""What the commands for networks share: errors in one line, checkpoints, pictures."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .._install import in_the_checkout
from .endings import one_line, stop

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..data import Sets
    from ..train import Learner

NEEDED = ("lightning", "matplotlib")

Checkpoint = Annotated[Path, typer.Argument(help="A file that train wrote, such as last.ckpt.", show_default=False)]
Out = Annotated[Path, typer.Option(help="Folder of the pictures.")]
Data = Annotated[str | None, typer.Option(help="Other data than it was trained on.", show_default=False)]
DataDir = Annotated[str | None, typer.Option(help="Folder of the IDX files.", show_default=False)]
Accelerator = Annotated[str, typer.Option(help="auto, cpu, gpu, ... of Lightning.")]


@contextmanager
def plain_errors(command: str) -> Iterator[None]:
    """One line for what the package rejects, for an extra that is missing, and for what :func:`one_line` ends.

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
    """Whether an option was given, by the name of its argument."""
    return str(context.get_parameter_source(name)).endswith("COMMANDLINE")


def say(text: str) -> None:
    Console(soft_wrap=True).print(text, markup=False, highlight=False)


def opened(checkpoint: Path, data: str | None, data_dir: str | None) -> "tuple[Learner, Sets]":
    """The network and the data sets of a checkpoint, the network on the device that Lightning would take."""
    from ..train import open_checkpoint

    learner, images = open_checkpoint(checkpoint, data=data, data_dir=data_dir)
    return learner, images.sets


def to_accelerator(learner: "Learner", accelerator: str) -> None:
    """Moves it to the first device of a Lightning accelerator."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch import Trainer

    from ..train.run import quiet

    try:
        with quiet():
            trainer = Trainer(accelerator=accelerator, devices=1, logger=False, enable_checkpointing=False)
    except (ValueError, MisconfigurationException) as error:
        raise stop(f"capsfast: --accelerator {accelerator}: {error}") from None
    learner.to(trainer.strategy.root_device)


def write(figure: "Figure", path: Path) -> None:
    from ..train.pictures import save

    say(f"wrote {save(figure, path)}")
