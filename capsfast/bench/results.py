"""Rows by case and contender, and what follows from two of them: speed-ups and shares of the limits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .cases import AXES, CANONICAL, DIRECTIONS, OPS, Case, sweep
from .contenders import OURS
from .measure import Row


@dataclass(frozen=True)
class Axis:
    """The measured cases of one sweep, op and direction, in the order of the sweep."""

    name: str
    op: str
    direction: str
    cases: list[Case]

    def label(self, case: Case) -> str:
        """What distinguishes the case on this axis, such as ``I=64``."""
        keys = dict.fromkeys(key for changes in AXES[self.name] for key in changes)
        words = [f"{key}={getattr(case, key)}" for key in keys if key != "dtype" and getattr(case, key)]
        return " ".join(words) if words else case.dtype


def differing(case: Case) -> str:
    """The batch, and what else is not that of the canonical layer, such as ``B=64 J=32``."""
    words = [f"{key}={getattr(case, key)}" for key in "BIJDKr" if key == "B" or getattr(case, key)]
    kept = {f"{key}={getattr(CANONICAL, key)}" for key in "IJDKr"}
    dtype = [] if case.dtype == CANONICAL.dtype else [case.dtype]
    return " ".join([word for word in words if word not in kept] + dtype)


class Results:
    """Look-up over rows; the later of two rows for one case and contender counts."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = {(row.case, row.contender): row for row in rows}
        self.cases = list(dict.fromkeys(case for case, _ in self.rows))
        self.contenders = list(dict.fromkeys(name for _, name in self.rows))

    def row(self, case: Case, name: str) -> Row | None:
        return self.rows.get((case, name))

    def seconds(self, case: Case, name: str) -> float | None:
        row = self.row(case, name)
        return row.seconds["median"] if row is not None and row.status == "ok" else None

    def memory(self, case: Case, name: str) -> int | None:
        row = self.row(case, name)
        return row.memory_bytes if row is not None else None

    def ours(self, case: Case) -> str | None:
        """The fastest of capsfast's fused backends on the case."""
        timed = {name: self.seconds(case, name) for name in self.contenders if name.startswith(OURS)}
        known = {name: seconds for name, seconds in timed.items() if seconds is not None}
        return min(known, key=known.__getitem__) if known else None

    def speedup(self, case: Case, against: str) -> float | None:
        """Time of ``against`` over the time of the fastest fused backend."""
        ours = self.ours(case)
        theirs = self.seconds(case, against)
        mine = self.seconds(case, ours) if ours is not None else None
        return theirs / mine if theirs is not None and mine is not None else None

    def axes(self) -> list[Axis]:
        """Every sweep of which at least two cases were measured."""
        found = []
        for op in [op for op in dict.fromkeys(case.op for case in self.cases) if op in OPS]:
            for name in AXES:
                for direction in DIRECTIONS:
                    cases = [case for case in sweep(name, op, (direction,)) if case in self.cases]
                    if len(cases) > 1:
                        found.append(Axis(name, op, direction, cases))
        return found

    def routings(self) -> dict[tuple[str, str], list[Case]]:
        """The cases of each routing of capsfast.nn, by name and direction."""
        found: dict[tuple[str, str], list[Case]] = {}
        for case in self.cases:
            if case.routing:
                found.setdefault((case.routing, case.direction), []).append(case)
        return found

    def others(self, axes: Sequence[Axis]) -> list[Case]:
        """Measured cases of an op that are in none of ``axes``."""
        shown = {case for axis in axes for case in axis.cases}
        return [case for case in self.cases if case.op in OPS and case not in shown]


def shares(case: Case, seconds: float, limits: dict[str, float]) -> tuple[float, float] | None:
    """Of the measured matmul and copy rates, what a float32 forward of dynamic routing reaches.

    Counted are the least FLOPs and bytes the result needs, not those a contender chose to spend.
    """
    if case.routing or case.backward or case.dtype != "float32" or not limits or "tf32_flops_per_second" in limits:
        return None  # on a GPU floors.py says more
    flops = case.forward_flops / seconds / limits["matmul_flops_per_second"]
    moved = (case.input_bytes + case.output_bytes) / seconds / limits["copy_bytes_per_second"]
    return flops, moved
