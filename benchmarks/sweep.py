"""Runs a sweep with interleaved contenders and keeps the record: python benchmarks/sweep.py --help."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from capsfast.bench import record
from capsfast.bench.cases import OPS, SWEEPS, sweep
from capsfast.bench.contenders import contenders
from capsfast.bench.limits import limits
from capsfast.bench.measure import Row, run
from capsfast.cli.tables import case_line

RESULTS = Path(__file__).parent / "results"
console = Console()


def main(
    name: Annotated[str, typer.Option("--sweep", help=f"One of {', '.join(SWEEPS)}.")] = "all",
    op: Annotated[str, typer.Option(help=f"One of {', '.join(OPS)}, or both.")] = "both",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="Torch threads; default torch's own choice.")] = None,
    seconds: Annotated[float, typer.Option(help="Timing per case; slow contenders take longer.")] = 2.0,
    rounds: Annotated[int, typer.Option(help="Least turns of a contender on a case.")] = 5,
    memory: Annotated[bool, typer.Option(help="Measure peak memory as well, over I, J and B.")] = True,
    resume: Annotated[bool, typer.Option(help="Keep the rows of an interrupted run.")] = False,
    output: Annotated[Path | None, typer.Option(help="Default: results/<machine>.json beside this file.")] = None,
) -> None:
    """Measures every case of a sweep and writes the record after each."""
    if threads is not None:
        torch.set_num_threads(threads)
    where = torch.device(device)
    try:
        cases = [case for each in (OPS if op == "both" else (op,)) for case in sweep(name, each)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None

    # A process for every contender: only where the report plots or tabulates what memory grows with.
    over = ("smoke", "I", "J", "batch") if memory else ()
    remembered = {case for each in over for op_name in OPS for case in sweep(each, op_name)}

    surroundings = record.environment(where)
    path = output or RESULTS / f"{record.machine_name(surroundings['machine'])}.json"
    rows: list[Row] = []
    if resume and path.exists():
        before, rows = record.load(path)
        surroundings["limits"] = before.pop("limits", None)
        if {**before, "limits": surroundings["limits"]} != surroundings:
            raise typer.BadParameter(f"{path.name} was measured in another environment; run without --resume")
        done = {row.case for row in rows}
        cases = [case for case in cases if case not in done]
    if not surroundings.get("limits"):
        surroundings["limits"] = limits(where)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(cases))
        measured = run(
            cases,
            contenders(),
            where,
            seconds=seconds,
            least_rounds=rounds,
            with_memory=lambda case: case in remembered,
            on_step=lambda text: progress.update(task, description=text),
        )
        for fresh in measured:
            rows += fresh
            record.save(path, surroundings, rows)
            progress.console.print(case_line(fresh), soft_wrap=True)
            progress.advance(task)
    console.print(f"wrote {path.name}; python benchmarks/report.py makes the tables and plots")
    if any(row.status in ("wrong", "failed") for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
