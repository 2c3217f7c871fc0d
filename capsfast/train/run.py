"""The Lightning trainer as ``capsfast train`` sets it up."""

import importlib.util
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from .checkpoint import read_checkpoint
from .images import ImageData
from .learner import Learner

LOGS = ("csv", "tensorboard")
LOG_EVERY = 10  # steps


class Throughput(Callback):
    """Logs ``images_per_s`` of all processes, a moving average over about ten steps."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._rate: float | None = None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last = None  # validation lies between

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if self._last is not None:
            rate = len(batch.images) * trainer.world_size / (now - self._last)
            self._rate = rate if self._rate is None else 0.9 * self._rate + 0.1 * rate
            pl_module.log("images_per_s", self._rate, prog_bar=True)
        self._last = now


class Bar(RichProgressBar):
    """Lightning's, with what fits in a line beside it."""

    SHOWN: ClassVar = {
        "margin": "margin",
        "reconstruction": "reconstruction",
        "images_per_s": "images/s",
        "test_accuracy": "test accuracy",
    }

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        found = super().get_metrics(trainer, pl_module)
        return {shown: found[name] for name, shown in self.SHOWN.items() if name in found}


def loggers(out: Path, names: Sequence[str]) -> list[Logger]:
    """Writers into ``out/logs``; every run, a resumed one too, has a version of its own.

    Raises:
        ValueError: no log of that name.
        ModuleNotFoundError: TensorBoard is asked for and not installed.
    """
    found: list[Logger] = []
    for name in names:
        if name not in LOGS:
            raise ValueError(f"capsfast.train: log must be one of {', '.join(LOGS)}, got {name!r}")
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
        progress: a progress bar.
        options: go to :class:`lightning.pytorch.Trainer`: accelerator, devices, strategy, precision, ...
    """
    # No monitor: the newest one is kept, under one name.
    common: dict[str, Any] = {"dirpath": out, "enable_version_counter": False}
    callbacks: list[Callback] = [Throughput(), ModelCheckpoint(filename="last", save_on_train_epoch_end=True, **common)]
    if checkpoint_every is not None:
        callbacks.append(ModelCheckpoint(filename="step", every_n_train_steps=checkpoint_every, **common))
    if progress:
        callbacks.append(Bar())
    return pl.Trainer(
        max_epochs=epochs,
        logger=loggers(out, log) or False,
        callbacks=callbacks,
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

    Raises:
        FileNotFoundError, ValueError: as :func:`capsfast.train.open_checkpoint`.
    """
    if resume is not None:
        # Lightning would run the code that a pickle holds.
        read_checkpoint(resume)
    with quiet():
        trainer.fit(learner, datamodule=images, ckpt_path=resume)
        if learner.tested_at != trainer.global_step and trainer.limit_val_batches != 0:
            trainer.validate(learner, datamodule=images, verbose=False)
