"""The Lightning trainer as ``capsfast train`` sets it up."""

import importlib.util
import logging
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from .. import checks
from .checkpoint import WholeCheckpoints, read_checkpoint
from .images import ImageData
from .learner import Learner
from .progress import LOG_EVERY, Lines, Throughput, bar_or_lines
from .stopping import Interrupted, Stop, Stopped, handlers_kept

LOGS = ("csv", "tensorboard")


def loggers(out: Path, names: Sequence[str]) -> list[Logger]:
    """Writers into ``out/logs``; every run, a resumed one too, has a version of its own.

    Raises:
        ValueError: no log of that name.
        ModuleNotFoundError: TensorBoard is asked for and not installed.
    """
    found: list[Logger] = []
    for name in names:
        checks.choice("capsfast.train", "log", name, LOGS)
        if name == "csv":
            found.append(CSVLogger(out, name="logs", flush_logs_every_n_steps=LOG_EVERY))
        else:
            if not any(map(importlib.util.find_spec, ("tensorboard", "tensorboardX"))):
                raise ModuleNotFoundError("capsfast.train: log tensorboard needs tensorboard: pip install tensorboard")
            found.append(TensorBoardLogger(out, name="tensorboard"))
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps Lightning's hints from the terminal that do not apply, and its reports of what it did not find."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Batches are made from memory in less time than a worker needs to hand them over.
            warnings.filterwarnings("ignore", ".*does not have many workers.*")
            # A resumed run may write beside the files of the one before, or elsewhere, and as often as it likes.
            warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
            warnings.filterwarnings("ignore", "The dirpath has changed from")
            warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint need to be provided")
            warnings.filterwarnings("ignore", ".*smaller than the logging interval.*")
            warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated")
            yield
    finally:
        log.setLevel(level)


def make_trainer(
    out: Path,
    *,
    epochs: int,
    log: Sequence[str] = ("csv",),
    checkpoint_every: int | None = None,
    test_every: int | None = None,
    progress: bool = True,
    **options: Any,
) -> pl.Trainer:
    """A Lightning trainer that writes ``last.ckpt`` after every epoch.

    Args:
        out: folder of checkpoints and logs.
        epochs: passes over the data.
        log: what of ``csv`` and ``tensorboard`` to write.
        checkpoint_every: also writes ``step.ckpt`` after so many steps.
        test_every: tests after so many steps of an epoch, at most all of them; default at its end.
        progress: a progress bar, or without a terminal a line from time to time.
        options: go to :class:`lightning.pytorch.Trainer`: accelerator, devices, strategy, precision, ...
    """
    # No monitor: the newest one is kept, under one name.
    common: dict[str, Any] = {"dirpath": out, "enable_version_counter": False}
    callbacks: list[Callback] = [
        Throughput(),
        Stop(out / "last.ckpt"),
        ModelCheckpoint(filename="last", save_on_train_epoch_end=True, **common),
    ]
    if checkpoint_every is not None:
        callbacks.append(ModelCheckpoint(filename="step", every_n_train_steps=checkpoint_every, **common))
    writer = WholeCheckpoints()
    if progress:
        shown = bar_or_lines()
        callbacks.append(shown)
        if isinstance(shown, Lines):
            writer.on_written = shown.wrote
    plugins = options.pop("plugins", None) or []
    plugins = [writer, *(plugins if isinstance(plugins, list) else [plugins])]
    return pl.Trainer(
        max_epochs=epochs,
        logger=loggers(out, log) or False,
        callbacks=callbacks,
        plugins=plugins,
        enable_progress_bar=progress,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=test_every,
        log_every_n_steps=LOG_EVERY,
        # BatchOrder shares the batches out.
        use_distributed_sampler=False,
        **options,
    )


def fit(trainer: pl.Trainer, learner: Learner, images: ImageData, resume: Path | None = None) -> None:
    """Trains, from the start or from a checkpoint, without the warnings of Lightning that do not apply.

    The end is tested, wherever it lies. A resumed run goes on bit for bit as an uninterrupted one if processes,
    threads, batch size and device are the same.

    Ctrl-C and SIGTERM end it after the step, with ``last.ckpt`` written: :class:`capsfast.train.stopping.Stop`.

    Raises:
        FileNotFoundError, ValueError: as :func:`capsfast.train.open_checkpoint`.
        Interrupted: by a signal, with what there is to go on from.
        OSError: a checkpoint or a log can't be written; the checkpoint before it is still there.
    """
    # Lightning would run the code that a pickle holds.
    resumed = None if resume is None else (resume, int(read_checkpoint(resume)["global_step"]))
    try:
        with quiet(), handlers_kept():
            trainer.fit(learner, datamodule=images, ckpt_path=resume)
            if learner.tested_at != trainer.global_step and trainer.limit_val_batches != 0:
                trainer.validate(learner, datamodule=images, verbose=False)
    except (Stopped, SystemExit) as error:
        if isinstance(error, SystemExit) and not trainer.interrupted:
            raise
        raise _interrupted(trainer, error, resumed) from None


def _interrupted(trainer: pl.Trainer, error: BaseException, resumed: tuple[Path, int] | None) -> Interrupted:
    # A trainer that make_trainer did not make has none.
    heard = [each.signal for each in trainer.callbacks if isinstance(each, Stop)]  # type: ignore[attr-defined]
    number = signal.SIGTERM if isinstance(error, SIGTERMException) else next(filter(None, heard), signal.SIGINT)
    writer = trainer.strategy.checkpoint_io
    newest = (writer.newest if isinstance(writer, WholeCheckpoints) else None) or resumed
    return Interrupted(number, trainer.global_step, *(newest or ()))
