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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from capsfast import native

ARCHITECTURE = "sm_90"
# The counted layer: ten output capsules of D = 16, K = 8, three iterations.
TILES, ITERATIONS = 20, 3
# Input capsules of a warp between two barriers in an accumulating pass (Size::chunk in rows/launch.h).
CHUNK = 4


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
        # _ZN8capsfast4cuda4rows15gradient_kernelINS1_4RowsILi20ELi1ELb1EEEEEvNS1_12GradientArgsE
        found = re.search(r"\d([a-z_]+?_kernel)", self.symbol)
        assert found is not None, self.symbol
        return found[1]

    @property
    def traits(self) -> str:
        """The traits of a kernel of the rows family, as the source spells them; else ""."""
        found = re.search(r"4RowsILi(\d+)ELi(\d)ELb([01])E", self.symbol)
        if found is None:
            return ""
        return f"Rows<{found[1]}, {found[2]}, {('false', 'true')[int(found[3])]}>"

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


class Instruction(NamedTuple):
    at: int
    predicate: str  # "@P0", "@!UP1" or ""
    op: str  # "LDG.E.128"
    operands: str

    @property
    def kind(self) -> str:
        return self.op.split(".", 1)[0]

    def target(self) -> int:
        found = re.search(r"0x([0-9a-f]+)$", self.operands)
        assert found is not None, self
        return int(found[1], 16)

    def work(self) -> int:
        """Products, and bytes that a lane moves. Narrow accesses count 0: they are for unusual strides."""
        if self.kind == "HMMA":
            return 1
        width = re.search(r"\.(64|128)\b", self.op)
        return int(width[1]) // 8 if width and self.kind in ("LDG", "STG", "LDS", "STS") else 0


class Loop(NamedTuple):
    header: int
    blocks: frozenset[int]
    latches: frozenset[int]  # blocks that jump back to the header


class Code:
    """The instructions of a kernel, in basic blocks named by their addresses."""

    def __init__(self, listing: str) -> None:
        self.instructions = [
            Instruction(int(at, 16), predicate.strip(), op, operands.strip())
            for at, predicate, op, operands in re.findall(
                r"/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", listing
            )
        ]
        # If nothing returns, ptxas has used a call as a far branch.
        returns = any(instruction.kind == "RET" for instruction in self.instructions)
        self.branches = ("BRA",) if returns else ("BRA", "CALL")
        self.blocks = self._cut()
        self.next = {at: self._leads_to(at) for at in self.blocks}
        self.order: dict[int, int] = {}  # blocks in reverse postorder
        self.back: set[tuple[int, int]] = set()  # from latches to headers
        self._walk()
        self.loops = [self._loop(header) for header in sorted({to for _, to in self.back})]

    def _cut(self) -> dict[int, list[Instruction]]:
        starts = {self.instructions[0].at}
        for n, instruction in enumerate(self.instructions):
            if instruction.kind in ("BRA", "BSSY", "CALL"):
                starts.add(instruction.target())
            ends = instruction.kind in (*self.branches, "BRX", "BSYNC", "EXIT", "RET")
            if ends and n + 1 < len(self.instructions):
                starts.add(self.instructions[n + 1].at)
        blocks: dict[int, list[Instruction]] = {}
        for instruction in self.instructions:
            if instruction.at in starts:
                current = blocks[instruction.at] = []
            current.append(instruction)
        return blocks

    def _leads_to(self, at: int) -> list[int]:
        last, follows = self.blocks[at][-1], min((other for other in self.blocks if other > at), default=None)
        always = not last.predicate
        to: list[int] = []
        # BRA.DIV is for diverged lanes; these kernels do not diverge.
        if last.kind in self.branches and last.op != "BRA.DIV":
            to.append(last.target())
            always = always and re.fullmatch(r"0x[0-9a-f]+", last.operands) is not None
        elif last.kind == "BSYNC":
            before = (x for x in reversed(self.instructions) if x.at < last.at and x.kind == "BSSY")
            to.append(next(x.target() for x in before if x.operands.startswith(f"{last.operands},")))
        elif last.kind not in ("EXIT", "RET", "BRX"):
            always = False
        if not always and follows is not None:
            to.append(follows)
        return list(dict.fromkeys(to))

    def _walk(self) -> None:
        """Depth first. An edge to a block that is not left yet goes back; no loop is entered but at its header."""
        done: list[int] = []
        seen: set[int] = set()
        targets = {to for all_to in self.next.values() for to in all_to}
        for root in [next(iter(self.blocks)), *(at for at in self.blocks if at not in targets)]:
            stack = [(root, iter(self.next[root]))] if root not in seen else []
            seen.add(root)
            while stack:
                at, rest = stack[-1]
                to = next(rest, None)
                if to is None:
                    done.append(at)
                    stack.pop()
                elif to in seen:
                    self.back |= {(at, to)} if any(to == other for other, _ in stack) else set()
                else:
                    seen.add(to)
                    stack.append((to, iter(self.next[to])))
        self.order = {at: n for n, at in enumerate(reversed(done))}

    def _loop(self, header: int) -> Loop:
        latches = frozenset(at for at, to in self.back if to == header)
        blocks, stack = {header}, list(latches)
        while stack:
            at = stack.pop()
            if at not in blocks:
                blocks.add(at)
                stack.extend(way for way in self.order if at in self.next[way])
        return Loop(header, frozenset(blocks), latches)

    def loops_within(self, loop: Loop) -> list[Loop]:
        return [inner for inner in self.loops if inner.blocks < loop.blocks]

    def within(self, blocks: Iterable[int]) -> list[Instruction]:
        return [instruction for at in sorted(blocks) for instruction in self.blocks[at]]

    def products(self, loop: Loop) -> int:
        return sum(instruction.kind == "HMMA" for instruction in self.within(loop.blocks))

    def innermost(self, products: int) -> list[Loop]:
        """Loops with this many products, none in an inner loop."""
        return [
            loop
            for loop in self.loops
            if self.products(loop) == products and not any(map(self.products, self.loops_within(loop)))
        ]

    def turn(self, loop: Loop, without: frozenset[int] = frozenset()) -> list[Instruction]:
        """One turn of a loop and of the loops in it, not through the blocks ``without``.

        Among the ways with the most work, the way with the fewest instructions.
        """
        best: dict[int, tuple[tuple[int, int], list[Instruction]]] = {}
        for at in sorted(loop.blocks - without, key=self.order.__getitem__, reverse=True):
            here = self.blocks[at]
            ways = [best[to] for to in self.next[at] if (at, to) not in self.back and to in best]
            if at in loop.latches:
                ways = [((0, 0), [])]
            if ways:
                (work, shortness), rest = max(ways, key=lambda way: way[0])
                best[at] = ((work + sum(x.work() for x in here), shortness - len(here)), here + rest)
        return best[loop.header][1]


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


