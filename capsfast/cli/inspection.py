"""The commands that inspect a trained network. :mod:`capsfast.train` does the work."""

import csv as csv_format
import inspect
import json as json_format
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count as numbers
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..storage.files import check_replaceable, check_writable, replacing, write_text
from .endings import plain_errors, say, say_parts, stop

if TYPE_CHECKING:
    from ..data import Sets
    from ..train import Learner, StackedLearner

Checkpoint = Annotated[Path, typer.Argument(help="A file that train wrote, such as last.ckpt.", show_default=False)]
Data = Annotated[str | None, typer.Option(help="Data set; default: the data set of the training.", show_default=False)]
DataDir = Annotated[str | None, typer.Option(help="Folder with the files of the data set.", show_default=False)]
Accelerator = Annotated[str, typer.Option(help="Lightning's accelerator: auto, cpu, gpu, ...")]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for the results; default: the next free COMMAND-1, ... beside the checkpoint."),
]
Json = Annotated[Path | None, typer.Option(help="Write the numbers to this JSON file instead of one in that folder.")]
Lengths = Annotated[Path | None, typer.Option(help="Write classes and lengths to this file, not to the screen.")]
# The commands that work on models without class capsules of whole images; clusters is only for stacked.
WORKING = {
    "autoencoder": ("reconstruct",),
    "segcaps": ("evaluate", "predict", "reconstruct"),
    "stacked": ("clusters", "reconstruct"),
}
DRAWN = 20  # predictions.png shows at most so many pictures


@contextmanager
def folder_of_results(command: str, out: Path | None, beside: Path) -> Iterator[Path]:
    """Where a command writes: into ``out``, or into a new folder, the next free ``beside/command-1`` and so on.

    A command that writes nothing into the new folder, because it fails, leaves none.
    """
    if out is not None:
        check_writable(out)
        yield out
        return
    beside.mkdir(parents=True, exist_ok=True)
    for n in numbers(1):
        new = beside / f"{command}-{n}"
        with suppress(FileExistsError):
            new.mkdir()
            break
    try:
        check_writable(new)
        yield new
    finally:
        with suppress(OSError):  # rmdir removes only an empty folder
            new.rmdir()


def check_works(command: str, learner: "Learner") -> None:
    """Ends a command that does not work on this kind of network, and names the commands that do."""
    model = learner.hparams["model"]
    working = WORKING.get(model, ())
    if command in working or (not working and command != "clusters"):
        return
    wanted = "of --model stacked" if command == "clusters" else "that classifies images"
    remedy = f"; for {model} use {' or '.join(working)}" if working else ""
    raise stop(f"capsfast {command}: a network {wanted} is needed, got {model}{remedy}")


def of_a_checkpoint(run: Callable[..., None]) -> Callable[..., None]:
    """The command with the name and the options of ``run``, and the options that say which network and which images.

    run: takes the network of the checkpoint, on its device, the data sets, the folder for the results, and the options
        of the command.
    """

    def command(
        checkpoint: Checkpoint,
        data: Data = None,
        data_dir: DataDir = None,
        accelerator: Accelerator = "auto",
        out: Out = None,
        **options: Any,
    ) -> None:
        with plain_errors(run.__name__):
            if options.get("json") is not None:
                check_replaceable(options["json"])
            from ..train import open_checkpoint

            learner, images = open_checkpoint(checkpoint, data=data, data_dir=data_dir)
            check_works(run.__name__, learner)
            _to_accelerator(learner, accelerator)
            say_parts(images.sets)
            with folder_of_results(run.__name__, out, checkpoint.parent) as folder:
                run(learner, images.sets, folder, **options)

    first, *common, _ = inspect.signature(command).parameters.values()
    own = [*inspect.signature(run).parameters.values()][3:]
    options = [option.replace(kind=option.KEYWORD_ONLY) for option in (*own, *common)]
    command.__signature__ = inspect.Signature([first, *options])  # type: ignore[attr-defined]
    command.__annotations__ = {option.name: option.annotation for option in (first, *options)}
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    return command


def _to_accelerator(learner: "Learner", accelerator: str) -> None:
    """Moves the network to the first device of a Lightning accelerator."""
    from lightning.fabric import Fabric

    try:
        learner.to(Fabric(accelerator=accelerator, devices=1).device)
    except (ValueError, RuntimeError) as error:
        raise stop(f"capsfast: --accelerator {accelerator}: {error}") from None


