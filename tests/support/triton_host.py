"""Compares what the launches of plans and Triton's ordinary launches give to the driver.

Runs as a process of its own, without a GPU: kernels are compiled for sm_90, and a stub in place of the launcher records
its arguments.

    python -m tests.support.triton_host
"""

import json
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

Launches = deque[tuple[str, tuple[Any, ...]]]  # of a kernel's name and its arguments


class Driver:
    """Answers what Triton asks a driver before a launch."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def stub() -> Launches:
    """From here on Triton prepares launches to the end, and then a stub records them.

    Only the last launches are kept. If all were kept, Python's garbage collector would have work to do.
    """
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    from capsfast.triton import plan

    launched: Launches = deque(maxlen=100)

    def load(self: Any) -> None:
        if self._run is None:
            name = f"{self.name}, launch_pdl={self.metadata.launch_pdl}"
            self._run = lambda *args: launched.append((name, args))

    CompiledKernel._init_handles = load
    plan.stream_of = lambda device: 0
    plan.has_pdl = lambda device: True
    driver.set_active(Driver())
    return launched


@contextmanager
def ordinary() -> Iterator[None]:
    """Inside, every launch takes Triton's ordinary path."""
    from capsfast.triton import plan

    before, plan.stream_of = plan.stream_of, lambda device: None
    try:
        yield
    finally:
        plan.stream_of = before


def differences(launched: Launches) -> list[str]:
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
        early = ["launch_pdl=True" in name for name, _ in sequences[0]]
        if early[0] or sum(early) < len(early) - 3:  # the backward has a plan of its own, and may begin with torch
            found.append(f"{case}: {early} start early")
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
    json.dump(differences(stub()), sys.stdout)
