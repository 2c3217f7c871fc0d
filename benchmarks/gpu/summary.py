"""The last step: check.md from check.json and the record of the sweep."""

import argparse
import json
from pathlib import Path
from typing import Any

from capsfast.bench import record
from capsfast.bench.floors import floor
from capsfast.bench.formats import markdown_table, mebibytes, times
from capsfast.bench.report import describe
from capsfast.bench.results import Results
from capsfast.bench.targets import Evidence, findings


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
    return markdown_table(["backend", "target", "bound", "found", ""], lines)


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
    names = [found[step]["record"] for step in ("sweep", "sweep-rest") if found.get(step, {}).get("record")]
    if names:
        results = Results(record.load(out / names[0])[1])
        medians = {key: {name: t["median"] for name, t in timings.items()} for key, timings in host.items()}
        parts += ["## Times", sweep_table(results, limits)] if with_times else []
        parts += ["## Targets", targets_table(Evidence(results, limits, medians))]
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
