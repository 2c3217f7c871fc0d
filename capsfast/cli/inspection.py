"""The commands that inspect a trained network. :mod:`capsfast.train` does the work."""

import json as json_format
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console

from ..files import check_replaceable, check_writable, write_text
from .common import on_command_line, plain_errors, say, to_accelerator
from .endings import stop
from .progress import progress

if TYPE_CHECKING:
    from ..data import Sets
    from ..train import Learner

Checkpoint = Annotated[Path, typer.Argument(help="A file that train wrote, such as last.ckpt.", show_default=False)]
Out = Annotated[Path, typer.Option(help="Folder for the pictures.")]
Data = Annotated[str | None, typer.Option(help="Data set; default: the data set of the training.", show_default=False)]
DataDir = Annotated[str | None, typer.Option(help="Folder with the files of the data set.", show_default=False)]
Accelerator = Annotated[str, typer.Option(help="Lightning's accelerator: auto, cpu, gpu, ...")]
Json = Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")]


@contextmanager
def _opened(
    command: str,
    checkpoint: Path,
    data: str | None,
    data_dir: str | None,
    accelerator: str,
    out: Path | None = None,
    json: Path | None = None,
) -> "Iterator[tuple[Learner, Sets]]":
    """The network of a checkpoint, on its device, and its data sets. Prints errors in one line."""
    with plain_errors(command):
        if out is not None:
            check_writable(out)
        if json is not None:
            check_replaceable(json)
        from ..train import open_checkpoint

        learner, images = open_checkpoint(checkpoint, data=data, data_dir=data_dir)
        to_accelerator(learner, accelerator)
        yield learner, images.sets


def _write(figure: Any, path: Path) -> None:
    from ..plot import save

    say(f"wrote {save(figure, path)}")


