"""For which calls ``backend=None`` takes the CUDA kernels before Triton's: where a record says they are faster."""

from typing import NamedTuple

import torch

from .toolchain import constant_while_tracing


class Call(NamedTuple):
    """What a call's speed depends on. op: "dynamic_routing", or "route_votes", whose K is 0."""

    op: str
    dtype: torch.dtype
    B: int
    I: int
    J: int
    D: int
    K: int = 0


class Faster(NamedTuple):
    """Calls of one op on one kind of GPU that the CUDA kernels serve faster, forward and backward.

    record: the file under benchmarks/results that says so. It holds at least two such cases, and none among these
    calls in which Triton is faster; tests/test_measured.py looks.
    """

    record: str
    capability: tuple[int, int]
    op: str
    dtypes: tuple[torch.dtype, ...]
    B: range
    I: range
    J: range
    D: range
    K: range

    def holds(self, call: Call) -> bool:
        sizes = ((self.B, call.B), (self.I, call.I), (self.J, call.J), (self.D, call.D), (self.K, call.K))
        # Compared by their ends: under torch.compile the sizes may be symbols.
        fits = all(allowed.start <= size < allowed.stop for allowed, size in sizes)
        return fits and call.op == self.op and call.dtype in self.dtypes


# The table. `make gpu-check` prints the cases of a record from which a line follows.
FASTER: tuple[Faster, ...] = ()


def cuda_first(call: Call, device: torch.device) -> bool:
    """Whether the CUDA kernels go before Triton's for the call."""
    found = [each for each in FASTER if each.holds(call)]
    return bool(found) and _capability(device) in [each.capability for each in found]


@constant_while_tracing
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
