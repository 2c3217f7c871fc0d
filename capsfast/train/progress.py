"""The progress of training: lines where there is no terminal, speed, and a warning if the network learns nothing."""

import math
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import rich.table
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ProgressBar, RichProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from rich.progress import TextColumn
from torch import Tensor

from ..backend import backends, demanded
from ..diagnostics import Finding, diagnose
from ..nn.routing.base import Capsules
from .learner import DETAILS

LINE_SECONDS = 15.0
LINE_STEPS = 10
LOG_EVERY = 10  # steps
# After this many steps a finished training, or a running training, should be better than guessing.
SOME_STEPS, MANY_STEPS = 50, 500
# Length of class capsules below which they have nearly no gradient.
FADED = 1e-2
# Images of the last step for the diagnosis.
DIAGNOSED = 32


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

    Guessing is checked at the end of training after SOME_STEPS, or at any step if patience ended it, and at every test
    after MANY_STEPS. The reason comes from :func:`capsfast.diagnose` with images of the last step.
    """

    said = False
    _images: Tensor | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self._images = batch.images

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        # After fitting, this is the last validation of a training that ended within an epoch.
        self._look(trainer, pl_module, MANY_STEPS if trainer.state.fn == TrainerFn.FITTING else SOME_STEPS)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        stopped = any(isinstance(callback, EarlyStopping) and callback.stopped_epoch > 0 for callback in callbacks)
        self._look(trainer, pl_module, 1 if stopped else SOME_STEPS)

    def _look(self, trainer: pl.Trainer, learner: Any, steps: int) -> None:
        metrics = trainer.callback_metrics
        part = "val" if "val_accuracy" in metrics else "test"
        loss, accuracy, length = (metrics.get(name) for name in ("loss", f"{part}_accuracy", f"{part}_length"))
        if loss is not None and not loss.isfinite():
            what = "its loss is not finite: lower the learning rate, or clip gradients"
        elif accuracy is None or accuracy > 1.2 * learner.chance or trainer.global_step < steps:
            return
        else:
            what = f"it only guesses, with a {part} accuracy of {float(accuracy):.1%}: "
            finding = self._finding(trainer, learner)
            if finding is not None:
                what += f"{finding.name}: {finding.what} Remedy: {finding.remedy}"
            elif length is not None and length < FADED and hasattr(learner.model, "routing"):
                what += f"class capsules are {float(length):.0e} long in the mean, where the squash has no gradient; "
                what += "raise the learning rate or init_std, or take larger images"
            else:
                what += "look at the learning rate, the images and their labels"
        if not self.said:
            rank_zero_warn(f"capsfast.train: the network learns nothing after {trainer.global_step} steps: {what}")
        self.said = True

    def _finding(self, trainer: pl.Trainer, learner: Any) -> Finding | None:
        """What is wrong with the network's routing layer, for the process that warns; leaves training as it was."""
        model = learner.model
        if not trainer.is_global_zero or self._images is None or not hasattr(model, "encode"):
            return None
        images = self._images[:DIAGNOSED]
        modes = [(module, module.training) for module in model.modules()]
        model.eval()  # batch statistics and random numbers belong to training
        try:
            # A test runs in inference mode, whose tensors have no gradient.
            with torch.inference_mode(False), torch.random.fork_rng([images.device] if images.is_cuda else []):
                with torch.no_grad():
                    u = learner.encode(images.to(next(model.parameters()).dtype))
                activation = {"activation": u.activations} if isinstance(u, Capsules) else {}
                diagnosis = diagnose(model.routing, u.poses if isinstance(u, Capsules) else u, **activation)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return None  # a network of a user's own, which may have other parts under these names
        finally:
            for module, mode in modes:
                module.training = mode
        return next(iter(diagnosis.findings), None)


def shown(metrics: dict[str, Any], tests: bool) -> list[str]:
    """The results of tests and validations, or the parts of the loss in training, as name and value."""
    return [
        f"{name.replace('_', ' ')} {float(value):.5g}"
        for name, value in metrics.items()
        if name != "images_per_s"
        and name.startswith(("val_", "test_")) == tests
        and name.split("_", 1)[-1] not in DETAILS
    ]