def _write(figure: Any, path: Path) -> None:
    from ..plot import save

    say(f"wrote {save(figure, path)}")


def _write_numbers(path: Path, content: Any) -> None:
    write_text(path, json_format.dumps(content, indent=1) + "\n")
    say(f"wrote {path}")


@of_a_checkpoint
def evaluate(
    learner: "Learner",
    sets: "Sets",
    out: Path,
    fgsm: Annotated[list[float], typer.Option(help="Attack by FGSM with this eps; repeatable.")] = [],  # noqa: B006
    pgd: Annotated[list[float], typer.Option(help="Attack by PGD with this eps; repeatable.")] = [],  # noqa: B006
    pgd_steps: Annotated[int, typer.Option(min=1, help="Number of steps of PGD.")] = 10,
    attacked: Annotated[int | None, typer.Option(min=1, help="Attack only so many images; default all.")] = None,
    json: Json = None,
) -> None:
    """Measure accuracy on test images and on attacked images; draw the confusion matrix if each image has one class.

    A network of ``train --model segcaps`` is measured as in training: intersection over union, right pixels, losses.
    """
    from .. import plot, train
    from ..data.seeds import generator

    json = json or out / "evaluate.json"
    if isinstance(learner, train.SegmentationLearner):
        if fgsm or pgd:
            raise stop("capsfast evaluate: attacks need a network that classifies images; leave out --fgsm and --pgd")
        measured = train.metrics(learner, sets.test)
        say(f"test images: {', '.join(f'{name} {value:.5g}' for name, value in measured.items())}")
        _write_numbers(json, {"test images": {"images": len(sets.test), **measured}})
        return
    # Attacks by name, each with its own generator for the start.
    attacks: dict[str, train.Attack] = {f"FGSM, eps {eps:g}": partial(train.fgsm, eps=eps) for eps in fgsm}
    for eps in pgd:
        start = generator(0, "attack")
        name = f"PGD, eps {eps:g}, {pgd_steps} steps"
        attacks[name] = partial(train.pgd, eps=eps, steps=pgd_steps, generator=start)
    evaluations: dict[str, train.Evaluation] = {}
    for name, attack in {"test images": None, **attacks}.items():
        each = train.evaluate(learner, sets.test, attack=attack, limit=None if attack is None else attacked)
        say(f"{name}: {each}")
        evaluations[name] = each
    plain = evaluations["test images"]
    if plain.confusion is not None:
        title = f"{plain.accuracy:.2%} of {plain.images}"
        _write(plot.confusion_figure(plain.confusion, title), out / "confusion.png")
    _write_numbers(json, {name: value.numbers() for name, value in evaluations.items()})


@of_a_checkpoint
def picture(
    learner: "Learner",
    sets: "Sets",
    out: Path,
    count: Annotated[int, typer.Option(min=1, help="Number of images.")] = 12,
    wrong: Annotated[bool, typer.Option("--wrong", help="Only misclassified images, in wrong.png.")] = False,
) -> None:
    """Draw test images with the activations of all classes as bars: predictions.png."""
    from .. import plot, train

    predictions = train.predictions(learner, sets.test, count, wrong=wrong)
    figure = plot.predictions_figure(predictions.images, predictions.labels, predictions.activations)
    _write(figure, out / ("wrong.png" if wrong else "predictions.png"))


@of_a_checkpoint
def reconstruct(learner: "Learner", sets: "Sets", out: Path) -> None:
    """Draw a test image of each class and its reconstruction by the decoder: reconstructions.png."""
    from .. import plot, train

    batch = sets.test.batch(train.one_of_each_class(sets.test, sets.num_classes))
    columns = [", ".join(map(str, label)) for label in batch.labels[:, None].flatten(1).tolist()]
    if isinstance(learner, train.SegmentationLearner):
        rows = train.segmented(learner, batch)
    else:
        rows = {"input": batch.images, "reconstruction": train.reconstructions(learner, batch).cpu()}
        if batch.parts is not None and learner.has_classes:
            parts, again = (plot.overlap_colours(image) for image in (batch.parts, rows["reconstruction"]))
            rows = {"input": batch.images, "its parts": parts, "reconstructions": again}
    _write(plot.images_figure(rows, columns), out / "reconstructions.png")


