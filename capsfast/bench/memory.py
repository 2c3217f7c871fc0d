"""Measures the peak memory of a call beyond its inputs and gradients.

On the CPU this is the peak of the resident set in a fresh process. The allocator of a process that ran other contenders
would hold freed pages, which hide the growth. The kernel's high-water mark is reset just before the call (5 to
clear_refs, see proc(5)); otherwise it would show the peak of importing, compiling and filling the inputs. On CUDA
torch's allocator counts the bytes, in the process that does the timing and has compiled the call already.
"""

import ctypes
import dataclasses
import gc
import multiprocessing
import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from .cases import Case
from .contenders import COMPILED, Contender, contender
from .inputs import Step, input_set, step

T = TypeVar("T")


def growth(call: Callable[[], object]) -> int:
    """Bytes by which the resident set of this process grows in the call, at its peak, results included."""

    def resident(name: str) -> int:
        (kib,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return 1024 * int(kib)

    gc.collect()
    # Otherwise the call would reuse pages that the C library holds after a free, without growth.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    result = call()
    grown = resident("VmHWM") - before
    del result
    return grown


def _measure_here(case: Case, name: str, threads: int) -> int:
    """For a fresh process: bytes by which the resident set grows in the call, less the gradients."""
    torch.set_num_threads(threads)
    cpu = torch.device("cpu")
    chosen = contender(name)
    call = step(chosen.make(case), case, [input_set(case, cpu)])
    # Starts the threads.
    torch.empty(2**22).normal_().exp_()
    if chosen.name == COMPILED:
        # Compile for this shape first: compilation takes far more memory than the call.
        call()
    else:
        # Load the code by a small call, so that buffers that a contender keeps between calls still count.
        small = dataclasses.replace(case, B=min(case.B, 2), I=min(case.I, 32), size=min(case.size, 8))
        step(chosen.make(small), small, [input_set(small, cpu)])()
    return max(0, growth(call) - case.gradient_bytes)


def cuda_growth(call: Step, case: Case, device: torch.device) -> int:
    """Bytes that torch's allocator gives out at the peak of a call, less the gradients."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before - case.gradient_bytes)


def why_not() -> str:
    """Why peak memory of a CPU call can't be measured here, "" if it can."""
    if not os.access("/proc/self/clear_refs", os.W_OK) or not hasattr(ctypes.CDLL(None), "malloc_trim"):
        return "the peak of the resident set cannot be reset on this system"
    return ""


def in_a_process(function: Callable[..., T], *arguments: Any) -> T:
    """Runs the function in a fresh process, with its error stream silenced, and returns the result.

    Raises:
        BrokenProcessPool: the process was killed, for example because memory ran out.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _silence) as pool:
        return pool.submit(function, *arguments).result()


def _silence() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def peak_growth(case: Case, chosen: Contender, device: torch.device, call: Step) -> tuple[int | None, str]:
    """Bytes one call takes at its peak beyond inputs and gradients, or None and the reason.

    call: a step of the contender that was called before. A GPU measures this step, the CPU a fresh process.
    """
    try:
        if device.type == "cuda":
            return cuda_growth(call, case, device), ""
        if reason := why_not():
            return None, reason
        return in_a_process(_measure_here, case, chosen.name, torch.get_num_threads()), ""
    except Exception as error:  # an error of the contender, such as too little memory, or a killed process
        return None, f"peak memory was not measured: {type(error).__name__}"
