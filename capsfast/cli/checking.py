"""The command that checks the kernels of this machine. :mod:`capsfast.bench.check` does the work."""

import dataclasses
import json as json_format
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..bench import record
from ..bench.check import ABSENT, FAMILIES, RIGHT, Result, check_families, families
from ..bench.report import describe
from ..storage.files import check_replaceable, write_text
from .endings import one_line, say, stop


def line(result: Result) -> str:
    """One line for a family: the result, the number of calls, the largest error of each dtype."""
    errors = ", ".join(f"{dtype} {error:.0e}" for dtype, error in result.errors.items())
    counted = (
        result.absent if result.status == ABSENT else f"{result.calls} of {result.of} calls; {errors or 'no error'}"
    )
    return f"{result.family:<{max(map(len, FAMILIES))}}  {result.status}: {counted}"


def check(
    device: Annotated[
        str | None, typer.Option(help="Only the kernels for cpu or cuda; default: all there are.", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds for all families; what is left is not checked.")] = 32,
    json: Annotated[Path | None, typer.Option(help="Write results, machine and versions to this file.")] = None,
) -> None:
    """Compare the kernels of this machine with float64: forward, backward, in a CUDA graph. Status 0 if all are right.

    Numbers are the largest relative errors against float64. Triton's kernels are compiled once, so a second check on a
    GPU sees more calls.
    """
    if device not in (None, "cpu", "cuda"):
        raise typer.BadParameter(f"--device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device: torch sees no CUDA device")
    with_gpu = torch.cuda.is_available() and device != "cpu"
    kinds = [device] if device else ["cpu", *["cuda"] * with_gpu]
    with one_line("check"):
        if json is not None:
            check_replaceable(json)
        surroundings = record.environment(torch.device("cuda" if with_gpu else "cpu"))
        say(describe(surroundings))
        names = [name for kind in kinds for name in families(kind)]
        results = check_families(names, seconds, lambda result: say(line(result)))
        for reason in (fault for result in results for fault in result.wrong):
            say(f"wrong: {reason}")
        if json is not None:
            rows = [{**dataclasses.asdict(result), "status": result.status} for result in results]
            write_text(json, json_format.dumps({"environment": surroundings, "families": rows}, indent=1) + "\n")
            say(f"wrote {json}")
        there = [result for result in results if result.status != ABSENT]
        if not there:
            raise stop("capsfast check: there are no kernels for this machine")
        if any(result.status != RIGHT for result in there):
            raise typer.Exit(1)
