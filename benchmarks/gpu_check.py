"""All checks for a machine with an NVIDIA GPU: make gpu-check.

Needs no network and installs nothing. Needs Python with a CUDA torch; uses nvcc, pytest, compute-sanitizer and ncu if
they exist. README.md in this folder describes the steps and the results. Each step is a process that runs gpu_steps.py
or a tool. A line of a step that begins with "@" holds JSON for the record; all lines go to the log.
"""

import argparse
import contextlib
import glob
import importlib.util
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# A minute more than the estimates in README.md.
MINUTES = 9.0
# Seconds between the request to stop, when pytest reports, and the kill.
GRACE_SECONDS = 5.0
ALSO = ("sanitizers", "counters")
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")

OK, FAILED, LATE, LEFT_OUT, INTERRUPTED = "ok", "failed", "out of time", "left out", "interrupted"


class Family(NamedTuple):
    """Kernels of a backend. op: a function of capsfast, or "em". shapes: (B, I, J, D, K); given votes have no K."""

    backend: str
    op: str
    shapes: tuple[tuple[int, ...], ...]


# Full tiles of columns; padded ones; enough input capsules for clusters, with weights in bulk copies as in the first.
# Sizes for the general kernels only; many outputs.
ROWS = ((33, 63, 10, 16, 8), (1, 33, 10, 12, 16), (2, 6000, 5, 16, 8))
GENERAL = ((17, 21, 5, 23, 3), (33, 9, 300, 4, 4))
VOTES = ((17, 21, 5, 7, 1), (4, 2520, 10, 16, 1))
FAMILIES = {
    "cuda-rows": Family("cuda", "dynamic_routing", ROWS),
    "cuda-general": Family("cuda", "dynamic_routing", GENERAL),
    "cuda-votes": Family("cuda", "route_votes", VOTES),
    "cuda-pass": Family("cuda", "routing_pass", GENERAL),
    "cuda-votes-pass": Family("cuda", "votes_pass", VOTES[:1]),
    "triton-routing": Family("triton", "dynamic_routing", ROWS[:1]),
    "triton-votes": Family("triton", "route_votes", VOTES[:1]),
    "triton-pass": Family("triton", "routing_pass", GENERAL[:1]),
    "triton-em": Family("triton", "em", ()),
}
# The same steps on a CPU.
REHEARSED = {
    "cpp-routing": Family("cpp", "dynamic_routing", ((3, 7, 4, 5, 6),)),
    "cpp-em": Family("cpp", "em", ()),
}


@dataclass(frozen=True)
class Step:
    """One process.

    Args:
        name: a word.
        command: its words.
        seconds: the time limit.
        environment: added to the environment of this process.
        why_not: why the step is skipped, or "".
        quiet: whether its lines go to the log alone.
    """

    name: str
    command: Sequence[str]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    why_not: str = ""
    quiet: bool = False


class Check:
    """Runs steps. Writes every fact at once: ``check.log`` has all lines, ``check.jsonl`` the results, and ``check.md``
    the tables, after each step.

    Args:
        folder: for these files; the next check replaces it.
        minutes: for everything.
        rehearsal: whether results are marked as a rehearsal.
    """

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

    def bad(self, prefix: str = "") -> list[str]:
        """The steps that did not end well and whose names begin so."""
        ended = [fact for fact in self.of("status") if fact["status"] in (FAILED, LATE, INTERRUPTED)]
        return [fact["step"] for fact in ended if fact["step"].startswith(prefix)]

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
            env={**os.environ, **step.environment, "PYTHONUNBUFFERED": "1"},
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
        self.write_page()

    def write_page(self) -> None:
        with self.lock:
            (self.folder / "check.md").write_text(self.page(), encoding="utf-8")

    def page(self) -> str:
        """The machine, a line for each step, the kernels of a call, the tables of times."""
        parts = ["# GPU check" + (" (rehearsal on the CPU: no number counts)" if self.rehearsal else "")]
        parts += [] if self.complete else ["Not complete."]
        parts += [fact["machine"] for fact in self.of("machine")] or ["No machine."]
        lines = ["| step | status | s | reason |", "|---|---|---:|---|"]
        for fact in self.of("status"):
            reason = fact["reason"].replace("|", "/")
            lines.append(f"| {fact['step']} | {fact['status']} | {fact['seconds']:.0f} | {reason} |")
        parts.append("\n".join(lines))
        lines = ["| call | kernel | launches | µs |", "|---|---|---:|---:|"]
        for fact in self.of("kernels"):
            lines += [f"| {fact['call']} | `{name}` | {n} | {us:.1f} |" for name, n, us in fact["kernels"]]
        parts += ["\n".join(lines)] if len(lines) > 2 else []
        parts += [fact["tables"] for fact in self.of("tables")[-1:]]
        return "\n\n".join(parts) + "\n"


