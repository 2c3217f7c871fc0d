"""All checks for a machine with an NVIDIA GPU: make gpu-check.

Needs no network and installs nothing. Needs Python with a CUDA torch; uses nvcc, pytest, compute-sanitizer and ncu if
they exist. README.md in this folder describes the steps and the results.
"""

import argparse
import contextlib
import glob
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SECONDS = 530.0
# Seconds between the request to stop, when pytest reports, and the kill.
GRACE_SECONDS = 5.0
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
# The exit status of compute-sanitizer if it found errors.
FOUND_ERRORS = 9
TEST_SECONDS = 120.0
MOST_SHARDS = 6

OK, FAILED, LATE, LEFT_OUT, INTERRUPTED = "ok", "failed", "out of time", "left out", "interrupted"


@dataclass(frozen=True)
class Step:
    """One process.

    Args:
        name: a word; ``<name>.log`` and ``<name>.json`` hold its output and its result.
        command: its words.
        seconds: the time limit.
        environment: added to the process's own.
        why_not: why the step is skipped, or "".
        judge: turns exit status and output into an error, or "", and counts for the table.
    """

    name: str
    command: Sequence[str] = ()
    seconds: float = 60.0
    environment: dict[str, str] = field(default_factory=dict)
    why_not: str = ""
    judge: Callable[[int, str], tuple[str, dict[str, int]]] = lambda code, text: (
        "" if code == 0 else (text.strip().splitlines() or [f"exit status {code}"])[-1],
        {},
    )


@dataclass
class Outcome:
    """How a step ended: status is one of the five above, counts come from its judge, result is what the step wrote."""

    name: str
    status: str
    seconds: float = 0.0
    reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)


def judged_pytest(code: int, text: str) -> tuple[str, dict[str, int]]:
    """A run without a passed test is an error."""
    last = next((line for line in reversed(text.splitlines()) if re.search(r"\d+ (passed|failed|error)", line)), "")
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    if counts.get("failed") or counts.get("error"):
        names = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        return f"{len(names)} failed: {', '.join(names[:5])}", counts
    if code != 0:
        return f"pytest ended with status {code}", counts
    return "" if counts.get("passed") else "no test ran", counts


def judged_collection(code: int, text: str) -> tuple[str, dict[str, int]]:
    return ("" if code == 0 else f"pytest ended with status {code}"), {"collected": text.count("::")}


