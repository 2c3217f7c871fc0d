"""The tables of trained networks in the docs agree with the records."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import capsfast

from ..test_docs import ROOT, table_rows

PAGE = ROOT / "docs" / "results.md"


def record_of(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "docs" / "records" / name).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


# The first cells of a table's header, its page, and the record of its rows; "" if each row has a link to its record.
TABLES = (
    ("| data | network | parameters |", PAGE, ""),
    ("| `--pretrained` |", PAGE, ""),
    ("| network | parameters | mean | lowest | highest | in the record |", PAGE, "digits-routings.json"),
    ("| network | in the record | parameters |", PAGE, "small-networks.json"),
    ("| iterations |", PAGE, "small-networks.json"),
    ("| data | parameters |", ROOT / "docs" / "unsupervised.md", "stacked-mnist.json"),
    ("| count |", PAGE, "multi-mnist-found.json"),
    ("| images | right |", ROOT / "docs" / "gallery.md", "mnist-evaluate.json"),
)


def numbers(record: Any) -> Iterator[float]:
    if isinstance(record, dict) and "right" in record:
        yield record["right"] / record["images"]
    if isinstance(record, dict) and "found" in record:
        yield record["found"] / (2 * record["images"])
    if isinstance(record, dict | list):
        for value in record.values() if isinstance(record, dict) else record:
            yield from numbers(value)
    elif isinstance(record, int | float):
        yield record


def known(cell: str, found: list[float]) -> bool:
    """Whether the number of a cell is a number of the record, rounded as in the cell: "98.87 % of 10000"."""
    cell = cell.partition(" of ")[0]
    text, percent = cell.removesuffix(" %").replace(" ", ""), cell.endswith(" %")
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        return True
    digits = len(text.partition(".")[2])
    return any(f"{100 * x if percent else x:.{digits}f}" == text for x in found)


@pytest.mark.parametrize(("header", "page", "file"), TABLES, ids=[table[0] for table in TABLES])
def test_numbers_are_those_of_the_records(header: str, page: Path, file: str) -> None:
    rows = table_rows(page, header)
    assert rows
    for row in rows:
        name = file or re.findall(r"records/([\w.-]+)", row[-1])[0]
        record = record_of(name)
        named = [record[key] for cell in row for key in record if key == cell.strip("`") or key == f"mnist-{cell}"]
        if name == "stacked-mnist.json":
            record = [record, record_of("stacked-mnist-clusters.json")]
        found = [*numbers(named or record)]
        assert [cell for cell in row if not known(cell, found)] == []


def test_every_routing_and_network_of_a_record_is_shown() -> None:
    rows = table_rows(PAGE, TABLES[2][0])
    assert set(capsfast.nn.ROUTINGS) <= set(record_of(TABLES[2][2])) == {row[-1].strip("`") for row in rows}
