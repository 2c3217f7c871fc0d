"""The command ``train``: arguments here, work in :mod:`capsfast.train`."""

import json
import shlex
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from ..bench import record
from ..files import check_writable, write_text
from ..nn import ROUTINGS
from . import training_options as options
from .common import DataDir, on_command_line, plain_errors, say
from .endings import stop
from .training_options import IMAGES, LEARNING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from ..train import ImageData, Interrupted, Learner

# Options by where they go; a resumed run takes all of them from its checkpoint.
MODEL = ("conv_channels", "primary_groups", "primary_dim", "digit_dim", "types", "num_caps", "caps_dim")
ROUTING = ("routing", "num_iterations", "backend")
FIXED = frozenset(("model", "reconstruction", "option", "normalize", *MODEL, *ROUTING, *LEARNING, *IMAGES))
TRAINER = (
    "epochs",
    "max_steps",
    "log",
    "checkpoint_every",
    "test_every",
    "accelerator",
    "devices",
    "num_nodes",
    "strategy",
    "precision",
    "deterministic",
    "limit_train_batches",
    "limit_val_batches",
    "progress",
)

# Of these a profile, which runs no training, heeds two alone. It chooses the backends itself, and makes one batch.
NOT_PROFILED = (*(name for name in TRAINER if name not in ("accelerator", "progress")), "backend", "workers")

PROFILED = 10  # steps

Size = Annotated[int | None, typer.Option(min=1, show_default="the model's", rich_help_panel="Model")]
Options = dict[str, Any]


def train(
    context: typer.Context,
    data: Annotated[
        str,
        typer.Option(
            help="digits, mnist, fashion-mnist, cifar10, smallnorb, a folder of IDX files; multi:NAME or affine:NAME "
            "of one."
        ),
    ] = "digits",
    data_dir: DataDir = None,
    model: Annotated[str, typer.Option(help=f"{', '.join(options.MODELS)}.")] = "capsnet",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data.")] = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Images a step, of each process.")] = 128,
    out: Annotated[Path, typer.Option(help="Folder of checkpoints, logs and pictures.")] = Path("out/train"),
    resume: Annotated[
        Path | None, typer.Option(help="Go on from this checkpoint, with its model, data and learning rate.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Measure routing's share of a step instead; profile.json.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, order and augmentation.")] = 0,
    conv_channels: Size = None,
    primary_groups: Size = None,
    primary_dim: Size = None,
    digit_dim: Size = None,
    types: Size = None,
    num_caps: Size = None,
    caps_dim: Size = None,
    routing: Annotated[
        str | None, typer.Option(help=f"{', '.join(ROUTINGS)}.", show_default="dynamic", rich_help_panel="Model")
    ] = None,
    num_iterations: Size = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE, of the routing or its layer; repeat.", rich_help_panel="Model"),
    ] = None,
    reconstruction: Annotated[bool, typer.Option(help="Whether there is a decoder.", rich_help_panel="Model")] = True,
    backend: Annotated[str | None, typer.Option(help="Of the routing.", rich_help_panel="Model")] = None,
    loss: options.Loss = None,
    spread_steps: options.SpreadSteps = 10_000,
    lr: options.LearningRate = 1e-3,
    weight_decay: options.WeightDecay = 0.0,
    schedule: options.Schedule = "exponential",
    warmup_steps: options.WarmupSteps = 0,
    decay_rate: options.DecayRate = 0.96,
    decay_steps: options.DecaySteps = None,
    clip: options.Clip = None,
    reconstruction_weight: options.ReconstructionWeight = 0.0005,
    entropy_weight: options.EntropyWeight = 0.0,
    caps_dropout: options.CapsDropout = 0.0,
    decoder_dropout: options.DecoderDropout = 0.0,
    adversarial: options.Adversarial = None,
    adversarial_eps: options.AdversarialEps = 0.1,
    adversarial_steps: options.AdversarialSteps = 10,
    adversarial_share: options.AdversarialShare = 1.0,
    image_size: options.ImageSize = None,
    shift: options.Shift = None,
    rotation: options.Rotation = 0.0,
    scale: options.Scale = 0.0,
    crop: options.Crop = None,
    crop_padding: options.CropPadding = 0,
    flip: options.Flip = False,
    brightness: options.Brightness = 0.0,
    contrast: options.Contrast = 0.0,
    cutout: options.Cutout = None,
    normalize: options.Normalize = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that make batches.", rich_help_panel="Images")] = 0,
    log: Annotated[list[str], typer.Option(help="csv, tensorboard; repeat.", rich_help_panel="Run")] = ["csv"],  # noqa: B006
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints step.ckpt.", rich_help_panel="Run")
    ] = None,
    test_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between tests; default an epoch.", rich_help_panel="Run")
    ] = None,
    max_steps: Annotated[int, typer.Option(help="End after so many steps; -1 never.", rich_help_panel="Run")] = -1,
    limit_train_batches: Annotated[
        int | None, typer.Option(min=1, help="Batches of an epoch, at most; default all.", rich_help_panel="Run")
    ] = None,
    limit_val_batches: Annotated[
        int | None, typer.Option(min=0, help="Batches of a test, at most; 0: no test.", rich_help_panel="Run")
    ] = None,
    progress: Annotated[
        bool, typer.Option(help="A bar, or without a terminal a line now and then.", rich_help_panel="Run")
    ] = True,
    accelerator: Annotated[str, typer.Option(help="Of Lightning, as all below.", rich_help_panel="Devices")] = "auto",
    devices: Annotated[str, typer.Option(rich_help_panel="Devices")] = "1",
    num_nodes: Annotated[int, typer.Option(min=1, rich_help_panel="Devices")] = 1,
    strategy: Annotated[str, typer.Option(rich_help_panel="Devices")] = "auto",
    precision: Annotated[str, typer.Option(rich_help_panel="Devices")] = "32-true",
    deterministic: Annotated[bool, typer.Option("--deterministic", rich_help_panel="Devices")] = False,
) -> None:
    """Trains a capsule network, tests it after every epoch, and writes last.ckpt, record.json and curve.png."""
    given: Options = dict(context.params)
    with plain_errors("train"):
        options.check_used(context)
        _check_profiled(context)
        learner, images = _resumed(context, resume, data_dir) if resume is not None else _new(context)
        if on_command_line(context, "reconstruction_weight") and not learner.weighs_reconstruction:
            raise stop(f"capsfast train: --reconstruction-weight has no use here, {given['model']} weighs no decoder")
        if profile:
            check_writable(out)
            _profile(learner, images, accelerator, out)
            return
        # Given as False, it would switch off what the caller has switched on.
        trainer = _trainer(out, {name: given[name] for name in TRAINER} | {"deterministic": deterministic or None})
        _check_test_every(given, trainer, images)
        check_writable(out)
        _fit(context, trainer, learner, images)