def judged_sanitizer(code: int, text: str) -> tuple[str, dict[str, int]]:
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)[^(\n]*(?:\((\d+) errors?)?", text)
    errors = sum(int(errors or total) for total, errors in found)
    if errors or code != 0:
        return f"{errors} errors, exit status {code}", {"errors": errors}
    return ("" if found else "no summary"), {"errors": errors}


class Check:
    """Runs groups of steps, the steps of a group in parallel, and writes check.json and check.md after each step.

    Args:
        folder: for logs and results.
        seconds: for everything.
        rehearsal: whether results are marked as a rehearsal.
    """

    def __init__(self, folder: Path, seconds: float, rehearsal: bool = False) -> None:
        self.folder, self.end, self.rehearsal = folder, time.monotonic() + seconds, rehearsal
        self.begin = time.monotonic()
        self.outcomes: list[Outcome] = []
        self.interrupted = self.complete = False
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.save()

    def heed_signals(self) -> None:
        """Ctrl-C, SIGTERM and SIGHUP end the processes, then the run. All results are written."""

        def note(number: int, frame: object) -> None:
            self.interrupted = True

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, note)

    def result(self, name: str) -> dict[str, Any]:
        return next((each.result for each in self.outcomes if each.name == name), {})

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:4.0f} s] {text}", flush=True)

    def run(self, *group: Step) -> None:
        with ThreadPoolExecutor(len(group)) as pool:
            for each in as_completed([pool.submit(self._run, step) for step in group]):
                outcome = each.result()
                self.outcomes.append(outcome)
                reason = f": {outcome.reason}" if outcome.reason else ""
                self.say(f"{outcome.name}: {outcome.status} after {outcome.seconds:.0f} s{reason}")
                self.save()

    def _run(self, step: Step) -> Outcome:
        limit = min(step.seconds, self.end - time.monotonic())
        why_not = step.why_not or ("" if limit > 1 else "the time is used up")
        if why_not or self.interrupted:
            return Outcome(step.name, LEFT_OUT, reason=why_not or "interrupted before")
        self.say(f"{step.name}: starts, at most {limit:.0f} s")
        log, result = (self.folder / f"{step.name}.{ending}" for ending in ("log", "json"))
        environment = {**os.environ, **step.environment, "STEP_RESULT": str(result), "STEP_SECONDS": str(limit)}
        begin, stopped = time.monotonic(), ""
        with (
            log.open("wb") as output,
            subprocess.Popen(
                step.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # so that its children end with it
            ) as process,
        ):
            while process.poll() is None and not stopped:
                stopped = INTERRUPTED if self.interrupted else LATE if time.monotonic() - begin > limit else ""
                time.sleep(0.1)
            for number in (signal.SIGINT, signal.SIGKILL) if stopped else ():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_SECONDS)
        wrong, counts = step.judge(process.returncode, log.read_text(errors="replace"))
        if stopped == LATE:
            wrong = f"stopped after {limit:.0f} s"
        status = stopped or (FAILED if wrong else OK)
        outcome = Outcome(step.name, status, round(time.monotonic() - begin, 1), wrong, counts)
        with contextlib.suppress(OSError, ValueError):
            outcome.result = json.loads(result.read_text())
        return outcome

    def save(self) -> None:
        steps = [vars(each) for each in self.outcomes]
        found = {"rehearsal": self.rehearsal, "complete": self.complete, "steps": steps}
        for name, text in (("check.json", json.dumps(found, indent=1) + "\n"), ("check.md", self.page())):
            draft = self.folder / f"{name}.part"
            draft.write_text(text, encoding="utf-8")
            draft.replace(self.folder / name)

    def page(self) -> str:
        """The summary: the machine, a line for each step, the cost of a call, the tables of the sweep."""
        parts = ["# GPU check" + (" (rehearsal on the CPU: no number counts)" if self.rehearsal else "")]
        parts += [] if self.complete else ["Not complete."]
        parts += [self.result("machine").get("said", "No machine.")]
        lines = ["| step | status | s | counts | reason |", "|---|---|---:|---|---|"]
        for each in self.outcomes:
            counts = ", ".join(f"{n} {kind}" for kind, n in each.counts.items() if n)
            reason = each.reason.replace("|", "/")
            lines.append(f"| {each.name} | {each.status} | {each.seconds:.0f} | {counts} | {reason} |")
        parts.append("\n".join(lines))
        for backend, kinds in self.result("cost").get("cost", {}).items():
            lines = [f"| {backend}, µs of a call | {' | '.join(kinds)} |", f"|---|{'---:|' * len(kinds)}"]
            for key in next(iter(kinds.values())):
                lines.append(f"| {key} | {' | '.join(f'{1e6 * found[key]:.1f}' for found in kinds.values())} |")
            parts.append("\n".join(lines))
        with contextlib.suppress(OSError):
            parts.append((self.folder / "sweep.md").read_text(encoding="utf-8"))
        return "\n\n".join(parts) + "\n"


def tool(name: str, *places: str) -> str | None:
    """The path of a program of the CUDA toolkit."""
    homes = [os.environ[key] for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)] + ["/usr/local/cuda*"]
    found = [path for home in homes for path in sorted(glob.glob(f"{home}/bin/{name}"), reverse=True)]
    found += [path for pattern in places for path in sorted(glob.glob(pattern), reverse=True)]
    return shutil.which(name) or next((path for path in found if os.access(path, os.X_OK)), None)


def missing(*modules: str) -> str:
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"Python has no {' and no '.join(absent)}" if absent else ""


