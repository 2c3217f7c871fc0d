"""Chooses the backend of a call: the table of backends, demands for a backend, and the choice."""

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
    """available: the backend can run here. reason: why it can't, else "". devices: device types that it serves."""

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
            return f"it serves linear passes, without {', '.join(lacking)}"
        if options.normalize not in ("out", "in"):
            return f"it serves normalize 'out' and 'in', got {options.normalize!r}"
    if call.shared_outputs:
        return "it does not serve votes that all output capsules share"
    if call.P != 1 or (call.weight is None and call.u.dim() == 5):
        return "it does not serve pose matrices, nor votes with axes of positions"
    return ""


class _Backend(NamedTuple):
    """A row of the table. Each function returns a reason, or "".

    Args:
        devices: device types of the tensors that the backend takes.
        absent: why the backend can't run here.
        unsuitable: why the backend can't run on this GPU.
        refuses: why the backend can't serve this call.
    """

    devices: tuple[str, ...]
    absent: Callable[[], str] = lambda: ""
    unsuitable: Callable[[torch.device], str] | None = None
    refuses: Callable[[Call], str] | None = None


# backend=None tries them in this order. On a GPU Triton goes first until a record of `make gpu-check` for its compute
# capability is committed; then the faster one by that record (docs/routing.md). The lambdas look their function up at
# each call, so that a test can replace it.
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
    """The status of every backend by name, with the reason if it is not available.

    ``backend=None`` tries the backends in this order. "reference" serves every call.
    """
    return {name: BackendStatus(not (why := _why_not_here(name)), why, _devices(name)) for name in ORDER}


def _why_not_here(name: str) -> str:
    """Why a backend can't run on any device of this machine, "" if it can."""
    there, gpus = BACKENDS[name], range(torch.cuda.device_count())
    reason = there.absent()
    if reason or there.unsuitable is None or _devices(name) != there.devices:
        return reason
    reasons = [there.unsuitable(torch.device("cuda", n)) for n in gpus]
    return reasons[0] if reasons and all(reasons) else ""


def _checked(name: str | None, source: str) -> str | None:
    if name is not None and not (isinstance(name, str) and name in BACKENDS):
        checks.choice(source, "backend", name, ORDER)
    return name


_forced: str | None = _checked(os.environ.get("CAPSFAST_BACKEND") or None, "CAPSFAST_BACKEND")


class use_backend:
    """Forces a backend for all following calls, or inside a ``with`` block; None ends the forcing.

    It holds for all threads of the process.

    A ``backend=`` argument at a call overrides ``use_backend``, which overrides the environment variable
    CAPSFAST_BACKEND. A forced backend that can't serve a call raises an error; there is no silent fallback.

    Raises:
        ValueError: no backend has this name.
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
        if _forced != self._name:  # forced anew between the constructor and the with statement
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
    """The backend that a call with ``backend=name`` must use, None if there is a choice."""
    return _forced if name is None else _checked(name, op)


def choose(call: Call, backend: str | None) -> str:
    """The backend for a call.

    Raises:
        RuntimeError: the demanded backend cannot serve the call.
    """
    demand, device = demanded(call.op, backend), call.u.device
    kind = device.type
    if demand is not None:
        reason = BACKENDS[demand].absent() or _elsewhere(demand, device) or _why_not(demand, call)
        if reason:
            raise RuntimeError(f"{call.op}: backend {demand!r} cannot serve this call: {reason}")
        return demand
    lacking = ""
    for name, there in BACKENDS.items():
        # Not _elsewhere(): Triton's interpreter runs only on demand.
        if kind not in there.devices and kind != "meta" and name != "reference":
            continue
        if there.refuses and there.refuses(call):
            continue
        reason = there.absent() or (_of_gpu(name, device) if kind == "cuda" else "")
        if not reason:
            if name == "reference" and lacking:
                _warn_once(lacking)
            return name
        lacking = lacking or reason
    raise AssertionError("the reference backend serves every call")


def _why_not(name: str, call: Call) -> str:
    """Why an available backend can't serve a call on its devices, "" if it can."""
    refuses = BACKENDS[name].refuses
    return (refuses(call) if refuses else "") or _of_gpu(name, call.u.device)


def _of_gpu(name: str, device: torch.device) -> str:
    unsuitable = BACKENDS[name].unsuitable
    return unsuitable(device) if unsuitable and device.type == "cuda" else ""


def _elsewhere(name: str, device: torch.device) -> str:
    """Why a backend can't serve tensors on this device, "" if it can."""
    devices = _devices(name)
    # Meta tensors run the fake of the CPU op.
    if "any" in devices or device.type in (*devices, "meta"):
        return ""
    return f"it runs on {' and '.join(devices)} tensors, got a tensor on {device}"
