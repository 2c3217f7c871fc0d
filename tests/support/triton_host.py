"""Compares what the launches of plans, by Python and by C++, and Triton's ordinary launches give to the driver.

Runs as a process of its own, without a GPU: kernels are compiled for sm_90, and stubs in place of the launcher and of
the CUDA driver record their arguments.

    python -m tests.support.triton_host
"""

import ctypes
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..emulator.build import compiler

Launches = deque[tuple[Any, tuple[Any, ...]]]  # of a compiled kernel and the arguments of its launcher


class Driver:
    """Answers what Triton asks a driver before a launch."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


kernels: dict[int, tuple[Any, Any]] = {}  # by what stands for the driver's function: the compiled kernel, and memory


def parameters(compiled: Any) -> list[str]:
    """The types of the parameters, without the two addresses of scratch memory that Triton adds."""
    return [kind for kind in compiled.src.signature.values() if kind != "constexpr"]


def stub() -> Launches:
    """From here on Triton prepares launches to the end, and then a stub records them. So does one for plans in C++.

    Only the last launches are kept. If all were kept, Python's garbage collector would have work to do.
    """
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    from capsfast.environment import native
    from capsfast.triton import plan

    launched: Launches = deque(maxlen=100)

    def load(self: Any) -> None:
        if self._run is None:
            sizes = [4 if kind in ("i32", "fp32") else 8 for kind in parameters(self)] + [8, 8]
            about = (ctypes.c_int64 * (len(sizes) + 1))(len(sizes), *sizes)
            self.function = ctypes.addressof(about)
            kernels[self.function] = (self, about)
            self._run = lambda *args: launched.append((self, args))

    CompiledKernel._init_handles = load
    plan.stream_of = lambda device: 0
    plan.has_pdl = lambda device: True
    driver.set_active(Driver())
    if native.extension is not None:
        native.extension.use_driver(str(cuda_driver()))
    return launched


@functools.cache
def cuda_driver() -> Path:
    """A library that records launches; see driver.cpp."""
    path = Path(tempfile.mkdtemp()) / "driver.so"
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    source = Path(__file__).with_name("driver.cpp")
    subprocess.run([compiler(), "-std=c++17", "-shared", "-fPIC", f"-I{toolkit}", source, "-o", path], check=True)
    return path


def taken(refuse_after: int = -1) -> list[dict[str, Any]]:
    """The launches that C++ made since the last call. refuse_after: the next launch to be refused, counted from 0."""
    library = ctypes.CDLL(str(cuda_driver()))
    library.take_launches.restype = ctypes.c_char_p
    found = []
    for line in library.take_launches(ctypes.c_int64(refuse_after)).decode().splitlines():
        function, x, y, z, threads, shared, stream, cooperative, early, *values = map(int, line.split())
        if not function:
            found.append({"name": "zeros", "stream": stream, "early": False, "values": [Address(values[0]), values[1]]})
            continue
        compiled, _ = kernels[function]
        kinds = parameters(compiled)
        numbers = [known(kind, value) for kind, value in zip(kinds, values, strict=False)]
        found.append(launch(compiled, (x, y, z), threads, shared, stream, bool(cooperative), bool(early), numbers))
        assert values[len(kinds) :] == [0, 0], "there is no scratch memory"
    return found


def recorded(launched: Launches) -> list[dict[str, Any]]:
    """The launches that the launcher's stub recorded, which are then dropped."""
    found = []
    for compiled, (x, y, z, stream, function, _, _, _, _, *values) in launched:
        assert function == compiled.function
        pairs = zip(compiled.src.signature.values(), values, strict=True)
        numbers = [known(kind, value) for kind, value in pairs if kind != "constexpr"]
        m = compiled.metadata
        cooperative, early = m.launch_cooperative_grid, m.launch_pdl
        found.append(launch(compiled, (x, y, z), 32 * m.num_warps, m.shared, stream, cooperative, early, numbers))
    launched.clear()
    return [each for each in found if 0 not in each["grid"]]  # Triton's launcher makes no such launch


