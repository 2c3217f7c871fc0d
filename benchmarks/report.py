"""Writes docs/benchmarks.md and docs/images/*.png from the records in results/."""

import sys
from pathlib import Path

from capsfast.bench.report import write

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    records = list((HERE / "results").glob("*.json"))
    if not records:
        sys.exit("no record in benchmarks/results; run python benchmarks/sweep.py first")
    page = write(records, HERE.parent / "docs")
    print(f"wrote {page.relative_to(HERE.parent)}")