def _check_profiled(context: typer.Context) -> None:
    useless = [name for name in NOT_PROFILED if on_command_line(context, name)] if context.params["profile"] else []
    if useless:
        raise stop(
            f"capsfast train: --profile has no use for {_spelled(useless)}; it measures steps and trains nothing"
        )


def _spelled(names: Iterable[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def _new(context: typer.Context) -> "tuple[Learner, ImageData]":
    from ..data.catalogue import check_data_dir
    from ..train import ImageData, make_learner

    given = context.params
    check_data_dir("capsfast train", given["data"], given["data_dir"])
    images = ImageData(data_dir=given["data_dir"], **{name: given[name] for name in IMAGES})
    images.setup()
    of_model = {name: given[name] for name in (*MODEL, *ROUTING) if given[name] is not None}
    if on_command_line(context, "reconstruction"):
        of_model["reconstruction"] = given["reconstruction"]
    of_model |= _named(given["option"] or [])
    learning = {name: given[name] for name in LEARNING} | {"normalize": _normalize(given["normalize"], images)}
    return make_learner(given["model"], *images.sets[2:], options=of_model, **learning), images


def _normalize(given: str | None, images: "ImageData") -> Any:
    """What a Learner takes: of ``"set"``, mean and deviation of each channel of the images to train on."""
    from ..data import channel_statistics

    if given not in (None, "set", "image"):
        raise stop(f"capsfast train: --normalize must be set or image, got {given!r}")
    return [list(part) for part in channel_statistics(images.sets.train.source)] if given == "set" else given


def _named(pairs: list[str]) -> Options:
    """``NAME=VALUE`` as the command line gives them: numbers, true, false and null as in JSON, all else as text."""
    found: Options = {}
    for pair in pairs:
        name, mark, value = pair.partition("=")
        if not (name and mark):
            raise stop(f"capsfast train: --option must be NAME=VALUE, got {pair!r}")
        try:
            found[name.replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            found[name.replace("-", "_")] = value
    return found


def _resumed(context: typer.Context, checkpoint: Path, data_dir: str | None) -> "tuple[Learner, ImageData]":
    from ..train import open_checkpoint

    named = [name for name in sorted(FIXED) if on_command_line(context, name)]
    if named:
        raise stop(f"capsfast train: --resume takes {_spelled(named)} from the checkpoint; leave out what it fixes")
    learner, images = open_checkpoint(checkpoint, data_dir=data_dir)
    learner.train()
    return learner, images


def _trainer(out: Path, given: Options) -> "Trainer":
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from ..train import make_trainer
    from ..train.run import quiet

    given["devices"] = int(given["devices"]) if given["devices"].lstrip("-").isdigit() else given["devices"]
    try:
        with quiet():
            return make_trainer(out, **given)
    except (ValueError, MisconfigurationException) as error:
        raise stop(f"capsfast train: {str(error).removeprefix('capsfast.train: ')}") from None


def _check_test_every(given: Options, trainer: "Trainer", images: "ImageData") -> None:
    from ..data import BatchOrder

    order = BatchOrder(
        len(images.sets.train), images.options["batch_size"], shuffle=True, world_size=trainer.world_size
    )
    steps = min(len(order), given["limit_train_batches"] or len(order))
    if given["test_every"] is not None and given["limit_val_batches"] == 0:
        raise stop("capsfast train: --test-every has no use beside --limit-val-batches 0, which is no test")
    if given["test_every"] is not None and given["test_every"] > steps:
        raise stop(f"capsfast train: --test-every must be at most {steps}, an epoch, got {given['test_every']}")


def _fit(context: typer.Context, trainer: "Trainer", learner: "Learner", images: "ImageData") -> None:
    from lightning.pytorch.loggers import CSVLogger

    from ..train import Interrupted, fit
    from ..train.pictures import curve, read_metrics, save
    from ..train.progress import shown_results

    out, resume = context.params["out"], context.params["resume"]
    start = time.perf_counter()
    try:
        fit(trainer, learner, images, resume)
    except Interrupted as end:
        if not trainer.is_global_zero:
            # A launcher takes any other status for a crash, and kills the process that reports.
            raise typer.Exit from None
        raise stop(f"capsfast train: {_ending(context, end)}", 128 + end.signal) from None
    except OSError as error:
        # Those of the logs say nothing of their file.
        error.filename = error.filename or str(out)
        raise
    seconds = time.perf_counter() - start
    if not trainer.is_global_zero:
        return
    csv = [Path(logger.log_dir) for logger in trainer.loggers if isinstance(logger, CSVLogger)]
    went_on = resume is not None and resume.resolve().parent == out.resolve()
    metrics = read_metrics(csv[0], went_on) if csv else {}
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("test_")}
    if metrics:
        save(curve(metrics), out / "curve.png")
    content = {
        **_run(learner, images),
        "processes": trainer.world_size,
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "seconds": round(seconds, 1),
        "results": found,
        "curve": {name: [(step, float(f"{value:.5g}")) for step, value in points] for name, points in metrics.items()},
    }
    _write(out / "record.json", content)
    shown = ", ".join(f"{name.replace('_', ' ')} {found[name]:.5g}" for name in shown_results(found))
    say(f"{trainer.global_step} steps in {seconds:.1f} s{': ' if shown else ''}{shown}")
    say(f"wrote {', '.join(sorted(path.name for path in out.glob('[!.]*') if path.is_file()))} in {out}")


def _ending(context: typer.Context, end: "Interrupted") -> str:
    """Where a signal has ended training, what is there, and the command that goes on."""
    by = "" if end.signal == signal.SIGINT else f" by {signal.Signals(end.signal).name}"
    at = f"interrupted{by} at step {end.step}"
    if end.checkpoint is None:
        return f"{at}; there is no checkpoint yet"
    words = ["python", "-m", "capsfast", "train", "--resume", str(end.checkpoint)]
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params.get(str(parameter.name))
        if not on_command_line(context, name) or name not in (*TRAINER, "out"):
            continue
        if isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
            continue
        for each in value if isinstance(value, list) else [value]:
            words += [parameter.opts[0], str(each)]
    return f"{at}; {end.checkpoint} holds step {end.checkpoint_step}; to go on: {shlex.join(words)}"


def _run(learner: "Learner", images: "ImageData") -> dict[str, Any]:
    """What a record says of network, data and machine."""
    return {
        "command": " ".join(["python -m capsfast", *sys.argv[1:]]),
        "environment": record.environment(learner.device),
        "parameters": sum(each.numel() for each in learner.parameters()),
        "model": dict(learner.hparams),
        "images": {**images.hparams, "data_dir": None},
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    # A line for each entry: short for git, and readable.
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())
    write_text(path, f"{{\n{lines}\n}}\n")


def _profile(learner: "Learner", images: "ImageData", accelerator: str, out: Path) -> None:
    from ..train import routing_share
    from .common import to_accelerator

    to_accelerator(learner, accelerator)
    rows = torch.arange(min(images.options["batch_size"], len(images.sets.train)))
    batch = images.sets.train.batch(rows).to(learner.device)
    say(
        f"measuring {PROFILED} training steps of {len(rows)} images, after a few that warm up, "
        "once with the fastest backend and once with einsum"
    )
    measured = {}
    for name, backend in (("fastest backend", None), ("einsum", "reference")):
        found = routing_share(learner, batch, backend=backend, steps=PROFILED)
        measured[name] = {"step_s": found.step, "routing_s": found.routing}
        say(f"{name}: step {1e3 * found.step:.1f} ms, routing {1e3 * found.routing:.1f} ms, {found.share:.1%}")
    _write(out / "profile.json", {**_run(learner, images), "measured": measured})
    say(f"wrote {out / 'profile.json'}")
