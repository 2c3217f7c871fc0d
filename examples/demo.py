"""``make demo``: digits.py, then the speed of routing against einsum, then a summary and commands to try next."""

import os
import shutil
import sys
import time
from pathlib import Path

import digits
import typer
from rich.console import Console
from rich.table import Table

from capsfast.bench import record
from capsfast.bench.cases import CANONICAL, DIRECTIONS
from capsfast.bench.contenders import COMPILED, EAGER
from capsfast.bench.results import Results
from capsfast.cli.endings import one_line
from capsfast.cli.measuring import bench

OUT = Path("out")
console = Console()


def say(text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)


def command() -> str:
    """The command line of this environment, as a user types it."""
    beside = Path(sys.executable).parent / "capsfast"
    found = shutil.which("capsfast")
    if found and beside.exists() and os.path.samefile(found, beside):
        return "capsfast"
    python = Path(sys.executable)
    return f"{python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python} -m capsfast"


def speeds(results: Results) -> str:
    """The speed-up over einsum for the canonical layer with a batch of 128."""
    found = []
    for case in results.cases:
        if case.B != CANONICAL.B:
            continue
        ratios = [
            f"{ratio:.1f}x {name}" for name in (COMPILED, EAGER) if (ratio := results.speedup(case, name)) is not None
        ]
        found.append(f"{case.direction} {', '.join(ratios)}" if ratios else f"{case.direction}: einsum alone was timed")
    assert len(found) == len(DIRECTIONS)
    return "; ".join(found)


def main() -> None:
    with one_line("demo"):
        show()


def show() -> None:
    """Runs both parts. A failed contender is in the table, and its status is the exit status of the demo."""
    begin = time.perf_counter()
    say("\n1/2  A small CapsNet learns handwritten digits, with fused routing and with einsum: half a minute.")
    outcome = digits.compare(digits.fastest(), epochs=8, seed=0, out=OUT)
    say("\n2/2  The speed of one routing layer against einsum, eager and compiled: a minute, most of it compiling.")
    status = 0
    try:
        bench(memory=False, seconds=0.5, json=OUT / "bench.json")
    except typer.Exit as end:
        status = end.exit_code
        if status != 1:  # interrupted
            raise
    _, rows = record.load(OUT / "bench.json")

    table = Table(box=None, show_header=False, title="What you saw", title_justify="left", pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("accuracy", "; ".join(f"{name} {accuracy:.2%}" for name, accuracy in outcome.accuracy.items()))
    table.add_row("training", "; ".join(f"{name} {seconds:.1f} s" for name, seconds in outcome.seconds.items()))
    table.add_row("routing, B=128", f"faster than: {speeds(Results(rows))}")
    table.add_row("pictures", ", ".join(str(OUT / name) for name in digits.PICTURES))
    table.add_row("time", f"{time.perf_counter() - begin:.0f} s")
    console.print()
    console.print(table)
    say("\nWhat to type next")
    for words, what in (
        ("info", "the backends of this machine, and why one is missing"),
        ("train --data digits", "a network of your own; needs the extra train: docs/training.md"),
        ("bench --sweep J", "the speed over the number of output capsules: benchmarks/README.md"),
    ):
        say(f"  {command()} {words:<22} {what}")
    say('and README.md, "In a network", for capsfast.DynamicRouting where a routing layer stands.')
    if status:
        raise typer.Exit(status)


if __name__ == "__main__":
    typer.run(main)
