"""Runs ncu on the rows kernels and reads what it counted."""

import contextlib
import csv
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .predicted import kind_of, passes_of

# By what it is, the metrics that say so, the first that this ncu knows. Metrics differ by device and version, and ncu
# measures nothing at all when one of them is unknown.
ELAPSED = "avg.pct_of_peak_sustained_elapsed"
METRICS: dict[str, tuple[str, ...]] = {
    "ns": ("gpu__time_duration.sum",),
    "instructions": ("smsp__inst_executed.sum", "sm__inst_executed.sum"),
    "issue": (f"smsp__issue_active.{ELAPSED}", f"smsp__inst_issued.{ELAPSED}"),
    "wavefronts": ("l1tex__data_pipe_lsu_wavefronts.sum",),
    "wavefronts_shared": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",),
    "memory": (f"l1tex__data_pipe_lsu_wavefronts.{ELAPSED}",),
    "conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
    "l1_hits": ("l1tex__t_sector_hit_rate.pct",),
    "tensor": (f"sm__pipe_tensor_cycles_active.{ELAPSED}", f"sm__pipe_tensor_op_hmma_cycles_active.{ELAPSED}"),
    "dram": (f"dram__throughput.{ELAPSED}", f"gpu__dram_throughput.{ELAPSED}"),
    "l2": (f"lts__t_sectors.{ELAPSED}", f"lts__throughput.{ELAPSED}"),
    "local": ("smsp__inst_executed_op_local.sum", "smsp__inst_executed_op_local_ld.sum"),
    "registers": ("launch__registers_per_thread",),
    "waves": ("launch__waves_per_multiprocessor",),
}
ROWS_KERNELS = "regex:accumulate_kernel|gradient_kernel"
WATCHED = ("-m", "gpu.exercise", "--device", "cuda", "--backend", "cuda", "--profile")


def words(program: str) -> list[str]:
    """What every run of ncu here begins with. The clocks stay as they are."""
    return [
        *(program, "--clock-control", "none", "--profile-from-start", "off"),
        *("--target-processes", "application-only", "--kernel-name", ROWS_KERNELS),
    ]


def call(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> str:
    """What the program wrote; its own words where it fails.

    Raises:
        RuntimeError: it failed, or took longer.
    """
    if seconds <= 0:
        raise RuntimeError("no time is left")
    try:
        process = subprocess.Popen(
            list(command),
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise RuntimeError(str(error)) from error
    with process:
        try:
            told, _ = process.communicate(timeout=seconds)
        except BaseException as error:
            # What ncu watches would live on without it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeError(f"stopped after {seconds:.0f} s") from error
            raise
    if process.returncode != 0:
        lines = [text for text in told.splitlines() if "==ERROR==" in text] or told.splitlines()[-3:]
        raise RuntimeError(f"exit status {process.returncode}: {' '.join(lines)}")
    return told


def known(program: str, seconds: float) -> dict[str, str]:
    """The metrics of METRICS that there are; the first of each where ncu does not say."""
    try:
        listed = set(re.findall(r"^\s*([a-z]\w+__\w+)", call([program, "--query-metrics"], seconds), re.M))
    except RuntimeError as error:
        print(f"--query-metrics: {error}", flush=True)
        listed = set()
    found = {}
    for name, candidates in METRICS.items():
        there = [each for each in candidates if each.startswith("launch__") or each.partition(".")[0] in listed]
        if there or not listed:
            found[name] = (there or candidates)[0]
        else:
            print(f"{name}: this ncu knows none of {', '.join(candidates)}", flush=True)
    return found


def table(text: str) -> list[dict[str, str]]:
    """The kernels of a page in CSV, without the line of units."""
    lines = text.splitlines()
    start = next((n for n, each in enumerate(lines) if each.startswith('"ID"')), None)
    if start is None:
        return []
    rows = csv.DictReader(io.StringIO("\n".join(each for each in lines[start:] if each.startswith('"'))))
    return [row for row in rows if row["ID"]]


def number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def counted(rows: list[dict[str, str]], metrics: Mapping[str, str]) -> list[dict[str, Any]]:
    """Of each kernel, its kind and what was counted."""
    found = []
    for row in rows:
        values = {name: number(row.get(metric)) for name, metric in metrics.items()}
        values = {name: value for name, value in values.items() if value is not None}
        found.append({"kernel": kind_of("rows " + row["Kernel Name"]), **values})
    return found


def by_call(kernels: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Cut where a forward begins."""
    calls: list[list[dict[str, Any]]] = []
    last = ""
    for kernel in kernels:
        if not calls or (kernel["kernel"] == "forward" and last != "forward"):
            calls.append([])
        calls[-1].append(kernel)
        last = kernel["kernel"]
    return calls


def with_passes(kernels: list[dict[str, Any]], iterations: int) -> list[dict[str, Any]]:
    passes = passes_of([each["kernel"] for each in kernels], iterations)
    return [{**kernel, "passes": each} for kernel, each in zip(kernels, passes, strict=True)]


class Clock:
    """How much of the step's time is left."""

    def __init__(self) -> None:
        self.end = time.monotonic() + float(os.environ.get("STEP_SECONDS", "600"))

    @property
    def left(self) -> float:
        # The runner's own patience ends a moment later.
        return self.end - time.monotonic() - 2.0


def watched(*more: str) -> list[str]:
    return [sys.executable, *WATCHED, *more]


def counters(
    program: str, metrics: Mapping[str, str], layers: str, cooperative: str, folder: Path, clock: Clock
) -> list[dict[str, Any]]:
    """Counts of the kernels of ``layers``, as exercise names them."""
    report = folder / "counters.ncu-rep"
    command = [*words(program), "--metrics", ",".join(metrics.values()), "--force-overwrite", "-o", str(report)]
    call([*command, *watched(layers)], clock.left, {"CAPSFAST_COOPERATIVE": cooperative})
    page = [program, "--import", str(report), "--page", "raw", "--csv", "--print-units", "base"]
    return counted(table(call(page, clock.left)), metrics)
