"""Measures what an eager call of the Triton backend costs the host, compared with a small torch.matmul.

Runs as a process of its own, without a GPU: kernels are compiled for sm_90, and a stub in place of the launcher records
its arguments. So the time of the driver is missing, and the allocator's time is measured with CPU tensors.

    python -m tests.support.triton_host          µs, for people
    python -m tests.support.triton_host json     µs for a layer that compiles faster, and where launches of plans differ
                                                 from launches by Triton's ordinary path
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

# The layer of the benchmarks except for B and I: the host's time does not depend on them, but torch's own ops run on
# the CPU here. Two tiles of the batch and few input capsules split the batch, so partial dW are added up.
SHAPE = (33, 2, 10, 16, 8)
ROUNDS = 300


@contextmanager
def stubbed() -> Iterator[deque[tuple[Any, ...]]]:
    """Inside, Triton prepares launches to the end, and then a stub records them: (name of the kernel, arguments).

    Only the last launches are kept. If all were kept, Python's garbage collector would have work to do.
    """
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    from capsfast.triton import plan
    from tests.support.triton_compile import Driver

    launched: deque[tuple[Any, ...]] = deque(maxlen=100)

    def load(self: Any) -> None:
        if self._run is None:
            name = self.name
            self._run = lambda *args: launched.append((name, args))

    before, CompiledKernel._init_handles = CompiledKernel._init_handles, load
    stream_of, plan.stream_of = plan.stream_of, lambda device: 0
    driver.set_active(Driver())
    try:
        yield launched
    finally:
        CompiledKernel._init_handles, plan.stream_of = before, stream_of


@contextmanager
def ordinary() -> Iterator[None]:
    """Inside, every launch takes Triton's ordinary path."""
    from capsfast.triton import plan

    before, plan.stream_of = plan.stream_of, lambda device: None
    try:
        yield
    finally:
        plan.stream_of = before


def microseconds(function: Callable[[], Any], calls: int = 10) -> float:
    """Microseconds of a call in the quickest round, because other work of the machine only adds time."""
    least = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        least = min(least, time.perf_counter() - start)
    return least / calls * 1e6


def measure(J: int, D: int) -> dict[str, float]:
    import torch

    import capsfast

    torch.set_num_threads(1)
    B, I, _, _, K = SHAPE
    plain = [torch.randn(B, I, K), torch.randn(I, J, D, K)]
    needing = [value.clone().requires_grad_() for value in plain]
    a, b = torch.randn(4, 4), torch.randn(4, 4)

    def forward(given: list[Any]) -> Any:
        return capsfast.dynamic_routing(*given, backend="triton")

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            ctx.save_for_backward(*given)
            return given[0].sum()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return ctx.saved_tensors

    v, nothing = forward(needing), Nothing.apply(*needing)
    dv, one = torch.randn_like(v), torch.ones_like(nothing)
    rows: dict[str, Callable[[], Any]] = {
        "forward": lambda: forward(plain),
        "forward under autograd": lambda: forward(needing),
        "backward": lambda: torch.autograd.grad(v, needing, dv, retain_graph=True),
    }
    found = {
        "torch.matmul of 4 x 4": microseconds(lambda: torch.matmul(a, b), 200),
        "backward of a Function that computes nothing": microseconds(
            lambda: torch.autograd.grad(nothing, needing, one, retain_graph=True)
        ),
    }
    found |= {name: microseconds(call) for name, call in rows.items()}
    with ordinary():
        return found | {f"{name}, ordinary": microseconds(call) for name, call in rows.items()}


def differences(launched: deque[tuple[Any, ...]]) -> list[str]:
    """Where a plan and Triton's own path give the launcher different arguments. Addresses differ only by alignment."""
    import torch

    from tests.support.problems import Case, make, run

    found = []
    for case, dtype in (
        (Case(coupling=False), torch.float32),
        (Case(coupling=False), torch.bfloat16),
        (Case(softmax="in", logits="BIJ", bias=True, mask=True), torch.float32),
    ):
        problem = make((17, 3, 2, 4, 4), case, dtype=dtype)
        sequences = []
        for manner in (ordinary, nullcontext, nullcontext):
            launched.clear()
            with manner():
                run(problem, "triton")
            sequences.append(list(launched))
        # Triton's own path has tensors where a plan has their addresses.
        pointers = [[hasattr(value, "data_ptr") for value in args[9:]] for _, args in sequences[0]]
        first, *others = (
            [known(*launch, where) for launch, where in zip(sequence, pointers, strict=True)] for sequence in sequences
        )
        for other in others:
            pairs = zip(first, other, strict=True)
            found += [f"{case}: {one} became {two}" for one, two in pairs if one != two]
    return found


def known(name: str, args: tuple[Any, ...], pointers: list[bool]) -> list[Any]:
    """The arguments of a launch, with every address reduced to its alignment."""
    x, y, z, stream, function, metadata, _, *rest = args
    hooks, values = rest[:2], rest[2:]
    numbers = (each.data_ptr() if hasattr(each, "data_ptr") else each for each in values)
    plain = [value % 16 if pointer else value for value, pointer in zip(numbers, pointers, strict=True)]
    return [name, (x, y, z), stream, function, metadata, hooks, plain]


if __name__ == "__main__":
    from capsfast import toolchain

    os.environ.pop("TRITON_INTERPRET", None)
    # The backend sends calls to Triton as if Triton's interpreter ran.
    toolchain.interpreting = lambda: True
    with stubbed() as launched:
        if sys.argv[1:] == ["json"]:
            json.dump({"microseconds": measure(4, 8), "differences": differences(launched)}, sys.stdout)
        else:
            for name, took in measure(*SHAPE[2:4]).items():
                print(f"{name:48}{took:8.1f} µs")
