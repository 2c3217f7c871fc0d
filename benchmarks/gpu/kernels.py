"""A step: every kernel launch of a forward and backward by the backend "cuda", measured beside its prediction.

Once with all passes of a direction in one launch, once with a launch for each: CAPSFAST_COOPERATIVE, which a process
reads once, so each has a process of its own.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from capsfast.bench.cases import Case
from capsfast.bench.contenders import OURS, contender
from capsfast.bench.inputs import Step, input_sets, step

from .common import fused_backends, publish
from .layers import BATCHES, layers
from .predicted import Device, kind_of, passes_of

CALLS = 22
# The first of a profile, which the profiler itself disturbs.
DROPPED = 2
SPINS = 4 * 10**7
MODES = {"together": "1", "apart": "0"}


class Launch(NamedTuple):
    """What CUPTI says of a launch. registers: of a thread. shared: bytes of a block."""

    name: str
    microseconds: float
    registers: int | None = None
    shared: int | None = None
    grid: Sequence[int] = ()
    block: Sequence[int] = ()


def launches(trace: dict[str, Any]) -> list[Launch]:
    """The work of the device in a trace as torch.profiler exports it, in order."""
    events = [
        each for each in trace["traceEvents"] if each.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy", "gpu_memops")
    ]
    found = []
    for each in sorted(events, key=lambda each: float(each["ts"])):
        more = each.get("args", {})
        found.append(
            Launch(
                each["name"],
                float(each["dur"]),
                more.get("registers per thread"),
                more.get("shared memory"),
                more.get("grid", ()),
                more.get("block", ()),
            )
        )
    return found


def positions(found: list[Launch], calls: int, dropped: int) -> list[list[Launch]]:
    """By position in a call, the launches of all calls but the first ``dropped``. By name where calls differ."""
    size, rest = divmod(len(found), calls)
    parts = [found[n * size : (n + 1) * size] for n in range(calls)]
    if not rest and all([each.name for each in part] == [each.name for each in parts[0]] for part in parts):
        return [list(column) for column in zip(*parts[dropped:], strict=True)]
    names: dict[str, list[Launch]] = {}
    for launch in found:
        names.setdefault(launch.name, []).append(launch)
    return list(names.values())


def traced(call: Step, calls: int, device: torch.device) -> list[Launch]:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiler:
        for n in range(calls):
            call(n)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return launches(json.loads(path.read_text()))


def clock(call: Step, calls: int) -> float:
    """Clocks a second of the multiprocessors right after these calls: a kernel that counts them, timed."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for n in range(calls):
        call(n)
    begin.record()
    torch.cuda._sleep(SPINS)
    end.record()
    torch.cuda.synchronize()
    return SPINS / (begin.elapsed_time(end) / 1e3)


def rows_of(columns: list[list[Launch]], case: Case, on: Device) -> list[dict[str, Any]]:
    kinds = [kind_of(column[0].name) for column in columns]
    found = []
    for column, kind, passes in zip(columns, kinds, passes_of(kinds, case.r), strict=True):
        times = sorted(each.microseconds for each in column)
        row: dict[str, Any] = {
            "kernel": kind,
            "passes": passes,
            "us": statistics.median(times),
            "least_us": times[0],
            "registers": column[0].registers,
            "shared": column[0].shared,
            "grid": list(column[0].grid),
            "block": list(column[0].block),
        }
        if passes:
            least = on.predict(passes, case.B, case.I, case.dtype)
            row |= {"predicted_us": least.seconds * 1e6, "limit": least.limit}
            row |= {"predicted_instructions": least.instructions, "predicted_memory_clocks": least.memory}
        found.append(row)
    return found


def measure(case: Case, name: str, device: torch.device, calls: int) -> dict[str, Any]:
    sets = input_sets(case, device)
    call = step(contender(OURS + name).make(case), case, sets)
    for n in range(3):
        call(n)
    on = Device(1, 1e9)
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
        on = Device(count, clock(call, 200))
    columns = positions(traced(call, calls, device), calls, DROPPED)
    if device.type == "cuda" and not columns:
        raise RuntimeError("the profiler saw no kernel")
    return {
        "dtype": case.dtype,
        "B": case.B,
        "multiprocessors": on.multiprocessors,
        "hertz": on.hertz,
        "launches": rows_of(columns, case, on),
    }


def line(found: dict[str, Any]) -> str:
    parts = []
    for each in found["launches"]:
        least = f" (at least {each['predicted_us']:.1f}: {each['limit']})" if each["passes"] else ""
        parts.append(f"{each['kernel']} {each['us']:.1f}{least}")
    return f"{found['mode']}, {found['dtype']} B={found['B']}, µs: {'; '.join(parts) or 'no kernels'}"


def here(mode: str, device: torch.device, rehearse: bool) -> None:
    """Measures in this process, a line of JSON for each layer."""
    fused = fused_backends(device.type)
    name = "cuda" if "cuda" in fused or not rehearse else fused[0]
    # Two batch sizes show what the launches in between cost.
    batches = BATCHES if mode == "together" else (BATCHES[0], BATCHES[-1])
    with torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else contextlib.nullcontext():
        for case in layers(batches, rehearse):
            print(json.dumps({"mode": mode, **measure(case, name, device, 3 if rehearse else CALLS)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mode", choices=tuple(MODES), help="measure it in this process")
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args()
    if asked.mode:
        here(asked.mode, torch.device(asked.device), asked.rehearse)
        return
    found: list[dict[str, Any]] = []
    bad = []
    for mode, value in MODES.items():
        words = [sys.executable, "-m", "gpu.kernels", "--device", asked.device, "--mode", mode]
        words += ["--rehearse"] * asked.rehearse
        environment = {**os.environ, "CAPSFAST_COOPERATIVE": value}
        with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for text in process.stdout:
                if not text.startswith("{"):
                    print(text, end="", flush=True)
                    continue
                found.append(json.loads(text))
                publish({"kernels": found})
                print(line(found[-1]), flush=True)
        if process.returncode != 0:
            bad.append(f"{mode}: exit status {process.returncode}")
    if bad:
        raise SystemExit("; ".join(bad))


if __name__ == "__main__":
    main()
