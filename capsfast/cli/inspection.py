"""The commands that inspect a trained network. :mod:`capsfast.train` does the work."""

import inspect
import json as json_format
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from ..files import check_replaceable, check_writable, write_text
from .endings import plain_errors, say, say_parts, stop

if TYPE_CHECKING:
    from ..data import Sets
    from ..train import Learner, StackedLearner

Checkpoint = Annotated[Path, typer.Argument(help="A file that train wrote, such as last.ckpt.", show_default=False)]
Out = Annotated[Path, typer.Option(help="Folder for the pictures.")]
Data = Annotated[str | None, typer.Option(help="Data set; default: the data set of the training.", show_default=False)]
DataDir = Annotated[str | None, typer.Option(help="Folder with the files of the data set.", show_default=False)]
Accelerator = Annotated[str, typer.Option(help="Lightning's accelerator: auto, cpu, gpu, ...")]
Json = Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")]


def of_a_checkpoint(run: Callable[..., None]) -> Callable[..., None]:
    """The command with the name and the options of ``run``, and the options that say which network and which images.

    run: takes the network of the checkpoint, on its device, the data sets, and the options of the command.
    """

    def command(
        checkpoint: Checkpoint,
        data: Data = None,
        data_dir: DataDir = None,
        accelerator: Accelerator = "auto",
        **options: Any,
    ) -> None:
        with plain_errors(run.__name__):
            if options.get("out") is not None:
                check_writable(options["out"])
            if options.get("json") is not None:
                check_replaceable(options["json"])
            from ..train import open_checkpoint

            learner, images = open_checkpoint(checkpoint, data=data, data_dir=data_dir)
            _to_accelerator(learner, accelerator)
            say_parts(images.sets)
            run(learner, images.sets, **options)

    first, *common, _ = inspect.signature(command).parameters.values()
    own = [*inspect.signature(run).parameters.values()][2:]
    options = [each.replace(kind=each.KEYWORD_ONLY) for each in (*own, *common)]
    command.__signature__ = inspect.Signature([first, *options])  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in (first, *options)}
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


