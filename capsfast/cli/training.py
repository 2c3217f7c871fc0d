"""The commands ``train``, ``fit``, ``validate`` and ``test``: LightningCLI around a Learner and an ImageData."""

import json
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger

from .. import checks, plot
from .._imported import search_here
from ..bench import record
from ..files import check_writable, reading, write_text
from ..train import ImageData, Interrupted, Learner, fit, make_trainer
from ..train.checkpoint import check_fits, open_learner, read_checkpoint
from ..train.progress import shown
from ..train.run import DEFAULTS, quiet, several
from .endings import say, say_parts, stop
from .words import HELP, LINKED, by_short_names, in_a_line, spelled_out

# Options that are a number of batches (int) or a share of all batches (float).
COUNTS = [f"trainer.{name}_batches" for name in ("overfit", "limit_train", "limit_val", "limit_test")]
# A folder with one of these files holds a run.
OF_A_RUN = ("config.yaml", "last.ckpt", "best.ckpt", "step.ckpt", "record.json", "curve.png")
NAMES = ("fit", "validate", "test")
GROUPS = ("model", "data", "trainer")


def _options_in(path: Path) -> dict[str, Any]:
    told = yaml.safe_load(path.read_text(encoding="utf-8"))
    groups = {"it": told} | ({name: told.get(name) or {} for name in GROUPS} if isinstance(told, dict) else {})
    for name, group in groups.items():
        # jsonargparse passes over a group that is a number or a list. A text is the name of a file with the group.
        if name != "it" and isinstance(group, str):
            continue
        if not (isinstance(group, dict) and all(isinstance(each, str) for each in group)):
            raise ValueError(f"{name} must hold names and values, got {checks.shown(group)}")
    return dict(told)


class Begin(Callback):
    """When the first step is certain: writes ``config.yaml``, and a new run removes the files of the run before it."""

    def __init__(self, folder: Path, config: str, is_new: bool) -> None:
        self.folder, self.is_new = folder, is_new
        self.config = yaml.safe_load(config) | {"out": str(folder)}
        # These options hold for this run only: a repeated run gets another folder and starts from the beginning.
        for name in ("overwrite", "ckpt_path", "weights_only"):
            self.config.pop(name, None)

    @rank_zero_only
    def on_train_start(self, *_: Any) -> None:
        for name in OF_A_RUN if self.is_new else ():
            (self.folder / name).unlink(missing_ok=True)
        write_text(self.folder / "config.yaml", yaml.safe_dump(self.config, sort_keys=False))