def _write_numbers(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        write_text(path, json_format.dumps(content, indent=1) + "\n")
        say(f"wrote {path}")


def _names(labels: torch.Tensor) -> list[str]:
    return [", ".join(map(str, each)) for each in labels.view(len(labels), -1).tolist()]


def evaluate(
    context: typer.Context,
    checkpoint: Checkpoint,
    out: Out = Path("out/evaluate"),
    data: Data = None,
    data_dir: DataDir = None,
    fgsm: Annotated[list[float], typer.Option(help="Attack by FGSM with this eps; repeatable.")] = [],  # noqa: B006
    pgd: Annotated[list[float], typer.Option(help="Attack by PGD with this eps; repeatable.")] = [],  # noqa: B006
    pgd_steps: Annotated[int, typer.Option(min=1, help="Number of steps of PGD.")] = 10,
    attacked: Annotated[int | None, typer.Option(min=1, help="Attack only so many images; default all.")] = None,
    json: Json = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Measure accuracy on test images and on attacked images; draw the confusion matrix if each image has one class."""
    for name, used, said in (("pgd_steps", pgd, "--pgd"), ("attacked", fgsm or pgd, "--fgsm or --pgd")):
        if on_command_line(context, name) and not used:
            raise stop(f"capsfast evaluate: --{name.replace('_', '-')} needs {said}")
    with _opened("evaluate", checkpoint, data, data_dir, accelerator, out, json) as (learner, sets):
        from .. import plot, train
        from ..data.seeds import generator

        # Attacks by name, each with its own generator for the start.
        attacks: dict[str, train.Attack] = {f"FGSM, eps {eps:g}": partial(train.fgsm, eps=eps) for eps in fgsm}
        attacks |= {
            f"PGD, eps {eps:g}, {pgd_steps} steps": partial(
                train.pgd, eps=eps, steps=pgd_steps, generator=generator(0, "attack")
            )
            for eps in pgd
        }
        limit = min(attacked or len(sets.test), len(sets.test))
        found: dict[str, train.Evaluation] = {}
        with progress(len(sets.test) + limit * len(attacks), Console(stderr=True)) as shown:
            shown.step("test images")
            plain = found["test images"] = train.evaluate(learner, sets.test, on_step=shown.advance)
            for name, attack in attacks.items():
                shown.step(name)
                found[name] = train.evaluate(learner, sets.test, attack=attack, limit=limit, on_step=shown.advance)
        for name, each in found.items():
            say(f"{name}: {each.accuracy:.2%} of {each.images} right")
        if plain.confusion is not None:
            title = f"{plain.accuracy:.2%} of {plain.images}"
            _write(plot.confusion_figure(plain.confusion, title), out / "confusion.png")
        _write_numbers(json, {name: {"images": each.images, "right": each.right} for name, each in found.items()})


def picture(
    checkpoint: Checkpoint,
    out: Out = Path("out/picture"),
    data: Data = None,
    data_dir: DataDir = None,
    count: Annotated[int, typer.Option(min=1, help="Number of images.")] = 12,
    wrong: Annotated[bool, typer.Option("--wrong", help="Only misclassified images, in wrong.png.")] = False,
    accelerator: Accelerator = "auto",
) -> None:
    """Draw test images with the activations of all classes as bars: predictions.png."""
    with _opened("picture", checkpoint, data, data_dir, accelerator, out) as (learner, sets):
        from .. import plot, train

        found = train.predictions(learner, sets.test, count, wrong=wrong)
        _write(
            plot.predictions_figure(found.images, found.labels, found.activations),
            out / ("wrong.png" if wrong else "predictions.png"),
        )


def reconstruct(
    checkpoint: Checkpoint,
    out: Out = Path("out/reconstruct"),
    data: Data = None,
    data_dir: DataDir = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Draw a test image of each class and its reconstruction by the decoder: reconstructions.png."""
    with _opened("reconstruct", checkpoint, data, data_dir, accelerator, out) as (learner, sets):
        from .. import plot, train

        batch = sets.test.batch(train.one_of_each_class(sets.test, sets.num_classes))
        columns = _names(batch.labels)
        if isinstance(learner, train.SegmentationLearner):
            rows = train.segmented(learner, batch)
        elif batch.parts is None or not learner.has_classes:
            rows = {"input": batch.images, "reconstruction": train.reconstructions(learner, batch).cpu()}
        else:
            rows = {
                "input": batch.images,
                "its parts": plot.overlap_colours(batch.parts),
                "reconstructions": plot.overlap_colours(train.reconstructions(learner, batch).cpu()),
            }
        _write(plot.images_figure(rows, columns), out / "reconstructions.png")


def perturb(
    checkpoint: Checkpoint,
    label: Annotated[list[int], typer.Option(help="Class, may be repeated; default all.", show_default=False)] = [],  # noqa: B006
    out: Out = Path("out/perturb"),
    data: Data = None,
    data_dir: DataDir = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Draw reconstructions with each dimension of a class capsule changed by -0.25 to 0.25: a PNG for each class."""
    with _opened("perturb", checkpoint, data, data_dir, accelerator, out) as (learner, sets):
        from .. import plot, train
        from ..train.inspect import DELTAS

        first = train.one_of_each_class(sets.test, sets.num_classes)
        rows = dict(zip(sets.test.labels[first].tolist(), first, strict=True))
        for each in label:
            if each not in rows:
                raise ValueError(f"capsfast perturb: label must be one of {', '.join(map(str, rows))}, got {each}")
        for each in label or rows:
            image = sets.test.batch(rows[each][None]).images[0]
            images = train.perturbations(learner, image, each)
            _write(plot.perturbations_figure(images, str(each), DELTAS), out / f"perturb-{each}.png")


def routing(
    checkpoint: Checkpoint,
    out: Out = Path("out/routing"),
    data: Data = None,
    data_dir: DataDir = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first so many images; default all.")] = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Draw capsule lengths by class, and coupling entropy by class and iteration: routing.png."""
    with _opened("routing", checkpoint, data, data_dir, accelerator, out) as (learner, sets):
        from .. import plot, train

        found = train.routing_statistics(learner, sets.test, limit=limit)
        _write(plot.routing_figure(found.lengths, found.entropy, "routing to the class capsules"), out / "routing.png")
        for t, values in enumerate(found.entropy, 1):
            say(f"iteration {t}: coupling entropy {torch.nanmean(values):.4f} of log J, mean of the classes")


def clusters(
    checkpoint: Checkpoint,
    data: Data = None,
    data_dir: DataDir = None,
    images: Annotated[int, typer.Option(min=1, help="Find the clusters in so many training images.")] = 10_000,
    json: Json = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Measure accuracy of clusters of object presences on test images, for a network of ``train --model stacked``.

    Labels are used only to assign the clusters to classes.
    """
    with _opened("clusters", checkpoint, data, data_dir, accelerator, json=json) as (learner, sets):
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
    if (checkpoint is None) == (pretrained is None):
        got = "neither" if checkpoint is None else "both"
        raise stop(f"capsfast predict: --checkpoint FILE or --model NAME --pretrained NAME is needed, got {got}")
    if (pretrained is None) != (model is None):
        missing = "--model, such as efficientcapsnet" if model is None else "--pretrained; a checkpoint holds its model"
        raise stop(f"capsfast predict: --{'pretrained' if model is None else 'model'} needs {missing}")
    with plain_errors("predict"):
        check_writable(out)
        from .. import plot, train
        from ..train.checkpoint import open_learner, read_checkpoint

        if pretrained is not None and model is not None:
            learner = train.open_pretrained(model, pretrained)
        elif checkpoint is not None:
            learner = open_learner(read_checkpoint(checkpoint))
        to_accelerator(learner, accelerator)
        names = learner.class_names
        images = torch.cat([train.read_picture(path, learner) for path in pictures])
        found = train.activations(learner, images)
        for path, values in zip(pictures, found, strict=True):
            best = values.argsort(descending=True)[:3].tolist()
            say(f"{path}: {', '.join(f'{names[j]} {values[j]:.3f}' for j in best)}")
        again = train.predicted_images(learner, images)
        rows = {"picture": images} if again is None else {"picture": images, "reconstruction": again}
        _write(plot.images_figure(rows, [names[j] for j in found.argmax(1).tolist()]), out / "predictions.png")
