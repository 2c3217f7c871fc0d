"""The table of docs/triton-kernels.md: what the compiler made of the passes of the canonical layer.

``python -m tests.support.triton_compile docs`` writes the table, ``table`` prints a table for another layer.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent.parent / "docs" / "triton-kernels.md"
BEGIN, END = "<!-- triton-sass -->", "<!-- /triton-sass -->"
PASSES = ("uniform", "accumulate", "accumulate_gradient", "gradient")
# The layer whose passes are counted, and the targets it is compiled for.
SHAPE = [32, 64, 10, 16, 8]
BUILDS = {"float32": (80, 90, 100), "bfloat16": (90,)}
COLUMNS = (
    "warps",
    "instructions",
    "barriers",
    "conversions",
    "exchanges",
    "shuffles",
    "spills",
    "loads",
    "registers",
    "shared",
    "resident",
    "microseconds",
)

Row = dict[str, Any]


def release() -> str:
    import triton

    return f"Triton {'.'.join(triton.__version__.split('.')[:2])}"


def name(row: Row) -> str:
    return row["mode"] if row["mode"] in ("uniform", "coupling") else str(row["kernel"]).removesuffix("_kernel")


def passes(rows: Iterable[Row], dtype: str, capability: int) -> dict[str, Row]:
    """The rows of one build of one layer, by pass."""
    found = {name(row): row for row in rows if (row["dtype"], row["capability"]) == (dtype, capability)}
    return {each: found[each] for each in PASSES if each in found}


def both_ways(found: dict[str, Row], what: str, iterations: int = 3) -> float:
    """Sums a column over the launches of a forward and a backward without logits."""
    again = iterations - 1
    return sum(found[each][what] * (1 if each in ("uniform", "gradient") else again) for each in PASSES)


def _cell(value: Any) -> str:
    if isinstance(value, dict):  # loads by width
        return ", ".join(f"{n} × {width}" for width, n in value.items()) or "0"
    return "" if value is None else f"{value:,}".replace(",", " ")


def lines(rows: Iterable[Row]) -> list[str]:
    """Lines of a Markdown table, one for each row."""
    head = [f"| {release()} | {' | '.join(COLUMNS)} |", "|---|" + "--:|" * len(COLUMNS)]
    found = []
    for row in rows:
        cells = [_cell(row.get(column)) for column in COLUMNS]
        found.append(f"| {name(row)}, {row['dtype']}, sm_{row['capability']} | {' | '.join(cells)} |")
    return [*head, *found]


def table(rows: list[Row]) -> str:
    """The text of the page between BEGIN and END, for rows of the canonical layer."""
    listed = [
        row
        for dtype, capabilities in BUILDS.items()
        for capability in capabilities
        for row in passes(rows, dtype, capability).values()
    ]
    (exact, half), times = (
        [both_ways(passes(rows, dtype, 90), what) for dtype in BUILDS] for what in ("instructions", "microseconds")
    )
    total = (
        f"Forward and backward at r = 3 on sm_90: {_cell(exact)} instructions in float32, {_cell(half)} in bfloat16 "
        f"({half / exact:.3f} of them); {times[0]:.0f} and {times[1]:.0f} µs."
    )
    return "\n".join([BEGIN, *lines(listed), "", total, END])


def split() -> tuple[str, str, str]:
    """The page in three parts: the text before the table, the table, the text after the table."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = text.index(BEGIN), text.index(END) + len(END)
    return text[:begin], text[begin:end], text[end:]


def write(rows: list[Row]) -> None:
    before, _, after = split()
    PAGE.write_text(before + table(rows) + after, encoding="utf-8")
