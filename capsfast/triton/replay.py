"""Launch plans: what a call launches is worked out once, and repeated by every later call of the same signature.

A signature is everything that decides about launches: function, options, needs, and of every tensor its shape, strides,
dtype, device and alignment; with it the tables of tile sizes. record.py makes the plan while the ordinary code runs.
Without a plan that code runs every time: where Triton is not one that this was tested with, while hooks of a profiler
wait for launches, and for calls of which record.py says why they have none.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ..toolchain import MINIMUM_TRITON
from . import config
from .kernels.update import restore_kernel

NEWEST_TRITON = (3, 9)
MOST_PLANS = 256
# Pointers of kernel arguments are multiples of it, or the compiler is told that they are not.
ALIGNMENT = 16

# What a step works with: tensors and their addresses by slot, and the stream.
Step = Callable[[list[Any], list[int], int], None]


class Place(NamedTuple):
    """Where a tensor lies: in which slot, how many bytes behind its address, in which form if not as the slot's own."""

    slot: int
    offset: int
    form: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]] | None

    def tensor(self, tensors: list[Any]) -> Tensor:
        base: Tensor = tensors[self.slot]
        if self.form is None:
            return base
        dtype, size, stride = self.form
        base = base if base.dtype == dtype else base.view(dtype)
        return base.as_strided(size, stride, base.storage_offset() + self.offset // base.itemsize)


class Plan(NamedTuple):
    """Slots are the tensors of the call, then fresh ones, then results of steps. fresh: size and strides, dtype."""

    device: torch.device
    fresh: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    results: int
    steps: tuple[Step, ...]
    outputs: tuple[Place, ...]

    def run(self, tensors: list[Any], addresses: list[int]) -> tuple[Tensor, ...] | None:
        """The outputs of the call, None if an allocator gave memory that is not aligned."""
        device, bits = self.device, 0
        for size, stride, dtype in self.fresh:
            tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
            address = tensor.data_ptr()
            tensors.append(tensor)
            addresses.append(address)
            bits |= address
        if bits % ALIGNMENT:
            return None
        tensors += [None] * self.results
        addresses += [0] * self.results
        stream = 0 if is_interpreted() else driver.active.get_current_stream(device.index)
        for step in self.steps:
            step(tensors, addresses, stream)
        return tuple([place.tensor(tensors) for place in self.outputs])


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, which it decided when they were defined."""
    return not isinstance(restore_kernel, JITFunction)


def compiled_launch(compiled: Any, grid: tuple[int, ...], arguments: list[Any]) -> Step:
    """A launch as JITFunction.run ends in it. arguments: all that the kernel's signature has."""
    places = [(n, value.slot, value.offset) for n, value in enumerate(arguments) if isinstance(value, Place)]
    template = [None if isinstance(value, Place) else value for value in arguments]
    x, y, z = (*grid, 1, 1)[:3]
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    # compiled: what unloads the function when nothing refers to it.
    def step(tensors: list[Any], addresses: list[int], stream: int, compiled: Any = compiled) -> None:
        filled = template.copy()
        for n, slot, offset in places:
            filled[n] = addresses[slot] + offset
        run(x, y, z, stream, function, metadata, None, None, None, *filled)

    return step


def interpreted_launch(kernel: Any, grid: tuple[int, ...], arguments: list[Any], constants: dict[str, Any]) -> Step:
    def step(tensors: list[Any], addresses: list[int], stream: int) -> None:
        kernel[grid](*(n.tensor(tensors) if isinstance(n, Place) else n for n in arguments), **constants)

    return step


@functools.cache
def why_not() -> str:
    """Why the launches of this Triton can't be repeated, "" if they can: it has other private parts than were tested."""
    if is_interpreted():
        return ""
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if not MINIMUM_TRITON <= version <= NEWEST_TRITON:
        return f"launches are repeated with triton 3.6 to 3.9, this is {triton.__version__}"
    from triton.compiler import CompiledKernel

    parts = (
        (CompiledKernel, "run"),
        (CompiledKernel, "launch_metadata"),
        (JITFunction, "run"),
        (triton.knobs.runtime, "launch_enter_hook"),
        (triton.knobs.runtime, "launch_exit_hook"),
    )
    lacking = [f"{owner!r} has no {name}" for owner, name in parts if not hasattr(owner, name)]
    return "; ".join(lacking)


def hooked() -> bool:
    """Whether somebody, such as a profiler, is to be told of every launch."""
    runtime = triton.knobs.runtime
    return any(getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))


_plans: dict[tuple[Any, ...], Plan | str] = {}
_lock = threading.Lock()
_tables: tuple[Any, ...] = ()
_edition = 0


def edition() -> int:
    """Another number whenever the table of tile sizes is another than at the call before."""
    global _tables, _edition
    now = tuple(config.TABLE.values())
    if now != _tables:
        with _lock:
            _tables, _edition = now, _edition + 1
            _plans.clear()
    return _edition


def clear() -> None:
    """Forgets all plans."""
    with _lock:
        _plans.clear()


def planned(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """The kernels of an op, whose launches are recorded at the first call of a signature and repeated at later ones."""

    @functools.wraps(function)
    def call(*args: Any) -> tuple[Tensor, ...]:
        if why_not() or hooked():
            return function(*args)
        key: list[Any] = [function, edition(), os.environ.get("CAPSFAST_TRITON_TABLE")]
        tensors, addresses = [], []
        for value in args:
            if isinstance(value, Tensor):
                address = value.data_ptr()
                tensors.append(value)
                addresses.append(address)
                key += (value.shape, value.stride(), value.dtype, value.device, address % ALIGNMENT)
            else:
                key.append(value)
        signature = tuple(key)
        plan = _plans.get(signature)
        if plan is None:
            from .record import record

            outputs, plan = record(function, args)
            with _lock:
                if len(_plans) >= MOST_PLANS:
                    del _plans[next(iter(_plans))]
                _plans[signature] = plan
            return outputs
        if isinstance(plan, str):
            return function(*args)
        device = plan.device
        if device.type != "cuda" or torch.cuda.current_device() == device.index:
            found = plan.run(tensors, addresses)
        else:
            with torch.cuda.device(device):
                found = plan.run(tensors, addresses)
        return function(*args) if found is None else found

    return call
