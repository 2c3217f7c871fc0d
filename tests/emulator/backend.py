"""The backend "emulated", for tests only: the CUDA kernels on CPU tensors."""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from capsfast import backend
from capsfast.ops import define, dynamic_routing, routing_pass

from .build import library

NAME, PREFIX = "emulated", "emulated_"
OPS = (dynamic_routing.OP, routing_pass.OP)


@functools.cache
def install() -> None:
    """Builds the kernels if necessary, and registers them as a backend that must be asked for by name."""
    path = library("ops")
    # Not in capsfast.backends(), so it is never chosen by itself. Same kernels as "cuda", so same refusals.
    refuses = backend.BACKENDS["cuda"].refuses
    backend.BACKENDS[NAME] = backend._Backend(("cpu",), refuses=refuses)
    define.PREFIX[NAME] = PREFIX
    for op in OPS:
        op.kernels[NAME] = op.define(PREFIX)
    torch.ops.load_library(str(path))


def take_launches(ways: bool = False, kernels: str = "ops") -> dict[str, int]:
    """How often kernels were launched since the last call, by the name of their arguments such as "rows::GradientArgs".

    With ``ways`` launches of blocks that run together, or that start early, count apart: "rows::AccumulateArgs cluster4
    cooperative early".
    """
    loaded = ctypes.CDLL(str(library(kernels)))
    loaded.capsfast_take_launches.restype = ctypes.c_char_p
    taken: dict[str, int] = {}
    for line in loaded.capsfast_take_launches().decode().splitlines():
        way, count = line.rsplit(" ", 1)
        name = way.removeprefix("capsfast::cuda::").removeprefix("planted::")
        name = name if ways else name.split(" ")[0]
        taken[name] = taken.get(name, 0) + int(count)
    return taken


def take_questions(kernels: str = "ops") -> int:
    """How often the host queried or configured the device since the last call."""
    ask = ctypes.CDLL(str(library(kernels))).capsfast_take_questions
    ask.restype = ctypes.c_int64
    return int(ask())


ROWS_PLAN = ("tiles", "groups", "units", "cluster", "gradient_chunk", "gradient_tiles", "parts", "splits")


def rows_plan(B: int, I: int, J: int, D: int, K: int, backward: bool) -> dict[str, int]:
    """How the rows family cuts a call without options on the emulated device."""
    loaded = ctypes.CDLL(str(library("ops")))
    values = (ctypes.c_int64 * len(ROWS_PLAN))()
    loaded.capsfast_rows_plan((ctypes.c_int64 * 5)(B, I, J, D, K), ctypes.c_bool(backward), values)
    return dict(zip(ROWS_PLAN, values, strict=True))


COLUMNS_PLAN = (
    *("warps", "strips", "streams", "chunk", "stages", "sections", "splits", "groups"),
    *("gradient_streams", "gradient_parts", "gradient_splits", "together"),
)


def columns_plan(B: int, I: int, J: int, D: int, K: int) -> dict[str, int]:
    """How the columns family cuts a call without options and its backward on the emulated device."""
    loaded = ctypes.CDLL(str(library("ops")))
    values = (ctypes.c_int64 * len(COLUMNS_PLAN))()
    loaded.capsfast_columns_plan((ctypes.c_int64 * 5)(B, I, J, D, K), values)
    return dict(zip(COLUMNS_PLAN, values, strict=True))


@contextmanager
def device(
    multiprocessors: int = 2,
    shared_bytes: int = 99 * 1024,
    shared_bytes_together: int | None = None,
    clusters: bool = True,
    cooperative: bool = True,
    crowded: bool = False,
    capturing: bool = False,
    fixed_shared_bytes: int = 0,
    architecture: int = 90,
    columns_first: bool = False,
    pairs_bytes: int = 1 << 28,
    kernels: str = "ops",
) -> Iterator[None]:
    """Calls in the block run on this device.

    Without ``shared_bytes_together`` a multiprocessor holds one largest block. ``crowded``: the device refuses
    cooperative launches that would fit. ``capturing``: a graph captures the launches. ``fixed_shared_bytes``: what each
    block has without asking for it.
    """
    least = shared_bytes + 1024
    together = least if shared_bytes_together is None else shared_bytes_together
    if multiprocessors < 1 or shared_bytes < 0 or together < least:
        given = f"{multiprocessors} multiprocessors with {together} bytes each, {least} of them for one block"
        raise ValueError(f"no device has {given}")
    exchange = ctypes.CDLL(str(library(kernels))).capsfast_exchange_device
    first = (multiprocessors, shared_bytes, together, clusters, cooperative, crowded, capturing)
    settings = (ctypes.c_int64 * 11)(*first, fixed_shared_bytes, architecture, columns_first, pairs_bytes)
    exchange(settings)
    try:
        yield
    finally:
        exchange(settings)
