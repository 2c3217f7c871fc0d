"""The command ``picture``: what a trained network does, as one picture of a kind."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..files import check_writable
from .common import (
    Accelerator,
    Checkpoint,
    Data,
    DataDir,
    Out,
    on_command_line,
    opened,
    plain_errors,
    to_accelerator,
    write,
)
from .endings import stop
from .inspection import draw_perturbations, draw_reconstructions, draw_routing


class Kind(str, Enum):
    """What there is to see. The last three are also the commands reconstruct, perturb and routing."""

    predictions = "predictions"
    reconstructions = "reconstructions"
    perturbations = "perturbations"
    routing = "routing"


OF_KIND = {"count": Kind.predictions, "wrong": Kind.predictions, "label": Kind.perturbations, "limit": Kind.routing}


def picture(
    context: typer.Context,
    checkpoint: Checkpoint,
    kind: Annotated[Kind, typer.Option(help="What is drawn.")] = Kind.predictions,
    out: Out = Path("out/picture"),
    data: Data = None,
    data_dir: DataDir = None,
    count: Annotated[int, typer.Option(min=1, help="Images, of predictions.")] = 12,
    wrong: Annotated[bool, typer.Option("--wrong", help="Only images taken wrongly, of predictions.")] = False,
    label: Annotated[
        list[int], typer.Option(help="Class to vary, of perturbations; repeat. Default all.", show_default=False)
    ] = [],  # noqa: B006
    limit: Annotated[int | None, typer.Option(min=1, help="First so many images, of routing.")] = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Test images with a bar for each class: predictions.png; or reconstructions, perturbations, routing."""
    for name, its in OF_KIND.items():
        if kind is not its and on_command_line(context, name):
            raise stop(f"capsfast picture: --{name} is an option of --kind {its.value}, got --kind {kind.value}")
    if kind is Kind.reconstructions:
        draw_reconstructions("picture", checkpoint, out, data, data_dir, accelerator)
    elif kind is Kind.perturbations:
        draw_perturbations("picture", checkpoint, label, out, data, data_dir, accelerator)
    elif kind is Kind.routing:
        draw_routing("picture", checkpoint, out, data, data_dir, limit, accelerator)
    else:
        with plain_errors("picture"):
            check_writable(out)
            from .. import train
            from ..train import pictures

            learner, sets = opened(checkpoint, data, data_dir)
            to_accelerator(learner, accelerator)
            found = train.predictions(learner, sets.test, count, wrong=wrong)
            write(pictures.predictions(found), out / "predictions.png")
