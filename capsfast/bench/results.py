"""Rows by case and contender, comparisons between rows, and the format of numbers."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .cases import CANONICAL, Case
from .contenders import CPP, OURS
from .measure import Row

RATE = "multiply_add_flops_per_second"


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    ms = seconds * 1e3
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.{1 if seconds < 1e-4 else 0}f}"


def mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f}"


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1f}x"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] + ["---:"] * (len(header) - 1), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def differing(case: Case) -> str:
    """The image, the batch, and all sizes that differ from the canonical layer, such as ``B=64 J=32``."""
    words = [f"{key}={getattr(case, key)}" for key in "BIJDKr" if key == "B" or getattr(case, key)]
    kept = {f"{key}={getattr(CANONICAL, key)}" for key in "IJDKr"}
    dtype = case.dtype if case.dtype != "float32" else ""
    return " ".join(filter(None, [case.image, *(word for word in words if word not in kept), dtype]))


class Results:
    """Look-up over rows; of two rows for a case and a contender the later counts. how: "eager", "graph" or "host"."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = {(row.case, row.contender): row for row in rows}
        self.cases = list(dict.fromkeys(case for case, _ in self.rows))
        self.contenders = list(dict.fromkeys(name for _, name in self.rows))

    def of(self, case: Case, name: str, field: str) -> Any:
        """The field of the row, None if there is no row."""
        return getattr(self.rows.get((case, name)), field, None)

    def seconds(self, case: Case, name: str, how: str = "eager") -> float | None:
        return (self.of(case, name, "seconds") or {}).get("median") if how == "eager" else self.of(case, name, how)

    def main(self, case: Case) -> str:
        """The kind of time that compares the contenders: "graph" if the case has such times, else "eager"."""
        return "graph" if any(self.seconds(case, name, "graph") is not None for name in self.contenders) else "eager"

    def shown(self, case: Case, name: str, how: str = "eager", unit: Callable[..., str] = milliseconds) -> str:
        """The time, or why there is none, or "" without a row."""
        status = self.of(case, name, "status") or ""
        return unit(self.seconds(case, name, how)) if status == "ok" else status

    def memory(self, case: Case, name: str) -> int | None:
        return self.of(case, name, "memory_bytes")  # type: ignore[no-any-return]

    def ours(self, case: Case, how: str = "eager") -> str | None:
        """The fastest of capsfast's fused backends on the case."""
        timed = {name: self.seconds(case, name, how) for name in self.contenders if name.startswith(OURS)}
        known = {name: seconds for name, seconds in timed.items() if seconds is not None}
        return min(known, key=known.__getitem__) if known else None

    def speedup(self, case: Case, against: str, how: str = "eager") -> float | None:
        """Time of ``against`` over the time of the fastest fused backend."""
        ours = self.ours(case, how)
        theirs = self.seconds(case, against, how)
        our_seconds = self.seconds(case, ours, how) if ours is not None else None
        return theirs / our_seconds if theirs is not None and our_seconds is not None else None

    def share(self, case: Case, limits: dict[str, float]) -> float | None:
        """The FLOPs of the case in the time of the backend cpp, over the rate of multiply-adds on registers.

        None if the record lacks one of them, and for float64, which has another rate.
        """
        seconds = self.seconds(case, CPP)
        if seconds is None or RATE not in limits or not case.flops or case.dtype == "float64":
            return None
        return case.flops / seconds / limits[RATE]

    def along(self, size: str, op: str, direction: str) -> list[Case]:
        """The measured cases of an op that differ from the canonical layer in ``size`` only, sorted by this size."""
        canonical = dataclasses.replace(
            CANONICAL, op=op, direction=direction, K=0 if op == "route_votes" else CANONICAL.K
        )
        along = [case for case in self.cases if case == dataclasses.replace(canonical, **{size: getattr(case, size)})]
        return sorted(along, key=lambda case: getattr(case, size))