@of_a_checkpoint
def perturb(
    learner: "Learner",
    sets: "Sets",
    out: Path,
    label: Annotated[list[int], typer.Option(help="Class, may be repeated; default all.", show_default=False)] = [],  # noqa: B006
) -> None:
    """Draw reconstructions with each dimension of a class capsule changed by -0.25 to 0.25: a PNG for each class."""
    from .. import plot, train
    from ..train.evaluate import DELTAS

    examples = train.one_of_each_class(sets.test, sets.num_classes)
    rows = dict(zip(sets.test.labels[examples].tolist(), examples, strict=True))
    for class_label in label:
        if class_label not in rows:
            raise ValueError(f"capsfast perturb: label must be one of {', '.join(map(str, rows))}, got {class_label}")
    for class_label in label or rows:
        images = train.perturbations(learner, sets.test.batch(rows[class_label][None]).images[0], class_label)
        _write(plot.perturbations_figure(images, str(class_label), DELTAS), out / f"perturb-{class_label}.png")


@of_a_checkpoint
def routing(
    learner: "Learner",
    sets: "Sets",
    out: Path,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first so many images; default all.")] = None,
) -> None:
    """Draw capsule lengths by class, and coupling entropy by class and iteration: routing.png."""
    from .. import plot, train

    statistics = train.routing_statistics(learner, sets.test, limit=limit)
    _write(
        plot.routing_figure(statistics.lengths, statistics.entropy, "routing to the class capsules"),
        out / "routing.png",
    )
    for t, values in enumerate(statistics.entropy, 1):
        say(f"iteration {t}: coupling entropy {torch.nanmean(values):.4f} of log J, mean of the classes")


@of_a_checkpoint
def clusters(
    learner: "StackedLearner",
    sets: "Sets",
    out: Path,
    images: Annotated[int, typer.Option(min=1, help="Find the clusters in so many training images.")] = 10_000,
    json: Json = None,
) -> None:
    """Measure accuracy of clusters of object presences on test images, for a network of ``train --model stacked``.

    Labels are used only to assign the clusters to classes.
    """
    from .. import train

    accuracy, classes, tested = train.clustered(learner, sets, limit=images)
    say(f"{accuracy:.2%} of {tested} right, by {sets.num_classes} clusters of {classes} images")
    _write_numbers(json or out / "clusters.json", {"images": tested, "accuracy": accuracy, "clustered": classes})


