"""The tables of ``python -m capsfast info``."""

from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from ..backend import backends


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
    table = Table(title="Backends, in the order of choice", title_justify="left", box=box.SIMPLE)
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