def launch(compiled: Any, grid: Any, threads: int, shared: int, stream: int, *rest: Any) -> dict[str, Any]:
    names = ("cooperative", "early", "values")
    return {"name": compiled.name, "hash": compiled.metadata.hash, "grid": grid, "threads": threads,
            "shared": shared, "stream": stream} | dict(zip(names, rest, strict=True))  # fmt: skip


class Address(int):
    """An argument that is an address."""


def numbered(launches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The launches with addresses as (which, counted from the first appearance; remainder by 16).

    Addresses count anew where a kernel starts late, as the first of a plan does: plans use the memory of others again.
    """
    seen: dict[int, int] = {}
    found = []
    for each in launches:
        seen = seen if each["early"] else {}
        values = [
            (seen.setdefault(value, len(seen)), value % 16) if isinstance(value, Address) else value
            for value in each["values"]
        ]
        found.append(each | {"values": values})
    return found


def known(kind: str, value: Any) -> int:
    """An argument as the bits of its type."""
    if kind.startswith("*"):
        return Address(value.data_ptr() if hasattr(value, "data_ptr") else value)
    if kind == "fp32" and isinstance(value, float):
        return int.from_bytes(ctypes.c_float(value), "little")
    return int(value) % 2 ** (64 if kind == "i64" else 32)


@contextmanager
def patched(name: str, value: Any) -> Iterator[None]:
    from capsfast.triton import plan

    before = getattr(plan, name)
    setattr(plan, name, value)
    try:
        yield
    finally:
        setattr(plan, name, before)


def ordinary() -> Any:
    """Inside, every launch takes Triton's ordinary path."""
    return patched("stream_of", lambda device: None)


def in_python() -> Any:
    """Inside, no plan goes to C++."""
    return patched("by_cpp", False)


def by_cpp() -> Any:
    """Inside, plans go to C++ as they do by themselves."""
    return patched("by_cpp", True)


def differences(launched: Launches) -> list[str]:
    """Where ways of launching give the driver different things; which tensor an address is counts, see numbered()."""
    import torch

    from capsfast.environment import native
    from tests.support.problems import Case, make, run

    ways: list[Callable[[], Any]] = [ordinary, in_python, in_python, by_cpp, by_cpp]
    found = []
    for case, dtype in (
        (Case(coupling=False), torch.float32),
        (Case(coupling=False), torch.bfloat16),
        (Case(coupling=False, logits="IJ", bias=True, mask=True, out_mask=True), torch.float32),
        (Case(softmax="in", logits="BIJ", bias=True, mask=True), torch.float32),
    ):
        problem = make((17, 3, 2, 4, 4), case, dtype=dtype)
        sequences = []
        for way in ways:
            with way():
                run(problem, "triton")
            by_python, made_by_cpp = recorded(launched), taken()
            # Of a call with a coupling, whose gradient takes torch, C++ runs the forward alone.
            # torch fills with zeros where Python runs a plan.
            sequences.append(numbered([each for each in made_by_cpp + by_python if each["name"] != "zeros"]))
        early = [each["early"] for each in sequences[0]]
        if early[0] or sum(early) < len(early) - 3:  # the backward has a plan of its own, and may begin with torch
            found.append(f"{case}: {early} start early")
        in_torch = case.softmax == "in" and case.coupling
        if native.extension is not None and (not made_by_cpp or bool(by_python) != in_torch):
            found.append(f"{case}: Python launched {len(by_python)}, C++ {len(made_by_cpp)} kernels")
        first, *others = sequences
        for other in others:
            if len(other) != len(first):
                found.append(f"{case}: {len(first)} launches became {len(other)}")
            pairs = zip(first, other, strict=False)
            found += [f"{case}: {one} became {two}" for one, two in pairs if one != two]
    return found


if __name__ == "__main__":
    from capsfast.environment import toolchain

    os.environ.pop("TRITON_INTERPRET", None)
    # The backend sends calls to Triton as if Triton's interpreter ran.
    toolchain.interpreting = lambda: True
    json.dump(differences(stub()), sys.stdout)
