"""The machine code of the CUDA kernels: registers, stack, and the instructions that a warp executes.

Reads the built extension, or another file with machine code. ``python -m tests.support.sass [FILE]`` prints the table
of docs/cuda-kernels.md.
"""

import functools
import os
import re
import shutil
import site
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from capsfast import native

from .listing import Code, Counts, Instruction, Loop

ARCHITECTURE = "sm_90"
# The counted layer: ten output capsules of D = 16, K = 8, three iterations.
TILES, ITERATIONS = 20, 3
# Input capsules of a warp between two barriers in an accumulating pass (Size::chunk in rows/launch.h).
CHUNK = 4
BEGIN, END = "<!-- sass -->", "<!-- /sass -->"


def cuobjdump() -> str | None:
    """From the CUDA toolkit, or from Triton."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    triton = [Path(folder, "triton/backends/nvidia/bin") for folder in site.getsitepackages()]
    return shutil.which("cuobjdump", path=os.pathsep.join([f"{home}/bin", *map(str, triton), os.environ["PATH"]]))


def built_for() -> list[str]:
    """Architectures with machine code in the extension, such as "sm_90"."""
    if native.extension is None:
        return []
    names = native.extension.build_info()["cuda_architectures"].replace("+PTX", "").replace(".", "").split()
    return [f"sm_{name}" for name in names]


def why_not(architecture: str | None = None) -> str | None:
    """Why there is nothing to read, for this architecture or for any."""
    if native.extension is None or not native.extension.build_info()["cuda"]:
        return "the extension was built without CUDA kernels"
    if cuobjdump() is None:
        return "no cuobjdump (it comes with CUDA toolkits and with Triton)"
    if architecture is not None and architecture not in built_for():
        return f"the extension was built without {architecture}"
    return None


def _dumped(*options: str, file: str | None = None) -> str:
    tool = cuobjdump()
    assert tool is not None
    if file is None:
        assert native.extension is not None
        file = str(native.extension.__file__)
    command = [tool, *options, file]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Kernel(NamedTuple):
    architecture: str
    symbol: str
    registers: int
    stack: int
    shared: int

    @property
    def name(self) -> str:
        # _ZN8capsfast4cuda4rows15gradient_kernelINS1_4RowsILi20ELi1ELb1ELNS1_7OptionsE0EEEEEvNS1_12GradientArgsE
        found = re.search(r"\d([a-z_]+?_kernel)", self.symbol)
        assert found is not None, self.symbol
        return found[1]

    @property
    def traits(self) -> str:
        """The traits of a kernel of the rows family, as the source spells them; else ""."""
        found = re.search(r"4RowsILi(\d+)ELi(\d)ELb([01])ELNS\w*?7OptionsE([012])E", self.symbol)
        if found is None:
            return ""
        exact, options = ("false", "true")[int(found[3])], ("plain", "any", "in")[int(found[4])]
        return f"Rows<{found[1]}, {found[2]}, {exact}, {options}>"

    @property
    def label(self) -> str:
        if not self.traits:
            return self.name
        way = "" if self.name != "accumulate_kernel" else "backward" if "EELb1EEEv" in self.symbol else "forward"
        return f"{self.name}<{self.traits}{', ' if way else ''}{way}>"


@functools.cache
def kernels(file: str | None = None) -> tuple[Kernel, ...]:
    """The kernels of every architecture in the extension, or in another file."""
    found, architecture = [], ARCHITECTURE  # a single kernel's file does not name it
    for part in re.split(r"\n(?= Function|.*arch = )", _dumped("--dump-resource-usage", file=file)):
        arch = re.search(r"arch = (sm_\w+)", part)
        architecture = arch[1] if arch else architecture
        usage = re.search(r"Function (\w+):\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)", part)
        if usage:
            found.append(Kernel(architecture, usage[1], *map(int, usage.groups()[1:])))
    return tuple(found)


@functools.cache
def code(symbol: str, architecture: str = ARCHITECTURE, file: str | None = None) -> Code:
    return Code(_dumped("-sass", "-arch", architecture, "-fun", symbol, file=file))


class Executed(NamedTuple):
    """What a warp executes for 16 samples and one input capsule, with staging, and the code of that loop."""

    kernel: Kernel
    counts: dict[str, float]  # by opcode without modifiers
    hot: list[Instruction]  # all instructions on any way through the loop over input capsules

    @property
    def instructions(self) -> float:
        return sum(self.counts.values())


def plain_kernel(name: str, exact: bool, way: str = "", file: str | None = None) -> Kernel:
    label = f"{name}<Rows<{TILES}, 1, {str(exact).lower()}, plain>{', ' if way else ''}{way}>"
    return next(kernel for kernel in kernels(file) if (kernel.architecture, kernel.label) == (ARCHITECTURE, label))


def _turn(found: Code, loop: Loop, without: frozenset[int] = frozenset()) -> Counts:
    """One turn of a loop and of the loops in it, without the blocks that the canonical layer does not execute."""
    way = found.way(loop.header, lambda at: at in loop.latches, loop.blocks - without)
    assert way is not None
    return Counter(instruction.kind for instruction in way.instructions)


def _scaled(parts: list[tuple[Counts, float]]) -> dict[str, float]:
    kinds = {kind for counts, _ in parts for kind in counts}
    return {kind: sum(counts[kind] * times for counts, times in parts) for kind in kinds}


def _around(found: Code, inner: Loop) -> Loop:
    """The loop over chunks: the smallest one around `inner` with a barrier of the block."""
    outer = [loop for loop in found.loops if inner.blocks < loop.blocks]
    return min(
        (loop for loop in outer if any(x.kind == "BAR" for x in found.within(loop.blocks - inner.blocks))),
        key=lambda loop: len(loop.blocks),
    )


def accumulating(exact: bool, way: str, weighted: bool, file: str | None = None) -> Executed:
    """A pass that accumulates. Without weights, the first, a turn of the loop takes two input capsules."""
    kernel = plain_kernel("accumulate_kernel", exact, way, file)
    found = code(kernel.symbol, file=file)
    capsules = 1 if weighted else 2
    products = 3 * TILES  # three products, or one for each of three types
    loops = {True: found.innermost("HMMA", products), False: found.innermost("HMMA", 2 * products)}
    (loop,) = loops[weighted]
    chunk = _around(found, loop)
    others = frozenset(at for other in loops[not weighted] for at in other.blocks)
    turn, whole = _turn(found, loop), _turn(found, chunk, others)
    return Executed(kernel, _scaled([(turn, 1 / capsules - 1 / CHUNK), (whole, 1 / CHUNK)]), found.within(loop.blocks))


def gradients(exact: bool, file: str | None = None) -> Executed:
    """The gradient pass: votes, the loop over iterations 1 and later, du, dweight, and its sum in memory."""
    kernel = plain_kernel("gradient_kernel", exact, file=file)
    found = code(kernel.symbol, file=file)
    (loop,) = (
        loop
        for loop in found.loops
        if _turn(found, loop)["FFMA"] >= 16 * TILES and not found.loops_within(loop) and not _turn(found, loop)["HMMA"]
    )
    chunk = _around(found, loop)
    # Sums over several input capsules, for a shared weight.
    shared = frozenset(
        at
        for other in found.loops_within(chunk)
        for at in other.blocks
        if {x.kind for x in found.within(other.blocks)} >= {"LDS", "FADD"}
        and not {x.kind for x in found.within(other.blocks)} & {"STG", "HMMA", "FFMA"}
    )
    whole = _turn(found, chunk, shared)
    return Executed(kernel, _scaled([(whole, 1), (_turn(found, loop), ITERATIONS - 2)]), found.within(chunk.blocks))


PASSES: dict[str, Callable[..., Executed]] = {
    "first pass": functools.partial(accumulating, way="forward", weighted=False),
    "forward pass": functools.partial(accumulating, way="forward", weighted=True),
    "backward pass": functools.partial(accumulating, way="backward", weighted=True),
    "gradients": gradients,
}


def release() -> str:
    """The release of the compiler."""
    assert native.extension is not None
    return f"nvcc {native.extension.build_info()['cuda']}, {ARCHITECTURE}"


def table(file: str | None = None) -> str:
    """The lines of docs/cuda-kernels.md between BEGIN and END."""
    kinds = ("HMMA", "FFMA", "LDS", "LDG")
    name_of_file = ARCHITECTURE if file is not None else release()
    lines = [
        BEGIN,
        f"| {name_of_file} | instructions | {' | '.join(kinds)} | registers | stack |",
        "|---|" + "--:|" * (3 + len(kinds)),
    ]
    for name, count in PASSES.items():
        for exact in (True, False):
            found = count(exact, file=file)
            numbers = [round(found.instructions), *(round(found.counts.get(kind, 0)) for kind in kinds)]
            numbers += [found.kernel.registers, found.kernel.stack]
            lines.append(f"| {name}, {'exact' if exact else 'single'} | {' | '.join(map(str, numbers))} |")
    return "\n".join([*lines, END])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(table(sys.argv[1]))
    else:
        raise SystemExit(why_not(ARCHITECTURE) or print(table()))
