"""Whether Triton is there, its version and its limits, without importing it."""

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re

import torch

from .private_torch import constant_while_tracing

# The tests compile and interpret the kernels with 3.6 (torch 2.10) and 3.9 (torch 2.15).
MINIMUM_TRITON = (3, 6)
# The interpreter of older releases takes arrays of one element for numbers, which NumPy refuses from 2.4 on.
INTERPRETED_WITH_ANY_NUMPY = (3, 7)
# The first GPUs with TF32 and bfloat16 tensor cores.
MINIMUM_CAPABILITY = (8, 0)
# AMD's architectures whose matrix instructions the compiled kernels use. No kernel ran on one yet.
AMD = ("gfx90a", "gfx942", "gfx950")
# A tile holds whole output capsules of 16 samples: larger capsules don't fit the shared memory of all these GPUs.
LARGEST_D = 512
# All rows of a pose matrix lie in one tile. Four warps together would multiply a tile of 64 rows (wgmma).
LARGEST_P = 32
# One program updates all output capsules of a sample, with J and D padded to powers of two: at most so many numbers.
LARGEST_UPDATE = 4096


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors. Triton reads the variable at import."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "on", "true", "yes")


@constant_while_tracing
def why_no_triton() -> str:
    """Why the Triton kernels can't run here, "" if they can."""
    if interpreting():
        return _why_not_installed() or _why_not_interpreted()
    return _why_not_installed() or ("" if torch.cuda.is_available() else _NO_DEVICE)


_NO_DEVICE = (
    "there is no CUDA device that this torch can use (TRITON_INTERPRET=1, set before the start, runs the kernels "
    "on the CPU for tests)"
)


@functools.cache
def _why_not_installed() -> str:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (it comes with the CUDA builds of torch)"
    if _release(_triton()) < MINIMUM_TRITON:
        return f"the kernels need triton {'.'.join(map(str, MINIMUM_TRITON))} or newer, this is {_triton()}"
    return ""


@functools.cache
def _why_not_interpreted() -> str:
    numpy = importlib.metadata.version("numpy") if importlib.util.find_spec("numpy") else ""
    if _release(_triton()) < INTERPRETED_WITH_ANY_NUMPY and _release(numpy) >= (2, 4):
        return f"the interpreter of Triton {_triton()} needs NumPy below 2.4, this is {numpy}"
    return ""


def _triton() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a Triton installed under another package name
        return str(importlib.import_module("triton").__version__)


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else ()


@constant_while_tracing
def too_old_for_triton(device: torch.device) -> str:
    """Why the GPU can't run the kernels, "" if it can."""
    return _too_old(device)


@functools.cache
def _too_old(device: torch.device) -> str:
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        return "" if name in AMD else f"it needs an AMD GPU of {', '.join(AMD)}, {device} is {name}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < MINIMUM_CAPABILITY:
        return f"it needs a GPU of compute capability 8.0 or newer, {device} has {major}.{minor}"
    return ""


def too_large_for_triton(D: int, poses: int) -> str:
    """Why tiles can't hold the capsules, "" if they can."""
    if D > LARGEST_D:
        return f"it serves output capsules of dimension D up to {LARGEST_D}, got {D}"
    if poses > LARGEST_P:
        return f"it serves pose matrices of up to {LARGEST_P} rows, got {poses}"
    return ""
