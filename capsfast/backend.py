"""Chooses the backend of a call: the table of backends, demands for a backend, and the choice."""

import functools
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from .calls import checks
from .calls.arguments import Call
from .calls.options import Backend, PassOptions
from .environment import native, toolchain
from .environment.private_torch import constant_while_tracing, statically


class BackendStatus(NamedTuple):
    """available: the backend can run here. reason: why it can't, else "". devices: device types that it serves."""

    available: bool
    reason: str
    devices: tuple[str, ...]


def _not_by_triton(call: Call) -> str:
    if call.u.dtype == torch.float64:
        return "it serves float32, bfloat16 and float16, got float64"
    # While a compiler traces, a comparison would limit the sizes of the graph.
    if not torch.compiler.is_compiling() and _reach(call) >= 2**31:
        return "it serves tensors that reach less than 2**31 numbers in 32 samples; pass contiguous tensors"
    return toolchain.too_large_for_triton(call.D, call.P)


def _reach(call: Call) -> int:
    """How far the samples of one tile reach in u or the votes and in their gradient; launch.py checks all tensors."""
    u = call.u
    if u.dim() == 5:
        return call.J * call.D * u.shape[4]
    of_sample = call.J * call.D if call.weight is None else max(call.J, u.shape[2])
    samples = min(u.shape[0], 32)
    return max(samples * u.shape[1] * of_sample, (samples - 1) * u.stride(0))


def _not_by_cuda(call: Call) -> str:
    options, parameters = call.options, call.parameters
    if isinstance(options, PassOptions):
        lacking = [name for name in ("precision", "center", "activation") if getattr(parameters, name) is not None]
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


def _updates_by_triton(J: int, D: int) -> bool:
    """Whether one program of Triton can update J output capsules of D components."""
    return J * D > 0 and 1 << ((J - 1).bit_length() + (D - 1).bit_length()) <= toolchain.LARGEST_UPDATE


class _Backend(NamedTuple):
    """A row of the table. The functions that take a device or a call return a reason, or "".

    Args:
        devices: device types of the tensors that the backend takes.
        absent: why the backend can't run here.
        unsuitable: why the backend can't run on this GPU.
        refuses: why the backend can't serve this call.
        rounds: whether its kernels read torch's setting for TF32.
        updates: whether its kernels of EM routing can update J output capsules of D components; None without such
            kernels.
        wide: the dtypes of sums that its EM update takes.
        windows: whether its kernels unfold the windows of an image.
    """

    devices: tuple[str, ...]
    absent: Callable[[], str] = lambda: ""
    unsuitable: Callable[[torch.device], str] | None = None
    refuses: Callable[[Call], str] | None = None
    rounds: bool = True
    updates: Callable[[int, int], bool] | None = None
    wide: tuple[torch.dtype, ...] = ()
    windows: bool = False


# The definition, which serves every call.
REFERENCE = "reference"
# backend=None tries them in this order, on a GPU after the backend that FIRST_ON_GPU names. The lambdas look their
# function up at each call, so that a test can replace it.
BACKENDS: dict[str, _Backend] = {
    "cpp": _Backend(
        ("cpu",),
        lambda: native.why_absent,
        rounds=False,
        updates=lambda J, D: True,
        wide=(torch.float32, torch.float64),
        windows=True,
    ),
    "triton": _Backend(
        ("cuda",),
        lambda: toolchain.why_no_triton(),
        lambda gpu: toolchain.too_old_for_triton(gpu),
        _not_by_triton,
        updates=_updates_by_triton,
        wide=(torch.float32,),
        windows=True,
    ),
    "cuda": _Backend(("cuda",), lambda: native.why_no_cuda(), lambda gpu: native.why_not_on(gpu), _not_by_cuda),
    REFERENCE: _Backend(("any",)),
}
ORDER = get_args(Backend)


