"""What the tests may ask of each backend."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import capsfast
from capsfast.bench.problems import Shape
from capsfast.environment import toolchain

__all__ = ["Shape"]

ALL_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# The op of each function.
OP_OF = {
    "dynamic_routing": "dynamic_routing",
    "route_votes": "dynamic_routing",
    "routing_pass": "routing_pass",
    "votes_pass": "routing_pass",
}
# How many rows of a table the first tier takes.
ROWS = 8


@dataclass(frozen=True)
class Backend:
    """name: as in capsfast.backends(). device: of its inputs. dtypes: that it serves.

    fused: the prefix of its ops in torch.ops.capsfast, if it has ops. linear: serves only linear passes, see
    passes.PassCase.linear.
    max_work: the largest Shape.work in its tests, so that an emulated backend runs the same tests with small shapes.
    rows: how many rows of a test's table it runs in the first and in the second tier; None: all.
    """

    name: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    fused: bool
    max_work: int = 10**9
    prefix: str = ""
    linear: bool = False
    rows: tuple[int, int | None] = (ROWS, None)

    @property
    def emulated(self) -> bool:
        """Whether it is far slower than the device of its kernels."""
        return self.max_work < 10**9

    @property
    def widest(self) -> torch.dtype:
        """The widest dtype, for tests of exact relations, which need small rounding errors."""
        return torch.float64 if torch.float64 in self.dtypes else torch.float32

    def op(self, function: str, backward: bool = False) -> Any:
        """The registered op of a public function."""
        return getattr(torch.ops.capsfast, f"{self.prefix}{OP_OF[function]}{'_backward' * backward}").default

    def __str__(self) -> str:
        return self.name


TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TABLE = (
    Backend("reference", "cpu", ALL_DTYPES, fused=False),
    Backend("cpp", "cpu", ALL_DTYPES, fused=True),
    Backend("triton", "cpu", TRITON_DTYPES, fused=True, max_work=13_000, prefix="triton_", rows=(1, 4))
    if toolchain.interpreting()
    else Backend("triton", "cuda", TRITON_DTYPES, fused=True, prefix="triton_"),
    Backend("cuda", "cuda", ALL_DTYPES, fused=True, linear=True),
)
# The CUDA kernels run by the emulator: a backend for the tests only.
EMULATED = Backend(
    "emulated", "cpu", ALL_DTYPES, fused=True, max_work=20_000, prefix="emulated_", linear=True, rows=(6, None)
)


def named(name: str) -> Backend:
    return next(backend for backend in (*TABLE, EMULATED) if backend.name == name)


def available() -> list[Backend]:
    """The backends of the table that exist here. A backend that is missing in the table is an error."""
    states = capsfast.backends()
    forgotten = states.keys() - {backend.name for backend in TABLE}
    if forgotten:
        raise LookupError(f"tests/support/backends.py has no row for {', '.join(sorted(forgotten))}")
    found = [backend for backend in TABLE if backend.name in states and states[backend.name].available]
    # The kernels are not emulated if a GPU can run them, or without a compiler.
    return found if torch.cuda.is_available() or not shutil.which("c++") else [*found, EMULATED]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded_ops() -> Iterator[list[str]]:
    """Yields the names of all ops that run in the block, such as "capsfast::dynamic_routing"."""
    with _Recorder() as recorder:
        yield recorder.ops


class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operation in the block returned."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leave in tree_leaves(found):
            if isinstance(leave, Tensor):
                self.numel = max(self.numel, leave.numel())
        return found


def assert_path(backend: Backend, op: str, ops: list[str], backward: bool = True) -> None:
    """The recorded ops belong to this backend: its fused op and no other product, or no fused op.

    Ops that copy the capsules of windows serve every backend.
    """
    fused = {name for name in ops if name.startswith("capsfast::") and not name.endswith("fold_windows")}
    if not backend.fused:
        assert not fused, f"backend {backend} ran {fused}"
        return
    name = f"capsfast::{backend.prefix}{OP_OF[op]}"
    assert fused == {name} | ({f"{name}_backward"} if backward else set())
    products = {"aten::bmm", "aten::mm", "aten::einsum", "aten::matmul", "aten::_softmax"} & set(ops)
    assert not products, f"backend {backend} also ran {products}"
