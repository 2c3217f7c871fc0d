"""What pytest and compute-sanitizer say, in numbers."""

import re
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

# Names of failed tests and reasons of skipped ones that the record keeps.
MOST_NAMES = 40


def junit(path: Path) -> dict[str, Any]:
    """Counts, names of failed tests and reasons of skipped ones; empty if pytest wrote nothing."""
    try:
        root = xml.etree.ElementTree.parse(path).getroot()
    except (OSError, xml.etree.ElementTree.ParseError):
        return {}
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed: list[str] = []
    skipped: dict[str, int] = {}
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        omission = case.find("skipped")
        if problem is not None:
            counts["failed"] += 1
            failed.append(name)
        elif omission is not None:
            counts["skipped"] += 1
            reason = omission.get("message", "")
            skipped[reason] = skipped.get(reason, 0) + 1
        else:
            counts["passed"] += 1
    return {**counts, "failures": failed[:MOST_NAMES], "skips": skipped}


def judged_pytest(code: int, path: Path) -> tuple[str, dict[str, Any]]:
    """For Step.judge: a run that found no test has shown nothing. The file is read and removed."""
    found = junit(path)
    path.unlink(missing_ok=True)
    if found.get("failed"):
        return f"{found['failed']} failed: {', '.join(found['failures'][:5])}", found
    if code != 0:
        return f"pytest ended with status {code}, see log.txt", found
    return "" if found.get("passed") else "no test ran", found


SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)[^(\n]*(?:\((\d+) errors?)?")


def sanitizer_errors(text: str) -> int | None:
    """The errors that compute-sanitizer counts, None without a summary."""
    found = SUMMARY.findall(text)
    return sum(int(errors or all_of_them) for all_of_them, errors in found) if found else None


def judged_sanitizer(code: int, text: str) -> tuple[str, dict[str, Any]]:
    """For Step.judge."""
    errors = sanitizer_errors(text)
    kinds: dict[str, int] = {}
    for line in re.findall(r"^=+ (?:Error: )?((?:Invalid|Uninitialized|Race|Barrier|Misaligned)[^\n]*)", text, re.M):
        kinds[line] = kinds.get(line, 0) + 1
    kept: dict[str, Any] = {"errors": errors, "kinds": kinds}
    if errors:
        return f"{errors} errors, see log.txt", kept
    if code != 0:
        return f"exit status {code}, see log.txt", kept
    return ("" if errors == 0 else "no summary"), kept
