"""The application, and the commands for :mod:`capsfast.bench`: arguments here, work there."""

import importlib.util
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..bench import record
from ..bench.cases import OPS, SWEEPS, sweep
from ..bench.contenders import contenders
from ..bench.measure import Row, run
from ..bench.report import describe
from ..bench.results import Results
from .inspection import evaluate, perturb, reconstruct, routing
from .tables import backends_table, build_table, case_table, reasons, versions_table
from .training import train
from .tuning import tune

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Fused capsule-network routing for PyTorch.")
for command in (train, evaluate, reconstruct, perturb, routing, tune):
    app.command()(command)


@app.command()
def info() -> None:
    """Versions, backends and why one is missing, and how the extension was built."""
    console = Console()
    console.print(versions_table(record.versions(), record.commit()))
    console.print(backends_table())
    build = record.build_info()
    if build:
        console.print(build_table(build))


@app.command()
def bench(
    name: Annotated[str, typer.Option("--sweep", help=f"One of {', '.join(SWEEPS)}.")] = "quick",
    op: Annotated[str, typer.Option(help=f"One of {', '.join(OPS)}.")] = "dynamic_routing",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="Torch threads; default torch's own choice.")] = None,
    seconds: Annotated[float, typer.Option(help="Timing per case; slow contenders take longer.")] = 1.0,
    png: Annotated[Path | None, typer.Option(help="Write a plot there.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the record there.")] = None,
) -> None:
    """Compares the backends with einsum, compiled and eager, and with the broadcast form."""
    if png is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter('--png needs matplotlib: pip install "capsfast[cli]"')
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device")
    try:
        cases = sweep(name, op)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if threads is not None:
        torch.set_num_threads(threads)
    where = torch.device(device)

    console = Console()
    surroundings = record.environment(where)
    console.print(describe(surroundings))
    rows: list[Row] = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        measured = run(
            cases,
            contenders(),
            where,
            seconds=seconds,
            least_rounds=3,
            # A process for every contender: for the last case only, the one that needs most.
            with_memory=lambda case: case == cases[-1],
            on_step=lambda text: progress.update(task, description=text),
        )
        for fresh in measured:
            rows += fresh
            progress.console.print(case_table(fresh))
            progress.advance(task)
            if json is not None:
                record.save(json, surroundings, rows)
    for line in reasons(rows):
        console.print(line)
    if png is not None:
        from ..bench.plots import bars

        bars(Results(rows), png)
    if any(row.status in ("wrong", "failed") for row in rows):
        raise typer.Exit(1)
