"""How many programs of a compiled kernel a GPU holds at once: for so many a grid is made."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .recorder import ALWAYS

# The interpreter runs programs one by one: few, but enough to split every sum.
INTERPRETED = 3
# What most kernels take of a thread's registers: all.
MOST_REGISTERS = 255
# The most programs of a multiprocessor, which torch does not tell, by capability; 32 on the others.
MOST = {(8, 6): 16, (8, 7): 16, (8, 9): 24, (11, 0): 24, (12, 0): 24, (12, 1): 24}


class Device(NamedTuple):
    """How many multiprocessors there are, and what each has. shared: bytes."""

    multiprocessors: int
    registers: int
    shared: int
    warps: int
    programs: int


@functools.cache
def device_of(device: torch.device) -> Device | None:
    """None for the interpreter."""
    if device.type != "cuda":
        return None
    found: Any = torch.cuda.get_device_properties(device)
    return Device(
        found.multi_processor_count,
        found.regs_per_multiprocessor,
        found.shared_memory_per_multiprocessor,
        found.max_threads_per_multi_processor // found.warp_size,
        MOST.get((found.major, found.minor), 32),
    )


def of_multiprocessor(device: Device, registers: int, shared: int, warps: int) -> int:
    """Programs of so many registers a thread, bytes of shared memory and warps."""
    # Registers of a warp come in 256, a quarter of all to each scheduler. Of shared memory the system takes 1 KiB.
    of_warp = -(-registers * 32 // 256) * 256
    by_registers = device.registers // 4 // of_warp * 4 // warps
    by_shared = device.shared // (-(-shared // 128) * 128 + 1024)
    return max(1, min(by_registers, by_shared, device.warps // warps, device.programs))


def of_device(
    device: torch.device, kernel: Any, arguments: Callable[[], Sequence[Any]], constants: dict[str, Any]
) -> int:
    """Programs of a launch. Compiles the kernel, which the grid has no part in, and looks at no device memory."""
    there = device_of(device)
    if there is None:
        return INTERPRETED
    compiled = kernel.warmup(*arguments(), grid=(1,), **constants, **ALWAYS)
    try:
        compiled._init_handles()  # loads it, as the launch will
        registers, shared = compiled.n_regs or MOST_REGISTERS, compiled.metadata.shared
    except AttributeError:  # private parts, which a later release may not have, or a hook of the user's is in the way
        registers, shared = MOST_REGISTERS, 0
    return there.multiprocessors * of_multiprocessor(there, registers, shared, constants.get("num_warps", 4))
