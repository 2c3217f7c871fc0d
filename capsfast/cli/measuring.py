"""The commands for measurements. :mod:`capsfast.bench` does the work."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..bench import record
from ..bench.cases import IMAGES, SWEEPS, sweep
from ..bench.contenders import OURS, contenders, missing
from ..bench.layers import LAYERS
from ..bench.measure import Row, first_line, lost, measure, multiply_adds
from ..bench.report import describe, page, write
from ..bench.results import Results, mebibytes, microseconds, milliseconds, percent, times
from ..environment.install import in_the_checkout
from ..nn import ROUTINGS
from ..storage.files import check_replaceable
from .endings import one_line, say, stop


def bench(
    op: Annotated[
        str,
        typer.Option(
            help="dynamic_routing, route_votes, or both of them; or a routing of capsfast.nn: "
            f"{', '.join(ROUTINGS)}; or all of these routings: routings; or a convolutional layer: "
            f"{', '.join(LAYERS)}; or all of these layers: layers."
        ),
    ] = "dynamic_routing",
    name: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            help=f"One of {', '.join(SWEEPS)}; default quick, for routings: routings. For layers one of "
            f"{', '.join(IMAGES)}; default images.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device: cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Number of torch threads; default: torch's.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Least seconds of eager timing per case; default 1, on a GPU 0.")
    ] = None,
    memory: Annotated[
        bool, typer.Option(help="Measure peak memory; --sweep quick only for the last case of each op.")
    ] = True,
    baselines: Annotated[bool, typer.Option(help="Measure einsum, compiled and eager, too.")] = True,
    json: Annotated[Path | None, typer.Option(help="Write the record to this file, for report.")] = None,
) -> None:
    """Compare the speed of the backends with einsum, compiled and eager.

    --json writes all results so far after every case, and replaces an existing record.
    """
    of_layers = op in ("layers", *LAYERS)
    name = name or ("images" if of_layers else "routings" if op in ("routings", *ROUTINGS) else "quick")
    try:
        cases = sweep(name, op)
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from None
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device: torch sees no CUDA device")
    if threads is not None:
        torch.set_num_threads(threads)
    where = torch.device(device)
    if seconds is None:  # on a GPU the five turns that each contender has in any case are enough
        seconds = 0.0 if device == "cuda" else 1.0
    surroundings = record.environment(where)
    absent = missing(where)
    able = [contender for contender in contenders() if contender.serves(where) and (baselines or contender.ours)]
    if not baselines and not any(contender.ours for contender in able):
        why_not = "; ".join(absent.values())
        raise stop(f"capsfast bench: --no-baselines needs a fused backend for {device}: {why_not}", 2)

    rows: list[Row] = []

    def kept() -> str:
        if json is None:
            return "nothing is kept; --json PATH writes a record"
        done = len({row.case for row in rows})
        return f"{json} holds {done} of {len(cases)} cases" if done else f"no case was finished, {json} is unchanged"

    with one_line("bench", kept):
        if json is not None:
            check_replaceable(json)
        if device == "cpu":
            surroundings["limits"] = multiply_adds()
        for backend, reason in absent.items():
            say(f"{OURS}{backend} is not measured: {reason}")
        say(describe(surroundings))
        lasts = {(case.op, case.module_name): case for case in cases}.values()
        for case in cases:
            # The quick sweep measures memory for the last case of each op and routing.
            with_memory = memory and (name != "quick" or case in lasts)
            try:
                fresh = measure(case, able, where, seconds=seconds, with_memory=with_memory)
            except RuntimeError as error:  # too little memory for every contender, or the GPU is lost
                fresh = [Row(case, contender.name, "failed", first_line(error)) for contender in able]
            if json is not None:
                record.save(json, surroundings, [*rows, *fresh])
            rows += fresh
            Console().print(case_table(fresh, device, surroundings.get("limits") or {}))
            if lost(where):
                break
        for row in rows:
            if row.reason:
                say(f"{row.contender}, {row.case.name}, {row.status}: {row.reason}")
        if lost(where):
            raise stop(f"capsfast bench: the GPU refuses every call after {case.name}; {kept()}")
        if json is not None:
            say(f"wrote {json}; python -m capsfast report makes a page of records")
    if any(row.status in ("wrong", "failed") for row in rows):
        raise typer.Exit(1)


def report(
    records: Annotated[list[Path], typer.Argument(help="Files that bench --json wrote.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Write benchmarks.md and images/ into this folder; default standard output.")
    ] = None,
) -> None:
    """Make Markdown tables from records, and plots with --out."""
    if out is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter(f"--out needs matplotlib; {in_the_checkout('cli')}")
    with one_line("report"):
        try:
            if out is None:
                typer.echo(page(records), nl=False)
            else:
                typer.echo(f"wrote {write(records, out)}")
        except ValueError as error:
            raise stop(f"capsfast report: {error}") from None


def case_table(rows: Sequence[Row], device: str, limits: dict[str, float]) -> Table:
    """Table of a case: times, times slower than capsfast, error, memory; on a CPU quantiles and share of multiply-adds.

    On a GPU the first time is that in a CUDA graph, then eager and host.
    """
    results, case = Results(rows), rows[0].case
    # Narrow gaps and short headers: a terminal has 80 columns.
    table = Table(title=case.name, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("contender", no_wrap=True)

    def spent(how: str) -> Callable[[Row], str]:
        return lambda row: microseconds(results.seconds(case, row.contender, how))

    columns: dict[str, Callable[[Row], str]] = (
        {"graph µs": spent("graph"), "eager µs": spent("eager"), "host µs": spent("host")}
        if device == "cuda"
        else {
            "median ms": lambda row: milliseconds(row.seconds["median"]),
            "10-90 %": lambda row: f"{milliseconds(row.seconds['p10'])}-{milliseconds(row.seconds['p90'])}",
        }
    )
    columns |= {
        "over capsfast": lambda row: times(results.speedup(case, row.contender, results.main(case))),
        # Share of the rate of multiply-adds on registers.
        "of peak": lambda row: percent(Results([row]).share(case, limits)),
        "error": lambda row: f"{max(row.errors.values()):.0e}",
        "peak MiB": lambda row: mebibytes(row.memory_bytes),
    }
    columns_shown = {
        title: [show(row) if row.status == "ok" else "" for row in rows] for title, show in columns.items()
    }
    # Columns without any number are left out.
    columns_shown = {title: cells for title, cells in columns_shown.items() if set(cells) - {"-", ""}}
    for title in columns_shown:
        table.add_column(title, justify="right", no_wrap=title == "10-90 %")
    for n, row in enumerate(rows):
        cells = [column[n] for column in columns_shown.values()]
        table.add_row(row.contender, *(cells if row.status == "ok" else [row.status]))
    return table
