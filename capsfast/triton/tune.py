"""Measures tile sizes for one layer on this GPU and writes the table that CAPSFAST_TRITON_TABLE names.

Nothing is measured unless this is called. Without a table the defaults of config.py are used.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import write_text
from ..options import Options
from . import config, routing
from .config import Choice
from .launch import Call

# Values to try beside the default, for each field of config.Choice.
CANDIDATES = {
    "columns": (24, 32, 40, 48, 64, 80, 96),
    "warps": (4, 8),
    "resident": (8, 12, 16, 24, 32),
    "chunk": (2, 4, 8, 16, 32),
}
# The kernels that are tuned, in this order. A forward and a backward launch all of them, row_norm for large J only.
KERNELS = ("accumulate", "accumulate_gradient", "gradient", "row_norm")

Timer = Callable[[Callable[[], Any]], float]


@contextlib.contextmanager
def using(kernel: str, choice: Choice) -> Iterator[None]:
    """Replaces the default choice of a kernel inside the with block."""
    before = config.TABLE[kernel]
    config.TABLE[kernel] = choice
    try:
        yield
    finally:
        config.TABLE[kernel] = before


def gpu_milliseconds(function: Callable[[], Any]) -> float:
    """The median time of a call on the GPU, in ms."""
    from triton.testing import do_bench

    return float(do_bench(function, warmup=10, rep=50, return_mode="median"))


def workload(call: Call) -> Callable[[], Any]:
    """A function that runs one forward and one backward."""
    v, coupling, s, norm = routing.forward(call, False)
    dv = torch.randn_like(v)
    needed = (True, call.weight is not None, False, False)

    def step() -> None:
        routing.forward(call, False)
        routing.backward(call, dv, None, coupling, s, norm, needed)

    return step


def tune(
    u: Tensor, weight: Tensor, options: Options, timer: Timer = gpu_milliseconds, say: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """The rows of the table for ``u [B, I, K]`` and ``weight [I or 1, J, D, K]``: the best choice of every kernel.

    Tries one kernel after the other, and for each one field after the other. All other choices stay at the best found
    so far. A candidate that raises an error, because it does not compile or needs too much shared memory, is skipped.
    """
    if os.environ.get("CAPSFAST_TRITON_TABLE"):
        raise ValueError("tune: unset CAPSFAST_TRITON_TABLE, its choices would stand in the way of those to be tried")
    call = Call(u, weight, None, None, None, None, options)
    device = torch.cuda.get_device_name(u.device) if u.is_cuda else "interpreter"
    rows = []
    with contextlib.ExitStack() as held:
        for kernel in KERNELS:
            if kernel == "row_norm" and call.tiles("accumulate").groups == 1 and call.tiles("gradient").groups == 1:
                continue
            best = config.TABLE[kernel]
            first = least = timer(workload(call))
            tried = {best}
            for name, values in CANDIDATES.items():
                for value in values if name != "chunk" or kernel == "gradient" else ():
                    candidate = best._replace(**{name: value})
                    if candidate in tried:
                        continue
                    tried.add(candidate)
                    with using(kernel, candidate):
                        try:
                            took = timer(workload(call))
                        except Exception as error:
                            say(f"{kernel} {candidate}: {type(error).__name__}")
                            continue
                    if took < least:
                        best, least = candidate, took
            say(f"{kernel}: {best}, {first:.4g} ms to {least:.4g} ms")
            held.enter_context(using(kernel, best))
            rows.append(
                {
                    "device": device,
                    "kernel": kernel,
                    "layer": call.layer,
                    "choice": best,
                    "milliseconds": least,
                    "default_milliseconds": first,
                }
            )
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Adds rows to the table at path. They replace those for the same device, kernel and layer."""
    table = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {(row["device"], row["kernel"], tuple(row["layer"])) for row in rows}
    kept = [row for row in table if (row["device"], row["kernel"], tuple(row["layer"])) not in new]
    text = ",\n  ".join(json.dumps(row) for row in kept + rows)
    write_text(path, f'{{"rows": [\n  {text}\n]}}\n')