def predict(
    pictures: Annotated[
        list[Path], typer.Argument(help="Picture files, and folders with pictures anywhere below.", show_default=False)
    ],
    checkpoint: Annotated[
        Path | None, typer.Option(help="A file that train wrote, such as last.ckpt.", show_default=False)
    ] = None,
    pretrained: Annotated[
        str | None,
        typer.Option(
            help="Instead of a checkpoint: mnist, fashion-mnist, multi-mnist, a folder from save_pretrained, or a "
            "repository on the Hugging Face Hub.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model of the pretrained network, such as efficientcapsnet.", show_default=False)
    ] = None,
    csv: Lengths = None,
    json: Lengths = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of pictures read and classified together.")] = 64,
    out: Out = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Classify pictures, resized to the network's image size: a line for each, and predictions.png of the first 20.

    Pictures must look like the training images. mnist, fashion-mnist and multi-mnist show a light object in the centre
    on black. Digits have a margin of a seventh of the width, clothes fill the picture. A picture that can't be read is
    named, the others are classified, and the exit status is 1.

    A network of ``train --model segcaps`` gives each class's share of the pixels, and a picture of the pixels' classes
    for each picture.
    """
    if (checkpoint is None) == (pretrained is None) or (pretrained is None) != (model is None):
        got = {"--checkpoint": checkpoint, "--model": model, "--pretrained": pretrained}
        there = ", ".join(name for name, value in got.items() if value is not None) or "none of them"
        raise stop(f"capsfast predict: --checkpoint FILE or --model NAME --pretrained NAME is needed, got {there}")
    with plain_errors("predict"):
        for path in filter(None, (csv, json)):
            check_replaceable(path)
        from .. import train
        from ..train.checkpoint import open_learner

        files = _files(pictures)
        learner = train.open_pretrained(str(model), str(pretrained)) if checkpoint is None else open_learner(checkpoint)
        check_works("predict", learner)
        _to_accelerator(learner, accelerator)
        with folder_of_results("predict", out, Path("out") if checkpoint is None else checkpoint.parent) as folder:
            found = _classified(learner, files, folder, batch_size, lines=csv is None and json is None)
            if csv is not None and found:
                with replacing(csv) as draft, draft.open("w", newline="", encoding="utf-8") as table:
                    rows = csv_format.writer(table)
                    rows.writerow(["file", "class", *learner.class_names])
                    rows.writerows([row["file"], row["class"], *row["lengths"].values()] for row in found)
                say(f"wrote {csv}")
            if json is not None and found:
                _write_numbers(json, found)
        if len(found) < len(files):
            raise typer.Exit(1)


def _files(paths: list[Path]) -> list[Path]:
    """The pictures, each once: files as they are given, and what folders hold.

    Raises:
        OSError: a file or a folder is not there.
        ValueError: a folder has no pictures.
    """
    from ..data.files import pictures_below

    files: dict[str, Path] = {}
    for path in paths:
        path.stat()
        below = [Path(picture) for picture in pictures_below(path)] if path.is_dir() else [path]
        if not below:
            raise ValueError(f"capsfast predict: {path} must hold pictures, got a folder without any")
        files |= {os.path.realpath(picture): picture for picture in below}
    return [*files.values()]


def _read(path: Path, learner: "Learner") -> torch.Tensor | None:
    """A picture for the network, ``[C, H, W]``; says why if it can't be read."""
    from .. import train

    try:
        return train.read_picture(path, learner)[0]
    except (OSError, ValueError) as error:
        said = f"capsfast predict: {error.strerror}: {path}" if isinstance(error, OSError) else str(error)
    say(said, error=True)
    return None


def _classified(
    learner: "Learner", files: list[Path], out: Path, batch_size: int, *, lines: bool
) -> list[dict[str, Any]]:
    """Classifies pictures in batches, says each class with ``lines``, and draws the first pictures.

    Returns:
        File, class and lengths of each picture that can be read.
    """
    from .. import plot, train
    from ..data.vision import torchvision

    segments = isinstance(learner, train.SegmentationLearner)
    root = os.path.commonpath([os.path.abspath(file.parent) for file in files])
    found: list[dict[str, Any]] = []
    shown: list[tuple[torch.Tensor, ...]] = []
    for start in range(0, len(files), batch_size):
        pairs = ((path, _read(path, learner)) for path in files[start : start + batch_size])
        images = {path: image for path, image in pairs if image is not None}
        if not images:
            continue
        scores, drawn = train.classified(learner, torch.stack([*images.values()]))
        for n, (path, values) in enumerate(zip(images, scores.tolist(), strict=True)):
            lengths = dict(zip(learner.class_names, values, strict=True))
            best = sorted(lengths, key=lengths.__getitem__, reverse=True)[:3]
            # Perhaps no pixel has a class.
            found.append({"file": str(path), "class": best[0] if lengths[best[0]] else None, "lengths": lengths})
            if lines:
                say(f"{path}: {', '.join(f'{name} {lengths[name]:.3f}' for name in best)}")
            if len(shown) < DRAWN:
                shown.append((images[path], *(() if drawn is None else (drawn[n],))))
            if segments and drawn is not None:
                with replacing(out / "classes" / f"{os.path.relpath(path, root)}.png") as draft:
                    torchvision("utils").save_image(drawn[n], draft)
    if found:
        names = ("picture", "classes" if segments else "reconstruction")
        rows = dict(zip(names, map(torch.stack, zip(*shown, strict=True)), strict=False))
        _write(plot.images_figure(rows, [row["class"] or "" for row in found[:DRAWN]]), out / "predictions.png")
        if segments:
            say(f"wrote the classes of the pixels of {len(found)} pictures into {out / 'classes'}")
    return found


def models(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the networks of train --model: parameters, pretrained weights that come with the package, and options."""
    with plain_errors("models"):
        from ..train.networks import described

        networks = described()
    if json:
        typer.echo(json_format.dumps(networks, indent=1))
        return
    table = Table("model", "parameters", "pretrained", "options", box=box.SIMPLE, show_lines=True)
    for name, evaluation in networks.items():
        options = ", ".join(f"{option}={value}" for option, value in evaluation["options"].items())
        parameters = f"{evaluation['parameters']:,}".replace(",", " ")
        table.add_row(name, parameters, "\n".join(evaluation["pretrained"]), escape(options))
    Console().print(table)
    say("parameters for 28 x 28 grey images of ten classes; train --model NAME --option NAME=VALUE, --pretrained NAME")
