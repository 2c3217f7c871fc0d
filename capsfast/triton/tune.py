"""Measures tile sizes for one layer on this GPU and writes the table that CAPSFAST_TRITON_TABLE names.

Nothing is measured unless this is called. Without a table the defaults of config.py are used.
"""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import PassParameters
from ..files import write_text
from ..options import Options, PassOptions
from . import config, dynamic_routing, moments, replay, routing_pass
from .config import Choice, Layer
from .launch import Call
from .recorder import noted

# Values to try beside the default, for each field of config.Choice.
CANDIDATES: dict[str, tuple[Any, ...]] = {
    "columns": (20, 40, 80, 120, 160, 240),
    "warps": (1, 2, 4, 8),
    "waves": (0.5, 1, 2, 3),
    "chunk": (2, 4, 8, 16, 32),
    "down": (1, 2),
}
# What is tuned, in this order, as far as a forward and a backward launch it.
KERNELS = ("accumulate", "accumulate_gradient", "gradient", "row_norm")
# If a single iteration has a gradient.
ONCE = (*KERNELS[:2], "gradient once", *KERNELS[2:])
# Of a routing pass with precision, center or second moments.
QUADRATIC = tuple(f"{kernel} quadratic" for kernel in KERNELS[:3])

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


class Workload(NamedTuple):
    """A forward and a backward of one layer, which repeat recorded launches, or else the host would be timed."""

    layer: Layer
    run: Callable[[], None]


def of_dynamic_routing(u: Tensor, weight: Tensor, options: Options) -> Workload:
    given = (u, weight, None, None, None, None)
    v, *saved = dynamic_routing.forward(*given, None, *options, False, False)
    dv = torch.randn_like(v)

    def run() -> None:
        dynamic_routing.forward(*given, None, *options, False, False)
        needed = (True, True, False, False)
        dynamic_routing.backward(dv, None, *given, *saved, None, *options, False, needed)

    return Workload(Call(*given, options).layer, run)


def of_routing_pass(u: Tensor, weight: Tensor, options: PassOptions) -> Workload:
    """An iteration of EM routing, all of whose arguments have a gradient."""
    (B, I, _), (J, D) = u.shape, weight.shape[1:3]
    draw = functools.partial(torch.rand, device=u.device)
    # Positive, as a precision and an activation are.
    parameters = PassParameters(precision=draw(B, J, D), center=draw(B, J, D), prior=draw(B, J), activation=draw(B, I))
    given = (u, weight, *parameters)
    saved = routing_pass.forward(*given, None, *options, False, False, False)
    gradients = (*saved[:2], saved[2] if options.second else None, None, None)
    needed = tuple(value is not None for value in given[:9])

    def run() -> None:
        routing_pass.forward(*given, None, *options, False, False, False)
        routing_pass.backward(*gradients, *given, *saved, None, *options, False, needed)

    return Workload(moments.call(u, weight, parameters, options).layer, run)


def launched(run: Callable[[], None]) -> tuple[Any, ...]:
    """Kernels, grids and constants of a run, which is recorded: choices that lead to the same are one."""
    replay.forget()
    with noted() as found:
        run()
    return tuple(found)


def tune(
    u: Tensor,
    weight: Tensor,
    options: Options | PassOptions,
    timer: Timer = gpu_milliseconds,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """The rows of the table for ``u [B, I, K]`` and ``weight [I or 1, J, D, K]``: the best choice of every kernel.

    options: of dynamic routing, or of a routing pass, which has a precision and a center then.

    Tries one kernel after the other, and for each one field after the other. All other choices stay at the best found
    so far. A candidate that launches what another one did is not measured again. One that raises an error, because it
    does not compile or needs too much shared memory, is skipped.
    """
    if os.environ.get("CAPSFAST_TRITON_TABLE"):
        raise ValueError("tune: unset CAPSFAST_TRITON_TABLE, its choices would stand in the way of those to be tried")
    if isinstance(options, PassOptions):
        work, kernels = of_routing_pass(u, weight, options), QUADRATIC
    else:
        work = of_dynamic_routing(u, weight, options)
        kernels = ONCE if options.gradient == "last" or options.num_iterations == 1 else KERNELS
    device = torch.cuda.get_device_name(u.device) if u.is_cuda else "interpreter"
    rows = []
    with contextlib.ExitStack() as held:
        for kernel in kernels:
            tried = {launched(work.run)}
            if not any(name == f"{kernel.split()[0]}_kernel" for (name, *_) in next(iter(tried))):
                continue
            best = config.TABLE[kernel]
            first = least = timer(work.run)
            for name, values in CANDIDATES.items():
                for value in values if name != "chunk" or kernel.startswith("gradient") else ():
                    candidate = best._replace(**{name: value})
                    with using(kernel, candidate):
                        try:
                            launches = launched(work.run)
                            if launches in tried:
                                continue
                            tried.add(launches)
                            took = timer(work.run)
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
                    "layer": work.layer,
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
