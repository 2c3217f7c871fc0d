"""``python examples/recipes`` runs every recipe with the seeds 0, 1 and 2, and writes a record of their numbers."""

import importlib
import json
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from recipe import run

from capsfast.bench.record import environment
from capsfast.cli.endings import one_line
from capsfast.storage.files import check_writable, write_text

FOLDER = Path(__file__).parent


def main(out: Annotated[Path, typer.Option(help="Folder for recipes.json.")] = Path("out")) -> None:
    """Run all recipes."""
    record = {"command": "python examples/recipes", "environment": environment(torch.device("cpu"))}
    with one_line("recipes"):
        check_writable(out)
        for name in sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("recipe", "__main__")):
            recipe = importlib.import_module(name)
            start = time.perf_counter()
            runs = [run(recipe.main, seed) for seed in range(3)]
            numbers = {what: [numbers[what] for numbers in runs] for what in runs[0]}
            record[name] = {"numbers": numbers, "seconds": round(time.perf_counter() - start, 1)}
            print(name, json.dumps(record[name]))
        write_text(out / "recipes.json", json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
