"""The commands that look at a trained network: arguments here, work in :mod:`capsfast.train`."""

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
Out = Annotated[Path, typer.Option(help="Folder of the pictures.")]
Data = Annotated[str | None, typer.Option(help="Other data than it was trained on.", show_default=False)]
DataDir = Annotated[str | None, typer.Option(help="Folder of the data sets' files.", show_default=False)]
Accelerator = Annotated[str, typer.Option(help="auto, cpu, gpu, ... of Lightning.")]
Json = Annotated[Path | None, typer.Option(help="Write the numbers there.")]


@contextmanager
def _opened(
    command: str, checkpoint: Path, data: str | None, data_dir: str | None, accelerator: str, out: Path | None = None
) -> "Iterator[tuple[Learner, Sets]]":
    """The network of a checkpoint, on its device, and its data sets; errors are one line in the command's name."""
    with plain_errors(command):
        if out is not None:
            check_writable(out)
        from ..train import open_checkpoint

        learner, images = open_checkpoint(checkpoint, data=data, data_dir=data_dir)
        to_accelerator(learner, accelerator)
        yield learner, images.sets


def _write(figure: Any, path: Path) -> None:
    from ..plot import save

    say(f"wrote {save(figure, path)}")


def _names(labels: torch.Tensor) -> list[str]:
    return [", ".join(map(str, each)) for each in labels.view(len(labels), -1).tolist()]


