"""Shared by the scripts of this folder: options, a comparison of functions, the record."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capsfast.bench.record import environment
from capsfast.bench.timing import interleave
from capsfast.storage.files import write_text

CPU = torch.device("cpu")
# The largest relative L2 error against float64.
BOUND = 1e-4


def options(name: str, doc: str | None, seconds: float) -> argparse.Namespace:
    """The command line of a script: --out, --threads, and --seconds for each measurement."""
    parser = argparse.ArgumentParser(f"python -m benchmarks.{name}", description=doc)
    parser.add_argument("--out", type=Path, help="file for the record; its rows are always printed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=seconds, help="for each measurement")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    return arguments


def keep(given: argparse.Namespace, name: str, **found: Any) -> None:
    """Writes the record: command, environment and results."""
    if given.out is not None:
        # A record does not say where on a machine it was written.
        words = [word.replace(str(given.out), given.out.name) for word in sys.argv[1:]]
        command = " ".join(["python -m", f"benchmarks.{name}", *words])
        record = {"format": 1, "command": command, "environment": environment(CPU), **found}
        write_text(given.out, json.dumps(record, indent=1) + "\n")


def compare(
    functions: Mapping[str, Callable[..., Tensor]],
    plain: Callable[..., Tensor],
    leaves: Sequence[Tensor],
    dout: Tensor,
    seconds: float,
) -> dict[str, Any]:
    """Errors of the functions against ``plain`` in float64, then their times in turns, forward and with backward.

    Raises:
        SystemExit: a result or a gradient is wrong.
    """

    def forward(function: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return function(*leaves)

    def both(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]

    right = both(plain, *(leaf.detach().double().requires_grad_() for leaf in leaves))
    row: dict[str, Any] = {"errors": {}}
    for name, function in functions.items():
        pairs = zip(both(function, *leaves), right, strict=True)
        row["errors"][name] = max(float((got - wanted).norm() / wanted.norm()) for got, wanted in pairs)
        if not row["errors"][name] <= BOUND:
            raise SystemExit(f"{name} is wrong by {row['errors'][name]:.1e}")
        forward(function)
    ways = {"forward": forward, "both": lambda function: both(function, *leaves)}
    for kind, way in ways.items():
        steps = {name: lambda way=way, function=function: way(function) for name, function in functions.items()}  # type: ignore[misc]
        row[kind] = {name: asdict(timing) for name, timing in interleave(steps, CPU, seconds).items()}
        print(kind, {name: f"{1e3 * value['median']:.2f} ms" for name, value in row[kind].items()}, flush=True)
    return row
