"""Runs the kernels of planted_*.cpp, right or with a fault in them, for the tests of the emulator itself."""

import ctypes
import functools
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import backend
from .build import library

Floats = NDArray[np.float32]


@functools.cache
def _loaded() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library("planted")))
    loaded.capsfast_run_planted.restype = ctypes.c_char_p
    loaded.capsfast_run_planted_meanwhile.restype = ctypes.c_char_p
    loaded.capsfast_planted_max_active.restype = ctypes.c_int64
    return loaded


def run(kernel: str, fault: str = "", size: int = 64, values: Floats | None = None) -> tuple[str, Floats]:
    """The fault that the emulator found, and the result."""
    given = np.arange(1, size + 1, dtype=np.float32) if values is None else values.astype(np.float32)
    out = np.full(size, np.nan, dtype=np.float32)
    pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (given, out))
    found = _loaded().capsfast_run_planted(kernel.encode(), fault.encode(), *pointers, size)
    return found.decode(), out


def check_right(kernel: str, wanted: Floats) -> None:
    """The kernel runs without a fault, forwards and backwards; ``wanted`` has the size of its input."""
    for _ in range(4):
        found, out = run(kernel, size=wanted.size)
        assert found == ""
        np.testing.assert_array_equal(out, wanted.flatten())


def check_found(kernel: str, fault: str, message: str, size: int = 64) -> None:
    """The emulator finds the fault, forwards and backwards, and still works afterwards."""
    for _ in range(4):
        found = run(kernel, fault, size)[0]
        assert message in found, found
    assert run("rotate")[0] == ""
    assert run("both", size=256)[0] == ""


def run_meanwhile(much: int, less: int, own: bool = False) -> str:
    """The fault that the emulator found in a launch while another thread plans a launch with less shared memory.

    With ``own`` each thread sets the kernel's limit of shared memory to what it needs itself.
    """
    found: bytes = _loaded().capsfast_run_planted_meanwhile(much, less, own)
    return found.decode()


def device(**settings: Any) -> AbstractContextManager[None]:
    """The device of these kernels, as ``device`` in backend.py."""
    return backend.device(kernels="planted", **settings)


def settings() -> list[int]:
    """The settings of the device, in the order of ``device``."""
    values = (ctypes.c_int64 * 9)()
    _loaded().capsfast_exchange_device(values)
    found = list(values)
    _loaded().capsfast_exchange_device(values)
    return found


def max_active_blocks(shared_bytes: int) -> int:
    """Blocks of two warps on a multiprocessor; -1 if the emulator finds a fault."""
    return int(_loaded().capsfast_planted_max_active(0, 64, shared_bytes))


def max_active_clusters(size: int, shared_bytes: int) -> int:
    """Clusters of such blocks on the device."""
    return int(_loaded().capsfast_planted_max_active(size, 64, shared_bytes))
