"""What the compiler made of the CUDA kernels: their registers and stack, and the instructions that a warp executes.

Read out of the built extension. ``python -m tests.support.sass`` prints the table of docs/cuda-kernels.md.
"""

import functools
import os
import re
import shutil
import site
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from capsfast import native

ARCHITECTURE = "sm_90"
# The layer that is counted: ten output capsules of D = 16, K = 8, three iterations.
TILES, ITERATIONS = 20, 3
BEGIN, END = "<!-- sass -->", "<!-- /sass -->"


def cuobjdump() -> str | None:
    """From the toolkit, or from Triton, which brings one along."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    triton = [Path(folder, "triton/backends/nvidia/bin") for folder in site.getsitepackages()]
    return shutil.which("cuobjdump", path=os.pathsep.join([f"{home}/bin", *map(str, triton), os.environ["PATH"]]))


def built_for() -> list[str]:
    """Architectures whose machine code the extension holds: "sm_90"."""
    if native.extension is None:
        return []
    names = native.extension.build_info()["cuda_architectures"].replace("+PTX", "").replace(".", "").split()
    return [f"sm_{name}" for name in names]


def why_not(architecture: str | None = None) -> str | None:
    """Why nothing can be read, of this architecture or of any."""
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
        """Of a kernel of the rows family, as the source spells them; else ""."""
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
    """Of every architecture."""
    found, architecture = [], ""
    for part in re.split(r"\n(?= Function|.*arch = )", _dumped("--dump-resource-usage")):
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

    def bytes(self) -> int:
        """Of one lane, of an access to memory."""
        width = re.search(r"\.(?:[US]?(8|16)|(64)|(128))\b", self.op)
        return int(next(filter(None, width.groups()))) // 8 if width else 4


# Counts of instructions by opcode with its modifiers.
Counts = Counter[str]


def count_kind(counts: Counts, kind: str) -> int:
    return sum(n for op, n in counts.items() if op.split(".", 1)[0] == kind)


def _work(instruction: Instruction) -> int:
    """What a way must not miss: products, and bytes to and from memory."""
    if instruction.kind == "HMMA":
        return 1
    return instruction.bytes() if instruction.kind in ("LDG", "STG", "LDS", "STS") else 0


class Way(NamedTuple):
    """Instructions on the way from the begin of one block to where it ends."""

    work: int
    instructions: tuple[Instruction, ...]

    def counts(self) -> Counts:
        return Counter(instruction.op for instruction in self.instructions)


class Loop(NamedTuple):
    header: int
    blocks: frozenset[int]
    latches: tuple[int, ...]  # from which it goes back to the header


class Code:
    """The instructions of a kernel, in basic blocks named by their addresses."""

    def __init__(self, listing: str) -> None:
        self.instructions = [
            Instruction(int(at, 16), predicate.strip(), op, operands.strip())
            for at, predicate, op, operands in re.findall(
                r"/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", listing
            )
        ]
        self.blocks = self._cut()
        self.follows = dict(zip(self.blocks, [*list(self.blocks)[1:], None], strict=True))
        self.next = {at: self._leads_to(at) for at in self.blocks}
        self.before: dict[int, list[int]] = {at: [] for at in self.blocks}
        for at, to in self.next.items():
            for target in to:
                self.before[target].append(at)
        self.order = self._numbered()
        self.dominator = self._dominators()

    def _cut(self) -> dict[int, list[Instruction]]:
        starts = {self.instructions[0].at}
        for n, instruction in enumerate(self.instructions):
            if instruction.kind in ("BRA", "BSSY", "CALL"):
                starts.add(instruction.target())
            if instruction.kind in ("BRA", "BRX", "BSYNC", "EXIT", "RET") and n + 1 < len(self.instructions):
                starts.add(self.instructions[n + 1].at)
        blocks: dict[int, list[Instruction]] = {}
        for instruction in self.instructions:
            if instruction.at in starts:
                current = blocks[instruction.at] = []
            current.append(instruction)
        return blocks

    def _leads_to(self, at: int) -> list[int]:
        last, follows = self.blocks[at][-1], self.follows[at]
        always = not last.predicate
        to: list[int] = []
        # BRA.DIV is for lanes of a warp that are not together, which these kernels' are.
        if last.kind == "BRA" and last.op != "BRA.DIV":
            to.append(last.target())
            always = always and re.fullmatch(r"0x[0-9a-f]+", last.operands) is not None
        elif last.kind == "BSYNC":
            register = last.operands
            before = (x for x in reversed(self.instructions) if x.at < last.at and x.kind == "BSSY")
            to.append(next(x.target() for x in before if x.operands.startswith(f"{register},")))
        elif last.kind not in ("EXIT", "RET", "BRX"):
            always = False
        if not always and follows is not None:
            to.append(follows)
        return list(dict.fromkeys(to))

    def _numbered(self) -> dict[int, int]:
        """Blocks in reverse postorder, with all that nothing leads to as starts."""
        done: list[int] = []
        seen: set[int] = set()
        entry = next(iter(self.blocks))
        for root in [entry, *(at for at in self.blocks if not self.before[at])]:
            stack = [(root, iter(self.next[root]))] if root not in seen else []
            seen.add(root)
            while stack:
                at, rest = stack[-1]
                to = next((to for to in rest if to not in seen), None)
                if to is None:
                    done.append(at)
                    stack.pop()
                else:
                    seen.add(to)
                    stack.append((to, iter(self.next[to])))
        return {at: n for n, at in enumerate(reversed(done))}

    def _dominators(self) -> dict[int, int | None]:
        """The next block that every way to a block goes through; None where there is none."""
        found: dict[int, int | None] = {at: None for at in self.order if not self.before[at]}

        def common(a: int | None, b: int | None) -> int | None:
            while a != b:
                if a is None or b is None:
                    return None
                if self.order[a] > self.order[b]:
                    a = found[a]
                else:
                    b = found[b]
            return a

        changed = True
        while changed:
            changed = False
            for at in self.order:
                ways = [way for way in self.before[at] if way in found]
                if not ways:
                    continue
                new: int | None = ways[0]
                for way in ways[1:]:
                    new = common(new, way)
                if at not in found or found[at] != new:
                    found[at] = new
                    changed = True
        return found

    def dominators(self, at: int) -> Iterator[int]:
        """The block itself, then those that every way to it goes through, the nearest first."""
        here: int | None = at
        while here is not None:
            yield here
            here = self.dominator.get(here)

    @functools.cached_property
    def back(self) -> frozenset[tuple[int, int]]:
        return frozenset((at, to) for at in self.order for to in self.next[at] if to in self.dominators(at))

    @functools.cached_property
    def loops(self) -> list[Loop]:
        found = []
        for header in sorted({to for _, to in self.back}):
            latches = tuple(at for at, to in self.back if to == header)
            blocks, stack = {header}, list(latches)
            while stack:
                at = stack.pop()
                if at not in blocks:
                    blocks.add(at)
                    stack.extend(way for way in self.before[at] if way in self.order)
            found.append(Loop(header, frozenset(blocks), latches))
        return found

    def within(self, blocks: Iterable[int]) -> list[Instruction]:
        return [instruction for at in sorted(blocks) for instruction in self.blocks[at]]

    def innermost(self, kind: str, times: int) -> list[Loop]:
        """Loops with that many instructions of a kind none of which is in a loop within."""

        def count(loop: Loop) -> int:
            return sum(instruction.kind == kind for instruction in self.within(loop.blocks))

        def has_inner(loop: Loop) -> bool:
            return any(inner.blocks < loop.blocks and count(inner) > 0 for inner in self.loops)

        return [loop for loop in self.loops if count(loop) == times and not has_inner(loop)]

    def way(
        self, start: int, ends: Callable[[int], bool], within: Iterable[int] | None = None, most_work: bool = True
    ) -> Way | None:
        """From the begin of block `start` to the end of the first block for which `ends` holds.

        Loops on the way are passed once. Of the ways with the most work, or of all, the one with the fewest
        instructions. None if no way leads there.
        """
        inside = None if within is None else frozenset(within)
        best: dict[int, Way | None] = {}

        def key(way: Way) -> tuple[int, int]:
            return (way.work if most_work else 0, -len(way.instructions))

        def reachable() -> list[int]:
            stack, seen = [start], {start}
            while stack:
                at = stack.pop()
                if ends(at):
                    continue
                for to in self._forward(at, inside):
                    if to not in seen:
                        seen.add(to)
                        stack.append(to)
            return sorted(seen, key=self.order.__getitem__, reverse=True)

        for at in reachable():
            here = tuple(self.blocks[at])
            rests: list[Way] = [Way(0, ())] if ends(at) else []
            if not ends(at):
                rests = [rest for to in self._forward(at, inside) if (rest := best.get(to)) is not None]
            rest = max(rests, key=key, default=None)
            best[at] = None if rest is None else Way(sum(map(_work, here)) + rest.work, here + rest.instructions)
        return best[start]

    def _forward(self, at: int, inside: frozenset[int] | None) -> list[int]:
        return [to for to in self.next[at] if (at, to) not in self.back and (inside is None or to in inside)]

    def turn(self, loop: Loop, most_work: bool = True) -> Way:
        """One turn of a loop."""
        found = self.way(loop.header, lambda at: at in loop.latches, loop.blocks, most_work)
        assert found is not None
        return found


@functools.cache
def code(symbol: str, architecture: str = ARCHITECTURE) -> Code:
    return Code(_dumped("-sass", "-arch", architecture, "-fun", symbol))


class Executed(NamedTuple):
    """What a warp executes for 16 samples and one input capsule, and where that is in the code."""

    kernel: Kernel
    counts: Counts
    hot: list[Instruction]  # everything that may be executed for it, whichever way a loop goes

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
    """The pass of iteration 0, which sums the votes up. What every fourth input capsule adds is not counted."""
    return _capsule_loop(plain_kernel("accumulate_kernel", tiles, exact, "forward"), tiles, exact, weighted=False)


def forward_pass(exact: bool, tiles: int = TILES) -> Executed:
    return _capsule_loop(plain_kernel("accumulate_kernel", tiles, exact, "forward"), tiles, exact, weighted=True)


def backward_pass(exact: bool, tiles: int = TILES) -> Executed:
    return _capsule_loop(plain_kernel("accumulate_kernel", tiles, exact, "backward"), tiles, exact, weighted=True)


def _is_barrier(instruction: Instruction) -> bool:
    return instruction.kind in ("BAR", "UCGABAR_ARV", "UCGABAR_WAIT") and not instruction.predicate


def gradients(exact: bool, tiles: int = TILES) -> Executed:
    """From the barrier before the votes to the one after dweight: iteration 0 without dot products, others with db."""
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
    # The votes are made before the loop, whether or not it has a turn.
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
    for turn in (found.turn(loop, most_work=False), *[found.turn(loop)] * (ITERATIONS - 1)):
        counts += turn.counts()
    return Executed(kernel, counts, [*once, *found.within(loop.blocks)])


PASSES: dict[str, Callable[..., Executed]] = {
    "first pass": first_pass,
    "forward pass": forward_pass,
    "backward pass": backward_pass,
    "gradients": gradients,
}


def release() -> str:
    """Of the compiler."""
    assert native.extension is not None
    return f"nvcc {native.extension.build_info()['cuda']}, {ARCHITECTURE}"


def table() -> str:
    """What docs/cuda-kernels.md has between BEGIN and END."""
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
