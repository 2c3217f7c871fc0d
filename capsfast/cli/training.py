"""The commands ``train``, ``fit``, ``validate`` and ``test``: LightningCLI around a Learner and an ImageData."""

import json
import shlex
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable
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

from .. import plot
from ..bench import record
from ..data.images import PARTS
from ..storage.dotted import search_here
from ..storage.files import check_writable, reading, write_text
from ..train import ImageData, Interrupted, Learner, fit, make_trainer
from ..train.checkpoint import check_fits, open_learner, read_checkpoint
from ..train.progress import shown
from ..train.run import DEFAULTS, quiet, several
from .early import GROUPS, options_in
from .endings import say, say_parts, stop
from .parser import OPTIONS, Parser

# Options that are a number of batches (int) or a share of all batches (float).
COUNTS = [f"trainer.{name}_batches" for name in ("overfit", "limit_train", "limit_val", "limit_test")]
# A folder with one of these files holds a run.
OF_A_RUN = ("config.yaml", "last.ckpt", "best.ckpt", "step.ckpt", "record.json", "curve.png")
# Options of a model whose values come from the data set.
LINKED: dict[str, Callable[[ImageData], Any]] = {
    "in_channels": lambda images: images.sets.channels,
    "image_size": lambda images: images.sets.image_size,
    "num_classes": lambda images: images.sets.num_classes,
    "class_names": lambda images: images.sets.train.source.classes,
}


class Begin(Callback):
    """When the first step is certain: writes ``config.yaml``, and a new run removes the files of the run before it."""

    def __init__(self, folder: Path, config: str, is_new: bool) -> None:
        self.folder, self.is_new = folder, is_new
        self.config = yaml.safe_load(config) | {"out": str(folder)}
        # These options hold for this run only: a repeated run gets another folder and starts from the beginning.
        for name in ("overwrite", "ckpt_path", "weights_only"):
            self.config.pop(name, None)

    @rank_zero_only
    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        # Otherwise a run that is resumed from another folder takes the old best.ckpt for its own.
        if self.is_new and stage == "fit":
            (self.folder / "best.ckpt").unlink(missing_ok=True)

    @rank_zero_only
    def on_train_start(self, *_: Any) -> None:
        config = self.folder / "config.yaml"
        if not self.is_new and config.is_file() and not self.config["model"].get("pretrained"):
            # A checkpoint does not hold where its first weights came from.
            self.config["model"]["pretrained"] = yaml.safe_load(config.read_text("utf-8"))["model"].get("pretrained")
        for name in OF_A_RUN if self.is_new else ():
            (self.folder / name).unlink(missing_ok=True)
        write_text(config, yaml.safe_dump(self.config, sort_keys=False))


