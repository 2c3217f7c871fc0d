"""What a Triton kernel executes for one input capsule, read from Triton's intermediate code and the machine code.

In the intermediate code (TTGIR) the loop over input capsules is the innermost loop that contains all products and whose
bounds are known only at run time. Loops over batch tiles and groups of outputs enclose it, steps of K lie within it.
The products tell how many matrix instructions an input capsule takes. This number identifies the same loop in the
machine code, and tells how many input capsules a turn of that loop takes.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .listing import Code, Instruction, Loop

# The layer and the H100 for which times are predicted: multiprocessors, schedulers of each, which issue one instruction
# of a warp per cycle, and GHz. The prediction is a lower bound, as if nothing ever waited.
B, I = 128, 1152
MULTIPROCESSORS, SCHEDULERS, CLOCK = 132, 4, 1.755
# Instructions are counted for the rows of one matrix instruction.
ROWS = 16
# KiB of shared memory, warps and programs of a multiprocessor, by capability.
LIMITS = {80: (164, 64, 32), 86: (100, 48, 16), 89: (100, 48, 24), 90: (228, 64, 32), 100: (228, 64, 32)}
LIMITS[120] = LIMITS[89]


def resident(capability: int, registers: int, shared: int, warps: int) -> int:
    """How many programs a multiprocessor holds. registers: of a thread; shared: bytes of a program."""
    kib, most_warps, programs = LIMITS[capability]
    # A warp gets registers in units of 256, a scheduler has a quarter of all. A program takes 1 KiB more shared memory.
    of_warp = -(-registers * 32 // 256) * 256
    by_registers = 65536 // 4 // of_warp * 4 // warps
    by_shared = kib * 1024 // (-(-shared // 128) * 128 + 1024)
    return max(1, min(by_registers, by_shared, most_warps // warps, programs))


class Scf(NamedTuple):
    """A loop of TTGIR. trips: how many turns it takes, None if known only at run time."""

    first: int  # its lines
    last: int
    trips: int | None

    def holds(self, other: "Scf") -> bool:
        return self.first < other.first and other.last <= self.last


class Intermediate:
    """TTGIR of a kernel."""

    def __init__(self, ttgir: str) -> None:
        self.lines = ttgir.splitlines()
        self.mma = {
            name: (_numbers(warps), _numbers(shape))
            for name, warps, shape in re.findall(
                r"^(#\w+) = #ttg\.nvidia_mma<\{.*?warpsPerCTA = \[([\d, ]+)\].*?instrShape = \[([\d, ]+)\]", ttgir, re.M
            )
        }
        constants = {name: int(value) for name, value in re.findall(r"(%[\w-]+) = arith\.constant (-?\d+) : i", ttgir)}
        self.loops = list(self._loops(constants))

    def _loops(self, constants: dict[str, int]) -> Iterator[Scf]:
        for n, line in enumerate(self.lines):
            found = re.match(r"( *)(?:%\S+ = )?scf\.for %\S+ = (%\S+) to (%\S+) step (%\S+) ", line)
            if found is None:
                continue
            last = next(m for m in range(n + 1, len(self.lines)) if self.lines[m].startswith(f"{found[1]}}}"))
            bounds = [constants.get(name) for name in found.groups()[1:]]
            low, high, step = bounds
            trips = None if low is None or high is None or step is None else max(0, -(-(high - low) // step))
            yield Scf(n, last, trips)

    def over_capsules(self) -> Scf | None:
        """Among loops with unknown trips, the innermost that has all products; without products the longest."""
        loops = [loop for loop in self.loops if loop.trips is None]
        dots = {loop: sum(" tt.dot " in line for line in self.lines[loop.first : loop.last]) for loop in loops}
        most = [loop for loop in loops if dots[loop] == max(dots.values())]
        inner = [loop for loop in most if not any(loop.holds(other) for other in most)]
        return max(inner, key=lambda loop: loop.last - loop.first, default=None)

    def within(self, loop: Scf) -> list[Scf]:
        return [inner for inner in self.loops if loop.holds(inner)]

    def times(self, loop: Scf) -> Iterator[tuple[str, int]]:
        """The lines of a loop, and how often one turn of it executes them."""
        for n in range(loop.first + 1, loop.last):
            yield (
                self.lines[n],
                math.prod(1 if x.trips is None else x.trips for x in self.within(loop) if x.first < n < x.last),
            )

    def conversions(self, loop: Scf) -> int:
        """Conversions of layout, which move numbers to other lanes, or through shared memory to other warps."""
        return sum(times for line, times in self.times(loop) if "ttg.convert_layout" in line)

    def products(self, loop: Scf) -> int:
        """Matrix instructions of a warp."""
        return sum(times * self._instructions(line) for line, times in self.times(loop) if " tt.dot " in line)

    def _instructions(self, line: str) -> int:
        found = re.search(r": tensor<([\dx]+)x([a-z]+)(\d+), .*-> tensor<([\dx]+)xf32, (#\w+)>", line)
        assert found is not None and found[5] in self.mma, line
        warps, instruction = self.mma[found[5]]
        shape = [int(n) for n in found[4].split("x")]
        cut = zip(shape, warps, instruction, strict=True)
        # An instruction takes 32 bytes along the axis of the sum.
        depth = int(found[1].split("x")[-1]) * int(found[3]) // 8 // 32
        return math.prod(max(1, -(-n // (warp * each))) for n, warp, each in cut) * depth


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


class Turn(NamedTuple):
    """The instructions of a turn of a loop, loops within it included, and how many input capsules it takes."""

    counts: Counter[Instruction]
    capsules: int

    def count(self, *kinds: str) -> float:
        """Instructions of these kinds, or all, for one input capsule."""
        return _whole(sum(n for x, n in self.counts.items() if not kinds or x.kind in kinds) / self.capsules)

    def widths(self, *kinds: str) -> dict[int, float]:
        """Instructions of these kinds for one input capsule, by the bytes that a lane accesses."""
        found: Counter[int] = Counter()
        for x, n in self.counts.items():
            if x.kind in kinds:
                found[x.bytes()] += n
        return {width: _whole(n / self.capsules) for width, n in sorted(found.items(), reverse=True)}


def _whole(n: float) -> float:
    return int(n) if n == int(n) else round(n, 2)


def turn(code: Code, products: int, trips: list[int]) -> Turn | None:
    """A turn of the loop over input capsules, or None if no loop fits. products: matrix instructions per input capsule.

    trips: trips of the loops within that loop in the intermediate code. The compiler keeps all these loops or unrolls
    all.
    """
    fits: list[tuple[int, Turn]] = []
    for loop in code.loops:
        inner = code.loops_within(loop)
        if inner and len(inner) != len(trips):
            continue
        counts = _counts(code, loop, dict(zip(inner, trips, strict=False)))
        made = sum(n for x, n in counts.items() if x.kind == "HMMA")
        if products and (made == 0 or made % products):
            continue
        fits.append((len(loop.blocks), Turn(counts, made // products if products else 1)))
    if not products:  # without products, the longest loop is the loop over input capsules
        return max((found for _, found in fits), key=lambda found: found.counts.total(), default=None)
    return min(fits, key=lambda fit: fit[0])[1] if fits else None


def _counts(code: Code, loop: Loop, trips: dict[Loop, int]) -> Counter[Instruction]:
    counts: Counter[Instruction] = Counter()
    addresses = {inner: {x.at for x in code.within(inner.blocks)} for inner in trips}
    for instruction in code.turn(loop).instructions:
        counts[instruction] += math.prod(n for inner, n in trips.items() if instruction.at in addresses[inner])
    return counts


def spills(code: Code) -> int:
    """Loads and stores of local memory in the innermost loops."""
    inner = [loop for loop in code.loops if not code.loops_within(loop)]
    return sum(x.kind in ("LDL", "STL") for loop in inner for x in code.within(loop.blocks))


def microseconds(instructions: float, tiles: float) -> float:
    """A lower bound for a launch. instructions: for 16 rows and one input capsule; tiles: of 16 rows."""
    return instructions * tiles * I / (MULTIPROCESSORS * SCHEDULERS) / (CLOCK * 1000)


def measured(ttgir: str, code: Callable[[], Code], warps: int, constants: dict[str, Any]) -> dict[str, Any]:
    """Counts for one input capsule; empty for kernels without a countable loop over input capsules.

    code: makes the listing, which few kernels need.

    instructions: of all warps, for 16 rows and all outputs. barriers, conversions, exchanges (accesses to shared
    memory), shuffles and loads (from global memory, by bytes of a lane): of one warp, for all outputs. products and
    additions: of one warp, for a group of outputs. turn: how many input capsules a turn of the loop takes.
    """
    intermediate = Intermediate(ttgir)
    loop = intermediate.over_capsules()
    if loop is None or "BB" not in constants:
        return {}
    trips = [inner.trips for inner in intermediate.within(loop) if inner.trips is not None]
    if len(trips) < len(intermediate.within(loop)):  # the trips of some inner loop are not known
        return {}
    products = intermediate.products(loop)
    found = turn(code(), products, trips)
    if found is None:
        return {}
    groups = -(-constants["J"] // (constants["JT"] * constants["NT"]))
    instructions = _whole(found.count() * warps * groups * ROWS / constants["BB"])
    return {
        "turn": found.capsules,
        "instructions": instructions,
        "products": products,
        "additions": found.count("FADD") + 2 * found.count("FADD2"),
        "barriers": _whole(groups * found.count("BAR")),
        "conversions": groups * intermediate.conversions(loop),
        "exchanges": _whole(groups * found.count("LDS", "STS", "LDSM", "STSM")),
        "shuffles": _whole(groups * found.count("SHFL")),
        "loads": {width: _whole(groups * n) for width, n in found.widths("LDG", "LDGSTS").items()},
        "microseconds": round(microseconds(instructions, B * constants["PP"] / ROWS), 1),
    }
