"""What the commands print."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from ..backend import backends
from ..bench import roofline
from ..bench.formats import mebibytes, milliseconds, percent, times
from ..bench.measure import Row
from ..bench.results import Results


def _pairs(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def versions_table(versions: dict[str, Any], commit: dict[str, Any] | None) -> Table:
    table = _pairs("Versions")
    for name, value in versions.items():
        table.add_row(name, "none" if value is None else escape(str(value)))
    if commit is not None:
        table.add_row("commit", commit["hash"] + (" with changes" if commit["changed"] else ""))
    return table


def backends_table() -> Table:
    table = Table(title="Backends, fastest first", title_justify="left", box=box.SIMPLE)
    table.add_column("backend", no_wrap=True)
    table.add_column("devices", no_wrap=True)
    table.add_column("available", overflow="fold")
    for name, status in backends().items():
        table.add_row(name, ", ".join(status.devices), "yes" if status.available else f"no: {escape(status.reason)}")
    return table


def build_table(build: dict[str, Any]) -> Table:
    table = _pairs("Build of the extension")
    for name, value in build.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        table.add_row(escape(name), escape(shown))
    return table


def case_table(rows: Sequence[Row], limits: dict[str, float]) -> Table:
    """One case: milliseconds, quantiles, how much slower than capsfast, share of the multiply-adds, error, memory."""
    results = Results(rows)
    case = rows[0].case
    with_ours = results.ours(case) is not None
    with_memory = any(row.memory_bytes is not None for row in rows)
    with_share = any(roofline.share(row, limits) is not None for row in rows)
    # Narrow gaps and short headers: a terminal has 80 columns.
    table = Table(title=case.name, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("contender", no_wrap=True)
    table.add_column("median ms", justify="right")
    table.add_column("10-90 %", justify="right", no_wrap=True)
    if with_ours:
        table.add_column("over capsfast", justify="right")
    if with_share:
        # Of the multiply-adds on registers: FLOP/s.
        table.add_column("of peak", justify="right")
    table.add_column("error", justify="right")
    if with_memory:
        table.add_column("peak MiB", justify="right")
    for row in rows:
        if row.status == "ok":
            cells = [
                milliseconds(row.seconds["median"]),
                f"{milliseconds(row.seconds['p10'])}-{milliseconds(row.seconds['p90'])}",
                *([times(results.speedup(case, row.contender))] if with_ours else []),
                *([percent(roofline.share(row, limits))] if with_share else []),
                f"{max(row.errors.values()):.0e}",
            ]
        else:
            cells = [row.status, *[""] * (2 + with_ours + with_share)]
        if with_memory:
            cells.append("" if row.memory_bytes is None else mebibytes(row.memory_bytes))
        table.add_row(row.contender, *cells)
    return table


def case_line(rows: Sequence[Row], limits: dict[str, float]) -> str:
    """One case in one line, for long sweeps and log files."""
    shown = []
    for row in rows:
        result = f"{milliseconds(row.seconds['median'])} ms" if row.status == "ok" else row.status
        share = roofline.share(row, limits)
        shown.append(f"{row.contender} {result}" + (f" ({percent(share)} of the multiply-adds)" if share else ""))
    return f"{rows[0].case.name}: {', '.join(shown)}"


def roofline_table(lines: Sequence[Sequence[str]], op: str) -> Table:
    """Of capsfast.bench.roofline.table."""
    table = Table(title=f"{op}: cpp, share of the multiply-adds", title_justify="left", box=box.SIMPLE)
    # The title says of what.
    for n, name in enumerate([*roofline.HEADER[:-1], "share"]):
        table.add_column(name, justify="right" if n > 1 else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def reasons(rows: Sequence[Row]) -> list[str]:
    """Why a contender has no time, or no memory, on a case."""
    return [f"{row.contender}, {row.case.name}, {row.status}: {row.reason}" for row in rows if row.reason]