def _write_numbers(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        write_text(path, json_format.dumps(content, indent=1) + "\n")
        say(f"wrote {path}")


@of_a_checkpoint
def evaluate(
    learner: "Learner",
    sets: "Sets",
    out: Out = Path("out/evaluate"),
    fgsm: Annotated[list[float], typer.Option(help="Attack by FGSM with this eps; repeatable.")] = [],  # noqa: B006
    pgd: Annotated[list[float], typer.Option(help="Attack by PGD with this eps; repeatable.")] = [],  # noqa: B006
    pgd_steps: Annotated[int, typer.Option(min=1, help="Number of steps of PGD.")] = 10,
    attacked: Annotated[int | None, typer.Option(min=1, help="Attack only so many images; default all.")] = None,
    json: Json = None,
) -> None:
    """Measure accuracy on test images and on attacked images; draw the confusion matrix if each image has one class."""
    from .. import plot, train
    from ..data.seeds import generator

    # Attacks by name, each with its own generator for the start.
    attacks: dict[str, train.Attack] = {f"FGSM, eps {eps:g}": partial(train.fgsm, eps=eps) for eps in fgsm}
    for eps in pgd:
        start = generator(0, "attack")
        name = f"PGD, eps {eps:g}, {pgd_steps} steps"
        attacks[name] = partial(train.pgd, eps=eps, steps=pgd_steps, generator=start)
    found: dict[str, train.Evaluation] = {}
    for name, attack in {"test images": None, **attacks}.items():
        each = train.evaluate(learner, sets.test, attack=attack, limit=None if attack is None else attacked)
        say(f"{name}: {each.accuracy:.2%} of {each.images} right")
        found[name] = each
    plain = found["test images"]
    if plain.confusion is not None:
        title = f"{plain.accuracy:.2%} of {plain.images}"
        _write(plot.confusion_figure(plain.confusion, title), out / "confusion.png")
    _write_numbers(json, {name: {"images": each.images, "right": each.right} for name, each in found.items()})


@of_a_checkpoint
def picture(
    learner: "Learner",
    sets: "Sets",
    out: Out = Path("out/picture"),
    count: Annotated[int, typer.Option(min=1, help="Number of images.")] = 12,
    wrong: Annotated[bool, typer.Option("--wrong", help="Only misclassified images, in wrong.png.")] = False,
) -> None:
    """Draw test images with the activations of all classes as bars: predictions.png."""
    from .. import plot, train

    found = train.predictions(learner, sets.test, count, wrong=wrong)
    figure = plot.predictions_figure(found.images, found.labels, found.activations)
    _write(figure, out / ("wrong.png" if wrong else "predictions.png"))


@of_a_checkpoint
def reconstruct(learner: "Learner", sets: "Sets", out: Out = Path("out/reconstruct")) -> None:
    """Draw a test image of each class and its reconstruction by the decoder: reconstructions.png."""
    from .. import plot, train

    batch = sets.test.batch(train.one_of_each_class(sets.test, sets.num_classes))
    columns = [", ".join(map(str, each)) for each in batch.labels[:, None].flatten(1).tolist()]
    if isinstance(learner, train.SegmentationLearner):
        rows = train.segmented(learner, batch)
    else:
        rows = {"input": batch.images, "reconstruction": train.reconstructions(learner, batch).cpu()}
        if batch.parts is not None and learner.has_classes:
            parts, again = (plot.overlap_colours(each) for each in (batch.parts, rows["reconstruction"]))
            rows = {"input": batch.images, "its parts": parts, "reconstructions": again}
    _write(plot.images_figure(rows, columns), out / "reconstructions.png")


@of_a_checkpoint
def perturb(
    learner: "Learner",
    sets: "Sets",
    label: Annotated[list[int], typer.Option(help="Class, may be repeated; default all.", show_default=False)] = [],  # noqa: B006
    out: Out = Path("out/perturb"),
) -> None:
    """Draw reconstructions with each dimension of a class capsule changed by -0.25 to 0.25: a PNG for each class."""
    from .. import plot, train
    from ..train.evaluate import DELTAS

    first = train.one_of_each_class(sets.test, sets.num_classes)
    rows = dict(zip(sets.test.labels[first].tolist(), first, strict=True))
    for each in label:
        if each not in rows:
            raise ValueError(f"capsfast perturb: label must be one of {', '.join(map(str, rows))}, got {each}")
    for each in label or rows:
        images = train.perturbations(learner, sets.test.batch(rows[each][None]).images[0], each)
        _write(plot.perturbations_figure(images, str(each), DELTAS), out / f"perturb-{each}.png")


@of_a_checkpoint
def routing(
    learner: "Learner",
    sets: "Sets",
    out: Out = Path("out/routing"),
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first so many images; default all.")] = None,
) -> None:
    """Draw capsule lengths by class, and coupling entropy by class and iteration: routing.png."""
    from .. import plot, train

    found = train.routing_statistics(learner, sets.test, limit=limit)
    _write(plot.routing_figure(found.lengths, found.entropy, "routing to the class capsules"), out / "routing.png")
    for t, values in enumerate(found.entropy, 1):
        say(f"iteration {t}: coupling entropy {torch.nanmean(values):.4f} of log J, mean of the classes")


@of_a_checkpoint
def clusters(
    learner: "StackedLearner",
    sets: "Sets",
    images: Annotated[int, typer.Option(min=1, help="Find the clusters in so many training images.")] = 10_000,
    json: Json = None,
) -> None:
    """Measure accuracy of clusters of object presences on test images, for a network of ``train --model stacked``.

    Labels are used only to assign the clusters to classes.
    """
    from .. import train

    if not isinstance(learner, train.StackedLearner):
        raise stop(f"capsfast clusters: a network of --model stacked is needed, got {learner.hparams['model']}")
    accuracy, found, tested = train.clustered(learner, sets, limit=images)
    say(f"{accuracy:.2%} of {tested} right, by {sets.num_classes} clusters of {found} images")
    _write_numbers(json, {"images": tested, "accuracy": accuracy, "clustered": found})


def predict(
    pictures: Annotated[list[Path], typer.Argument(help="PNG or JPEG files.", show_default=False)],
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
    out: Out = Path("out/predict"),
    accelerator: Accelerator = "auto",
) -> None:
    """Classify pictures, resized to the network's image size: a line for each, and predictions.png.

    Pictures must look like the training images. mnist, fashion-mnist and multi-mnist show a light object in the centre
    on black. Digits have a margin of a seventh of the width, clothes fill the picture.
    """
    if (checkpoint is None) == (pretrained is None) or (pretrained is None) != (model is None):
        got = {"--checkpoint": checkpoint, "--model": model, "--pretrained": pretrained}
        given = ", ".join(name for name, value in got.items() if value is not None) or "none of them"
        raise stop(f"capsfast predict: --checkpoint FILE or --model NAME --pretrained NAME is needed, got {given}")
    with plain_errors("predict"), torch.no_grad():
        check_writable(out)
        from .. import plot, train
        from ..train.checkpoint import open_learner

        if checkpoint is not None:
            learner = open_learner(checkpoint)
        else:
            learner = train.open_pretrained(str(model), str(pretrained))
        learner.check("predict")
        _to_accelerator(learner, accelerator)
        names = learner.class_names
        images = torch.cat([train.read_picture(path, learner) for path in pictures])
        poses, found = learner.classify(images.to(learner.device))
        for path, values in zip(pictures, found, strict=True):
            best = values.argsort(descending=True)[:3].tolist()
            say(f"{path}: {', '.join(f'{names[j]} {values[j]:.3f}' for j in best)}")
        rows = {"picture": images}
        if learner.has_decoder:
            rows["reconstruction"] = learner.model.reconstruct(poses, found.argmax(1)).cpu()
        _write(plot.images_figure(rows, [names[j] for j in found.argmax(1).tolist()]), out / "predictions.png")
