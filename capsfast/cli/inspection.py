"""The commands that look at a trained network: arguments here, work in :mod:`capsfast.train`."""

import json as json_format
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..files import check_replaceable, check_writable, write_text
from .common import (
    Accelerator,
    Checkpoint,
    Data,
    DataDir,
    Out,
    on_command_line,
    opened,
    plain_errors,
    say,
    to_accelerator,
    write,
)
from .endings import stop
from .progress import progress


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
    json: Annotated[Path | None, typer.Option(help="Write the numbers there.")] = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Accuracy on the test images, with the confusion matrix where each has one class, and on attacked images."""
    with plain_errors("evaluate"):
        check_writable(out)
        if json is not None:
            check_replaceable(json)
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
        from .. import train
        from ..data.seeds import generator
        from ..train import pictures

        learner, sets = opened(checkpoint, data, data_dir)
        to_accelerator(learner, accelerator)
        if detect:
            learner.check_decoder("detection")
            if sets.test.batch(torch.arange(1)).labels.dim() != 1:
                raise stop("capsfast evaluate: --detect needs images of one class each, these overlap")

        def attack_by_name(name: str) -> train.Attack:
            kind, eps = named[name]
            if kind == "fgsm":
                return partial(train.fgsm, eps=eps)
            return partial(train.pgd, eps=eps, steps=pgd_steps, generator=generator(0, "attack"))

        named = {f"FGSM, eps {eps:g}": ("fgsm", eps) for eps in fgsm}
        named |= {f"PGD, eps {eps:g}, {pgd_steps} steps": ("pgd", eps) for eps in pgd}
        attacks: dict[str, train.Attack | None] = {"test images": None}
        attacks |= {name: attack_by_name(name) for name in named}
        found = {}
        images = {
            name: len(sets.test) if attack is None else min(attacked or len(sets.test), len(sets.test))
            for name, attack in attacks.items()
        }
        detected: dict[str, train.Detection] = {}
        clean: torch.Tensor | None = None
        total = sum(images.values()) + len(sets.test) * detect
        with progress(total, Console(stderr=True)) as shown:
            for name, attack in attacks.items():
                shown.step(name)
                if detect and attack is not None:
                    # It sees who is fooled as well: no image is attacked twice.
                    one = train.detection(
                        learner,
                        sets.test,
                        attack,
                        false_positive_rate=false_positives,
                        clean=clean,
                        limit=attacked,
                        on_step=shown.advance,
                    )
                    detected[name] = one
                    found[name] = train.Evaluation(one.images, one.images - one.fooled, None)
                    continue
                found[name] = train.evaluate(
                    learner,
                    sets.test,
                    attack=attack,
                    limit=None if attack is None else attacked,
                    on_step=shown.advance,
                )
                if detect:
                    shown.step("reconstruction of the test images")
                    clean = train.clean_errors(learner, sets.test, on_step=shown.advance)
        for name, each in found.items():
            say(f"{name}: {each.accuracy:.2%} of {each.images} right")
        for name, one in detected.items():
            say(
                f"{name}: {one.undetected_rate:.2%} of {one.images} undetected, {one.detection_rate:.2%} of the "
                f"{one.fooled} that fool the network detected, at {one.false_positives:.2%} false positives"
            )
        plain = found["test images"]
        if plain.confusion is not None:
            write(pictures.confusion(plain.confusion, f"{plain.accuracy:.2%} of {plain.images}"), out / "confusion.png")
        if json is not None:
            content = {name: {"images": each.images, "right": each.right} for name, each in found.items()}
            for name, one in detected.items():
                content[name] |= one._asdict()
            write_text(json, json_format.dumps(content, indent=1) + "\n")
            say(f"wrote {json}")


def reconstruct(
    checkpoint: Checkpoint,
    out: Out = Path("out/reconstruct"),
    data: Data = None,
    data_dir: DataDir = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Test images, one of each class, and what the decoder makes of their class capsules: reconstructions.png."""
    draw_reconstructions("reconstruct", checkpoint, out, data, data_dir, accelerator)


