"""Disassembled machine code: basic blocks, loops, and the instructions of a warp in one turn of a loop.

For any compiler: sass.py reads the CUDA kernels with it, triton_listing.py the Triton kernels.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple


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
        """How many bytes of memory one lane accesses."""
        width = re.search(r"\.(?:[US]?(8|16)|(64)|(128))\b", self.op)
        return int(next(filter(None, width.groups()))) // 8 if width else 4


# Counts of instructions by opcode with its modifiers.
Counts = Counter[str]


def count_kind(counts: Counts, kind: str) -> int:
    return sum(n for op, n in counts.items() if op.split(".", 1)[0] == kind)


def _work(instruction: Instruction) -> int:
    """The work of an instruction: products, and bytes to and from memory. Narrow accesses are for unusual strides."""
    if instruction.kind == "HMMA":
        return 1
    if instruction.bytes() < 8:
        return 0
    return instruction.bytes() if instruction.kind in ("LDG", "STG", "LDS", "STS") else 0


class Way(NamedTuple):
    """The instructions from the beginning of a block to the end of the way."""

    work: int
    instructions: tuple[Instruction, ...]

    def counts(self) -> Counts:
        return Counter(instruction.op for instruction in self.instructions)


class Loop(NamedTuple):
    header: int
    blocks: frozenset[int]
    latches: tuple[int, ...]  # blocks that jump back to the header


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
        last, follows = self.blocks[at][-1], self.follows[at]
        always = not last.predicate
        to: list[int] = []
        # BRA.DIV is for diverged lanes; these kernels do not diverge.
        if last.kind in self.branches and last.op != "BRA.DIV":
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
        """Blocks in reverse postorder. Blocks without a predecessor are starts."""
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
        """For each block the nearest block that every way to it goes through, or None."""
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
        """The block itself, then all blocks that every way to it goes through, the nearest first."""
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

    def loops_within(self, loop: Loop) -> list[Loop]:
        return [inner for inner in self.loops if inner.blocks < loop.blocks]

    def within(self, blocks: Iterable[int]) -> list[Instruction]:
        return [instruction for at in sorted(blocks) for instruction in self.blocks[at]]

    def innermost(self, kind: str, times: int) -> list[Loop]:
        """Loops with ``times`` instructions of this kind, none in an inner loop."""

        def count(loop: Loop) -> int:
            return sum(instruction.kind == kind for instruction in self.within(loop.blocks))

        def has_inner(loop: Loop) -> bool:
            return any(count(inner) > 0 for inner in self.loops_within(loop))

        return [loop for loop in self.loops if count(loop) == times and not has_inner(loop)]

    def way(
        self, start: int, ends: Callable[[int], bool], within: Iterable[int] | None = None, most_work: bool = True
    ) -> Way | None:
        """The way from the beginning of block `start` to the end of the first block for which `ends` holds.

        Passes each loop once. Returns the way with the fewest instructions among all ways, or among the ways with the
        most work. None if there is no way.
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
