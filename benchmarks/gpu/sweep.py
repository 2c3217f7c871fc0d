"""Steps: all contenders on the cases of the targets, the compiler's search on some of them, all contenders on the rest.

Each until its time is used up.
"""

import argparse
import dataclasses
import os
import time
from pathlib import Path

import torch

from capsfast.bench import record
from capsfast.bench.cases import CANONICAL, DIRECTIONS, Case
from capsfast.bench.contenders import BROADCAST, COMPILED, Contender, contenders, tuned
from capsfast.bench.measure import Row, measure
from capsfast.bench.targets import CASES, TUNED_CASES, VOTES

from .common import publish, step_results
from .layers import layers

# Compiling the baselines takes most of a case.
CASE_SECONDS = 20.0
FIRST_CALL_SECONDS = 90.0
TIMING_SECONDS = 1.2

_VARIED = [{"B": 1}, {"B": 16}, {"J": 1000}]
REST: tuple[Case, ...] = tuple(
    case
    for case in dict.fromkeys(
        [
            *(dataclasses.replace(layer, direction=each) for layer in layers() for each in DIRECTIONS),
            *(dataclasses.replace(CANONICAL, direction=each, **v) for v in _VARIED for each in DIRECTIONS),
            dataclasses.replace(VOTES, direction="forward+backward"),
            *(
                dataclasses.replace(CANONICAL, direction=each, dtype="bfloat16", **v)
                for v in _VARIED[:2]
                for each in DIRECTIONS
            ),
        ]
    )
    if case not in CASES
)


def small(case: Case) -> Case:
    """The case in a size for a rehearsal."""
    return dataclasses.replace(case, B=min(case.B, 3), I=min(case.I, 16), J=min(case.J, 12))


def line(rows: list[Row]) -> str:
    parts = []
    for row in rows:
        text = f"{row.seconds['median'] * 1e6:.1f} µs by {row.clock}" if row.seconds else f"{row.status}: {row.reason}"
        parts.append(f"{row.contender} {text}")
    return f"{rows[0].case.name}: " + "; ".join(parts)


def able(device: torch.device, case: Case, part: str, rehearse: bool) -> list[Contender]:
    """Whom a part of the sweep measures on the case."""
    found = [each for each in contenders() if "any" in each.devices or device.type in each.devices]
    if rehearse:
        return [each for each in found if each.name != COMPILED]
    if part == "tuned":
        return [*(each for each in found if each.ours), tuned()]
    if case.B > CANONICAL.B:
        # It takes gigabytes and seconds to say what it has said at smaller batches.
        found = [each for each in found if each.name != BROADCAST]
    return found


PARTS: dict[str, tuple[Case, ...]] = {"targets": CASES, "tuned": TUNED_CASES, "rest": REST}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", choices=tuple(PARTS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the record")
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args()
    begin, seconds = time.monotonic(), float(os.environ.get("STEP_SECONDS", "inf"))
    device = torch.device(asked.device)
    surroundings = record.environment(device)
    surroundings["limits"] = step_results(asked.out / "gpu-check" / "check.json").get("limits", {}).get("limits", {})
    path = asked.out / f"{record.machine_name(surroundings['machine'])}{'-rehearsal' * asked.rehearse}.json"
    rows: list[Row] = record.load(path)[1] if asked.cases != "targets" and path.exists() else []
    cases = PARTS[asked.cases]
    if asked.rehearse:
        cases = tuple(dict.fromkeys(small(case) for case in cases))
    if asked.cases == "rest":
        # What another part has measured already.
        cases = tuple(case for case in cases if case not in {row.case for row in rows})

    fresh: list[Row] = []
    late: list[Case] = []
    for case in cases:
        left = seconds - (time.monotonic() - begin)
        if left < (0 if asked.rehearse else CASE_SECONDS):
            late.append(case)
            continue
        try:
            found = measure(
                case,
                able(device, case, asked.cases, asked.rehearse),
                device,
                seconds=0.0 if asked.rehearse else TIMING_SECONDS,
                least_rounds=1 if asked.rehearse else 5,
                with_memory=not asked.rehearse,
                first_call_seconds=min(FIRST_CALL_SECONDS, left),
            )
        except RuntimeError as error:  # the device's memory, or a kernel of no contender in particular
            found = [Row(case, "all", "failed", str(error).partition("\n")[0])]
        fresh += found
        measured = {(row.case, row.contender) for row in found}
        rows = [row for row in rows if (row.case, row.contender) not in measured]
        record.save(path, surroundings, rows + fresh)
        print(line(found), flush=True)
        publish(
            {
                "record": path.name,
                "cases": len({row.case for row in fresh}),
                "not_reached": [each.name for each in cases if each not in {row.case for row in fresh}],
            }
        )
    if late:
        print(f"not reached: {'; '.join(case.name for case in late)}", flush=True)
    bad = [row for row in fresh if row.status in ("wrong", "failed") and row.contender.startswith(("capsfast", "all"))]
    if bad:
        raise SystemExit("; ".join(f"{row.contender} on {row.case.name} {row.status}: {row.reason}" for row in bad))


if __name__ == "__main__":
    main()
