"""The application."""

import typer
from rich.console import Console

from ..bench import record
from .clusters import clusters
from .inspection import evaluate, perturb, reconstruct, routing
from .measuring import bench, report
from .picture import picture
from .tables import backends_table, build_table, versions_table
from .training import train
from .tuning import tune

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Fused capsule-network routing for PyTorch.")
for command in (bench, report, train, evaluate, clusters, picture, reconstruct, perturb, routing, tune):
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
