"""Which steps there are, in which order, and what each may cost."""

import dataclasses
import glob
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from .networks import RUNS, data_of
from .reports import judged_pytest, judged_sanitizer
from .runner import OK, Runner, Step, python

ROOT = Path(__file__).resolve().parents[2]
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
TEST_SECONDS = 110.0
MOST_SHARDS = 6
# compute-sanitizer's own status when it found something.
FOUND_ERRORS = 9
# For ncu, which comes last. Steps that only tell more leave it this time.
COUNTER_SECONDS, PROFILE_SECONDS = 60.0, 50.0
TRAINING_SECONDS = 300.0
# Less is not worth a start.
LEAST_SECONDS = 8.0
# Without these there is nothing to run.
FIRST = ("machine", "build", "backends")


def tool(name: str, *places: str) -> str | None:
    """Where a program of the CUDA toolkit is."""
    found = shutil.which(name)
    if found:
        return found
    homes = [os.environ[key] for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)] + ["/usr/local/cuda"]
    for pattern in [*(f"{home}/bin/{name}" for home in homes), *places]:
        for path in sorted(glob.glob(pattern), reverse=True):
            if os.access(path, os.X_OK):
                return path
    return None


def missing_module(*names: str) -> str:
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    return f"{sys.executable.rpartition('/')[2]} has no {' and no '.join(absent)}" if absent else ""


def missing_data(name: str) -> str:
    """What is said where the files of a data set are not there."""
    code = f"from capsfast.data import load; load({name!r})"
    environment = {**os.environ, **own_environment()}
    found = subprocess.run(python("-c", code), capture_output=True, text=True, env=environment, check=False)
    return found.stderr.strip().rpartition("\n")[2] if found.returncode else ""


def own_environment() -> dict[str, str]:
    """For the steps of this folder: the checkout goes before an installed capsfast."""
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "CAPSFAST_BACKEND": "", "TRITON_INTERPRET": "0"}