def tool(name: str) -> str | None:
    """The path of a program of the CUDA toolkit."""
    patterns = [f"{os.environ.get('CUDA_HOME')}/bin", "/usr/local/cuda*/bin", "/opt/nvidia/nsight-compute/*"]
    folders = [folder for pattern in patterns for folder in sorted(glob.glob(pattern), reverse=True)]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))


def missing(*modules: str) -> str:
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"Python has no {' and no '.join(absent)}" if absent else ""


class Steps:
    """Makes the steps. device: "cuda", or "cpu" for a rehearsal. out: the folder for results."""

    def __init__(self, device: str, out: Path) -> None:
        self.device, self.out, self.rehearse = device, out, device == "cpu"
        self.families = REHEARSED if self.rehearse else FAMILIES
        # The checkout comes before an installed capsfast, and kernels are not interpreted.
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.environment = {"PYTHONPATH": path, "CAPSFAST_BACKEND": "", "TRITON_INTERPRET": "0"}

    def own(self, name: str, seconds: float, *words: str, quiet: bool = False, **more: str) -> Step:
        """A step of gpu_steps.py; its first word is the name up to a blank."""
        command = [sys.executable, "-m", "benchmarks.gpu_steps", name.split()[0], "--device", self.device, *words]
        return Step(name, command, seconds, {**self.environment, **more}, quiet=quiet)

    def build(self, capability: str) -> Step:
        """The extension in place, for this compute capability alone."""
        why_not = "a rehearsal takes the extension as it is" if self.rehearse else ""
        why_not = why_not or ("CAPSFAST_BUILD=0" if os.environ.get("CAPSFAST_BUILD") == "0" else "")
        why_not = why_not or missing("setuptools", "pybind11", "ninja")
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        more = {**self.environment, "TORCH_CUDA_ARCH_LIST": capability}
        return Step("build", command, 240, more, why_not, quiet=True)

    def warm(self) -> list[Step]:
        """Beside the smoke calls the compilers fill their caches on the disk, so that the times need no compiling."""
        shares, few = 1 if self.rehearse else 6, {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
        return [self.own(f"warm {n}", 100, "--share", f"{n}/{shares}", quiet=True, **few) for n in range(1, shares + 1)]

    def smoke(self) -> list[Step]:
        """Families, directions and modes, each in a process: cooperative launches, none, in a CUDA graph."""
        found = []
        for name, family in self.families.items():
            modes = ["", *["not-cooperative"] * (family.backend == "cuda"), "graph"]
            for mode in modes if family.op != "em" else [""]:
                for direction in ("forward", "both"):
                    more = {"CAPSFAST_COOPERATIVE": "0"} if mode == "not-cooperative" else {}
                    words = ["--family", name, "--direction", direction, *["--graph"] * (mode == "graph")]
                    step = " ".join(filter(None, ("smoke", name, direction, mode)))
                    # Triton compiles on the way.
                    found.append(self.own(step, 60 if family.backend == "cuda" else 120, *words, **more))
        return sorted(found, key=lambda step: ("graph" in step.name, "not-cooperative" in step.name))

    def tests(self) -> list[Step]:
        """The tests marked gpu, a process for each file."""
        files = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text()]
        words = ["-q", "-rfE", "-m", "gpu", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
        words += [*["--noconftest"] * bool(missing("hypothesis")), *["--collect-only"] * self.rehearse]
        # Tests ask torch for determinism, so cuBLAS needs this setting.
        more = {**self.environment, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        command = [sys.executable, "-m", "pytest", *words]
        return [Step(path.stem, [*command, str(path)], 160, more, missing("pytest")) for path in files]

    def sanitizers(self) -> list[Step]:
        program = tool("compute-sanitizer")
        why_not = "" if program or self.rehearse else "compute-sanitizer is not installed"
        steps = []
        for kind in SANITIZERS:
            words = [program or "", "--tool", kind, "--error-exitcode", "9", "--print-limit", "20"]
            words += ["--target-processes", "application-only"]
            # torch may ask for features that the driver lacks. Only initcheck must see the writes of torch's kernels.
            words += ["--report-api-errors", "no"] if kind == "memcheck" else []
            words += ["--kernel-name-exclude", "kns=at6native,kns=cub"] if kind != "initcheck" else []
            for name in self.families:
                watched = self.own("smoke", 120, "--family", name, "--few")
                # One allocation for each tensor and each part of the scratch memory, so that nothing lies behind it.
                more = {**watched.environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CAPSFAST_SCRATCH_APART": "1"}
                command = [*words * (not self.rehearse), *watched.command]
                steps.append(Step(f"{kind} {name}", command, 120, more, why_not, quiet=True))
        return steps

    def counters(self) -> list[Step]:
        """ncu with detailed sections on the canonical layer. The report is for ncu-ui; the log has its pages."""
        program = tool("ncu")
        why_not = "" if program else "ncu is not installed"
        why_not = "a rehearsal has no device to watch" if self.rehearse else why_not
        words = ["--set", "detailed", "--clock-control", "none", "--profile-from-start", "off", "--page", "details"]
        words += ["--target-processes", "application-only", "--force-overwrite"]
        words += ["--export", str(self.out / "gpu-check" / "profile")]
        watched = self.own("profiled", 120)
        return [Step("counters", [program or "", *words, *watched.command], 120, self.environment, why_not, quiet=True)]


def run(check: Check, steps: Steps, only: Sequence[str], also: Sequence[str]) -> int:
    """Runs all steps, the most important first. Returns the exit status."""
    at_once = max(1, min(8, len(os.sched_getaffinity(0)) // 2))

    def chosen(*group: Step, at_once: int = 1) -> None:
        wanted = [each for each in group if not only or each.name.startswith(tuple(only))]
        if wanted:
            check.run(*wanted, at_once=at_once)

    check.run(steps.own("machine", 30))
    if not check.of("machine"):
        check.say("there is nothing to check here")
        return 2
    chosen(steps.build(check.of("machine")[0]["environment"]["machine"].get("compute_capability", "")))
    smoke = {part: [each for each in steps.smoke() if ("graph" in each.name) == part] for part in (False, True)}
    chosen(*smoke[False], *steps.warm(), at_once=at_once)
    chosen(*smoke[True], at_once=at_once)
    cooperative = [name for name in check.bad("smoke cuda") if not name.endswith(("not-cooperative", "graph"))]
    if cooperative:
        check.say(f"CAPSFAST_COOPERATIVE=0 from here on, because not ok: {', '.join(cooperative)}")
        steps.environment["CAPSFAST_COOPERATIVE"] = "0"
    without = ["--no-graph"] if check.bad("smoke") else []
    # The record of a rehearsal is none that `capsfast report` should find.
    out = check.folder if steps.rehearse else steps.out
    chosen(steps.own("times", 180, "--out", str(out), *without))
    chosen(*steps.tests(), at_once=2)
    for name in also:
        chosen(*getattr(steps, name)(), at_once=4 if name == "sanitizers" else 1)
    check.complete = not check.interrupted
    check.write_page()
    print(check.page())
    bad = check.bad()
    check.say(f"{'complete' if check.complete else 'interrupted'}; {'not ok: ' + ', '.join(bad) if bad else 'ok'}")
    return 0 if check.complete and not bad else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for everything (default {MINUTES:.0f})")
    parser.add_argument("--only", default="", help='steps by what their names begin with, such as "smoke cuda,times"')
    parser.add_argument("--also", default="", help=f"more steps: {', '.join(ALSO)}")
    parser.add_argument("--rehearse", action="store_true", help="the same steps on the CPU, small: no result")
    asked = parser.parse_args()
    only, also = ([name for name in words.split(",") if name] for words in (asked.only, asked.also))
    if unknown := set(also) - set(ALSO):
        parser.error(f"--also must be of {', '.join(ALSO)}, got {', '.join(sorted(unknown))}")
    if not asked.minutes > 0:
        parser.error(f"--minutes must be positive, got {asked.minutes:g}")
    out = Path(os.environ.get("OUT") or HERE / "results").resolve()
    check = Check(out / "gpu-check", asked.minutes, asked.rehearse)
    check.heed_signals()
    return run(check, Steps("cpu" if asked.rehearse else "cuda", out), only, also)


if __name__ == "__main__":
    sys.exit(main())
