"""The last step: check.md from check.json and the record of the sweep."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from capsfast.bench import record
from capsfast.bench.cases import CANONICAL, DIRECTIONS
from capsfast.bench.floors import floor
from capsfast.bench.formats import markdown_table, mebibytes, times
from capsfast.bench.report import describe
from capsfast.bench.results import Results
from capsfast.bench.targets import Evidence, findings

from .layers import BATCHES, DTYPES


def microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


def steps_table(steps: list[dict[str, Any]]) -> str:
    lines = []
    for each in steps:
        found = each["result"]
        counts = ", ".join(f"{found[key]} {key}" for key in ("passed", "failed", "skipped", "errors") if found.get(key))
        lines.append([each["name"], each["status"], f"{each['seconds']:.0f}", counts, each["reason"].replace("|", "/")])
    return markdown_table(["step", "status", "s", "counts", "reason"], lines)


def limits_line(limits: dict[str, float]) -> str:
    rates = [f"copy {limits['copy_bytes_per_second'] / 1e12:.2f} TB/s (read and written)"]
    for key, name in (("matmul", "float32"), ("tf32", "TF32"), ("bf16", "bfloat16")):
        if f"{key}_flops_per_second" in limits:
            rates.append(f"{name} products {limits[f'{key}_flops_per_second'] / 1e12:.1f} TFLOP/s")
    return "Measured limits: " + ", ".join(rates) + "."


def sweep_table(results: Results, limits: dict[str, float]) -> str:
    """A line for every case and contender that was timed."""
    lines = []
    for row in results.rows.values():
        least = floor(row.case, limits)
        if row.status != "ok":
            lines.append([row.case.name, row.contender, row.status, "", "", "", "", row.reason.replace("|", "/")])
            continue
        share = "-" if least is None else f"{100 * least.seconds / row.seconds['median']:.0f} % ({least.limiting})"
        spread = f"{microseconds(row.seconds['p10'])} to {microseconds(row.seconds['p90'])}"
        memory = "-" if row.memory_bytes is None else mebibytes(row.memory_bytes)
        events = microseconds(row.event_seconds.get("median"))
        time = microseconds(row.seconds["median"])
        lines.append([row.case.name, row.contender, time, spread, events, memory, share, row.reason.replace("|", "/")])
    header = ["case", "contender", "µs", "10 % to 90 %", "µs by events", "MiB", "of the floor's rate", ""]
    return markdown_table(header, lines)


def batches_table(results: Results) -> str:
    """By batch size, the time in a graph and, behind it, of calls that the host launches."""
    lines = []
    for dtype in DTYPES:
        for direction in DIRECTIONS:
            for B in BATCHES:
                case = dataclasses.replace(CANONICAL, dtype=dtype, direction=direction, B=B)
                cells = []
                for name in results.contenders:
                    row = results.row(case, name)
                    if row is None or row.status != "ok":
                        cells.append("" if row is None else row.status)
                        continue
                    events = microseconds(row.event_seconds.get("median"))
                    cells.append(f"{microseconds(row.seconds['median'])} / {events}")
                if any(cells):
                    lines.append([f"{dtype} {direction} B={B}", *cells])
    return markdown_table(["canonical layer, µs: graph replay / eager", *results.contenders], lines)


# Of a launch, as ncu counts: the heading, the key and the factor.
COUNTED = (
    ("issue %", "issue", 1.0),
    ("L1/shared %", "memory", 1.0),
    ("tensor %", "tensor", 1.0),
    ("L2 %", "l2", 1.0),
    ("DRAM %", "dram", 1.0),
    ("L1 hits %", "l1_hits", 1.0),
    ("bank conflicts, M", "conflicts", 1e-6),
    ("local, k", "local", 1e-3),
    ("waves", "waves", 1.0),
)


def figure(value: float | None, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:.3g}"


def both(found: float | None, predicted: float | None) -> str:
    """In millions."""
    return f"{figure(found, 1e-6)} / {figure(predicted, 1e-6)}"


def counts_of(counters: list[dict[str, Any]], call: dict[str, Any]) -> list[dict[str, Any]]:
    """What ncu counted of the launches of a call that have passes, in order."""
    keys = ("mode", "dtype", "B")
    return next((each["launches"] for each in counters if all(each[key] == call[key] for key in keys)), [])


def kernels_table(kernels: list[dict[str, Any]], counters: list[dict[str, Any]]) -> str:
    lines = []
    for call in kernels:
        counts = iter(counts_of(counters, call))
        for launch in call["launches"]:
            passes = launch["passes"]
            counted = next((each for each in counts if each["passes"] == passes), {}) if passes else {}
            least = launch.get("predicted_us")
            name = f"{launch['kernel']} ({', '.join(passes)})" if passes else launch["kernel"]
            lines.append(
                [
                    f"{call['dtype']} B={call['B']} {call['mode']}: {name}",
                    f"{launch['us']:.1f}",
                    "-" if least is None else f"{least:.1f}",
                    "-" if not least else f"{launch['us'] / least:.2f}x",
                    launch.get("limit", "-"),
                    str(launch.get("registers") or "-"),
                    *(
                        both(counted.get(found), launch.get(predicted)) if passes else "-"
                        for found, predicted in (
                            ("instructions", "predicted_instructions"),
                            ("wavefronts", "predicted_memory_clocks"),
                        )
                    ),
                    *(figure(counted.get(key), factor) for _, key, factor in COUNTED),
                ]
            )
        total = sum(launch["us"] for launch in call["launches"])
        least = sum(launch.get("predicted_us", 0.0) for launch in call["launches"])
        whole = [f"{call['dtype']} B={call['B']} {call['mode']}: all", f"{total:.1f}", f"{least:.1f}"]
        lines.append([*whole, f"{total / least:.2f}x" if least else "-", *["-"] * (4 + len(COUNTED))])
    header = ["launch", "µs", "at least", "ratio", "by", "registers", "instructions, M: found / predicted"]
    header += ["L1/shared clocks, M: found / predicted", *(heading for heading, _, _ in COUNTED)]
    return markdown_table(header, lines)


def clocks_line(kernels: list[dict[str, Any]]) -> str:
    clocks = sorted({round(each["hertz"] / 1e6) for each in kernels})
    return f"{kernels[0]['multiprocessors']} multiprocessors at {clocks[0]} to {clocks[-1]} MHz beside these kernels."


def targets_table(evidence: Evidence) -> str:
    words = {True: "met", False: "missed", None: "not measured"}
    lines = [
        [
            each.contender,
            each.target.text,
            f"{'at most' if each.target.at_most else 'at least'} {each.target.bound:g} {each.target.unit}",
            "-" if each.value is None else f"{each.value:.3g} {each.target.unit}",
            words[each.met],
        ]
        for each in findings(evidence)
    ]
    if not lines:
        return "No fused GPU backend was timed."
    return markdown_table(["backend", "what", "target", "measured", "met"], lines)


def host_table(host: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = []
    for direction, timings in host.items():
        matmul = timings.get("torch.matmul", {}).get("median")
        for name, timing in timings.items():
            ratio = times(timing["median"] / matmul if matmul else None)
            lines.append([direction, name, microseconds(timing["median"]), ratio])
    return markdown_table(["", "host time of a call", "µs", "of torch.matmul"], lines)


def first_call_line(name: str, found: dict[str, Any]) -> str:
    cold, warm = found["cold"], found["from_disk"]
    return (
        f"First call of {name}: forward {cold['forward']:.2f} s, then forward and backward "
        f"{cold['forward+backward']:.2f} s, {found['kernels_compiled']} kernels compiled; "
        f"from the disk {warm['forward']:.2f} s and {warm['forward+backward']:.2f} s."
    )


def page(out: Path, with_times: bool = True) -> str:
    """with_times: the table of all cases too."""
    check = json.loads((out / "gpu-check" / "check.json").read_text())
    found = {each["name"]: each["result"] for each in check["steps"]}
    parts = ["# GPU check" + (" (rehearsal on the CPU: no number counts)" if check.get("rehearsal") else "")]
    if not check["complete"]:
        parts.append("Not complete.")
    machine = found.get("machine", {})
    if machine:
        parts.append(describe({**machine, "limits": None}))
    limits = found.get("limits", {}).get("limits", {})
    if limits:
        parts.append(limits_line(limits))
    host = found.get("host", {}).get("host", {})
    parts_of_sweep = ("sweep", "sweep-tuned", "sweep-rest")
    names = [found[step]["record"] for step in parts_of_sweep if found.get(step, {}).get("record")]
    if names:
        results = Results(record.load(out / names[0])[1])
        medians = {key: {name: t["median"] for name, t in timings.items()} for key, timings in host.items()}
        parts += ["## Times", sweep_table(results, limits)] if with_times else []
        parts += ["## Targets", targets_table(Evidence(results, limits, medians))]
        parts += ["## Batch sizes", batches_table(results)]
    kernels = [each for each in found.get("kernels", {}).get("kernels", []) if each["launches"]]
    if kernels:
        counters = found.get("counters", {}).get("counters", [])
        parts += ["## Kernels", clocks_line(kernels), kernels_table(kernels, counters)]
    if host:
        parts += ["## Host", host_table(host)]
    first = found.get("first-call", {}).get("first_call", {})
    parts += [first_call_line(name, each) for name, each in first.items()]
    parts += ["## Steps", steps_table(check["steps"])]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    (out / "gpu-check" / "check.md").write_text(page(out))
    # The lines of the sweep have said the times.
    print(page(out, with_times=False), flush=True)


if __name__ == "__main__":
    main()
