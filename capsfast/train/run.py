"""The Lightning trainer of ``capsfast train``."""

import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console

from ..calls import checks
from .checkpoint import Best, WholeCheckpoints, read_to_go_on
from .images import ImageData
from .learner import Learner
from .progress import LOG_EVERY, Guessing, Lines, Table, Throughput
from .stopping import Interrupted, Stop, Stopped, handlers_kept

# Trainer options whose defaults differ from Lightning's.
DEFAULTS: dict[str, Any] = {
    "devices": 1,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": LOG_EVERY,
    # BatchOrder distributes the batches.
    "use_distributed_sampler": False,
}
# Warnings of Lightning that do not apply here.
IDLE = (
    # Making a batch from memory takes less time than its transfer from a worker.
    ".*does not have many workers.*",
    # A resumed run may write beside the files of the earlier run, elsewhere, or at other intervals.
    "Checkpoint directory .* exists and is not empty",
    "The dirpath has changed from",
    ".*callbacks used to create the checkpoint need to be provided",
    ".*smaller than the logging interval.*",
    ".*LeafSpec.* is deprecated",
    # Command passes the words to LightningCLI as args on purpose.
    "LightningCLI's args parameter is intended",
)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences Lightning's hints that do not apply here."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # its report was asked for
    try:
        with warnings.catch_warnings():
            for message in IDLE:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        log.setLevel(level)


def table_or_lines() -> Table | Lines:
    """A table and a bar if standard output is a terminal or a notebook, otherwise lines."""
    console = Console()
    return Table() if console.is_interactive or console.is_jupyter else Lines()


def make_trainer(
    out: Path,
    *,
    epochs: int | None = None,
    best: tuple[str, str] | None = None,
    checkpoint_every: int | None = None,
    progress: bool = True,
    **options: Any,
) -> pl.Trainer:
    """A Lightning trainer that writes ``last.ckpt`` after every epoch and a CSV log, into ``out``.

    Args:
        out: folder of checkpoints and logs. Every run, also a resumed run, has its own log ``logs/version_N``.
        epochs: passes over the data.
        best: metric of a validation that selects ``best.ckpt``, and ``"max"`` or ``"min"``, such as
            ``learner.monitor``; None: no ``best.ckpt``.
        checkpoint_every: write ``step.ckpt`` every so many steps, in addition.
        progress: show a table of epochs and a bar; without a terminal, print a line from time to time.
        options: options of :class:`lightning.pytorch.Trainer`: accelerator, precision, callbacks, logger, ...
    """
    epochs, checkpoint_every, options = checks.plain((epochs, checkpoint_every, options))
    # Without a monitor ModelCheckpoint keeps only the newest file.
    common: dict[str, Any] = {"dirpath": out, "enable_version_counter": False}
    callbacks: list[Callback] = [
        Throughput(),
        Guessing(),
        ModelCheckpoint(filename="last", save_on_train_epoch_end=True, **common),
    ]
    if best is not None:
        callbacks.append(Best(filename="best", monitor=best[0], mode=best[1], save_on_train_epoch_end=False, **common))
    if checkpoint_every is not None:
        callbacks.append(ModelCheckpoint(filename="step", every_n_train_steps=checkpoint_every, **common))
    callbacks.append(Stop(out / "last.ckpt"))  # after Best, so that last.ckpt knows its result
    writer = WholeCheckpoints()
    if progress:
        shown = table_or_lines()
        callbacks.append(shown)
        if isinstance(shown, Lines):
            writer.on_written = shown.wrote
    log, more, plugins = (options.pop(name, None) for name in ("logger", "callbacks", "plugins"))
    csv = CSVLogger(out, name="logs", flush_logs_every_n_steps=LOG_EVERY)
    return pl.Trainer(
        **DEFAULTS | options,
        max_epochs=epochs,
        logger=False if log is False else [csv, *several(log)],
        callbacks=[*callbacks, *several(more)],
        plugins=[writer, *several(plugins)],
        enable_progress_bar=progress,
    )


def several(value: Any) -> list[Any]:
    """A list of what Lightning takes as a list, a single object, or None."""
    return value if isinstance(value, list) else [] if value in (None, True) else [value]