def rows_kernel(name: str, exact: bool, way: str = "", file: str | None = None) -> Kernel:
    label = f"{name}<Rows<{TILES}, 1, {str(exact).lower()}>{', ' if way else ''}{way}>"
    return next(kernel for kernel in kernels(file) if (kernel.architecture, kernel.label) == (ARCHITECTURE, label))


def _turn(found: Code, loop: Loop, without: frozenset[int] = frozenset()) -> Counter[str]:
    """The instructions of a turn by opcode. without: blocks that the canonical layer does not execute."""
    return Counter(instruction.kind for instruction in found.turn(loop, without))


def _scaled(parts: list[tuple[Counter[str], float]]) -> dict[str, float]:
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
    kernel = rows_kernel("accumulate_kernel", exact, way, file)
    found = code(kernel.symbol, file=file)
    capsules = 1 if weighted else 2
    products = 3 * TILES  # three products, or one for each of three types
    loops = {True: found.innermost(products), False: found.innermost(2 * products)}
    (loop,) = loops[weighted]
    chunk = _around(found, loop)
    others = frozenset(at for other in loops[not weighted] for at in other.blocks)
    turn, whole = _turn(found, loop), _turn(found, chunk, others)
    return Executed(kernel, _scaled([(turn, 1 / capsules - 1 / CHUNK), (whole, 1 / CHUNK)]), found.within(loop.blocks))


def gradients(exact: bool, file: str | None = None) -> Executed:
    """The gradient pass: votes, the loop over iterations 1 and later, du, dweight, and its sum in memory."""
    kernel = rows_kernel("gradient_kernel", exact, file=file)
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
        if "LDS" in (kinds := {x.kind for x in found.within(other.blocks)}) and not kinds & {"STG", "HMMA", "LDG"}
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
    """The table of docs/cuda-kernels.md."""
    kinds = ("HMMA", "FFMA", "LDS", "LDG")
    name_of_file = ARCHITECTURE if file is not None else release()
    lines = [
        f"| {name_of_file} | instructions | {' | '.join(kinds)} | registers | stack |",
        "|---|" + "--:|" * (3 + len(kinds)),
    ]
    for name, count in PASSES.items():
        for exact in (True, False):
            found = count(exact, file=file)
            numbers = [round(found.instructions), *(round(found.counts.get(kind, 0)) for kind in kinds)]
            numbers += [found.kernel.registers, found.kernel.stack]
            lines.append(f"| {name}, {'exact' if exact else 'single'} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(table(sys.argv[1]))
    else:
        raise SystemExit(why_not(ARCHITECTURE) or print(table()))
