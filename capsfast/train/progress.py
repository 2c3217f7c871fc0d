"""The progress of training: a bar on a terminal, otherwise lines."""

import math
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ProgressBar, RichProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console

LINE_SECONDS = 15.0
LINE_STEPS = 10
LOG_EVERY = 10  # steps
OF_CLASSES = ("margin", "mse", "spread", "cross_entropy")
# Metrics in the log that progress does not show.
DETAILS = ("margin_present", "margin_absent", "reconstruction_absent", "length")
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

    def __init__(self) -> None:
        self._said = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        loss = trainer.callback_metrics.get("loss")
        if trainer.state.fn == TrainerFn.FITTING and loss is not None and not loss.isfinite():
            self._say(trainer, "its loss is not finite: lower the learning rate, or clip gradients")
        elif trainer.state.fn == TrainerFn.FITTING and trainer.global_step >= MANY_STEPS:
            self._look(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.global_step >= SOME_STEPS:
            self._look(trainer, pl_module)

    def _look(self, trainer: pl.Trainer, learner: Any) -> None:
        found = trainer.callback_metrics
        accuracy, length = found.get("test_accuracy"), found.get("test_length")
        if accuracy is None or accuracy > 1.2 * learner.chance:
            return
        why = "look at the learning rate, the images and their labels"
        if length is not None and length < FADED and hasattr(learner.model, "routing"):
            why = (
                f"class capsules are {float(length):.0e} long in the mean, where the squash has no gradient; raise the "
                "learning rate or init_std, or take larger images"
            )
        self._say(trainer, f"it only guesses, with a test accuracy of {float(accuracy):.1%}: {why}")

    def _say(self, trainer: pl.Trainer, what: str) -> None:
        if not self._said:
            rank_zero_warn(f"capsfast.train: the network learns nothing after {trainer.global_step} steps: {what}")
        self._said = True


def shown_results(names: Iterable[str]) -> list[str]:
    """The results of a test that fit into a line."""
    return [name for name in names if name.startswith("test_") and name.removeprefix("test_") not in DETAILS]


class Bar(RichProgressBar):
    """Lightning's bar with selected metrics."""

    SHOWN: ClassVar = {
        "loss": "loss",
        "margin": "margin",
        "mse": "mse",
        "spread": "spread",
        "cross_entropy": "cross-entropy",
        "reconstruction": "reconstruction",
        "images_per_s": "images/s",
        "test_accuracy": "test accuracy",
        "test_iou": "test IoU",
        "test_pixels": "test pixels",
    }

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        found = super().get_metrics(trainer, pl_module)
        if any(name in found for name in OF_CLASSES):
            found.pop("loss", None)
        return {shown: found[name] for name, shown in self.SHOWN.items() if name in found}


class Lines(ProgressBar):
    """Prints a line for the first step, then for steps at intervals, and for each test and checkpoint.

    Args:
        steps, seconds: least number of steps, and least time, between two lines for steps.
    """

    SHOWN: ClassVar = ("loss", *OF_CLASSES, "reconstruction")

    def __init__(self, steps: int = LINE_STEPS, seconds: float = LINE_SECONDS) -> None:
        super().__init__()
        self.enabled = True
        self._steps = steps
        self._seconds = seconds

    def enable(self) -> None:
        self.enabled = True

    def disable(self) -> None:
        self.enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.enabled:
            # Without flush, a pipe or file would get the lines only after kilobytes.
            print(*args, **kwargs, flush=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = self._shown_at = time.monotonic()
        self._first = trainer.global_step
        self._shown: int | None = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, now = trainer.global_step, time.monotonic()
        early = self._shown is not None and (step - self._shown < self._steps or now - self._shown_at < self._seconds)
        if early or not self.enabled:
            return
        self._shown, self._shown_at = step, now
        found: dict[str, Any] = self.get_metrics(trainer, pl_module)
        parts = [f"{name} {float(found[name]):.4g}" for name in self.SHOWN if name in found]
        if "images_per_s" in found:
            parts.append(f"{float(found['images_per_s']):.0f} images/s")
        elapsed = now - self._began
        parts.append(f"{timedelta(seconds=int(elapsed))} elapsed")
        total = trainer.estimated_stepping_batches
        # The first step takes longer than the others.
        if step - self._first > 1 and math.isfinite(total):
            left = elapsed / (step - self._first) * (total - step)
            parts.append(f"{timedelta(seconds=int(left))} left")
        self._say(trainer, ", ".join(parts))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = {name: float(trainer.callback_metrics[name]) for name in shown_results(trainer.callback_metrics)}
        if found and not trainer.sanity_checking:
            shown = (f"{name.replace('_', ' ')} {value:.4g}" for name, value in sorted(found.items()))
            self._say(trainer, ", ".join(shown))

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
        self.print(f"step {step}, epoch {where}: {text}")


def bar_or_lines() -> Bar | Lines:
    """A bar if standard output is a terminal or a notebook, otherwise lines."""
    console = Console()
    return Bar() if console.is_interactive or console.is_jupyter else Lines()
