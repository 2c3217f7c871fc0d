"""The typer application with all commands."""

from collections.abc import Iterable

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..backend import backends
from ..bench import ran, record
from .checking import check
from .endings import plain_errors
from .inspection import clusters, evaluate, perturb, picture, predict, reconstruct, routing
from .measuring import bench, report

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Fused capsule-network routing for PyTorch.")
for command in (check, bench, report, evaluate, predict, picture, reconstruct, perturb, routing, clusters):
    app.command()(command)

# The commands whose options, --help included, Lightning's command line parses.
OF_LIGHTNING = {
    "train": "Train a capsule network: --data, --model, --epochs and so on.",
    "fit": "Train with configuration files and all options of Lightning's command line.",
    "validate": "Test a checkpoint: loss and its parts, accuracy.",
    "test": "Same as validate.",
}


def _passed_on(name: str) -> None:
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, help=OF_LIGHTNING[name], context_settings=settings)
    def run(context: typer.Context) -> None:
        with plain_errors(name):
            from . import training

            training.run(name, context.args)


for name in OF_LIGHTNING:
    _passed_on(name)


@app.command()
def info() -> None:
    """Show versions, backends, kernels that changed since a GPU ran them, and the build of the extension."""
    versions = {name: "none" if value is None else value for name, value in record.versions().items()}
    commit = record.commit()
    if commit is not None:
        versions["commit"] = commit["hash"] + (" with changes" if commit["changed"] else "")
    _print_table("Versions", versions.items())
    found = backends().items()
    rows = [(name, ", ".join(s.devices), "yes" if s.available else f"no: {s.reason}") for name, s in found]
    _print_table("Backends", rows, "backend", "devices", "available")
    _print_table("Kernels for GPUs", [(name, ran.since_the_run(name)) for name in ran.FOLDERS])
    if built := record.build_info():
        lists = {name: ", ".join(map(str, value)) for name, value in built.items() if isinstance(value, list)}
        _print_table("Build of the extension", (built | lists).items())


def _print_table(title: str, rows: Iterable[tuple[object, ...]], *headers: str) -> None:
    """The last column may be folded, the others not."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=bool(headers))
    for header in headers[:-1] or [""]:
        table.add_column(header, no_wrap=True)
    table.add_column(headers[-1] if headers else "", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    Console().print(table)