class Command(LightningCLI):
    """``capsfast train``, ``fit``, ``validate`` or ``test``.

    Args:
        command: its name.
        asked: its options, from :func:`capsfast.cli.early.asked`.
    """

    def __init__(self, command: str, asked: Namespace) -> None:
        self.command, self.asked = command, asked
        self.training = command in ("train", "fit")
        self.held: dict[str, Any] | None = None  # options of the model in the checkpoint
        self.first_step = 0
        self.claimed: Path | None = None
        self.checkpoint = None if asked.resume is None else Path(asked.resume)
        self.kept = {} if self.checkpoint is None else self._of_checkpoint(self.checkpoint)
        try:
            super().__init__(
                Learner,
                ImageData,
                save_config_callback=None,
                trainer_defaults={"max_epochs": 10, **DEFAULTS},
                seed_everything_default=False,
                parser_class=Parser,
                parser_kwargs={
                    "prog": f"capsfast {command}",
                    "description": None,
                    "exit_on_error": False,
                    "allow_abbrev": False,
                },
                args=[*self._of_the_run(), *asked.words],
                run=False,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
            )
            work = self.fit if self.training else getattr(self, command)
            work(self.model, self.datamodule, ckpt_path=asked.resume)
        finally:
            # A run that was refused leaves its number to the next run: rmdir removes only an empty folder.
            if self.claimed is not None:
                with suppress(OSError):
                    self.claimed.rmdir()

    def _of_checkpoint(self, path: Path) -> dict[str, Any]:
        """Options by name that a checkpoint fixes."""
        content = read_checkpoint(path)
        open_learner(path, content)  # what it holds may be anything
        model = content[Learner.CHECKPOINT_HYPER_PARAMS_KEY]
        data = content[ImageData.CHECKPOINT_HYPER_PARAMS_KEY]
        self.held, self.first_step = model, int(content["global_step"])
        kept = {f"model.{name}": value for name, value in model.items() if name not in (*LINKED, "seed", "options")}
        kept |= {f"{OPTIONS}.{name}": value for name, value in model["options"].items()}
        # Other data hold nothing out.
        same = self.asked.data is None
        if same and data.get("data") is None:
            remedy = "capsfast.train.fit goes on" if self.training else "give other data with --data"
            raise ValueError(f"capsfast {self.command}: {path} was trained on data sets from Python; {remedy}")
        left_out = () if same else ("seed", "hold_out")
        kept |= {f"data.{name}": value for name, value in data.items() if name not in left_out}
        return kept | {"seed": model["seed"]}

    def _of_the_run(self) -> list[str]:
        """Options of a resumed run that its checkpoint does not hold, from config.yaml beside the checkpoint."""
        path = None if self.checkpoint is None else self.checkpoint.with_name("config.yaml")
        if not self.training or path is None or not path.is_file():
            return []
        with reading(f"capsfast {self.command}", path, "the options of a run", "mend it, or remove it"):
            told = options_in(path.read_text(encoding="utf-8"), path.parent)
            names = ("trainer", "checkpoint_every", "best", "patience")
            return [f"--{name}={json.dumps(told[name])}" for name in names if told.get(name) is not None]

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(Trainer, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})
        # add_network adds the options of the network.
        parser.add_class_arguments(Learner, "model", skip={"options"}, fail_untyped=False, sub_configs=True)
        parser.add_lightning_class_args(ImageData, "data")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        assert isinstance(parser, Parser)
        parser.add_argument("--ckpt_path", type=str | None, help="Continue from this checkpoint, or test it.")
        parser.add_argument("--out", type=str, default="out/train", help="Folder for checkpoints, logs and pictures.")
        parser.add_argument("--overwrite", type=bool, default=False, help="Replace the run in that folder.")
        parser.add_argument("--seed", type=int, default=0, help="Seed of weights, order and augmentation.")
        parser.add_argument("--checkpoint_every", type=int | None, help="Write step.ckpt every so many steps.")
        parser.add_argument("--best", type=bool, default=False, help="Write best.ckpt, the best by validation.")
        parser.add_argument("--patience", type=int | None, help="Stop after so many validations without improvement.")
        # Data of a checkpoint keep their seed: it drew the images that are held out.
        self.linked = {f"{part}.seed" for part in GROUPS[:2]} - self.kept.keys()
        for name in sorted(self.linked):
            parser.link_arguments("seed", name)
        for name, read in LINKED.items():
            parser.link_arguments("data", f"model.{name}", read, apply_on="instantiate")
        for action in parser._actions:
            if action.dest in COUNTS:
                # 1 is one batch, 1.0 all batches, and jsonargparse takes the first type that fits. typing caches
                # unions, so an annotation of Lightning may have float before int.
                action._typehint = int | float | None  # type: ignore[attr-defined]
        model, routing = self.asked.model or "capsnet", self.asked.routing
        if self.held is not None:
            model, routing = self.held["model"], self.held["options"].get("routing")
        parser.add_network(f"capsfast {self.command}", model, routing)
        for name in self.kept:
            # A network with **options takes any.
            if f"--{name}" not in parser._option_string_actions:
                parser.add_argument(f"--{name}", type=Any)
        parser.add_short_names()
        parser.set_defaults({"data.data": "digits", **self.kept})

    def before_instantiate_classes(self) -> None:
        """
        Raises:
            ValueError: an option that the checkpoint fixes has another value, or a file names the checkpoint.
        """
        config, unchanged = self.config, self.parser.parse_args([])
        if self.held is not None:
            fixed = {*(GROUPS[:2] if self.training else GROUPS[:1])}
            if self.training or self.asked.data is None:  # other images would be held out, such as those to train on
                fixed |= {"seed", "data.seed", "data.hold_out"}
            changed = [
                self.parser.short(name)  # type: ignore[attr-defined]
                for name, value in config.items()
                if {name, name.partition(".")[0]} & fixed and value != unchanged.get(name) and name not in self.linked
            ]
            if changed:
                what = "model, data and seed" if self.training else "model, seed and hold_out"
                raise ValueError(
                    f"capsfast {self.command}: the checkpoint holds {what}; leave out {', '.join(changed)}"
                )
            config.model["options"] = self.held["options"]
            return
        if config.ckpt_path is not None and self.checkpoint is None:
            raise ValueError(f"capsfast {self.command}: ckpt_path must be given as an option, not in a file")
        if config.model.model != (self.asked.model or "capsnet"):
            got = f"{self.asked.model} before a --config with {config.model.model}"
            raise ValueError(f"capsfast {self.command}: --config must come before --model, got --model {got}")
        config.model["options"] = vars(config.model.get("options") or Namespace())

    def instantiate_trainer(self, **more: Any) -> Trainer:
        """
        Raises:
            ValueError: options that don't fit the checkpoint.
            MisconfigurationException: options that don't fit each other, or this machine.
        """
        options = {**self._get(self.config_init, "trainer"), **more}
        if self.held is not None:
            check_fits(f"capsfast {self.command}: {self.checkpoint}", self.held, self.datamodule)
        best, patience = self._get(self.config, "best"), self._get(self.config, "patience")
        if (best or patience is not None) and options["limit_val_batches"] == 0:
            raise ValueError("capsfast fit: best and patience need validation, and limit_val_batches=0 leaves it out")
        self.out = self._folder()
        callbacks = several(options.pop("callbacks", None))
        if self.training:
            config = self.parser.dump(self.config, skip_unset=False)
            callbacks.append(Begin(self.out, config, not self.goes_on))
        if patience is not None:
            metric, mode = self.model.monitor
            callbacks.append(EarlyStopping(metric, mode=mode, patience=patience, strict=False))
        progress = options.pop("enable_progress_bar") is not False and self.training
        try:
            return make_trainer(
                self.out,
                epochs=options.pop("max_epochs"),
                best=self.model.monitor if best or patience is not None else None,
                checkpoint_every=self._get(self.config, "checkpoint_every"),
                progress=progress,
                callbacks=callbacks,
                **options if self.training else options | {"logger": False},
            )
        except (ValueError, TypeError, MisconfigurationException) as error:
            remedy = "; --accelerator=auto takes what is there" if "accelerator" in str(options) else ""
            text = " ".join(str(error).split()).rstrip(".!")
            raise MisconfigurationException(f"{text}{remedy}") from None

    def _folder(self) -> Path:
        """The folder of the run: a new one if the folder holds a run, unless it is resumed or overwritten."""
        asked = Path(self._get(self.config, "out"))
        if self.checkpoint is not None and self.asked.out is None:
            asked = self.checkpoint.parent
        self.goes_on = self.checkpoint is not None and self.checkpoint.resolve().parent == asked.resolve()
        # Only the first process writes files.
        if not self.training or rank_zero_only.rank != 0:  # type: ignore[attr-defined]
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
        datamodule.hold_out_for(self.trainer)
        if self.trainer.is_global_zero:
            say_parts(datamodule.sets)
        try:
            results = fit(self.trainer, model, datamodule, None if ckpt_path is None else Path(ckpt_path))
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
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, EarlyStopping) and callback.stopped_epoch > 0:
                    say(f"stopped: {callback.patience} validations without improvement")
            seconds = time.perf_counter() - start
            _report(self.trainer, model, datamodule, self.out, seconds, self.goes_on, self.first_step, results)

    def validate(self, model: Learner, datamodule: ImageData, **options: Any) -> None:
        if datamodule.sets.val is None:
            remedy = "train with --best, --patience or --hold-out, or give --data with them; capsfast test tests"
            raise ValueError(f"capsfast validate: {self.checkpoint} has no images for validation; {remedy}")
        self._measure(self.trainer.validate, model, datamodule, **options)

    def test(self, model: Learner, datamodule: ImageData, **options: Any) -> None:
        self._measure(self.trainer.test, model, datamodule, **options)

    def _measure(
        self, loop: Any, model: Learner, datamodule: ImageData, ckpt_path: str | None = None, **_: Any
    ) -> None:
        if self.trainer.is_global_zero:
            say_parts(datamodule.sets)
        with quiet():
            loop(model, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False, weights_only=True)
        if self.trainer.is_global_zero:
            say(", ".join(shown(self.trainer.progress_bar_metrics, tests=True)))

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


