"""The progress of training: lines where there is no terminal, speed, and a warning if the network learns nothing."""

import math
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from .learner import DETAILS

LINE_SECONDS = 15.0
LINE_STEPS = 10
LOG_EVERY = 10  # steps
# After this many steps a finished training, or a running training, should be better than guessing.
SOME_STEPS, MANY_STEPS = 50, 500
# Length of class capsules below which they have nearly no gradient.
FADED = 1e-2


class Throughput(Callback):
    """Logs ``images_per_s`` over all processes, a moving average of about ten steps."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._rate: float | None = None

    def on_train_epoch_start(self, *_: Any) -> None:
        self._last = None  # the time since the last step includes a validation

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        now = time.perf_counter()
        if self._last is not None:
            rate = len(batch.images) * trainer.world_size / (now - self._last)
            self._rate = rate if self._rate is None else 0.9 * self._rate + 0.1 * rate
            pl_module.log("images_per_s", self._rate, prog_bar=True)
        self._last = now


class Guessing(Callback):
    """Warns once if the loss is not finite or the network only guesses, with the reason if it is known.

    Guessing is checked at the end of training after SOME_STEPS, and at every test after MANY_STEPS.
    """

    said = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._look(trainer, pl_module, MANY_STEPS)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._look(trainer, pl_module, SOME_STEPS)

    def _look(self, trainer: pl.Trainer, learner: Any, steps: int) -> None:
        found = trainer.callback_metrics
        part = "val" if "val_accuracy" in found else "test"
        loss, accuracy, length = (found.get(name) for name in ("loss", f"{part}_accuracy", f"{part}_length"))
        if loss is not None and not loss.isfinite():
            what = "its loss is not finite: lower the learning rate, or clip gradients"
        elif accuracy is None or accuracy > 1.2 * learner.chance or trainer.global_step < steps:
            return
        else:
            what = f"it only guesses, with a {part} accuracy of {float(accuracy):.1%}: "
            if length is not None and length < FADED and hasattr(learner.model, "routing"):
                what += f"class capsules are {float(length):.0e} long in the mean, where the squash has no gradient; "
                what += "raise the learning rate or init_std, or take larger images"
            else:
                what += "look at the learning rate, the images and their labels"
        if not self.said:
            rank_zero_warn(f"capsfast.train: the network learns nothing after {trainer.global_step} steps: {what}")
        self.said = True


def shown(metrics: dict[str, Any], tests: bool) -> list[str]:
    """The results of tests and validations, or the parts of the loss in training, as name and value."""
    return [
        f"{name.replace('_', ' ')} {float(value):.5g}"
        for name, value in metrics.items()
        if name != "images_per_s"
        and name.startswith(("val_", "test_")) == tests
        and name.split("_", 1)[-1] not in DETAILS
    ]


class Lines(ProgressBar):
    """Prints a line for the first step, then for steps at intervals, and for each test and checkpoint.

    Args:
        steps, seconds: least number of steps, and least time, between two lines for steps.
    """

    def __init__(self, steps: int = LINE_STEPS, seconds: float = LINE_SECONDS) -> None:
        super().__init__()
        self._enabled = True
        self._steps = steps
        self._seconds = seconds

    def disable(self) -> None:
        self._enabled = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = self._shown_at = time.monotonic()
        self._first = trainer.global_step
        self._shown: int | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step, now = trainer.global_step, time.monotonic()
        early = self._shown is not None and (step - self._shown < self._steps or now - self._shown_at < self._seconds)
        if early or not self._enabled:
            return
        self._shown, self._shown_at = step, now
        parts, elapsed = shown(trainer.progress_bar_metrics, tests=False), now - self._began
        if "images_per_s" in trainer.progress_bar_metrics:
            parts.append(f"{trainer.progress_bar_metrics['images_per_s']:.0f} images/s")
        parts.append(f"{timedelta(seconds=int(elapsed))} elapsed")
        total = trainer.estimated_stepping_batches
        # The first step takes longer than the others.
        if step - self._first > 1 and math.isfinite(total):
            left = elapsed / (step - self._first) * (total - step)
            parts.append(f"{timedelta(seconds=int(left))} left")
        self._say(trainer, ", ".join(parts))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        results = shown(trainer.progress_bar_metrics, tests=True)
        if results and not trainer.sanity_checking:
            self._say(trainer, ", ".join(sorted(results)))

    def wrote(self, path: Path) -> None:
        """Prints a line for a checkpoint."""
        self._say(self.trainer, f"wrote {path}")

    def _say(self, trainer: pl.Trainer, text: str) -> None:
        total, epochs = trainer.estimated_stepping_batches, trainer.max_epochs
        # Count started epochs: Lightning increases current_epoch before the last test.
        step, epoch = str(trainer.global_step), max(1, trainer.fit_loop.epoch_progress.current.ready)
        if math.isfinite(total):
            step += f"/{int(total)}"
        where = f"{epoch}/{epochs}" if epochs is not None and epochs > 0 else str(epoch)
        if self._enabled:
            # Without flush, a pipe or file would get the lines only after kilobytes.
            print(f"step {step}, epoch {where}: {text}", flush=True)
