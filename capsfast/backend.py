"""Which implementation serves a call: ``backends()``, ``use_backend()`` and ``CAPSFAST_BACKEND``."""

import os
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from . import checks, native, toolchain

# In the order in which backend=None tries them, but for one kind of call. docs/routing.md has the same table:
#
#   call on a GPU                   | order                   | reason
#   served by "cuda", whose kernels | cuda                    | one launch from C++ against six from Python (a forward,
#   its op wants first              |                         | r = 3): host time decides small layers
#   any other                       | triton, cuda, reference | kernels that run for longer hide the host's time;
#                                   |                         | nothing says whose are faster
#
# This follows from the number of launches. No GPU has measured it.
ORDER = ("cpp", "triton", "cuda", "reference")
DEVICES = {"cpp": ("cpu",), "triton": ("cuda",), "cuda": ("cuda",), "reference": ("any",)}


class BackendStatus(NamedTuple):
    """available: the backend can run here. reason: why it can't, else empty. devices: what it serves."""

    available: bool
    reason: str
    devices: tuple[str, ...]


def _absence(name: str) -> str:
    if name == "cuda":
        return native.why_no_cuda()
    if name == "cpp":
        return native.why_absent
    return toolchain.why_no_triton() if name == "triton" else ""


def _devices(name: str) -> tuple[str, ...]:
    return ("cpu",) if name == "triton" and toolchain.interpreting() else DEVICES[name]


def backends() -> dict[str, BackendStatus]:
    """Every backend by name, and for each absent one the reason.

    They are in the order in which ``backend=None`` tries them, but that "cuda" goes before "triton" for some layers of
    few output capsules (docs/routing.md). "reference" serves every call.
    """
    return {name: BackendStatus(not _absence(name), _absence(name), _devices(name)) for name in ORDER}


def _checked(name: str | None, source: str) -> str | None:
    if name is not None:
        checks.choice(source, "backend", name, ORDER)
    return name


_forced: str | None = _checked(os.environ.get("CAPSFAST_BACKEND") or None, "CAPSFAST_BACKEND")


class use_backend:
    """Forces a backend for all following calls, or inside a ``with`` block; None lifts the force.

    The force is the process's, not the thread's.

    A ``backend=`` argument at a call goes before it, the environment variable CAPSFAST_BACKEND
    after it. A forced backend that can't serve a call is an error, never a silent fallback.

    Raises:
        ValueError: no backend of that name.
        RuntimeError: the backend is not available here.
    """

    def __init__(self, name: str | None) -> None:
        global _forced
        _checked(name, "capsfast.use_backend")
        if name is not None and _absence(name):
            raise RuntimeError(f"capsfast.use_backend: backend {name!r} is not available: {_absence(name)}")
        self._name = name
        self._previous = _forced
        _forced = name

    def __enter__(self) -> "use_backend":
        global _forced
        if _forced != self._name:  # entered later than made
            self._previous, _forced = _forced, self._name
        return self

    def __exit__(self, *error: object) -> None:
        global _forced
        _forced = self._previous


_warned = False


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned and not torch.compiler.is_compiling():
        _warned = True
        warnings.warn(f"capsfast: running on the slow reference backend: {reason}", RuntimeWarning, stacklevel=5)


def demanded(op: str, name: str | None) -> str | None:
    """The backend that a call with ``backend=name`` has to run on, None where it may choose."""
    return _checked(name, op) or _forced


def select(
    op: str,
    device: torch.device,
    backend: str | None,
    cannot: Mapping[str, Callable[[], str]] | None = None,
    why_not_cuda_first: Callable[[], str] | None = None,
) -> str:
    """The backend for a call of ``op`` on ``device``.

    ``cannot`` maps a backend to a function that says why it can't serve this call ("" if it can).
    ``why_not_cuda_first`` says why Triton's kernels go before the CUDA kernels, which they do without it, and "" if
    they don't. It is asked only where the CUDA kernels can serve the call.
    """
    name = demanded(op, backend)
    if name is not None:
        reason = _absence(name) or _refusal(name, device, cannot) or _unsuitable(name, device)
        if reason:
            raise RuntimeError(f"{op}: backend {name!r} cannot serve this call: {reason}")
        return name
    if why_not_cuda_first is not None and device.type == "cuda":
        # Last what may compare symbols: under torch.compile a comparison is a guard.
        reason = _refusal("cuda", device, cannot) or _absence("cuda") or _unsuitable("cuda", device)
        if not (reason or why_not_cuda_first()):
            return "cuda"
    lacking = ""
    for name in ORDER:
        # An interpreter serves those who ask for it.
        if device.type not in (*DEVICES[name], "meta") and "any" not in DEVICES[name]:
            continue
        if _refusal(name, device, cannot):
            continue
        reason = _absence(name) or _unsuitable(name, device)
        if reason:
            lacking = lacking or reason
            continue
        if name == "reference" and lacking:
            _warn_once(lacking)
        return name
    raise AssertionError("the reference backend serves every call")


def _unsuitable(name: str, device: torch.device) -> str:
    """Why a backend that is available can't run on this very GPU, "" if it can."""
    if device.type != "cuda" or name not in ("triton", "cuda"):
        return ""
    return toolchain.too_old_for_triton(device) if name == "triton" else native.why_not_on(device)


def _refusal(name: str, device: torch.device, cannot: Mapping[str, Callable[[], str]] | None) -> str:
    """Why a backend can't serve a call on a ``device`` of this type, "" if it can."""
    devices = _devices(name)
    # Meta tensors take the path of the device they stand for: the fake of the CPU op.
    if "any" not in devices and device.type not in (*devices, "meta"):
        return f"it runs on {' and '.join(devices)} tensors, got a tensor on {device}"
    if cannot is not None and name in cannot:
        return cannot[name]()
    return ""
