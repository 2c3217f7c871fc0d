"""The commands for measurements. :mod:`capsfast.bench` does the work."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from .._install import in_the_checkout
from ..bench import record
from ..bench.cases import OPS, ROUTING, SWEEPS, Case, sweep
from ..bench.checkout import checkout
from ..bench.contenders import OURS, contenders, missing
from ..bench.measure import Row, measure, multiply_adds
from ..bench.report import describe, page, write
from ..bench.results import Results, mebibytes, milliseconds, percent, times
from ..files import check_replaceable
from ..nn import ROUTINGS
from .endings import one_line, stop
from .progress import plain, progress

# Sweeps with a measurement of peak memory, which takes a process for every contender.
REMEMBERED = ("smoke", "I", "J", "batch", "long", "routings")
# A sweep with more cases prints a line for each case instead of a table.
MOST_TABLES = 8


def bench(
    chosen: Annotated[
        str | None,
        typer.Option("--sweep", help=f"One of {', '.join(SWEEPS)}; default quick, with --routing: routings."),
    ] = None,
    op: Annotated[
        str | None, typer.Option(help=f"Op: {', '.join(OPS)} or both; default dynamic_routing.", show_default=False)
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(help=f"Measure a routing of capsfast.nn instead of an op: {', '.join(ROUTINGS)}, or all."),
    ] = None,
    device: Annotated[str, typer.Option(help="Device: cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Number of torch threads; default: torch's.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Least seconds of timing per case; default 1, with --record 2."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Least rounds of timing per case; default 3, with --record 5.")
    ] = None,
    memory: Annotated[
        bool,
        typer.Option(
            help="Measure peak memory in the sweeps I, J, batch, long, routings and smoke; in quick: the last case."
        ),
    ] = True,
    baselines: Annotated[bool, typer.Option(help="Measure einsum, compiled and eager, too.")] = True,
    keep: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Write benchmarks/results/<machine>.json, or with the suffix -route-votes, -long, -routings.",
        ),
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the record to this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a plot to this file.")] = None,
) -> None:
    """Compare the speed of the backends with einsum, compiled and eager.

    --record and --json write all results so far after every case, and replace an existing record.
    """
    name = chosen if chosen is not None else "quick" if routing is None else "routings"
    cases = _cases(name, op, routing)
    where = _device(device)
    if keep and json is not None:
        raise typer.BadParameter("--record and --json each name a file for the record; give one of them")
    if png is not None:
        _need_matplotlib("--png")
    if threads is not None:
        torch.set_num_threads(threads)
    surroundings = record.environment(where)
    path = _results() / f"{record.name(surroundings['machine'], op or '', name, routing or '')}.json" if keep else json
    absent = missing(where)
    able = [each for each in contenders() if each.serves(where) and (baselines or each.ours)]
    if not baselines and not able:
        raise stop("capsfast bench: --no-baselines leaves nothing to measure, as no fused backend is there", 2)
    if keep and not any(each.ours for each in able):
        raise stop(f"capsfast bench: --record needs a fused backend for {where.type}: {'; '.join(absent.values())}", 2)

    rows: list[Row] = []

    def kept() -> str:
        if path is None:
            return "nothing is kept; --record or --json PATH writes a record"
        done = len({row.case for row in rows})
        return f"{path} holds {done} of {len(cases)} cases" if done else f"no case was finished, {path} is unchanged"

    with one_line("bench", kept):
        for target in filter(None, (path, png)):
            _check_target(target)
        if where.type == "cpu":
            surroundings["limits"] = multiply_adds()
        limits = surroundings.get("limits") or {}
        remembered = _remembered(name, cases, op, routing) if memory else set()
        console = Console()
        for backend, reason in absent.items():
            console.print(plain(f"{OURS}{backend} is not measured: {reason}"), soft_wrap=True)
        console.print(plain(describe(surroundings)), soft_wrap=True)
        console.file.flush()
        with progress(len(cases), console) as shown:
            for case in cases:
                fresh = measure(
                    case,
                    able,
                    where,
                    seconds=seconds if seconds is not None else 2.0 if keep else 1.0,
                    least_rounds=rounds if rounds is not None else 5 if keep else 3,
                    with_memory=case in remembered,
                    on_step=lambda text, case=case: shown.step(f"{text}: {case.name}"),  # type: ignore[misc]
                )
                if path is not None:
                    _save(path, surroundings, [*rows, *fresh])
                rows += fresh
                shown.advance()
                shown.print(case_table(fresh, limits) if len(cases) <= MOST_TABLES else case_line(fresh, limits))
        for row in rows:
            if row.reason:
                reason = f"{row.contender}, {row.case.name}, {row.status}: {row.reason}"
                console.print(plain(reason), soft_wrap=True)
        if png is not None:
            from ..bench.plots import bars

            bars(Results(rows), png)
        if path is not None:
            console.print(plain(f"wrote {path}; python -m capsfast report makes a page of records"), soft_wrap=True)
    if any(row.status in ("wrong", "failed") for row in rows):
        raise typer.Exit(1)


def report(
    records: Annotated[
        list[Path] | None, typer.Argument(help="Files of records; default: all of this checkout.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write benchmarks.md and images/ into this folder; default standard output.")
    ] = None,
) -> None:
    """Make Markdown tables from records, and plots with --out."""
    if out is not None:
        _need_matplotlib("--out")
    with one_line("report"):
        chosen = records or sorted(_results().glob("*.json"))
        if not chosen:
            raise stop("capsfast report: no record in benchmarks/results; python -m capsfast bench --record makes one")
        try:
            if out is None:
                typer.echo(page(chosen), nl=False)
            else:
                typer.echo(f"wrote {write(chosen, out)}")
        except (ValueError, FileNotFoundError) as error:
            raise stop(f"capsfast report: {error}") from None


def _cases(name: str, op: str | None, routing: str | None) -> list[Case]:
    if op is not None and routing is not None:
        raise typer.BadParameter("--op and --routing each say what is measured; give one of them")
    try:
        if routing is not None:
            chosen = ROUTINGS if routing == "all" else (routing,)
            return [case for each in chosen for case in sweep(name, ROUTING, routing=each)]
        return [case for each in (OPS if op == "both" else (op or OPS[0],)) for case in sweep(name, each)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _device(name: str) -> torch.device:
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device must be cpu or cuda, got {name!r}")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device")
    return torch.device(name)


def _need_matplotlib(what: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter(f"{what} needs matplotlib; {in_the_checkout('cli')}")


def _results() -> Path:
    """The folder of the records."""
    root = checkout()
    if root is None:
        raise typer.BadParameter(
            "records lie in a checkout, and this capsfast is an installed copy: "
            "bench --json PATH writes a record anywhere, report PATH reads it"
        )
    return root / "benchmarks" / "results"


def _check_target(path: Path) -> None:
    try:
        check_replaceable(path)
    except OSError as error:
        raise stop(f"capsfast bench: {path} can't be written: {error.strerror}; nothing was measured") from None


def _save(path: Path, surroundings: dict[str, Any], rows: list[Row]) -> None:
    try:
        record.save(path, surroundings, rows)
    except OSError as error:
        raise stop(
            f"capsfast bench: {path} can't be written: {error.strerror}; it keeps its content from before this case"
        ) from None


def _remembered(name: str, cases: list[Case], op: str | None, routing: str | None) -> set[Case]:
    """The cases whose peak memory is measured."""
    if name == "quick":
        # The last case of an op or routing needs most memory.
        return set({(case.op, case.routing): case for case in cases}.values())
    return {case for each in REMEMBERED for case in _cases(each, op, routing)} & set(cases)


def case_table(rows: Sequence[Row], limits: dict[str, float]) -> Table:
    """Table of a case: milliseconds, quantiles, times slower than capsfast, share of multiply-adds, error, memory."""
    results, case = Results(rows), rows[0].case
    # Narrow gaps and short headers: a terminal has 80 columns.
    table = Table(title=case.name, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("contender", no_wrap=True)
    columns = {
        "median ms": lambda row: milliseconds(row.seconds["median"]),
        "10-90 %": lambda row: f"{milliseconds(row.seconds['p10'])}-{milliseconds(row.seconds['p90'])}",
        "over capsfast": lambda row: times(results.speedup(case, row.contender)),
        # Share of the rate of multiply-adds on registers.
        "of peak": lambda row: percent(Results([row]).share(case, limits)),
        "error": lambda row: f"{max(row.errors.values()):.0e}",
        "peak MiB": lambda row: mebibytes(row.memory_bytes),
    }
    found = {title: [show(row) if row.status == "ok" else "" for row in rows] for title, show in columns.items()}
    # Columns without any number are left out.
    found = {title: cells for title, cells in found.items() if set(cells) - {"-", ""}}
    for title in found:
        table.add_column(title, justify="right", no_wrap=title == "10-90 %")
    for n, row in enumerate(rows):
        cells = [column[n] for column in found.values()]
        table.add_row(row.contender, *(cells if row.status == "ok" else [row.status]))
    return table


def case_line(rows: Sequence[Row], limits: dict[str, float]) -> str:
    """One case in one line, for long sweeps and log files."""
    shown = []
    for row in rows:
        result = f"{milliseconds(row.seconds['median'])} ms" if row.status == "ok" else row.status
        share = Results([row]).share(row.case, limits)
        shown.append(f"{row.contender} {result}" + (f" ({percent(share)} of the multiply-adds)" if share else ""))
    return f"{rows[0].case.name}: {', '.join(shown)}"
