"""The machine code of the CUDA kernels: registers, stack, and the instructions that a warp executes.

Reads the built extension. ``python -m tests.support.sass`` prints the table of docs/cuda-kernels.md.
"""

import functools
import os
import re
import shutil
import site
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from capsfast import native

from .listing import Code, Counts, Instruction, count_kind

ARCHITECTURE = "sm_90"
# The counted layer: ten output capsules of D = 16, K = 8, three iterations.
TILES, ITERATIONS = 20, 3
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


def _dumped(*options: str) -> str:
    tool = cuobjdump()
    assert tool is not None and native.extension is not None
    command = [tool, *options, str(native.extension.__file__)]
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
def kernels() -> tuple[Kernel, ...]:
    """The kernels of every architecture."""
    found, architecture = [], ""
    for part in re.split(r"\n(?= Function|.*arch = )", _dumped("--dump-resource-usage")):
        arch = re.search(r"arch = (sm_\w+)", part)
        architecture = arch[1] if arch else architecture
        usage = re.search(r"Function (\w+):\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)", part)
        if usage:
            found.append(Kernel(architecture, usage[1], *map(int, usage.groups()[1:])))
    return tuple(found)


@functools.cache
def code(symbol: str, architecture: str = ARCHITECTURE) -> Code:
    return Code(_dumped("-sass", "-arch", architecture, "-fun", symbol))


class Executed(NamedTuple):
    """The instructions of a warp for 16 samples and one input capsule, and their place in the code."""

    kernel: Kernel
    counts: Counts
    hot: list[Instruction]  # all instructions on any way through the loop

    @property
    def instructions(self) -> int:
        return sum(self.counts.values())


def plain_kernel(name: str, tiles: int, exact: bool, way: str = "") -> Kernel:
    label = f"{name}<Rows<{tiles}, 1, {str(exact).lower()}, plain>{', ' if way else ''}{way}>"
    return next(kernel for kernel in kernels() if (kernel.architecture, kernel.label) == (ARCHITECTURE, label))


def _capsule_loop(kernel: Kernel, tiles: int, exact: bool, weighted: bool) -> Executed:
    found = code(kernel.symbol)
    products = tiles * (3 if exact else 1)
    (loop,) = (
        loop
        for loop in found.innermost("HMMA", products)
        if (count_kind(found.turn(loop).counts(), "FFMA") >= 4 * tiles) == weighted
    )
    return Executed(kernel, found.turn(loop).counts(), found.within(loop.blocks))


def first_pass(exact: bool, tiles: int = TILES) -> Executed:
    """The pass of iteration 0, which sums the votes up, without the extra work of every fourth input capsule."""
    return _capsule_loop(plain_kernel("accumulate_kernel", tiles, exact, "forward"), tiles, exact, weighted=False)


def forward_pass(exact: bool, tiles: int = TILES) -> Executed:
    return _capsule_loop(plain_kernel("accumulate_kernel", tiles, exact, "forward"), tiles, exact, weighted=True)


def backward_pass(exact: bool, tiles: int = TILES) -> Executed:
    return _capsule_loop(plain_kernel("accumulate_kernel", tiles, exact, "backward"), tiles, exact, weighted=True)


def _is_barrier(instruction: Instruction) -> bool:
    return instruction.kind in ("BAR", "UCGABAR_ARV", "UCGABAR_WAIT") and not instruction.predicate


def gradients(exact: bool, tiles: int = TILES) -> Executed:
    """From the barrier before the votes to the barrier after dweight. Iteration 0 is before the loop."""
    kernel = plain_kernel("gradient_kernel", tiles, exact)
    found = code(kernel.symbol)

    def has(at: int, kind: str) -> bool:
        return any(instruction.kind == kind for instruction in found.blocks[at])

    def ends(at: int) -> bool:
        return any(map(_is_barrier, found.blocks[at]))

    (loop,) = (
        loop
        for loop in found.loops
        if not any(has(at, "HMMA") for at in loop.blocks)
        and count_kind(found.turn(loop).counts(), "FFMA") >= 16 * tiles
    )
    (latch,) = loop.latches
    # The votes are made before the loop, even if the loop has no turn.
    votes = next(at for at in found.dominators(loop.header) if has(at, "HMMA"))
    barrier = next(at for at in found.dominators(votes) if ends(at))
    to_votes = found.way(barrier, lambda at: at == votes, most_work=False)
    to_loop = [found.way(to, lambda at: at == loop.header) for to in found.next[votes]]
    (onwards,) = (found.way(to, ends) for to in found.next[latch] if to not in loop.blocks)
    assert to_votes is not None and onwards is not None
    before = next(way for way in to_loop if way is not None)
    last = max(n for n, instruction in enumerate(to_votes.instructions) if _is_barrier(instruction))
    first = next(n for n, instruction in enumerate(onwards.instructions) if _is_barrier(instruction))
    once = [
        *to_votes.instructions[last + 1 :],
        *before.instructions[: -len(found.blocks[loop.header])],
        *onwards.instructions[: first + 1],
    ]
    counts = Counter(instruction.op for instruction in once)
    for _ in range(1, ITERATIONS):
        counts += found.turn(loop).counts()
    return Executed(kernel, counts, [*once, *found.within(loop.blocks)])


PASSES: dict[str, Callable[..., Executed]] = {
    "first pass": first_pass,
    "forward pass": forward_pass,
    "backward pass": backward_pass,
    "gradients": gradients,
}


def release() -> str:
    """The release of the compiler."""
    assert native.extension is not None
    return f"nvcc {native.extension.build_info()['cuda']}, {ARCHITECTURE}"


def table() -> str:
    """The lines of docs/cuda-kernels.md between BEGIN and END."""
    kinds = ("HMMA", "FFMA", "LDS", "LDG")
    lines = [
        BEGIN,
        f"| {release()} | instructions | {' | '.join(kinds)} | registers | stack |",
        "|---|" + "--:|" * (3 + len(kinds)),
    ]
    for name, count in PASSES.items():
        for exact in (True, False):
            found = count(exact)
            numbers = [found.instructions, *(count_kind(found.counts, kind) for kind in kinds)]
            numbers += [found.kernel.registers, found.kernel.stack]
            lines.append(f"| {name}, {'exact' if exact else 'single'} | {' | '.join(map(str, numbers))} |")
    return "\n".join([*lines, END])


if __name__ == "__main__":
    raise SystemExit(why_not(ARCHITECTURE) or print(table()))
