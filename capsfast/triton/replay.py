"""What a call launches is worked out once, and repeated by every later call of the same signature.

A signature is all that decides about launches: the function, options, needs, of every tensor shape, strides, dtype,
device and alignment, and the tables of tile sizes. Without a recording (recorder.py) the ordinary code runs: where
Triton is none that this was tested with, and while hooks, such as a profiler's, are to be called at every launch.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from ..toolchain import MINIMUM_TRITON
from . import config
from .recorder import record
from .recording import ALIGNMENT, Recording, is_interpreted

NEWEST_TRITON = (3, 9)
MOST = 256


@functools.cache
def why_not() -> str:
    """Why launches are not repeated, "" if they are: this Triton may have other private parts than were tested."""
    if is_interpreted():
        return ""
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if not MINIMUM_TRITON <= version <= NEWEST_TRITON:
        return f"launches are repeated with triton 3.6 to 3.9, this is {triton.__version__}"
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
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # Chains of hooks, which are there without any.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


_recordings: dict[tuple[Any, ...], Recording | str] = {}  # by signature
_lock = threading.Lock()
_tables: tuple[Any, ...] = ()
_edition = 0
_as_it_is = contextlib.nullcontext()


def edition() -> int:
    """Another number whenever the table of tile sizes is another than at the call before."""
    global _tables, _edition
    now = tuple(config.TABLE.values())
    if now != _tables:
        with _lock:
            _tables, _edition = now, _edition + 1
            _recordings.clear()
    return _edition


def forget() -> None:
    """All calls are worked out anew."""
    with _lock:
        _recordings.clear()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes a device the current one: Triton launches there, on its current stream."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _as_it_is
    return torch.cuda.device(device)


def replayed(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """The kernels of an op, whose launches are recorded at the first call of a signature and repeated at later ones."""

    @functools.wraps(function)
    def call(*args: Any) -> tuple[Tensor, ...]:
        key: list[Any] = [function, edition()]
        tensors, addresses = [], []
        for value in args:
            if isinstance(value, Tensor):
                tensors.append(value)
                addresses.append(address := value.data_ptr())
                key.append((value.shape, value.stride(), value.dtype, value.get_device(), address % ALIGNMENT))
            else:
                key.append(tuple(value) if isinstance(value, list) else value)
        signature = tuple(key)
        with on_device(tensors[0].device):
            if why_not() or hooked():
                return function(*args)
            recording = _recordings.get(signature)
            if recording is None:
                outputs, recording = record(function, args)
                with _lock:
                    if len(_recordings) >= MOST:
                        del _recordings[next(iter(_recordings))]
                    _recordings[signature] = recording
                return outputs
            found = None if isinstance(recording, str) else recording.replay(tensors, addresses)
            return function(*args) if found is None else found

    return call