def started(trainer: pl.Trainer, learner: Any) -> str:
    """What is trained: network, parameters, input capsules of the class routing, device, backend, images."""
    hparams, routing = learner.hparams, getattr(getattr(learner, "model", None), "routing", None)
    options = ", ".join(f"{name}={value}" for name, value in (hparams.get("options") or {}).items())
    count = f"{sum(parameter.numel() for parameter in learner.parameters()):,}".replace(",", " ")
    text = f"{hparams.get('model')}{f' ({options})' if options else ''}: {count} parameters"
    if hasattr(routing, "in_caps"):
        text += f", {routing.in_caps} input capsules"  # type: ignore[union-attr]
    text += f"; device {learner.device}"
    if routing is not None:
        asked = demanded("capsfast.train.fit", getattr(getattr(routing, "routing", routing), "backend", None))
        names = [
            name for name, backend in backends().items() if backend.available and learner.device.type in backend.devices
        ]
        # On a GPU sizes decide.
        text += f", backend {asked or ' or '.join(names if learner.device.type != 'cpu' else names[:1]) or 'reference'}"
    sets = getattr(trainer.datamodule, "sets", None)  # type: ignore[attr-defined]
    parts = (
        f"{len(value)} {name}" for name, value in (sets._asdict() if sets else {}).items() if hasattr(value, "source")
    )
    return f"{text}; images: {', '.join(parts)}"


def epoch_of(trainer: pl.Trainer) -> str:
    """The epoch, and the number of epochs if there is one, counted from 1."""
    # Count started epochs: Lightning increases current_epoch before the last test.
    epoch, epochs = max(1, trainer.fit_loop.epoch_progress.current.ready), trainer.max_epochs
    return f"{epoch}/{epochs}" if epochs is not None and epochs > 0 else str(epoch)


class Table(RichProgressBar):
    """A table on a terminal, with a row for each epoch, above a progress bar of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._head = True
        self._begin()

    def _begin(self) -> None:
        self._began, self._steps = time.monotonic(), 0
        self._sums: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._begin()  # a run that is resumed within an epoch does not start the epoch
        if self.progress is not None and self.is_enabled:
            self.progress.console.print(started(trainer, pl_module), highlight=False, markup=False)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._begin()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *batch: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *batch)
        self._steps += 1
        for name, value in trainer.callback_metrics.items():
            self._sums[name] = self._sums.get(name, 0) + value

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self._row(trainer, f"{time.monotonic() - self._began:.1f} s")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn != TrainerFn.FITTING:  # the last test, if training ended within an epoch
            self._row(trainer, "")

    def _row(self, trainer: pl.Trainer, seconds: str) -> None:
        """Prints a row: means of the epoch, and results of the last test."""
        if self.progress is None or not self.is_enabled:
            return
        cells = {"epoch": epoch_of(trainer), "step": str(trainer.global_step)}
        for name, value in trainer.progress_bar_metrics.items():
            # images_per_s is a mean already.
            is_loss = name in self._sums and not name.startswith(("val_", "test_", "images_"))
            shown = float(self._sums[name]) / self._steps if is_loss else value
            cells[name] = f"{shown:.0f}" if name == "images_per_s" else f"{shown:.4g}"
        cells["time"] = seconds
        titles = {name: name.replace("_per_", "/").replace("_", " ") for name in cells}
        widths = {name: max(7, *map(len, title.split())) for name, title in titles.items()}
        # A narrow terminal leaves out parts of the loss and of the results.
        kept = {"epoch", "step", "loss", "time"}
        parts = [name for name in cells if name not in kept and not name.endswith(("accuracy", "iou"))]
        while parts and sum(widths.values()) + len(widths) > self.progress.console.width:
            del widths[parts.pop()]
        table = rich.table.Table(box=None, padding=(0, 1, 0, 0), show_header=self._head)
        for name, width in widths.items():
            table.add_column(titles[name], justify="right", width=width)
        table.add_row(*(cells[name] for name in widths))
        self.progress.console.print(table)
        self._head = False

    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        return [TextColumn("{task.description}"), *super().configure_columns(trainer)[1:4]]

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        shown = super().get_metrics(trainer, pl_module)
        return {name: shown[name] for name in ("loss", "images_per_s") if name in shown}

    def _get_train_description(self, current_epoch: int) -> str:
        return f"epoch {epoch_of(self.trainer)}"


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
        if self._enabled:
            print(started(trainer, pl_module), flush=True)

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
        step, total = str(trainer.global_step), trainer.estimated_stepping_batches
        if math.isfinite(total):
            step += f"/{int(total)}"
        if self._enabled:
            # Without flush, a pipe or file would get the lines only after kilobytes.
            print(f"step {step}, epoch {epoch_of(trainer)}: {text}", flush=True)
