"""Ctrl-C and SIGTERM end training after a complete step, with a checkpoint."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AT_ONCE_AFTER = 1.0  # seconds; launchers may repeat a signal that the terminal already sent to all processes


class Interrupted(KeyboardInterrupt):
    """A signal ended training.

    signal: number of the signal. step: steps done. checkpoint: the checkpoint to resume from, None if there is none.
    checkpoint_step: the step of that checkpoint.
    """

    def __init__(self, signal: int, step: int, checkpoint: Path | None = None, checkpoint_step: int = 0) -> None:
        super().__init__(f"capsfast.train: interrupted at step {step}")
        self.signal, self.step = signal, step
        self.checkpoint, self.checkpoint_step = checkpoint, checkpoint_step


class Stopped(Exception):  # noqa: N818
    """Leaves Lightning's loops; :func:`capsfast.train.fit` turns it into :class:`Interrupted`.

    Not a KeyboardInterrupt, because Lightning ends the whole process at one.
    """


def in_main_thread() -> bool:
    """Whether Python allows signal handlers here."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restores the signal handlers afterwards: Lightning leaves its own handlers, and ignores Ctrl-C."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items() if in_main_thread() else ():
            # None: the handler was not set by Python, which can't restore it.
            if handler is not None:
                signal.signal(number, handler)


def _choosing(trainer: pl.Trainer) -> bool:
    """Whether best checkpoints or patience depend on every validation, which a resumed run does not repeat."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return any(str(getattr(callback, "monitor", None)).startswith("val_") for callback in callbacks)


class Stop(Checkpoint):
    """Ends training at a signal, with a checkpoint.

    The current step is finished first: then weights, optimizer and order of the images are consistent, and a resumed
    run continues bit for bit. A test is aborted unless several processes share it; a validation on which best
    checkpoints or patience depend is finished. A second Ctrl-C ends at once.

    Args:
        checkpoint: file of the checkpoint.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.signal: int | None = None
        self._checkpoint = checkpoint
        self._heard_at = 0.0
        self._saved = False

    def on_train_start(self, *_: Any) -> None:
        self.signal, self._saved = None, False
        for number in SIGNALS if in_main_thread() else ():
            # A process in the background of a script is started with SIGINT ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._heard_at = number, now
        elif number == signal.SIGINT and now - self._heard_at > AT_ONCE_AFTER:
            raise KeyboardInterrupt

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # All processes must write the checkpoint together, after the same step.
        if trainer.strategy.reduce_boolean_decision(self.signal is not None, all=False):
            self._save(trainer)

    def on_train_batch_start(self, *_: Any) -> None:
        # Not in on_train_batch_end: Lightning logs the step's metrics after it.
        if self._saved:
            raise Stopped

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if not _choosing(trainer):
            self.on_train_batch_start()

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # All processes write the checkpoint together.
        decides = trainer.state.fn == TrainerFn.FITTING and _choosing(trainer)
        if decides and trainer.strategy.reduce_boolean_decision(self.signal is not None, all=False):
            self._save(trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # Several processes may have different numbers of batches here, so they can't agree on a batch to stop at.
        alone = trainer.world_size == 1 and trainer.state.fn == TrainerFn.FITTING
        if self.signal is not None and alone and not _choosing(trainer):
            self._save(trainer)
            raise Stopped

    def _save(self, trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(self._checkpoint)
        self._saved = True