def environment() -> dict[str, str]:
    """For all steps: the checkout comes before an installed capsfast, and kernels are not interpreted."""
    path = os.pathsep.join(filter(None, (str(ROOT), str(HERE), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "CAPSFAST_BACKEND": "", "TRITON_INTERPRET": "0"}


def own(name: str, seconds: float, device: str, *words: str, step: str = "", why_not: str = "") -> Step:
    """A step of gpu/steps.py."""
    command = [sys.executable, "-m", "gpu.steps", step or name, "--device", device, *words]
    command += ["--rehearse"] if device == "cpu" else []
    return Step(name, command, seconds, environment(), why_not)


def tests(fused: list[str], rehearse: bool) -> list[Step]:
    """The tests marked gpu, and for each backend the tests that take a backend, in shares."""
    folder = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").glob("test_*.py"))}
    quiet = ["-q", "-rfE", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    # Tests ask torch for determinism, so cuBLAS needs this setting. Many processes share the cores.
    more = {**environment(), "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "2"}
    bare = ["--noconftest"] if missing("hypothesis") else []

    def pytest(name: str, words: list[str], why_not: str, **extra: str) -> Step:
        command = [sys.executable, "-m", "pytest", *words, *quiet, *(["--collect-only"] if rehearse else [])]
        judge = judged_collection if rehearse else judged_pytest
        return Step(name, command, TEST_SECONDS, {**more, **extra}, why_not, judge)

    marked = [str(path) for path in folder if path.name.startswith("test_gpu")]
    steps = [pytest(Path(path).stem, [path, "-m", "gpu", *bare], missing("pytest")) for path in marked]
    shared = [str(path) for path, text in folder.items() if "backend: Backend" in text and str(path) not in marked]
    if rehearse:
        return steps
    # Most of the suite's time is Triton compiling.
    cores = len(os.sched_getaffinity(0))
    shards = max(1, min(MOST_SHARDS, (cores - len(SANITIZERS) - len(marked)) // max(len(fused), 1)))
    for name in fused:
        words = [*shared, "--backends", name, "-k", name, "-m", "not slow and not gpu", "-p", "gpu.shard"]
        for n in range(shards):
            share = {"SHARD": f"{n}/{shards}"}
            steps.append(pytest(f"suite-{name}-{n + 1}", words, missing("pytest", "hypothesis"), **share))
    return steps


def sanitizers(device: str) -> list[Step]:
    if device == "cpu":
        return [own("exercise", 60, device, "--shapes", "1")]  # only the calls
    program = tool("compute-sanitizer")
    steps = []
    for name in SANITIZERS:
        words = ["--tool", name, "--error-exitcode", str(FOUND_ERRORS), "--print-limit", "20"]
        words += ["--target-processes", "application-only"]
        if name == "memcheck":
            words += ["--report-api-errors", "no"]  # torch may ask for features that the driver lacks
        if name != "initcheck":
            # Skips torch's kernels, but not for initcheck, which must see their writes.
            words += ["--kernel-name-exclude", "kns=at6native,kns=cub"]
        watched = own(name, TEST_SECONDS, device, "--shapes", "4" if name == "memcheck" else "3", step="exercise")
        # One allocation for each tensor, so that no other tensor lies behind it.
        more = {**watched.environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        why_not = "" if program else "compute-sanitizer is not installed"
        command = [program or "", *words, *watched.command]
        steps.append(Step(name, command, TEST_SECONDS, more, why_not, judged_sanitizer))
    return steps


def profile(out: Path, device: str, asked: bool) -> Step:
    """ncu with detailed sections on the canonical layer. The report is for ncu-ui; the log has its pages as text."""
    program = tool("ncu", "/opt/nvidia/nsight-compute/*/ncu")
    why_not = "" if program else "ncu is not installed"
    why_not = "a rehearsal has no device to watch" if device == "cpu" else why_not if asked else "--no-profile"
    words = ["--set", "detailed", "--clock-control", "none", "--profile-from-start", "off", "--page", "details"]
    words += ["--target-processes", "application-only", "--force-overwrite", "--export", str(out / "profile")]
    watched = own("profile", 90, device, step="profiled")
    return Step("profile", [program or "", *words, *watched.command], 90, watched.environment, why_not)


def run(check: Check, out: Path, device: str, only: Sequence[str], with_profile: bool) -> int:
    """Runs all steps, the most important first. Returns the exit status."""

    def steps(*group: Step) -> None:
        chosen = [each for each in group if not only or each.name.startswith(tuple(only))]
        if chosen:
            check.run(*chosen)

    rehearse = device == "cpu"
    check.run(own("machine", 60, device, why_not=missing("torch")))
    if check.outcomes[-1].status != OK:
        check.say("there is nothing to check here")
        return 2
    as_it_is = "a rehearsal takes the extension as it is" if rehearse else ""
    as_it_is = as_it_is or ("CAPSFAST_BUILD=0" if os.environ.get("CAPSFAST_BUILD") == "0" else "")
    check.run(own("build", 240, device, why_not=as_it_is))
    check.run(own("backends", 60, device))
    fused = check.result("backends").get("fused", [])
    if fused:
        steps(own("sweep", 160, device, "--out", str(out)))
        steps(*tests(fused, rehearse), *sanitizers(device))
        steps(own("cost", 60, device))
        steps(profile(check.folder, device, with_profile))
    check.complete = not check.interrupted
    check.save()
    bad = [each.name for each in check.outcomes if each.status in (FAILED, LATE, INTERRUPTED)]
    print(check.page())
    check.say(f"{'complete' if check.complete else 'interrupted'}; {'not ok: ' + ', '.join(bad) if bad else 'ok'}")
    return 0 if check.complete and not bad else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for everything (default {SECONDS:.0f})")
    parser.add_argument("--no-profile", action="store_true", help="without ncu")
    parser.add_argument("--only", default="", help="steps by what their names begin with, such as sweep,suite-cuda")
    parser.add_argument(
        "--rehearse", action="store_true", help="the same steps on the CPU with small layers: no result"
    )
    asked = parser.parse_args()
    out = Path(os.environ.get("OUT") or HERE / "results").resolve()
    check = Check(out / "gpu-check", asked.seconds, asked.rehearse)
    check.heed_signals()
    only = [name for name in asked.only.split(",") if name]
    return run(check, out, "cpu" if asked.rehearse else "cuda", only, not asked.no_profile)


if __name__ == "__main__":
    sys.exit(main())