class Command(LightningCLI):
    """``capsfast fit``, ``validate`` or ``test``.

    Args:
        words: the command and its options.
    """

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.held: dict[str, Any] | None = None  # options of the model in the checkpoint
        self.claimed: Path | None = None
        given = [word.partition("=")[2] for word in words if word.startswith("--ckpt_path=")]
        self.checkpoint = Path(given[-1]) if given else None
        self.kept = self._of_checkpoint()
        try:
            super().__init__(
                Learner,
                ImageData,
                save_config_callback=None,
                trainer_defaults={"max_epochs": 10, **DEFAULTS},
                seed_everything_default=False,
                parser_kwargs={"exit_on_error": False} | {name: {"exit_on_error": False} for name in NAMES},
                args=[words[0], *self._of_the_run(), *words[1:]],
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
            )
        finally:
            # A run that was refused leaves its number to the next run: rmdir removes only an empty folder.
            if self.claimed is not None:
                with suppress(OSError):
                    self.claimed.rmdir()

    def _of_checkpoint(self) -> dict[str, Any]:
        """Options by name that the checkpoint on the command line fixes."""
        command, *words = self.words
        if self.checkpoint is None:
            if command != "fit":
                raise ValueError(f"capsfast {command}: a checkpoint is needed; give --resume FILE")
            return {}
        if any(word.startswith("--config") for word in words):
            raise ValueError(
                f"capsfast {command}: a checkpoint holds its model and data; leave out --config, and give only options "
                f"of the trainer"
            )
        content = read_checkpoint(self.checkpoint)
        held = ("--model.", "--data.", "--seed") if command == "fit" else ("--model.",)
        fixed = [word.partition("=")[0] for word in words if word.startswith(held)]
        if fixed:
            raise ValueError(
                f"capsfast {command}: the checkpoint holds model{', data and seed' * (command == 'fit')}; leave out "
                f"{', '.join(fixed)}{', or mistyped options of the trainer' * (command != 'fit')}"
            )
        open_learner(self.checkpoint, content)  # what it holds may be anything
        model = content[Learner.CHECKPOINT_HYPER_PARAMS_KEY]
        data = content[ImageData.CHECKPOINT_HYPER_PARAMS_KEY]
        self.held = model
        kept = {f"model.{name}": value for name, value in model.items() if name not in (*LINKED, "seed")}
        kept |= {f"data.{name}": value for name, value in data.items() if name != "seed"}
        return kept | {"seed": model["seed"]}

    def _of_the_run(self) -> list[str]:
        """Options of a resumed run that its checkpoint does not hold, from config.yaml beside the checkpoint."""
        path = None if self.checkpoint is None else self.checkpoint.with_name("config.yaml")
        if self.words[0] != "fit" or path is None or not path.is_file():
            return []
        with reading("capsfast fit", path, "the options of a run", "mend it, or remove it"):
            told = _options_in(path)
            names = ("trainer", "checkpoint_every", "patience")
            return [f"--{name}={json.dumps(told[name])}" for name in names if told.get(name) is not None]

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        found = LightningCLI.subcommands()
        return {name: found[name] for name in NAMES}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--out", type=str, default="out/train", help="Folder for checkpoints, logs and pictures.")
        parser.add_argument("--overwrite", type=bool, default=False, help="Replace the run in that folder.")
        parser.add_argument("--seed", type=int, default=0, help="Seed of weights, order and augmentation.")
        parser.add_argument("--checkpoint_every", type=int | None, help="Write step.ckpt every so many steps.")
        parser.add_argument("--patience", type=int | None, help="Stop after so many tests without improvement.")
        for part in ("model", "data"):
            parser.link_arguments("seed", f"{part}.seed")
        for name, read in LINKED.items():
            parser.link_arguments("data", f"model.{name}", read, apply_on="instantiate")
        for action in parser._actions:
            if action.dest in COUNTS:
                # 1 is one batch, 1.0 all batches, and jsonargparse takes the first type that fits. typing caches
                # unions, so an annotation of Lightning may have float before int.
                action._typehint = int | float | None  # type: ignore[attr-defined]
        parser.set_defaults({"data.data": "digits", **self.kept})

    def _parse_ckpt_path(self) -> None:
        """Does nothing, because __init__ has read the checkpoint."""

    def before_instantiate_classes(self) -> None:
        if self._get(self.config, "ckpt_path") is not None and self.checkpoint is None:
            raise ValueError(f"capsfast {self.subcommand}: ckpt_path must be given as an option, not in a file")

    def instantiate_trainer(self, **more: Any) -> Trainer:
        """
        Raises:
            ValueError: options that don't fit the checkpoint.
            MisconfigurationException: options that don't fit each other, or this machine.
        """
        given = {**self._get(self.config_init, "trainer"), **more}
        if self.held is not None:
            check_fits(f"capsfast {self.subcommand}: {self.checkpoint}", self.held, self.datamodule)
        best = None if given["limit_val_batches"] == 0 else self.model.monitor
        patience = self._get(self.config, "patience")
        self.out = self._folder()
        callbacks = several(given.pop("callbacks", None))
        training = self.subcommand == "fit"
        if training:
            config = self._parser("fit").dump(self.config["fit"], skip_unset=False)
            callbacks.append(Begin(self.out, config, not self.goes_on))
        if patience is not None:
            if best is None:
                raise ValueError("capsfast fit: patience counts tests, and limit_val_batches=0 leaves these out")
            callbacks.append(EarlyStopping(best[0], mode=best[1], patience=patience, strict=False))
        progress = given.pop("enable_progress_bar") is not False and training
        try:
            return make_trainer(
                self.out,
                epochs=given.pop("max_epochs"),
                best=best,
                checkpoint_every=self._get(self.config, "checkpoint_every"),
                progress=progress,
                callbacks=callbacks,
                **given if training else given | {"logger": False},
            )
        except (ValueError, TypeError, MisconfigurationException) as error:
            remedy = "; --trainer.accelerator=auto takes what is there" if "accelerator" in str(given) else ""
            text = " ".join(str(error).split()).rstrip(".!")
            raise MisconfigurationException(f"{text}{remedy}") from None

    def _folder(self) -> Path:
        """The folder of the run: a new one if the folder holds a run, unless it is resumed or overwritten."""
        asked = Path(self._get(self.config, "out"))
        if self.checkpoint is not None and not any(word.startswith("--out=") for word in self.words):
            asked = self.checkpoint.parent
        self.goes_on = self.checkpoint is not None and self.checkpoint.resolve().parent == asked.resolve()
        # Only the first process writes files.
        if self.subcommand != "fit" or rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            return asked
        check_writable(asked)
        if self.goes_on or self._get(self.config, "overwrite"):
            return asked
        for folder in chain([asked], (asked.with_name(f"{asked.name}-{n}") for n in count(2))):
            if any((folder / name).exists() for name in OF_A_RUN):
                continue
            # Another run may start at the same moment: only one of them makes the folder of the log.
            with suppress(FileExistsError):
                (folder / "logs").mkdir(parents=True)
                self.claimed = folder / "logs"
                break
        if folder != asked:
            say(f"{asked} holds a run; this one goes to {folder} (--overwrite takes its place)")
        return folder

    def fit(self, model: Learner, datamodule: ImageData, ckpt_path: str | None = None, **_: Any) -> None:
        """Trains; LightningCLI calls it when trainer, model and data are made."""
        start = time.perf_counter()
        if self.trainer.is_global_zero:
            say_parts(datamodule.sets)
        try:
            fit(self.trainer, model, datamodule, None if ckpt_path is None else Path(ckpt_path))
        except Interrupted as end:
            if not self.trainer.is_global_zero:
                # A launcher would take any other status for a crash and kill the process that reports.
                sys.exit(0)
            raise stop(f"capsfast train: {self._ending(end)}", 128 + end.signal) from None
        except OSError as error:
            # Errors in writing the logs come without a filename.
            error.filename = error.filename or str(self.out)
            raise
        if self.trainer.is_global_zero:
            _report(self.trainer, model, datamodule, self.out, time.perf_counter() - start, self.goes_on)

    def validate(self, model: Learner, datamodule: ImageData, ckpt_path: str | None = None, **_: Any) -> None:
        if self.trainer.is_global_zero:
            say_parts(datamodule.sets)
        with quiet():
            self.trainer.validate(model, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False, weights_only=True)
        if self.trainer.is_global_zero:
            say(", ".join(shown(self.trainer.progress_bar_metrics, tests=True)))

    test = validate

    def _ending(self, end: Interrupted) -> str:
        """The message after a signal: the step, the checkpoint, and the command to resume."""
        by = "" if end.signal == signal.SIGINT else f" by {signal.Signals(end.signal).name}"
        at = f"interrupted{by} at step {end.step}"
        if end.checkpoint is None:
            return f"{at}; there is no checkpoint yet"
        words = ["python", "-m", "capsfast", "train", "--resume", str(end.checkpoint)]
        if end.checkpoint.parent != self.out:
            words += ["--out", str(self.out)]
        return f"{at}; {end.checkpoint} holds step {end.checkpoint_step}; to go on: {shlex.join(words)}"