def evaluate(
    context: typer.Context,
    checkpoint: Checkpoint,
    out: Out = Path("out/evaluate"),
    data: Data = None,
    data_dir: DataDir = None,
    fgsm: Annotated[list[float], typer.Option(help="Also under FGSM of this eps; repeat.")] = [],  # noqa: B006
    pgd: Annotated[list[float], typer.Option(help="Also under PGD of this eps; repeat.")] = [],  # noqa: B006
    pgd_steps: Annotated[int, typer.Option(min=1, help="Steps of PGD.")] = 10,
    attacked: Annotated[int | None, typer.Option(min=1, help="Attack the first so many images only.")] = None,
    detect: Annotated[bool, typer.Option("--detect", help="How many attacks the reconstruction gives away.")] = False,
    false_positives: Annotated[
        float, typer.Option(min=0, max=1, help="Share of clean images that may count as attacked, for --detect.")
    ] = 0.05,
    json: Json = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Accuracy on the test images, with the confusion matrix where each has one class, and on attacked images."""
    for name, used, said in (
        ("pgd_steps", pgd, "--pgd"),
        ("attacked", fgsm or pgd, "--fgsm or --pgd"),
        ("false_positives", detect, "--detect"),
    ):
        if on_command_line(context, name) and not used:
            raise stop(f"capsfast evaluate: --{name.replace('_', '-')} needs {said}")
    if detect and false_positives >= 1:
        raise stop(f"capsfast evaluate: --false-positives must be below 1 for --detect, got {false_positives:g}")
    if detect and not (fgsm or pgd):
        raise stop("capsfast evaluate: --detect needs an attack to be found; give --fgsm or --pgd")
    with plain_errors("evaluate"):
        if json is not None:
            check_replaceable(json)
    with _opened("evaluate", checkpoint, data, data_dir, accelerator, out) as (learner, sets):
        from .. import plot, train
        from ..data.seeds import generator

        if detect:
            learner.check_decoder("detection")
            if sets.test.batch(torch.arange(1)).labels.dim() != 1:
                raise stop("capsfast evaluate: --detect needs images of one class each, these overlap")
        # Attacks by name; each draws where it starts anew.
        attacks: dict[str, train.Attack] = {f"FGSM, eps {eps:g}": partial(train.fgsm, eps=eps) for eps in fgsm}
        attacks |= {
            f"PGD, eps {eps:g}, {pgd_steps} steps": partial(
                train.pgd, eps=eps, steps=pgd_steps, generator=generator(0, "attack")
            )
            for eps in pgd
        }
        limit = min(attacked or len(sets.test), len(sets.test))
        content: dict[str, dict[str, Any]] = {}
        lines = []
        with progress(len(sets.test) * (1 + detect) + limit * len(attacks), Console(stderr=True)) as shown:
            shown.step("test images")
            plain = train.evaluate(learner, sets.test, on_step=shown.advance)
            lines.append(f"test images: {plain.accuracy:.2%} of {plain.images} right")
            content["test images"] = {"images": plain.images, "right": plain.right}
            clean = train.clean_errors(learner, sets.test, on_step=shown.advance) if detect else None
            for name, attack in attacks.items():
                shown.step(name)
                common: dict[str, Any] = {"attack": attack, "limit": limit, "on_step": shown.advance}
                if not detect:
                    found = train.evaluate(learner, sets.test, **common)
                    content[name] = {"images": found.images, "right": found.right}
                    lines.append(f"{name}: {found.accuracy:.2%} of {found.images} right")
                    continue
                # It sees who is fooled as well: no image is attacked twice.
                one = train.detection(learner, sets.test, clean=clean, false_positive_rate=false_positives, **common)
                content[name] = {"images": one.images, "right": one.images - one.fooled, **one._asdict()}
                lines.append(f"{name}: {1 - one.fooled / one.images:.2%} of {one.images} right")
                lines.append(
                    f"{name}: {one.undetected_rate:.2%} of {one.images} undetected, {one.detection_rate:.2%} of the "
                    f"{one.fooled} that fool the network detected, at {one.false_positives:.2%} false positives"
                )
        for line in lines:
            say(line)
        if plain.confusion is not None:
            title = f"{plain.accuracy:.2%} of {plain.images}"
            _write(plot.confusion_figure(plain.confusion, title), out / "confusion.png")
        if json is not None:
            write_text(json, json_format.dumps(content, indent=1) + "\n")
            say(f"wrote {json}")


def picture(
    checkpoint: Checkpoint,
    out: Out = Path("out/picture"),
    data: Data = None,
    data_dir: DataDir = None,
    count: Annotated[int, typer.Option(min=1, help="Images.")] = 12,
    wrong: Annotated[bool, typer.Option("--wrong", help="Only images taken wrongly: wrong.png.")] = False,
    accelerator: Accelerator = "auto",
) -> None:
    """Test images, each beside a bar for the activation of every class: predictions.png."""
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
    """Test images, one of each class, and what the decoder makes of their class capsules: reconstructions.png."""
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
    label: Annotated[list[int], typer.Option(help="Class to vary; repeat. Default all.", show_default=False)] = [],  # noqa: B006
    out: Out = Path("out/perturb"),
    data: Data = None,
    data_dir: DataDir = None,
    accelerator: Accelerator = "auto",
) -> None:
    """What each number of a class capsule means: it is varied from -0.25 to 0.25 in steps of 0.05; a PNG a class."""
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
    limit: Annotated[int | None, typer.Option(min=1, help="Look at the first so many images.")] = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Capsule lengths and coupling entropy by class, iteration by iteration: routing.png."""
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
    images: Annotated[int, typer.Option(min=1, help="Find clusters among so many images to train on.")] = 10_000,
    json: Json = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Accuracy of clusters of object presences on the test images, for a network of ``train --model stacked``.

    Labels do no more than name the clusters.
    """
    with plain_errors("clusters"):
        if json is not None:
            check_replaceable(json)
    with _opened("clusters", checkpoint, data, data_dir, accelerator) as (learner, sets):
        from .. import train

        if not isinstance(learner, train.StackedLearner):
            raise stop(f"capsfast clusters: a network of --model stacked is needed, got {learner.hparams['model']}")
        accuracy, found, tested = train.clustered(learner, sets, limit=images)
        say(f"{accuracy:.2%} of {tested} right, by {sets.num_classes} clusters of {found} images")
        if json is not None:
            content = {"images": tested, "accuracy": accuracy, "clustered": found}
            write_text(json, json_format.dumps(content, indent=1) + "\n")
            say(f"wrote {json}")


def predict(
    pictures: Annotated[list[Path], typer.Argument(help="PNG or JPEG files.", show_default=False)],
    checkpoint: Annotated[
        Path | None, typer.Option(help="A file that train wrote, such as last.ckpt.", show_default=False)
    ] = None,
    pretrained: Annotated[
        str | None,
        typer.Option(
            help="In place of a checkpoint: mnist, fashion-mnist, multi-mnist, a folder of save_pretrained, or a "
            "repository of the Hugging Face Hub.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Class of the pretrained network, such as efficientcapsnet.", show_default=False)
    ] = None,
    out: Out = Path("out/predict"),
    accelerator: Accelerator = "auto",
) -> None:
    """The class of pictures, resized to the network's images: a line each, and predictions.png.

    They must look like the images of the training. Those of mnist, fashion-mnist and multi-mnist are light on black and
    in the middle. Digits have a margin of a seventh of the width, clothes fill the picture.
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
