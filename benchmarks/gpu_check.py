"""All checks for a machine with an NVIDIA GPU: make gpu-check.

Needs no network and installs nothing. Needs Python with a CUDA torch; uses nvcc, pytest, compute-sanitizer and ncu if
they exist. README.md in this folder describes the steps and the results. Each step is a process that runs gpu_steps.py
or a tool. A line of a step that begins with "@" holds JSON for the record; all lines go to the log.
"""

import argparse
import contextlib
import glob
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# Seconds between the request to stop, when pytest reports, and the kill.
GRACE_SECONDS = 5.0
# Steps that only run if they are asked for.
ALSO = ("counters", "sanitizers")
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZED = ("cuda rows", "cuda columns", "cuda general", "cuda votes", "triton routing", "triton passes")
# What may be at fault if values of a family are wrong: cooperative launches, launches that start early.
SUSPECTS = {"cuda rows": "CAPSFAST_COOPERATIVE", "cuda columns": "CAPSFAST_PDL"}
# Settings that a process reads once, by what a contender with them is called. Kernels that start early wait for the
# kernel before, so only without early starts a kernel's time is its own.
COLUMNS = {"CAPSFAST_COLUMNS": "1"}
VARIANTS = {"columns": COLUMNS, "columns, no early starts": {**COLUMNS, "CAPSFAST_PDL": "0"}}
SECTIONS = ("SpeedOfLight", "LaunchStats", "SchedulerStats", "WarpStateStats", "SourceCounters")
LARGE = "accuracy or elements or fifty"  # half of the tests marked gpu, by time

OK, FAILED, LATE, LEFT_OUT, INTERRUPTED = "ok", "failed", "out of time", "left out", "interrupted"


@dataclass(frozen=True)
class Step:
    """One process. why_not: why it is skipped, or "". quiet: its lines go to the log alone."""

    name: str
    command: Sequence[str]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    why_not: str = ""
    quiet: bool = False

    def having(self, **environment: str) -> "Step":
        return replace(self, environment={**self.environment, **environment})


