"""The typer application with all commands."""

import ast
import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from .._version import __version__
from .endings import plain_errors, say

# The modules of commands. They import torch, which takes seconds, so they are imported when a command runs.
MODULES = {
    "checking": ("check",),
    "measuring": ("bench", "report"),
    "inspection": ("evaluate", "predict", "picture", "reconstruct", "perturb", "routing", "clusters", "models"),
}


class Commands(TyperGroup):
    """Commands that are imported when they run; until then they are their first line of help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for module in (name for name, names in MODULES.items() if args[0] in names):
            command = typer.Typer(add_completion=False)
            command.command()(getattr(importlib.import_module(f".{module}", __package__), args[0]))
            self.commands[args[0]] = typer.main.get_command(command)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, help="Fused capsule-network routing for PyTorch."
)
for module, names in MODULES.items():
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names):
        app.command(function.name, help=ast.get_docstring(function))(lambda: None)


def _say_version(asked: bool) -> None:
    if asked:
        say(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


# The commands whose options, --help included, Lightning's command line parses.
OF_LIGHTNING = {
    "train": "Train a capsule network: --data, --model, --epochs and so on.",
    "fit": "Train with configuration files and all options of Lightning's command line.",
    "validate": "Measure a checkpoint on the images for validation: loss and its parts, accuracy.",
    "test": "Measure a checkpoint on the images for tests.",
}


def _passed_on(name: str) -> None:
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, help=OF_LIGHTNING[name], context_settings=settings)
    def run(context: typer.Context) -> None:
        with plain_errors(name):
            from . import early

            if name == "train" and context.args in (["--help"], ["-h"]):
                say(early.HELP)
                return
            asked = early.asked(name, context.args)
            from . import training

            training.run(name, asked)


for name in OF_LIGHTNING:
    _passed_on(name)


@app.command()
def info(
    ops: Annotated[bool, typer.Option(help="Show the schemas of the ops too.")] = False,
) -> None:
    """Show versions, backends, kernels that changed since a GPU ran them, and the build of the extension."""
    from ..backend import backends
    from ..bench import ran, record

    versions = {name: "none" if value is None else value for name, value in record.versions().items()}
    commit = record.commit()
    if commit is not None:
        versions["commit"] = commit["hash"] + (" with changes" if commit["changed"] else "")
    _print_table("Versions", versions.items())
    all_backends = backends().items()
    rows = [(name, ", ".join(s.devices), "yes" if s.available else f"no: {s.reason}") for name, s in all_backends]
    _print_table("Backends", rows, "backend", "devices", "available")
    _print_table("Kernels for GPUs", [(name, ran.since_the_run(name)) for name in ran.FOLDERS])
    if built := record.build_info():
        schemas = built.pop("schemas", [])
        lists = {name: ", ".join(map(str, value)) for name, value in built.items() if isinstance(value, list)}
        _print_table("Build of the extension", (built | lists).items())
        if ops:
            _print_table("Ops", [(text.partition("(")[0], text) for text in schemas])


def _print_table(title: str, rows: Iterable[tuple[object, ...]], *headers: str) -> None:
    """The last column may be folded, the others not."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=bool(headers))
    for header in headers[:-1] or [""]:
        table.add_column(header, no_wrap=True)
    table.add_column(headers[-1] if headers else "", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    Console().print(table)