def _report(
    trainer: Trainer,
    learner: Learner,
    images: ImageData,
    out: Path,
    seconds: float,
    resumed: bool,
    first_step: int,
    results: dict[str, dict[str, float]],
) -> None:
    logs = [Path(logger.log_dir) for logger in trainer.loggers if isinstance(logger, CSVLogger)]
    metrics = plot.read_metrics(logs[0], resumed) if logs else {}
    sets = images.sets
    parts: dict[str, Any] = {
        part: {"images": len(images)} for part, images in zip(PARTS, sets[:3], strict=True) if images is not None
    }
    if images.hparams["hold_out"]:
        parts["val"]["held_out"] = images.hparams["hold_out"]
    if sets.test is sets.val:
        parts["test"]["same_as"] = "val"
    if metrics:
        plot.save(plot.curve_figure(metrics), out / "curve.png")
    content = {
        "command": shlex.join(["python", "-m", "capsfast", *sys.argv[1:]]),
        "environment": record.environment(learner.device),
        "parameters": sum(parameter.numel() for parameter in learner.parameters()),
        "model": dict(learner.hparams),
        "images": {**images.hparams, "data_dir": None},
        "processes": trainer.world_size,
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "first_step": first_step,
        "seconds": round(seconds, 1),
        "parts": parts,
        "results": {name: value for name, value in results["last"].items() if name.startswith("test_")},
        **results,
        "curve": {name: [(step, float(f"{value:.5g}")) for step, value in points] for name, points in metrics.items()},
    }
    # One line per entry, for short and readable diffs.
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())
    write_text(out / "record.json", f"{{\n{lines}\n}}\n")
    last = ", ".join(shown(results["last"], tests=True))
    say(f"{trainer.global_step - first_step} steps in {seconds:.1f} s{': ' if last else ''}{last}")
    if "best" in results:
        say(f"best.ckpt, step {results['best']['step']}: {', '.join(shown(results['best'], tests=True))}")
    say(f"wrote {', '.join(sorted(path.name for path in out.glob('[!.]*') if path.is_file()))} in {out}")