class Plan:
    """device: "cuda", or "cpu" for a rehearsal, which runs the same steps on small layers. out: the folder OUT.

    profile: whether ncu runs, where it is. only: what the names of the steps begin with, all without it.
    train: networks of full size are trained, and nothing else is done.
    """

    def __init__(
        self,
        runner: Runner,
        out: Path,
        device: str,
        profile: bool = True,
        only: Sequence[str] = (),
        train: bool = False,
    ) -> None:
        self.runner, self.out, self.device, self.profile, self.only = runner, out, device, profile, tuple(only)
        self.rehearse, self.train = device == "cpu", train

    def module(self, name: str, *words: str) -> list[str]:
        return python("-m", f"gpu.{name}", *words)

    def measuring(self, name: str, *words: str) -> list[str]:
        return self.module(name, "--device", self.device, *words, *["--rehearse"] * self.rehearse)

    def groups(self) -> Iterator[list[Step]]:
        for group in self.all_groups():
            yield [self.asked(step) for step in group]

    def asked(self, step: Step) -> Step:
        if not self.only or step.name.startswith((*FIRST, *self.only)):
            return step
        return dataclasses.replace(step, why_not="not asked for")

    def all_groups(self) -> Iterator[list[Step]]:
        """The most telling first, ncu last. Nothing runs beside what is timed."""
        environment = own_environment()
        machine = self.module("machine", "--device", self.device)
        yield [Step("machine", machine, 60, environment, why_not=missing_module("torch"))]
        if self.status("machine") != OK:
            return
        # The compiler takes the host, the limits the device.
        yield [Step("limits", [*machine, "--limits"], 60, environment), self.build(environment)]
        yield [Step("backends", self.module("backends", "--device", self.device), 60, environment)]
        fused = self.runner.result("backends").get("fused", [])
        none = "" if fused else f"no fused backend for {self.device}"
        if self.train:
            for name in RUNS:
                yield [self.training(name, environment, none)]
            return
        no_cuda = none or ("" if "cuda" in fused or self.rehearse else "the backend cuda is not there")
        yield [Step("kernels", self.measuring("kernels"), 60, environment, why_not=no_cuda)]
        yield [self.sweep("sweep", "targets", 140, environment, none)]
        ncu = self.ncu_steps(environment, no_cuda)
        kept = sum(self.asked(step).seconds for step in ncu if not self.asked(step).why_not)
        # The search that it waits for may take as long as it is let.
        yield [self.leaving(kept, self.sweep("sweep-tuned", "tuned", 80, environment, none))]
        yield [*self.tests(fused), *self.sanitizers(environment, none)]
        for step in (
            Step("host", self.measuring("host"), 40, environment, why_not=none),
            Step("first-call", self.measuring("first_call"), 60, environment, why_not=none),
            self.sweep("sweep-rest", "rest", 600, environment, none),
        ):
            yield [self.leaving(kept, step)]
        for step in ncu:
            yield [step]

    def leaving(self, seconds: float, step: Step) -> Step:
        """The step with a limit that leaves so much of the time."""
        limit = self.runner.remaining - seconds
        if seconds and not step.why_not and limit < LEAST_SECONDS:
            return dataclasses.replace(step, why_not="the time that is left is kept for ncu")
        return dataclasses.replace(step, seconds=min(step.seconds, limit) if seconds else step.seconds)

    def status(self, name: str) -> str:
        return next((each.status for each in self.runner.outcomes if each.name == name), "")

    def build(self, environment: dict[str, str]) -> Step:
        why_not = missing_module("setuptools")
        if self.rehearse:
            why_not = "a rehearsal takes the extension as it is"
        elif os.environ.get("CAPSFAST_BUILD") == "0":
            why_not = "CAPSFAST_BUILD=0"
        return Step("build", self.module("build"), 200, environment, echo=False, why_not=why_not)

    def sweep(self, name: str, cases: str, seconds: float, environment: dict[str, str], why_not: str) -> Step:
        words = ["--cases", cases, "--out", str(self.out)]
        return Step(name, self.measuring("sweep", *words), seconds, environment, why_not=why_not)

    def training(self, name: str, environment: dict[str, str], none: str) -> Step:
        why_not = none or missing_module("lightning", "typer", "rich", "matplotlib")
        if not why_not and not self.rehearse:
            why_not = missing_data(data_of(name))
        words = ["--run", name, "--out", str(self.out)]
        return Step(
            f"training-{name}", self.measuring("training", *words), TRAINING_SECONDS, environment, True, why_not
        )

    def tests(self, fused: list[str]) -> list[Step]:
        """The tests marked gpu, and for each backend those of the shared suite that take a backend."""
        environment = {
            **own_environment(),
            # The tests ask torch for determinism, for which cuBLAS wants this.
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            # Many processes share the cores.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        }
        folder = ROOT / "tests"
        texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.glob("test_*.py"))}
        marked = [path for path, text in texts.items() if "mark.gpu" in text]
        shared = [str(path.relative_to(ROOT)) for path, text in texts.items() if "backend: Backend" in text]
        own_conftest = [] if not missing_module("hypothesis") else ["--noconftest"]
        steps = []
        for path in marked:
            name = "tests" + path.stem.removeprefix("test_gpu").replace("_", "-")
            words = [str(path.relative_to(ROOT)), "-m", "gpu", *own_conftest]
            steps.append(self.pytest(name, words, environment, missing_module("pytest")))
        # Most of the suite's time is Triton compiling. Beside it run the tests above and the sanitizers.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        shards = max(1, min(MOST_SHARDS, (cores - len(SANITIZERS) - len(marked)) // max(len(fused), 1)))
        for name in fused:
            words = [*shared, "--backends", name, "-k", name, "-m", "not slow and not gpu", "-p", "gpu.shard"]
            why_not = missing_module("pytest", "hypothesis")
            for part in range(shards):
                shard = {**environment, "SHARD": f"{part}/{shards}"}
                steps.append(self.pytest(f"suite-{name}-{part + 1}", words, shard, why_not))
        return steps

    def pytest(self, name: str, words: list[str], environment: dict[str, str], why_not: str) -> Step:
        if self.rehearse:
            why_not = "a rehearsal runs no tests"
        path = self.out / "gpu-check" / f"{name}.xml"
        quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore:TensorFloat32 tensor cores:UserWarning"]
        command = python("-m", "pytest", *words, *quiet, "--rootdir", str(ROOT), f"--junitxml={path}")
        judge = partial(lambda code, text, path: judged_pytest(code, path), path=path)
        return Step(name, command, TEST_SECONDS, environment, echo=False, why_not=why_not, judge=judge)

    def sanitizers(self, environment: dict[str, str], none: str) -> list[Step]:
        program = tool("compute-sanitizer", "/usr/local/cuda*/bin/compute-sanitizer")
        why_not = none or ("" if program else "compute-sanitizer is not installed")
        if self.rehearse:
            why_not = "a rehearsal has no device to watch"
        # Every tensor an allocation of its own, so that what lies behind it is nobody's.
        environment = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        steps = []
        for name in SANITIZERS:
            words = ["--tool", name, "--error-exitcode", str(FOUND_ERRORS), "--print-limit", "20"]
            words += ["--target-processes", "application-only"]
            if name == "memcheck":
                words += ["--report-api-errors", "no"]  # torch asks for what a driver may not have
            if name != "initcheck":
                # torch's kernels; initcheck has to see what they write.
                words += ["--kernel-name-exclude", "kns=at6native,kns=cub"]
            watched = self.module(
                "exercise", "--device", self.device, *([] if name == "memcheck" else ["--shapes", "3"])
            )
            command = [program or "compute-sanitizer", *words, *watched]
            steps.append(Step(name, command, TEST_SECONDS, environment, False, why_not, judged_sanitizer))
        return steps

    def ncu_steps(self, environment: dict[str, str], why_not: str) -> list[Step]:
        program = tool("ncu", "/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
        if not self.profile:
            why_not = "--no-profile"
        elif self.rehearse:
            why_not = "a rehearsal has no device to watch"
        elif not program:
            why_not = why_not or "ncu is not installed"
        words = ["--ncu", program or "ncu"]
        out = str(self.out / "gpu-check")
        return [
            Step("counters", self.module("counters", *words), COUNTER_SECONDS, environment, False, why_not),
            Step("profile", self.module("profile", *words, "--out", out), PROFILE_SECONDS, environment, True, why_not),
        ]
