"""What the fused GPU backends are to reach, and whether a record shows it.

The times are for an H200; the ratios and shares hold for every GPU.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from .cases import CANONICAL, Case
from .contenders import EAGER, OURS, TUNED
from .floors import floor
from .overhead import MATMUL
from .results import Results

BOTH = dataclasses.replace(CANONICAL, direction="forward+backward")
SINGLE = dataclasses.replace(CANONICAL, B=1)
HALF = dataclasses.replace(CANONICAL, dtype="bfloat16")
HALF_BOTH = dataclasses.replace(BOTH, dtype="bfloat16")
LARGE = dataclasses.replace(CANONICAL, B=1024)
LARGE_BOTH = dataclasses.replace(BOTH, B=1024)
WIDE = dataclasses.replace(CANONICAL, B=64, I=18432, J=32)
WIDE_BOTH = dataclasses.replace(WIDE, direction="forward+backward")
VOTES = dataclasses.replace(CANONICAL, op="route_votes", K=0)


@dataclass(frozen=True)
class Evidence:
    """results: of a sweep. limits: of the device. host: seconds of a call by direction and function."""

    results: Results
    limits: dict[str, float] = field(default_factory=dict)
    host: dict[str, dict[str, float]] = field(default_factory=dict)

    def seconds(self, case: Case, name: str) -> float | None:
        return self.results.seconds(case, name)


Measure = Callable[[Evidence, str], float | None]


@dataclass(frozen=True)
class Target:
    """text: what is measured. measure: it, for a contender; None if the record does not hold it. bound: the least,
    or the most where at_most. unit: what measure counts in."""

    text: str
    measure: Measure
    bound: float
    unit: str
    at_most: bool = False

    def met(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound


@dataclass(frozen=True)
class Finding:
    """value, met: None where the record does not say."""

    contender: str
    target: Target
    value: float | None

    @property
    def met(self) -> bool | None:
        return None if self.value is None else self.target.met(self.value)


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def _time(case: Case) -> Measure:
    def microseconds(evidence: Evidence, name: str) -> float | None:
        seconds = evidence.seconds(case, name)
        return None if seconds is None else seconds * 1e6

    return microseconds


def _faster(case: Case, against: str) -> Measure:
    return lambda evidence, name: _ratio(evidence.seconds(case, against), evidence.seconds(case, name))


def _of(case: Case, other: Case) -> Measure:
    """How many times as long ``case`` takes as ``other``."""
    return lambda evidence, name: _ratio(evidence.seconds(case, name), evidence.seconds(other, name))


def _share(case: Case) -> Measure:
    """Of the rate that limits the case."""

    def percent(evidence: Evidence, name: str) -> float | None:
        least = floor(case, evidence.limits)
        share = _ratio(least.seconds, evidence.seconds(case, name)) if least is not None else None
        return None if share is None else 100 * share

    return percent


def _copy_share(case: Case) -> Measure:
    """Of the copy rate, had every input been read once."""

    def percent(evidence: Evidence, name: str) -> float | None:
        least = floor(case, evidence.limits)
        share = _ratio(least.copy, evidence.seconds(case, name)) if least is not None else None
        return None if share is None else 100 * share

    return percent


def _memory(case: Case) -> Measure:
    def percent(evidence: Evidence, name: str) -> float | None:
        ours, theirs = evidence.results.memory(case, name), evidence.results.memory(case, EAGER)
        share = _ratio(ours, theirs)
        return None if share is None else 100 * share

    return percent


def _host(direction: str) -> Measure:
    def ratio(evidence: Evidence, name: str) -> float | None:
        seconds = evidence.host.get(direction, {})
        return _ratio(seconds.get(name), seconds.get(MATMUL))

    return ratio


def _common(times: tuple[float, float], tuned: tuple[float, float], wide: float) -> tuple[Target, ...]:
    forward, both = "B=128 forward", "B=128 forward+backward"
    return (
        Target(forward, _time(CANONICAL), times[0], "µs", at_most=True),
        Target(both, _time(BOTH), times[1], "µs", at_most=True),
        Target(f"{forward}, faster than max-autotune", _faster(CANONICAL, TUNED), tuned[0], "x"),
        Target(f"{both}, faster than max-autotune", _faster(BOTH, TUNED), tuned[1], "x"),
        Target(f"{forward}, faster than eager einsum", _faster(CANONICAL, EAGER), 15, "x"),
        Target(f"{both}, faster than eager einsum", _faster(BOTH, EAGER), 15, "x"),
        Target("B=64 I=18432 J=32 forward, of the limiting rate", _share(WIDE), wide, "%"),
        Target("B=64 I=18432 J=32 forward+backward, of the limiting rate", _share(WIDE_BOTH), wide, "%"),
        Target(f"{both}, peak memory of eager einsum's", _memory(BOTH), 5, "%", at_most=True),
        Target("forward, host time of torch.matmul's", _host("forward"), 2, "x", at_most=True),
        Target("forward+backward, host time of torch.matmul's", _host("forward+backward"), 2, "x", at_most=True),
    )


TARGETS: dict[str, tuple[Target, ...]] = {
    "cuda": (
        *_common((30, 95), (8, 6), 50),
        Target("B=128 forward, bfloat16", _time(HALF), 22, "µs", at_most=True),
        Target("B=128 forward+backward, bfloat16", _time(HALF_BOTH), 60, "µs", at_most=True),
        Target("B=128 forward, bfloat16, faster than max-autotune", _faster(HALF, TUNED), 8, "x"),
        Target("B=128 forward+backward, bfloat16, faster than max-autotune", _faster(HALF_BOTH, TUNED), 6, "x"),
        Target("B=1024 forward, of the time of B=128", _of(LARGE, CANONICAL), 7, "x", at_most=True),
        Target("B=1024 forward+backward, of the time of B=128", _of(LARGE_BOTH, BOTH), 7, "x", at_most=True),
        Target("B=1 forward", _time(SINGLE), 15, "µs", at_most=True),
        Target("route_votes B=128 forward, of the copy rate", _copy_share(VOTES), 70, "%"),
    ),
    "triton": _common((40, 150), (5, 4), 40),
}

# The cases that the targets speak of, the most telling first.
CASES = (CANONICAL, BOTH, HALF, HALF_BOTH, LARGE, LARGE_BOTH, SINGLE, VOTES, WIDE, WIDE_BOTH)
# Those that the compiler's search is run for. It takes longer than anything else, so there are few.
TUNED_CASES = (CANONICAL, BOTH, HALF, HALF_BOTH, LARGE, LARGE_BOTH)


def findings(evidence: Evidence) -> list[Finding]:
    """Every target of the backends that are in the record."""
    return [
        Finding(OURS + backend, target, target.measure(evidence, OURS + backend))
        for backend, targets in TARGETS.items()
        if OURS + backend in evidence.results.contenders
        for target in targets
    ]
