"""What an eager call of the Triton backend costs the host, beside what a small torch.matmul does.

Runs as a process of its own, without a GPU: kernels are compiled for sm_90, and what would launch them does nothing.
So the time of the driver is missing, and that of PyTorch's allocator is the one of CPU tensors.

    python -m tests.support.triton_host          a table for people
    python -m tests.support.triton_host json     µs by row
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SHAPE = (48, 1, 10, 16, 8)


@contextmanager
def stubbed() -> Iterator[list[str]]:
    """Inside, launches of Triton kernels are prepared to the end and then only noted: the names of the kernels."""
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    from tests.support.triton_compile import Driver

    launched: list[str] = []

    def load(self: Any) -> None:
        self._run = lambda *args: launched.append(self.name)

    before, CompiledKernel._init_handles = CompiledKernel._init_handles, load
    driver.set_active(Driver())
    try:
        yield launched
    finally:
        CompiledKernel._init_handles = before


def microseconds(function: Callable[[], Any], calls: int = 200, rounds: int = 15) -> float:
    """Of a call, in the quickest round: what else the machine does only adds to it."""
    least = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        least = min(least, time.perf_counter() - start)
    return least / calls * 1e6


def measure() -> dict[str, float]:
    import torch

    import capsfast

    torch.set_num_threads(1)
    B, I, J, D, K = SHAPE
    u, weight = torch.randn(B, I, K), torch.randn(I, J, D, K)
    needing = [u.clone().requires_grad_(), weight.clone().requires_grad_()]
    a, b = torch.randn(4, 4), torch.randn(4, 4)

    def forward(*given: Any) -> Any:
        return capsfast.dynamic_routing(*given, backend="triton")

    v = forward(*needing)
    dv = torch.randn_like(v)
    with stubbed():
        return {
            "torch.matmul of 4 x 4": microseconds(lambda: torch.matmul(a, b), 2000),
            "forward": microseconds(lambda: forward(u, weight)),
            "forward under autograd": microseconds(lambda: forward(*needing)),
            "backward": microseconds(lambda: torch.autograd.grad(v, needing, dv, retain_graph=True)),
        }


if __name__ == "__main__":
    from capsfast import toolchain

    os.environ.pop("TRITON_INTERPRET", None)
    # Calls go to Triton as if its interpreter ran.
    toolchain.interpreting = lambda: True
    with stubbed():
        found = measure()
    if sys.argv[1:] == ["json"]:
        json.dump(found, sys.stdout)
    else:
        for name, took in found.items():
            print(f"{name:24}{took:8.1f} µs")