def draw_reconstructions(
    command: str, checkpoint: Path, out: Path, data: str | None, data_dir: str | None, accelerator: str
) -> None:
    """reconstructions.png; errors are in the name of the command."""
    with plain_errors(command):
        check_writable(out)
        from .. import train
        from ..train import pictures

        learner, sets = opened(checkpoint, data, data_dir)
        to_accelerator(learner, accelerator)
        batch = sets.test.batch(train.one_of_each_class(sets.test, sets.num_classes))
        if isinstance(learner, train.SegmentationLearner):
            columns = [", ".join(map(str, labels)) for labels in batch.labels.view(len(batch.labels), -1).tolist()]
            write(pictures.image_grid(train.segmented(learner, batch), columns), out / "reconstructions.png")
            return
        again = train.reconstructions(learner, batch).cpu()
        if batch.parts is None or not learner.has_classes:
            rows = {"input": batch.images, "reconstruction": again}
            columns = [", ".join(map(str, labels)) for labels in batch.labels.view(len(again), -1).tolist()]
        else:
            rows = {
                "input": batch.images,
                "its parts": pictures.overlap_colours(batch.parts),
                "reconstructions": pictures.overlap_colours(again),
            }
            columns = [f"{red}, {green}" for red, green in batch.labels.tolist()]
        write(pictures.image_grid(rows, columns), out / "reconstructions.png")


def perturb(
    checkpoint: Checkpoint,
    label: Annotated[list[int], typer.Option(help="Class to vary; repeat. Default all.", show_default=False)] = [],  # noqa: B006
    out: Out = Path("out/perturb"),
    data: Data = None,
    data_dir: DataDir = None,
    accelerator: Accelerator = "auto",
) -> None:
    """What each number of a class capsule means: it is varied from -0.25 to 0.25 in steps of 0.05; a PNG a class."""
    draw_perturbations("perturb", checkpoint, label, out, data, data_dir, accelerator)


def draw_perturbations(
    command: str,
    checkpoint: Path,
    label: list[int],
    out: Path,
    data: str | None,
    data_dir: str | None,
    accelerator: str,
) -> None:
    """perturb-N.png of the classes label, or all; errors are in the name of the command."""
    with plain_errors(command):
        check_writable(out)
        from .. import train
        from ..train import pictures

        learner, sets = opened(checkpoint, data, data_dir)
        to_accelerator(learner, accelerator)
        first = train.one_of_each_class(sets.test, sets.num_classes)
        rows = dict(zip(sets.test.source.labels[first].tolist(), first, strict=True))
        for each in label:
            if each not in rows:
                raise ValueError(f"capsfast {command}: label must be one of {', '.join(map(str, rows))}, got {each}")
        for each in label or rows:
            image = sets.test.batch(rows[each][None]).images[0]
            images = train.perturbations(learner, image, each)
            write(pictures.perturbation(images, str(each)), out / f"perturb-{each}.png")


def routing(
    checkpoint: Checkpoint,
    out: Out = Path("out/routing"),
    data: Data = None,
    data_dir: DataDir = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Look at the first so many images.")] = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Capsule lengths and coupling entropy by class, iteration by iteration: routing.png."""
    draw_routing("routing", checkpoint, out, data, data_dir, limit, accelerator)


def draw_routing(
    command: str,
    checkpoint: Path,
    out: Path,
    data: str | None,
    data_dir: str | None,
    limit: int | None,
    accelerator: str,
) -> None:
    """routing.png of the first limit images; errors are in the name of the command."""
    with plain_errors(command):
        check_writable(out)
        from .. import train
        from ..train import pictures

        learner, sets = opened(checkpoint, data, data_dir)
        to_accelerator(learner, accelerator)
        found = train.routing_statistics(learner, sets.test, limit=limit)
        write(pictures.routing(found, "routing to the class capsules"), out / "routing.png")
        for t, values in enumerate(found.entropy, 1):
            say(f"iteration {t}: coupling entropy {torch.nanmean(values):.4f} of log J, mean of the classes")
