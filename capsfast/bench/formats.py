"""Numbers and tables as the report and the command line show them."""

from collections.abc import Sequence


def milliseconds(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f}"


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1f}x"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def gigaflops(rate: float) -> str:
    return f"{rate / 1e9:.0f} GFLOP/s"


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] + ["---:"] * (len(header) - 1), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
