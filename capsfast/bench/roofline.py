"""How near the CPU kernels come to the machine: the FLOPs they execute against its rate of multiply-adds."""

from .cases import Case, sweep
from .executed import CPP
from .formats import milliseconds, percent
from .measure import Row
from .results import Results

RATE = "multiply_add_flops_per_second"
HEADER = ["B, I, J, D, K, r", "direction", "ms", "GFLOP", "GFLOP/s", "of the multiply-adds"]


def share(row: Row | None, limits: dict[str, float]) -> float | None:
    """Of the rate of float32 multiply-adds on registers.

    None where the record lacks the rate or the FLOPs, and for float64, whose rate is another.
    """
    if row is None or row.flops is None or not row.seconds or RATE not in limits or row.case.dtype == "float64":
        return None
    return row.flops / row.seconds["median"] / limits[RATE]


def _sizes(case: Case) -> str:
    return ", ".join(str(size) for size in (case.B, case.I, case.J, case.D, case.K or "-", case.r))


def table(results: Results, op: str, limits: dict[str, float]) -> list[list[str]]:
    """A line for each case of the sweep "roofline" that has a share, under HEADER; empty if fewer than two have."""
    lines = []
    for case in sweep("roofline", op):
        row = results.row(case, CPP)
        reached = share(row, limits)
        if row is None or row.flops is None or reached is None:
            continue
        seconds = row.seconds["median"]
        rate = row.flops / seconds
        line = [_sizes(case), case.direction, milliseconds(seconds), f"{row.flops / 1e9:.2f}", f"{rate / 1e9:.0f}"]
        lines.append([*line, percent(reached)])
    return lines if len(lines) > 1 else []