def fit(
    trainer: pl.Trainer, learner: Learner, images: ImageData, resume: Path | None = None
) -> dict[str, dict[str, float]]:
    """Trains, from the start or from a checkpoint, without Lightning's warnings that do not apply.

    With images for validation, given or held out, the network is validated after every epoch (``val_check_interval`` of
    the trainer) and tested once, after training; without them it is tested after every epoch. A callback that watches
    a metric ``val_...``, such as ``best`` of :func:`make_trainer`, needs images for validation: see ``hold_out`` of
    :class:`ImageData`.

    A resumed run continues bit for bit like an uninterrupted run if processes, threads, batch size and device are the
    same.

    Ctrl-C and SIGTERM end it after the current step, with ``last.ckpt``: see :class:`capsfast.train.stopping.Stop`.

    Returns:
        The results of the last weights, ``"last"``, and if ``best.ckpt`` was chosen of its weights, ``"best"``: the
        step, and metrics by their names in the log.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: as :func:`capsfast.train.open_checkpoint`; also if training can't
            continue from the checkpoint.
        Interrupted: a signal ended training; it names the checkpoint to resume from.
        OSError: a checkpoint or a log can't be written; the previous checkpoint is still there.
    """
    # Lightning would run the code that a pickle holds.
    resumed = None if resume is None else (resume, _held_out_again(resume, learner, images)["global_step"])
    try:
        with quiet(), handlers_kept():
            trainer.fit(learner, datamodule=images, ckpt_path=resume)
            if learner.tested_at != trainer.global_step and trainer.limit_val_batches != 0:
                trainer.validate(learner, datamodule=images, verbose=False)
                _keep_if_best(trainer)
            return _results(trainer, learner, images, resume is not None)
    except (Stopped, SystemExit) as error:
        if isinstance(error, SystemExit) and not trainer.interrupted:
            raise
        # A trainer that make_trainer did not make has no Stop.
        heard = [callback.signal for callback in trainer.callbacks if isinstance(callback, Stop)]  # type: ignore[attr-defined]
        number = signal.SIGTERM if isinstance(error, SIGTERMException) else next(filter(None, heard), signal.SIGINT)
        newest = getattr(trainer.strategy.checkpoint_io, "newest", None) or resumed
        raise Interrupted(number, trainer.global_step, *(newest or ())) from None


def _held_out_again(resume: Path, learner: Learner, images: ImageData) -> dict[str, Any]:
    """The content of the checkpoint. Makes ``images`` hold out the images that the earlier run held out.

    Raises:
        ValueError: as :func:`read_to_go_on`; also if ``images`` were made to hold out others.
    """
    content = read_to_go_on(resume, learner)
    held = content[ImageData.CHECKPOINT_HYPER_PARAMS_KEY]
    if images.options["hold_out"] is None:
        images.hold_out(held["hold_out"])
    wanted, got = ((options["hold_out"], options["seed"]) for options in (held, images.options))
    if wanted != got:
        rule = f"hold_out and seed must be those of {resume}, {wanted[0]} and {wanted[1]}"
        raise ValueError(f"capsfast.train.fit: {rule}, got {got[0]} and {got[1]}; give the same")
    return content


def _keep_if_best(trainer: pl.Trainer) -> None:
    """Lightning selects ``best.ckpt`` only within fit. After the last validation ``last.ckpt`` may be better."""
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, Best) or (score := trainer.callback_metrics.get(str(callback.monitor))) is None:
            continue
        # All processes decide this together; the first process writes.
        if not callback.check_monitor_top_k(trainer, score):
            continue
        best = callback.reached(score)
        if trainer.is_global_zero and (last := best.with_name("last.ckpt")).exists():
            # This process has just written the file, and a user's callback may keep any object in it.
            content = torch.load(last, map_location="cpu", weights_only=False)
            # last.ckpt also learns the result, for a resumed run.
            content["callbacks"][callback.state_key] = callback.state_dict()
            for path in (best, last):
                trainer.strategy.checkpoint_io.save_checkpoint(content, path)
        trainer.strategy.barrier()


def _results(trainer: pl.Trainer, learner: Learner, images: ImageData, resumed: bool) -> dict[str, dict[str, float]]:
    """The results that :func:`fit` returns. Tests the last weights and the best if validations watched the training."""
    part = f"{images.watched}_"
    last = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith(part)}
    results = {"last": {"step": trainer.global_step, **last}}
    if images.watched == "test" or trainer.limit_test_batches == 0:
        return results
    results["last"] |= trainer.test(learner, datamodule=images, verbose=False)[0]
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, Best) or callback.best_model_score is None:
            continue
        # A resumed run has already read such a file without running code in it; a new run wrote this file itself.
        content = torch.load(callback.best_model_path, map_location="cpu", weights_only=resumed)
        if content["global_step"] == trainer.global_step:
            results["best"] = results["last"]
            continue
        weights = {name: value.clone() for name, value in learner.state_dict().items()}
        # The log has the results of the last weights.
        loggers, trainer.loggers = trainer.loggers, []
        try:
            learner.load_state_dict(content["state_dict"])
            measured = trainer.test(learner, datamodule=images, verbose=False)[0]
        finally:
            learner.load_state_dict(weights)
            trainer.loggers = loggers
        score = {str(callback.monitor): float(callback.best_model_score)}
        results["best"] = {"step": content["global_step"], **score, **measured}
    return results