class Check:
    """Runs steps for so many minutes. Writes at once into the folder, which the next check replaces: all lines into
    ``check.log``, results into ``check.jsonl``, and after each step the tables into ``check.md``."""

    def __init__(self, folder: Path, minutes: float, rehearsal: bool = False) -> None:
        self.folder, self.rehearsal = folder, rehearsal
        self.begin = time.monotonic()
        self.end = self.begin + 60 * minutes
        self.facts: list[dict[str, Any]] = []
        self.interrupted = self.complete = False
        self.lock = threading.Lock()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def heed_signals(self) -> None:
        """Ctrl-C, SIGTERM and SIGHUP end the processes, then the run."""

        def note(number: int, frame: object) -> None:
            self.interrupted = True

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, note)

    def say(self, text: str, quiet: bool = False) -> None:
        line = f"[{time.monotonic() - self.begin:4.0f} s] {text}"
        with self.lock, (self.folder / "check.log").open("a", encoding="utf-8") as log:
            log.write(line + "\n")
            if not quiet:
                print(line, flush=True)

    def note(self, **fact: Any) -> None:
        with self.lock, (self.folder / "check.jsonl").open("a", encoding="utf-8") as record:
            record.write(json.dumps(fact) + "\n")
            self.facts.append(fact)

    def of(self, key: str) -> list[dict[str, Any]]:
        """The facts with this key."""
        return [fact for fact in self.facts if key in fact]

    def bad(self) -> list[str]:
        """The steps that did not end well."""
        return [fact["step"] for fact in self.of("status") if fact["status"] in (FAILED, LATE, INTERRUPTED)]

    def wrong(self, backend: str) -> list[str]:
        """Why kernels of a backend are wrong: a value, a refused launch, a hang. A step that is late says nothing."""
        return [why for fact in self.of("wrong") if fact["family"].startswith(backend) for why in fact["wrong"]]

    def run(self, *steps: Step, at_once: int = 1) -> None:
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(self._run, steps))

    def _run(self, step: Step) -> None:
        begin = time.monotonic()
        limit = min(step.seconds, self.end - begin)
        why_not = step.why_not or ("interrupted before" if self.interrupted else "" if limit > 1 else "no time is left")
        if why_not:
            return self._ended(step, LEFT_OUT, begin, why_not)
        self.say(f"{step.name}: starts, at most {limit:.0f} s")
        lines: list[str] = []
        with subprocess.Popen(
            step.command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **step.environment, "PYTHONUNBUFFERED": "1", "STEP_SECONDS": str(limit)},
            start_new_session=True,  # so that its children end with it
        ) as process:
            reader = threading.Thread(target=self._read, args=(step, process, lines), daemon=True)
            reader.start()
            stopped = ""
            while process.poll() is None and not stopped:
                stopped = INTERRUPTED if self.interrupted else LATE if time.monotonic() - begin > limit else ""
                time.sleep(0.05)
            before = lines[-1:]
            # A child that outlives its parent would hold the pipe, and the check would wait for it.
            for number in (signal.SIGINT, signal.SIGKILL) if stopped else (signal.SIGKILL,):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_SECONDS)
            reader.join(GRACE_SECONDS)
        said = (before if stopped else lines) or [f"no output, exit status {process.returncode}"]
        wrong = f"stopped after {limit:.0f} s in: {said[-1]}" if stopped else said[-1] if process.returncode else ""
        left_out = [fact["left_out"] for fact in self.of("left_out") if fact["step"] == step.name]
        status = stopped or (FAILED if wrong else LEFT_OUT if left_out else OK)
        self._ended(step, status, begin, wrong or "".join(left_out))

    def _read(self, step: Step, process: "subprocess.Popen[str]", lines: list[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("@"):
                with contextlib.suppress(ValueError):  # cut off
                    self.note(step=step.name, **json.loads(line[1:]))
            elif line.strip():
                lines.append(line.rstrip())
                self.say(f"{step.name} | {lines[-1]}", step.quiet)

    def _ended(self, step: Step, status: str, begin: float, reason: str) -> None:
        seconds = round(time.monotonic() - begin, 1)
        self.note(step=step.name, status=status, seconds=seconds, reason=reason)
        self.say(f"{step.name}: {status} after {seconds:.0f} s{': ' * bool(reason)}{reason}")
        with self.lock:
            (self.folder / "check.md").write_text(self.page(), encoding="utf-8")

    def page(self) -> str:
        """The machine, a line for each step, what is wrong, the tables."""
        parts = ["# GPU check" + (" (rehearsal on the CPU: no number counts)" if self.rehearsal else "")]
        parts += [] if self.complete else ["Not complete."]
        parts += [fact["machine"] for fact in self.of("machine")] or ["No machine."]
        lines = ["| step | status | s | reason |", "|---|---|---:|---|"]
        for fact in self.of("status"):
            reason = fact["reason"].replace("|", "/")
            lines.append(f"| {fact['step']} | {fact['status']} | {fact['seconds']:.0f} | {reason} |")
        parts.append("\n".join(lines))
        parts += [f"WRONG: {why}" for why in self.wrong("")]
        # Facts of a section are the rows of one table; their keys are its columns.
        sections: dict[str, list[dict[str, Any]]] = {}
        for fact in self.of("section"):
            sections.setdefault(fact["section"], []).append(fact["row"])
        parts += [fact["tables"] for fact in self.of("tables")[-1:]]
        for title, rows in sections.items():
            columns = list(dict.fromkeys(key for row in rows for key in row))
            lines = [f"## {title}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
            lines += ["| " + " | ".join(shown(row.get(key, "")) for key in columns) + " |" for row in rows]
            parts.append("\n".join(lines))
        return "\n\n".join(parts) + "\n"


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def missing(*modules: str) -> str:
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"Python has no {' and no '.join(absent)}" if absent else ""


class Steps:
    """Makes the steps. device: "cuda", or "cpu" for a rehearsal. out: the folder for results."""

    def __init__(self, device: str, out: Path) -> None:
        self.device, self.out, self.rehearse = device, out, device == "cpu"
        self.backends = ("cpp",) if self.rehearse else ("triton", "cuda")
        self.workers = 2 if self.rehearse else max(2, min(14, len(os.sched_getaffinity(0))))
        # The checkout comes before an installed capsfast, kernels are not interpreted, and the steps share the cores.
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.environment = {"PYTHONPATH": path, "CAPSFAST_BACKEND": ""}
        self.environment |= {"TRITON_INTERPRET": "0", "OMP_WAIT_POLICY": "passive"}

    def own(self, name: str, seconds: float, *words: str, quiet: bool = False) -> Step:
        """A step of gpu_steps.py; its first word is the name up to a blank."""
        command = [sys.executable, "-m", "benchmarks.gpu_steps", name.split()[0], "--device", self.device]
        return Step(name, [*command, "--out", str(self.out), *words], seconds, dict(self.environment), quiet=quiet)

    def build(self, machine: dict[str, Any]) -> Step:
        """The extension in place, for this compute capability alone, unless a prebuilt one loads."""
        why_not = "a rehearsal takes the extension as it is" if self.rehearse else ""
        why_not = why_not or ("CAPSFAST_BUILD=0" if os.environ.get("CAPSFAST_BUILD") == "0" else "")
        why_not = why_not or ("the extension was built before, from these sources" if machine["built"] else "")
        why_not = why_not or missing("setuptools", "pybind11", "ninja")
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        capability = machine["environment"]["machine"].get("compute_capability", "")
        return Step("build", command, 240, {**self.environment, "TORCH_CUDA_ARCH_LIST": capability}, why_not, True)

    def smoke(self, families: str, more: str = "") -> Step:
        """The families whose names begin so against float64, each in a process."""
        return self.own(f"smoke {families}{more}", 25 if self.rehearse else 150, "--families", families)

    def times(self) -> list[Step]:
        """The workers compile their shares at the same time, then take turns on the GPU."""
        steps = self.shares("times", self.workers)
        for name, variables in VARIANTS.items():
            steps.append(self.worker("times", name).having(**variables))
        return steps

    def layers(self) -> list[Step]:
        """As times(), for convolutional layers. Eight workers, because every worker may store windows and votes."""
        return self.shares("layers", min(8, self.workers))

    def shares(self, name: str, count: int) -> list[Step]:
        return [self.worker(name, f"{n}/{count}") for n in range(1, count + 1)]

    def worker(self, name: str, share: str) -> Step:
        return self.own(f"{name} {share}", 240, "--share", share, quiet=True).having(OMP_NUM_THREADS="2")

    def tests(self) -> list[Step]:
        """The tests marked gpu in two processes."""
        words = ["-q", "-rfE", "-m", "gpu", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "tests/test_gpu.py"]
        words += [*["--noconftest"] * bool(missing("hypothesis")), *["--collect-only"] * self.rehearse]
        # Tests ask torch for determinism, so cuBLAS needs this setting.
        more = {**self.environment, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        command = [sys.executable, "-m", "pytest", *words]
        parts = {"tests large": LARGE, "tests others": f"not ({LARGE})"}
        return [Step(name, [*command, "-k", which], 160, more, missing("pytest")) for name, which in parts.items()]

    def watcher(self, name: str) -> tuple[str, str]:
        """The path of a program of the CUDA toolkit, and why the program can't watch here."""
        patterns = [f"{os.environ.get('CUDA_HOME')}/bin", "/usr/local/cuda*/bin", "/opt/nvidia/nsight-compute/*"]
        folders = [folder for pattern in patterns for folder in sorted(glob.glob(pattern), reverse=True)]
        program = shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders)) or ""
        return program, "a rehearsal has no GPU" if self.rehearse else "" if program else f"{name} is not installed"

    def sanitizers(self) -> list[Step]:
        """compute-sanitizer on the first two calls of some families."""
        program, why_not = self.watcher("compute-sanitizer")
        # One allocation for each tensor and each part of the scratch memory, so that nothing lies behind it.
        more = {**self.environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CAPSFAST_SCRATCH_APART": "1"}
        steps = []
        for kind, family in itertools.product(SANITIZERS, SANITIZED):
            words = [program, "--tool", kind, "--error-exitcode", "9", "--print-limit", "20"]
            # torch may ask for features that the driver lacks. Only initcheck must see the writes of torch's kernels.
            words += ["--report-api-errors", "no"] if kind == "memcheck" else []
            words += ["--kernel-name-exclude", "kns=at6native,kns=cub"] if kind != "initcheck" else []
            words += [sys.executable, "-m", "capsfast.bench.check", family, "--calls", "2"]
            steps.append(Step(f"sanitizers {kind} {family}", words, 120, more, why_not, quiet=True))
        return steps

    def counters(self) -> list[Step]:
        """ncu on the canonical layer, forward and backward. The reports are for ncu-ui; the log has their pages."""
        program, why_not = self.watcher("ncu")
        words = [word for section in SECTIONS for word in ("--section", section)]
        words += ["--clock-control", "none", "--profile-from-start", "off", "--page", "details"]
        words += ["--target-processes", "application-only", "--force-overwrite", "--export"]
        steps = []
        for name in (*self.backends, "columns"):
            backend, variables = (self.backends[-1], COLUMNS) if name == "columns" else (name, {})
            watched = self.own("profiled", 45, "--backend", backend).having(**variables)
            command = [program, *words, str(self.out / "gpu-check" / f"{name}.ncu-rep"), *watched.command]
            steps.append(Step(f"counters {name}", command, 45, watched.environment, why_not, quiet=True))
        return steps


def run(check: Check, steps: Steps, only: Sequence[str], also: Sequence[str]) -> int:
    """Runs all steps, the most important first. Returns the exit status."""

    def chosen(*group: Step, at_once: int = 1) -> bool:
        asked = [step for step in group if not only or step.name.startswith(tuple(only))]
        if asked:
            check.run(*asked, at_once=at_once)
        return bool(asked)

    def measured(*group: Step) -> None:
        """Runs workers, which wait for each other, then makes the record of all that is measured so far."""
        if chosen(*group, at_once=len(group)) and check.of("measured"):
            check.run(steps.own("record", 60))

    also = [*also, *(name for name in ALSO if any(word.startswith(name) for word in only))]
    check.run(steps.own("machine", 60))
    if not check.of("machine"):
        check.say("there is nothing to check here")
        return 2
    build = steps.build(check.of("machine")[0])
    # Triton's kernels need no extension, so their check fills the time of a build.
    chosen(build, *[steps.smoke(name) for name in steps.backends if name != "cuda"], at_once=2)
    if "cuda" in steps.backends:
        chosen(steps.smoke("cuda"))
        for family, variable in SUSPECTS.items():
            if wrong := check.wrong(family):
                chosen(steps.smoke(family, f", {variable}=0").having(**{variable: "0"}))
                if check.wrong(family) == wrong:
                    check.say(f"{variable}=0 from here on, because {family} is wrong")
                    steps.environment[variable] = "0"
    # What was asked for above all comes before what takes long.
    if "counters" in also:
        chosen(*steps.counters())
    measured(*steps.times())
    chosen(*steps.tests(), at_once=2)
    measured(*steps.layers())
    if "sanitizers" in also:
        chosen(*steps.sanitizers(), at_once=4)
    check.complete = not check.interrupted
    (check.folder / "check.md").write_text(check.page(), encoding="utf-8")
    print(check.page())
    bad = check.bad()
    check.say(f"{'complete' if check.complete else 'interrupted'}; {'not ok: ' + ', '.join(bad) if bad else 'ok'}")
    return 0 if check.complete and not bad else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything (default 10)")
    parser.add_argument("--only", default="", help='steps by what their names begin with, such as "smoke cuda,times"')
    parser.add_argument("--also", default="", help=f"more steps: {', '.join(ALSO)}")
    parser.add_argument("--rehearse", action="store_true", help="the same steps on the CPU, small: no result")
    asked = parser.parse_args()
    only, also = ([name for name in words.split(",") if name] for words in (asked.only, asked.also))
    if unknown := set(also) - set(ALSO):
        parser.error(f"--also must be of {', '.join(ALSO)}, got {', '.join(sorted(unknown))}")
    out = Path(os.environ.get("OUT") or HERE / "results").resolve()
    check = Check(out / "gpu-check", asked.minutes, asked.rehearse)
    check.heed_signals()
    return run(check, Steps("cpu" if asked.rehearse else "cuda", out), only, also)


if __name__ == "__main__":
    sys.exit(main())