def _served_by_rows(call: Call, with_coupling: bool) -> bool:
    """Whether the backend "cuda" serves a call with its rows family: why_not() of csrc/ops/cuda/rows/kernels.h.

    False if a symbolic size decides it. with_coupling: the coupling is returned.
    """
    u, weight, options, parameters = call.u, call.weight, call.options, call.parameters
    if weight is None or with_coupling or u.dtype == torch.float64 or isinstance(options, PassOptions):
        return False
    masked = parameters.mask is not None or parameters.out_mask is not None
    if options.softmax != "out" or options.leaky or masked or parameters.logits is not None:
        return False
    (B, I, _), (_, J, D, K) = u.shape, weight.shape
    # The kernels count samples and input capsules in 32 bits.
    fits = statically(B * I * J * D * K > 0, D <= 16, call.P == 1, B < 2**30, (B // 16 + 1) * I < 2**30)
    if not fits or not (statically(J <= 10, K <= 16) or statically(J <= 12, K <= 8)):
        return False
    _, per_output, per_row, per_number = weight.stride()
    return (K == 1 or per_number == 1) and (D == 1 or per_row == K) and (J == 1 or per_output == D * K)


def _shares_weight(call: Call) -> bool:
    return call.weight is not None and call.weight.shape[0] == 1 != call.u.shape[1]


# Compute capabilities of the GPUs with a record of `make gpu-check` in benchmarks/results.
RECORDED = ((9, 0),)


@constant_while_tracing
def _timed(gpu: torch.device) -> bool:
    """Whether the times of FIRST_ON_GPU hold for a GPU and the CUDA kernels for it."""
    return _is_timed(gpu)


@functools.cache
def _is_timed(gpu: torch.device) -> bool:
    if native.why_no_cuda():
        return False
    capability = torch.cuda.get_device_capability(gpu)
    return capability in RECORDED and native.has_rows(capability)


# backend=None on a GPU first tries the backend of the first row whose condition holds. A condition takes the call and
# whether the coupling is returned. Times are from an H200 (2026-11-27), in us, of a forward and of both passes: host
# times of an eager call, otherwise times in a CUDA graph. The layer is B=128 I=1152 J=10 D=16 K=8 r=3 in float32,
# except for what a row names. A call that a graph captures counts as eager: the capture must run the kernels that ran
# before it, because the first launch of a Triton kernel loads it, which can fail while a stream is captured.
FIRST_ON_GPU: tuple[tuple[str, Callable[[Call, bool], bool]], ...] = (
    # Nobody timed both on this GPU, or for a weight that input capsules share, whose passes Triton runs without votes.
    ("triton", lambda call, with_coupling: not _timed(call.u.device) or _shares_weight(call)),
    # CUDA's columns and general families, which nobody has timed. Kernels that are gone took, for J=32, 3577 and 17451
    # (Triton 267 and 963), for D=K=32 7646 and 29486 (743 and 1797), for given votes 1393 and 3970 (166 and 356).
    ("triton", lambda call, with_coupling: not _served_by_rows(call, with_coupling)),
    # Eager: Triton 119 and 807, CUDA 43 and 285, the same for B=4 I=64.
    ("cuda", lambda call, with_coupling: not torch.compiler.is_compiling()),
    # bfloat16, also of autocast: Triton 63 and 242, CUDA 110 and 266.
    ("triton", lambda call, with_coupling: call.u.dtype != torch.float32 or torch.is_autocast_enabled("cuda")),
    # B=1: Triton 62 and 121, CUDA 81 and 170. B=16: Triton 73 and 135, CUDA 112 and 175.
    ("triton", lambda call, with_coupling: not statically(call.u.shape[0] > 16)),
    # B=1024 I=256: Triton 120 and 529, CUDA 203 and 599.
    ("triton", lambda call, with_coupling: not statically(call.u.shape[0] < 1024)),
    # Triton 88 and 306, CUDA 106 and 283. I=9216: Triton 491 and 2167, CUDA 330 and 1272.
    ("cuda", lambda call, with_coupling: True),
)


def _devices(name: str) -> tuple[str, ...]:
    return ("cpu",) if name == "triton" and toolchain.interpreting() else BACKENDS[name].devices


def backends() -> dict[str, BackendStatus]:
    """The status of every backend by name, with the reason if it is not available.

    ``backend=None`` tries the backends in this order; on a GPU measured times may put another one first
    (docs/routing.md). "reference" serves every call.
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

    def __init__(self, name: Backend | None) -> None:
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


def choose(call: Call, backend: str | None, with_coupling: bool = False) -> str:
    """The backend for a call.

    with_coupling: the coupling is returned.

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
    for name in _order_on_gpu(call, with_coupling) if kind == "cuda" else ORDER:
        there = BACKENDS[name]
        # Not _elsewhere(): Triton's interpreter runs only on demand.
        if kind not in there.devices and kind != "meta" and name != REFERENCE:
            continue
        if there.refuses and there.refuses(call):
            continue
        reason = there.absent() or (_of_gpu(name, device) if kind == "cuda" else "")
        if not reason:
            if name == REFERENCE and lacking:
                _warn_once(lacking)
            return name
        lacking = lacking or reason
    raise AssertionError("the reference backend serves every call")


def choose_for_em(call: Call, backend: str | None) -> str | None:
    """The backend whose kernels of EM routing serve a call, as a pass with second moments; None if passes have to.

    Raises:
        RuntimeError: the demanded backend cannot serve the call.
    """
    demand = demanded(call.op, backend)
    if demand is not None and BACKENDS[demand].updates is None:
        return None
    chosen = choose(call, demand)
    updates = BACKENDS[chosen].updates
    return chosen if updates and updates(call.J, call.D) else None


def choose_for_update(op: str, sums: Tensor, backend: str | None) -> str | None:
    """The backend whose kernel makes an EM update from ``sums [B, J, D]``; None if the definition has to.

    A demanded backend without a kernel for it raises no error, because the demand concerns the passes.
    """
    demand, device = demanded(op, backend), sums.device
    (_, J, D), names = sums.shape, (demand,) if demand is not None else ORDER
    name: str
    for name in names:
        there = BACKENDS[name]
        devices = there.devices if demand is None else _devices(name)
        if there.updates is None or device.type not in devices or sums.dtype not in there.wide:
            continue
        if there.updates(J, D) and not (there.absent() or _of_gpu(name, device)):
            return name
    return None


def choose_for_windows(device: torch.device) -> str | None:
    """The backend whose kernels unfold images on a device; None if torch has to.

    A demand for a backend concerns the passes alone.
    """
    for name in ORDER:
        there = BACKENDS[name]
        if there.windows and device.type in there.devices and not (there.absent() or _of_gpu(name, device)):
            return name  # type: ignore[no-any-return]
    return None


def _order_on_gpu(call: Call, with_coupling: bool) -> tuple[str, ...]:
    first = next(name for name, holds in FIRST_ON_GPU if holds(call, with_coupling))
    return (first, *ORDER)


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
