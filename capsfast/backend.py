"""Which implementation serves a call: the table of backends, who demands one, and the choice."""

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from . import checks, native, toolchain
from .arguments import Call
from .options import PassOptions


class BackendStatus(NamedTuple):
    """available: the backend can run here. reason: why it can't, else empty. devices: what it serves."""

    available: bool
    reason: str
    devices: tuple[str, ...]


def _not_by_triton(call: Call) -> str:
    if call.u.dtype == torch.float64:
        return "it serves float32, bfloat16 and float16, got float64"
    return toolchain.too_large_for_triton(call.D, call.P)


def _not_by_cuda(call: Call) -> str:
    options, given = call.options, call.parameters
    if isinstance(options, PassOptions):
        lacking = [name for name in ("precision", "center", "activation") if getattr(given, name) is not None]
        lacking += ["second"] * options.second
        if lacking:
            return f"it serves linear passes, those without {', '.join(lacking)}"
        if options.normalize not in ("out", "in"):
            return f"it serves normalize 'out' and 'in', got {options.normalize!r}"
    if call.shared_outputs:
        return "it does not serve votes that all output capsules share"
    if call.P != 1 or (call.weight is None and call.u.dim() == 5):
        return "it does not serve pose matrices, nor votes with axes of positions"
    return ""


class _Backend(NamedTuple):
    """A row of the table. Each function gives a reason, or "" where there is none.

    Args:
        devices: types of the devices that it takes tensors from.
        absent: why it can't run here.
        unsuitable: why it can't run on this GPU.
        refuses: why it can't serve this call.
    """

    devices: tuple[str, ...]
    absent: Callable[[], str] = lambda: ""
    unsuitable: Callable[[torch.device], str] | None = None
    refuses: Callable[[Call], str] | None = None


# In the order in which backend=None tries them. On a GPU Triton goes first wherever it serves: no record says yet which
# of the two is faster (docs/routing.md). A lambda looks its function up at each call, so that a test can replace it.
BACKENDS = {
    "cpp": _Backend(("cpu",), lambda: native.why_absent),
    "triton": _Backend(
        ("cuda",), lambda: toolchain.why_no_triton(), lambda gpu: toolchain.too_old_for_triton(gpu), _not_by_triton
    ),
    "cuda": _Backend(("cuda",), lambda: native.why_no_cuda(), lambda gpu: native.why_not_on(gpu), _not_by_cuda),
    "reference": _Backend(("any",)),
}
ORDER = tuple(BACKENDS)


def _devices(name: str) -> tuple[str, ...]:
    return ("cpu",) if name == "triton" and toolchain.interpreting() else BACKENDS[name].devices


def backends() -> dict[str, BackendStatus]:
    """Every backend by name, and for each absent one the reason.

    They are in the order in which ``backend=None`` tries them. "reference" serves every call.
    """
    return {name: BackendStatus(not (why := BACKENDS[name].absent()), why, _devices(name)) for name in ORDER}


def _checked(name: str | None, source: str) -> str | None:
    if name is not None and not (isinstance(name, str) and name in BACKENDS):
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
        if name is not None and (why := BACKENDS[name].absent()):
            raise RuntimeError(f"capsfast.use_backend: backend {name!r} is not available: {why}")
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
PACKAGE = str(Path(__file__).parent)


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned and not torch.compiler.is_compiling():
        _warned = True
        level, frame = 1, sys._getframe()
        while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
            level, frame = level + 1, frame.f_back  # type: ignore[assignment]
        warnings.warn(f"capsfast: running on the slow reference backend: {reason}", RuntimeWarning, stacklevel=level)


def demanded(op: str, name: str | None) -> str | None:
    """The backend that a call with ``backend=name`` has to run on, None where it may choose."""
    return _forced if name is None else _checked(name, op)


def choose(call: Call, backend: str | None) -> str:
    """The backend for a call.

    Raises:
        RuntimeError: the demanded backend cannot serve it.
    """
    demand, device = demanded(call.op, backend), call.u.device
    if demand is not None:
        reason = BACKENDS[demand].absent() or _elsewhere(demand, device) or _why_not(demand, call)
        if reason:
            raise RuntimeError(f"{call.op}: backend {demand!r} cannot serve this call: {reason}")
        return demand
    lacking = ""
    for name, there in BACKENDS.items():
        # Not _elsewhere(): an interpreter serves those who ask for it.
        if device.type not in (*there.devices, "meta") and name != "reference":
            continue
        if there.refuses and there.refuses(call):
            continue
        reason = there.absent() or (_of_gpu(name, device) if device.type == "cuda" else "")
        if not reason:
            if name == "reference" and lacking:
                _warn_once(lacking)
            return name
        lacking = lacking or reason
    raise AssertionError("the reference backend serves every call")


def _why_not(name: str, call: Call) -> str:
    """Why a backend that is there can't serve a call on its devices, "" if it can."""
    refuses = BACKENDS[name].refuses
    return (refuses(call) if refuses else "") or _of_gpu(name, call.u.device)


def _of_gpu(name: str, device: torch.device) -> str:
    unsuitable = BACKENDS[name].unsuitable
    return unsuitable(device) if unsuitable and device.type == "cuda" else ""


def _elsewhere(name: str, device: torch.device) -> str:
    """Why a backend can't serve tensors on this device, "" if it can."""
    devices = _devices(name)
    # Meta tensors take the path of the device they stand for: the fake of the CPU op.
    if "any" in devices or device.type in (*devices, "meta"):
        return ""
    return f"it runs on {' and '.join(devices)} tensors, got a tensor on {device}"
