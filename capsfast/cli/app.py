"""The typer application with all commands."""

import typer
from rich.console import Console

from ..bench import record
from .endings import plain_errors
from .inspection import clusters, evaluate, perturb, picture, predict, reconstruct, routing
from .measuring import bench, report
from .tables import backends_table, build_table, versions_table

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Fused capsule-network routing for PyTorch.")
for command in (bench, report, evaluate, predict, picture, reconstruct, perturb, routing, clusters):
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
    """Show versions, backends with reasons why they are missing, and the build of the extension."""
    console = Console()
    console.print(versions_table(record.versions(), record.commit()))
    console.print(backends_table())
    build = record.build_info()
    if build:
        console.print(build_table(build))
