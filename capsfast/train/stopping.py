"""Ctrl-C and SIGTERM end training between two steps, with a checkpoint, instead of inside of one."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AT_ONCE_AFTER = 1.0  # seconds; launchers pass on a signal that the terminal has sent to all processes already


class Interrupted(KeyboardInterrupt):
    """Training was ended by a signal.

    signal: its number. step: steps done. checkpoint: where to go on, None if none was written or read.
    checkpoint_step: the steps that it holds.
    """

    def __init__(self, signal: int, step: int, checkpoint: Path | None = None, checkpoint_step: int = 0) -> None:
        super().__init__(f"capsfast.train: interrupted at step {step}")
        self.signal = signal
        self.step = step
        self.checkpoint = checkpoint
        self.checkpoint_step = checkpoint_step


class Stopped(Exception):  # noqa: N818
    """Leaves Lightning's loops; :func:`capsfast.train.fit` makes :class:`Interrupted` of it.

    A KeyboardInterrupt would not do: Lightning ends the whole process at one.
    """


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Afterwards the signals do again what they did before: Lightning leaves handlers, and Ctrl-C ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: set by something else than Python, which can't give it back.
            if handler is not None:
                signal.signal(number, handler)


class Stop(Callback):
    """Hears the signals while training, and ends it with a checkpoint.

    A step is finished first: only then weights, optimizer and order of the images fit together, and a resumed run goes
    on bit for bit. A test is broken off, unless several processes share it. A second Ctrl-C ends at once.

    Args:
        checkpoint: written before the end.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.signal: int | None = None
        self._checkpoint = checkpoint
        self._heard_at = 0.0
        self._saved = False

    def on_train_start(self, *_: Any) -> None:
        self.signal, self._saved = None, False
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows handlers there only
        for number in SIGNALS:
            # A process in the background of a script is started with SIGINT ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._hear)  # Lightning's teardown puts back what was there before

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._heard_at = number, now
        elif number == signal.SIGINT and now - self._heard_at > AT_ONCE_AFTER:
            raise KeyboardInterrupt

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        heard = self.signal is not None
        if trainer.world_size > 1:
            # Writing is a matter of all of them, after the same step.
            heard = trainer.strategy.reduce_boolean_decision(heard, all=False)
        if heard:
            self._save(trainer)

    # The loop writes the step's metrics between its end and these.
    def on_train_batch_start(self, *_: Any) -> None:
        if self._saved:
            raise Stopped

    def on_validation_start(self, *_: Any) -> None:
        if self._saved:
            raise Stopped

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # Several processes may have unequal numbers of batches here, and nothing to agree by.
        if self.signal is not None and trainer.world_size == 1 and trainer.state.fn == TrainerFn.FITTING:
            self._save(trainer)
            raise Stopped

    def _save(self, trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(self._checkpoint)
        self._saved = True