def run(command: str, asked: Namespace) -> None:
    """Runs one of the four commands with the options from :func:`capsfast.cli.early.asked`.

    Raises:
        ValueError, TypeError, FileNotFoundError, OSError: :func:`capsfast.cli.endings.plain_errors` prints them.
    """
    search_here()
    try:
        with quiet():
            Command(command, asked)
    except (ArgumentError, ValueError, TypeError, MisconfigurationException, ModuleNotFoundError) as error:
        cause: BaseException = error
        if str(error).startswith("Call to compute_fn") and error.__cause__ is not None:  # the data set raised the cause
            cause = error.__cause__
            if not isinstance(cause, ValueError | TypeError):
                raise cause from None
        root = cause
        while root.__cause__ is not None:
            root = root.__cause__
        if isinstance(root, ModuleNotFoundError) and not isinstance(error, ArgumentError):
            cause = root  # a logger or a profiler needs a package
        text = str(cause).strip()
        of_the_words = text.startswith((f"capsfast {command}", "unrecognized arguments", "argument --"))
        if not text.startswith("capsfast"):
            if isinstance(cause, ValueError | TypeError) and not text.startswith("`val_check_interval`"):
                raise
            text = f"capsfast {command}: {' '.join(text.split())}"
            text = text.replace("`val_check_interval`", "--test-every")
        # Lightning's command line does not say where a value is from.
        resumed = [] if asked.resume is None else [Path(asked.resume), Path(asked.resume).with_name("config.yaml")]
        files = [str(path) for path in (*asked.config, *resumed) if path.is_file()]
        if files and not of_the_words and not any(path in text for path in files):
            text += f"; options are from {', '.join(files)} and the command line"
        raise ValueError(text.replace("capsfast fit: ", f"capsfast {command}: ")) from None