def _report(trainer: Trainer, learner: Learner, images: ImageData, out: Path, seconds: float, resumed: bool) -> None:
    logs = [Path(logger.log_dir) for logger in trainer.loggers if isinstance(logger, CSVLogger)]
    metrics = plot.read_metrics(logs[0], resumed) if logs else {}
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("test_")}
    if metrics:
        plot.save(plot.curve_figure(metrics), out / "curve.png")
    content = {
        "command": shlex.join(["python", "-m", "capsfast", *sys.argv[1:]]),
        "environment": record.environment(learner.device),
        "parameters": sum(each.numel() for each in learner.parameters()),
        "model": dict(learner.hparams),
        "images": {**images.hparams, "data_dir": None},
        "processes": trainer.world_size,
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "seconds": round(seconds, 1),
        "results": found,
        "curve": {name: [(step, float(f"{value:.5g}")) for step, value in points] for name, points in metrics.items()},
    }
    # One line per entry, for short and readable diffs.
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())
    write_text(out / "record.json", f"{{\n{lines}\n}}\n")
    results = ", ".join(shown(trainer.progress_bar_metrics, tests=True))
    say(f"{trainer.global_step} steps in {seconds:.1f} s{': ' if results else ''}{results}")
    say(f"wrote {', '.join(sorted(path.name for path in out.glob('[!.]*') if path.is_file()))} in {out}")


def run(command: str, words: Sequence[str]) -> None:
    """Runs one of the four commands.

    Raises:
        ValueError, TypeError, FileNotFoundError, OSError: :func:`capsfast.cli.endings.plain_errors` prints them.
    """
    asks = bool({"--help", "-h"} & {*words})
    if command == "train" and asks:
        say(HELP)
        return
    words = words if asks else spelled_out(command, words)
    given = [word.partition("=")[2] for word in words if word.startswith("--config=")]
    # jsonargparse also takes the options themselves.
    configs = [Path(each).expanduser() for each in given if ": " not in each]
    # A pipe can be read only once.
    for path in (path for path in configs if not path.is_fifo()):
        with reading(f"capsfast {command}", path, "options", "config.yaml of a run shows the form"):
            _options_in(path)
    resumed = [Path(word.partition("=")[2]) for word in words if word.startswith("--ckpt_path=")]
    sources = [*configs, *resumed, *(path.with_name("config.yaml") for path in resumed)]
    search_here()
    try:
        with quiet():
            Command(["fit" if command == "train" else command, *words])
    except (ArgumentError, ValueError, TypeError, MisconfigurationException, ModuleNotFoundError) as error:
        cause: BaseException = error
        if str(error).startswith("Call to compute_fn") and error.__cause__ is not None:  # the data set raised the cause
            cause = error.__cause__
            if not isinstance(cause, ValueError | TypeError):
                raise cause from None
        text = in_a_line(cause) if isinstance(cause, ArgumentError) else str(cause).strip()
        of_the_words = text.startswith(("capsfast fit", f"capsfast {command}"))
        if not text.startswith("capsfast"):
            if isinstance(cause, ValueError | TypeError) and not text.startswith("`val_check_interval`"):
                raise
            text = f"capsfast {command}: {' '.join(text.split())}"
            text = text.replace("`val_check_interval`", "--trainer.val_check_interval")
        # Lightning's command line does not say where a value is from.
        files = [str(path) for path in sources if path.is_file()]
        if files and not of_the_words and not any(path in text for path in files):
            text += f"; options are from {', '.join(files)} and the command line"
        raise ValueError(by_short_names(text).replace("capsfast fit: ", f"capsfast {command}: ")) from None
