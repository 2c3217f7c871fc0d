"""Peak memory of one call beyond its inputs and gradients.

On the CPU the peak is that of the resident set of a fresh process. A process of its own, because the
allocator of a process that has run other contenders holds freed pages, which would hide the growth;
and inside it the kernel's high-water mark is reset just before the call (5 to clear_refs, see
proc(5)), because without the reset it would still show the peak of importing, compiling and filling
the inputs. On CUDA torch's own allocator counts, in the process that times.
"""

import ctypes
import dataclasses
import gc
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import torch

from .cases import Case
from .contenders import COMPILED, Contender, contender
from .inputs import Step, input_set, step

CHILD_SECONDS = 600
PR_SET_PDEATHSIG = 1  # prctl(2)


def _resident() -> dict[str, int]:
    """VmRSS and VmHWM of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return {name: int(kib) * 1024 for name, kib in re.findall(r"(VmHWM|VmRSS):\s+(\d+) kB", status)}


def _reset_peak() -> None:
    gc.collect()
    # Pages that the C library holds after a free would be reused without growth.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _measure_here(case: Case, name: str) -> int:
    """For a fresh process: bytes by which the resident set grows in the call, less the gradients."""
    cpu = torch.device("cpu")
    chosen = contender(name)
    inputs = input_set(case, cpu)
    call = step(chosen.make(case), case, [inputs])
    # Starts the threads.
    torch.empty(2**22).normal_().exp_()
    if chosen.name == COMPILED:
        # Compilation depends on the shape and takes far more memory than the call.
        call(0)
    else:
        # Loads the code; a small call, so that buffers a contender keeps between calls still count.
        small = dataclasses.replace(case, B=min(case.B, 2), I=min(case.I, 32))
        step(chosen.make(small), small, [input_set(small, cpu)])(0)
    _reset_peak()
    before = _resident()["VmRSS"]
    result = call(0)
    growth = _resident()["VmHWM"] - before
    del result
    return max(0, growth - case.gradient_bytes)


def cuda_growth(case: Case, call: Step, device: torch.device) -> int:
    """Bytes that torch's allocator hands out at the peak of a call, less the gradients. One call went before."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call(0)
    torch.cuda.synchronize(device)
    growth = torch.cuda.max_memory_allocated(device) - before
    del result
    return max(0, growth - case.gradient_bytes)


def why_not() -> str:
    """Why peak memory of a CPU call can't be measured here, "" if it can."""
    if not os.access("/proc/self/clear_refs", os.W_OK) or not hasattr(ctypes.CDLL(None), "malloc_trim"):
        return "the peak of the resident set cannot be reset on this system"
    return ""


def peak_growth(case: Case, chosen: Contender, device: torch.device) -> tuple[int | None, str]:
    """Bytes one call takes at its peak beyond inputs and gradients, or None and the reason."""
    if device.type == "cuda":
        call = step(chosen.make(case), case, [input_set(case, device)])
        call(0)
        return cuda_growth(case, call, device), ""
    reason = why_not()
    if reason:
        return None, reason
    package_parent = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH"))))
    request = json.dumps([dataclasses.asdict(case), chosen.name, torch.get_num_threads(), os.getpid()])
    command = [sys.executable, "-m", "capsfast.bench.memory", request]
    try:
        # From there, since -m puts the current folder first, which may hold another capsfast.
        status, output = _output_of(command, package_parent, {**os.environ, "PYTHONPATH": path}, CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        return None, f"the measuring process took more than {CHILD_SECONDS} s"
    if status != 0:
        return None, f"the measuring process ended with status {status}"
    return int(output.split()[-1]), ""


def _output_of(command: list[str], folder: str, environment: dict[str, str], seconds: float) -> tuple[int, str]:
    """Status and output of a process that does not outlive this function, nor do compilers that it has started."""
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        # Ctrl-C reaches the parent alone, and the group can be ended as one.
        start_new_session=True,
    ) as child:
        try:
            output, _ = child.communicate(timeout=seconds)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    return child.returncode, output


def _end_with(parent: int) -> None:
    """Ends this process as soon as ``parent`` has ended, however that was."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before
        sys.exit(1)


def main() -> None:
    fields, name, threads, parent = json.loads(sys.argv[1])
    _end_with(parent)
    torch.set_num_threads(threads)
    print(_measure_here(Case(**fields), name))


if __name__ == "__main__":
    main()
