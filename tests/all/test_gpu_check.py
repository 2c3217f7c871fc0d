"""benchmarks/gpu_check.py without a GPU: time limits, interruptions, the record, a rehearsal."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_check, gpu_steps
from benchmarks.gpu_check import Check, Step
from capsfast.bench import record
from capsfast.bench.cases import sweep
from capsfast.bench.contenders import COMPILED, EAGER, contender

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "benchmarks" / "gpu_check.py"
WAIT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print('@{"child": %d}' % child.pid)
print("call number two", flush=True)
time.sleep(60)
"""


def python(name: str, code: str, seconds: float = 60) -> Step:
    return Step(name, [sys.executable, "-c", textwrap.dedent(code)], seconds)


def facts(folder: Path, key: str) -> dict[str, Any]:
    """The values of a key in the record, by step."""
    found = [json.loads(line) for line in (folder / "check.jsonl").read_text().splitlines()]
    return {fact["step"]: fact[key] for fact in found if key in fact}


def ended(pid: int) -> bool:
    """Whether the process ends within ten seconds: the system may take a moment to remove a killed process."""
    stat, end = Path(f"/proc/{pid}/stat"), time.monotonic() + 10
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.1)
                continue
        return True
    return False


def test_steps_are_kept_with_what_they_found(tmp_path: Path) -> None:
    """A late step names its call, and its children end with it."""
    check = Check(tmp_path, 1)
    check.run(
        python("good", """print('a line\\n@{"found": 3}')"""),
        python("bad", "import sys; sys.exit('wrong | here')"),
        python("without", """print('@{"left_out": "no such backend"}')"""),
        Step("absent", [], 1, why_not="no such tool"),
        python("late", WAIT, seconds=1.5),
        at_once=2,
    )
    status, reason = facts(tmp_path, "status"), facts(tmp_path, "reason")
    assert list(map(status.get, ("good", "bad", "late"))) == ["ok", "failed", "out of time"]
    assert status["without"] == status["absent"] == "left out" and reason["absent"] == "no such tool"
    assert reason["late"] == "stopped after 2 s in: call number two" and ended(facts(tmp_path, "child")["late"])
    assert facts(tmp_path, "seconds")["late"] < 30  # the child would sleep for a minute
    assert facts(tmp_path, "found") == {"good": 3} and sorted(check.bad()) == ["bad", "late"]
    assert "good | a line\n" in (tmp_path / "check.log").read_text()
    page = (tmp_path / "check.md").read_text()
    assert "Not complete." in page and "| bad | failed | 0 | wrong / here |" in page
    check.end = time.monotonic()
    check.run(python("next", ""))
    assert facts(tmp_path, "reason")["next"] == "no time is left"


def run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OUT": str(tmp_path), "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, str(CHECK), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    answer = run(tmp_path)
    assert answer.returncode == 2 and "finds no CUDA device" in answer.stdout + answer.stderr


def test_a_rehearsal_runs_the_steps(tmp_path: Path) -> None:
    answer = run(tmp_path, "--rehearse")
    assert answer.returncode == 0, answer.stdout
    folder = tmp_path / "gpu-check"
    status = facts(folder, "status")
    assert set(status.values()) == {"ok", "left out"} and status["build"] == "left out"
    assert {"smoke cpp", "times 1/2", "times 2/2", "record", "tests large", "tests others", "layers 1/2"} < set(status)
    surroundings, rows = record.load(folder / facts(folder, "record")["record"])
    assert surroundings["machine"]["cpu"] and {row.status for row in rows} == {"ok"}
    counts = Counter(row.contender.removeprefix("capsfast cpp ") for row in rows if not row.case.layer)
    assert counts == {"capsfast cpp": 6, EAGER: 1} | dict.fromkeys(gpu_check.VARIANTS, 6)
    of_layers = {(row.case, row.contender) for row in rows if row.case.layer}
    assert of_layers == {(case, name) for case in sweep("smoke", "layers") for name in ("capsfast cpp", EAGER)}
    page = (folder / "check.md").read_text()
    assert "no number counts" in page and "Not complete" not in page and "WRONG" not in page
    assert "| B=2 I=16 |" in page and "| ConvCaps2d 6^2 B=2 " in page and "| cpp passes | right |" in page
    assert "## Training step of CapsNet, 2 images" in page and "| capsfast::dynamic_routing_backward | 1 |" in page


class Steps(gpu_check.Steps):
    """Steps for a GPU that print what a GPU would have found, by the name of the step."""

    def __init__(self, out: Path, found: dict[str, list[dict[str, Any]]]) -> None:
        super().__init__("cuda", out)
        self.found, self.workers = found, 1

    def own(self, name: str, seconds: float, *words: str, quiet: bool = False) -> Step:
        lines = "\n".join("@" + json.dumps(fact) for fact in self.found.get(name, []))
        # A step without a fact is late.
        code = f"print({lines!r})" if lines else "import time; time.sleep(60)"
        return Step(name, [sys.executable, "-c", code], 10 if lines else 1.5, dict(self.environment))

    def tests(self) -> list[Step]:
        return []


def checked(tmp_path: Path, smoke: dict[str, tuple[str, list[str]] | None]) -> tuple[set[str], Steps]:
    """The steps that ran. smoke: by step a family and why it is wrong, None if the step is late."""
    environment = {"machine": {"compute_capability": "9.0"}}
    found: dict[str, list[dict[str, Any]]] = {
        "machine": [{"machine": "a GPU", "environment": environment, "built": True}],
        "times 1/1": [{"measured": {}}],
        "layers 1/1": [{"measured": {}}],
        "record": [{"tables": "a table"}],
    }
    found |= {f"times {name}": [{"measured": {}}] for name in gpu_check.VARIANTS}
    for name, result in smoke.items():
        found[f"smoke {name}"] = [] if result is None else [{"family": result[0], "wrong": result[1]}]
    check, steps = Check(tmp_path, 1), Steps(tmp_path, found)
    gpu_check.run(check, steps, (), ())
    return {fact["step"] for fact in check.of("status")}, steps


def test_right_and_late_kernels_switch_nothing_off(tmp_path: Path) -> None:
    ran, steps = checked(tmp_path, {"triton": ("triton routing", []), "cuda": None})
    times = {"times 1/1", "layers 1/1", *(f"times {name}" for name in gpu_check.VARIANTS)}
    assert ran == {"machine", "build", "smoke triton", "smoke cuda", "record"} | times
    assert facts(tmp_path, "reason")["build"] == "the extension was built before, from these sources"
    assert facts(tmp_path, "status")["smoke cuda"] == "out of time"
    assert not steps.environment.keys() & set(gpu_check.SUSPECTS.values())
    assert "a table" in (tmp_path / "check.md").read_text()


@pytest.mark.parametrize(("family", "variable"), gpu_check.SUSPECTS.items())
def test_a_way_to_launch_is_switched_off_if_kernels_are_wrong_with_it_alone(
    tmp_path: Path, family: str, variable: str
) -> None:
    wrong, triton = (family, ["v has relative error 1.0e+00, bound 1e-04"]), ("triton routing", [])
    without = f"{family}, {variable}=0"
    ran, steps = checked(tmp_path, {"triton": triton, "cuda": wrong, without: (family, [])})
    assert f"smoke {without}" in ran and steps.environment[variable] == "0"
    assert len(steps.environment.keys() & set(gpu_check.SUSPECTS.values())) == 1
    assert "WRONG: v has relative error" in (tmp_path / "check.md").read_text()
    ran, steps = checked(tmp_path, {"triton": triton, "cuda": wrong, without: wrong})
    assert f"smoke {without}" in ran and variable not in steps.environment
    ran, steps = checked(tmp_path, {"triton": ("triton routing", ["v is not finite"]), "cuda": (family, [])})
    assert f"smoke {without}" not in ran and variable not in steps.environment


def test_variants_are_measured_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their own variables and under their own names; every contender has each case once."""
    steps = {step.name: step for step in gpu_check.Steps("cuda", tmp_path).times()}
    cuda, triton = (replace(contender(EAGER), name=f"capsfast {n}", devices=("cuda",)) for n in ("cuda", "triton"))
    monkeypatch.setattr(gpu_steps, "contenders", lambda: [cuda, triton, *map(contender, (COMPILED, EAGER))])
    for name, variables in gpu_check.VARIANTS.items():
        assert steps[f"times {name}"].environment.items() >= variables.items()
        tasks = gpu_steps.variant_tasks(SimpleNamespace(share=name, rehearse=False))  # type: ignore[arg-type]
        assert {task.args[0].name for task in tasks} == {f"capsfast cuda {name}"}
    tasks = gpu_steps.tasks(False, torch.device("cuda"))
    pairs = [task.args for task in tasks if task.func is gpu_steps.contender_task]
    assert len(pairs) == len(set(pairs)) == 3 * len(gpu_steps.cases(False)) + 1  # eager einsum on one
    pairs = [task.args for task in gpu_steps.layer_tasks(False, torch.device("cuda"))]
    assert len(pairs) == len(set(pairs)) == 4 * len(gpu_steps.layer_cases(False))


def test_workers_take_turns_and_go_on_after_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers of two tasks, one of which fails to prepare and one of which fails in its turn."""
    (tmp_path / "gpu-check").mkdir()
    order: list[str] = []

    def task(name: str, device: torch.device) -> Callable[[], None]:
        if name == "a":
            raise RuntimeError("no such kernel")

        def timed() -> None:
            order.append(f"{name} begins")
            time.sleep(0.2)
            order.append(f"{name} ends")
            if name == "b":
                raise RuntimeError("out of memory")

        return timed

    monkeypatch.setattr(gpu_steps, "tasks", lambda *given: [partial(task, name) for name in "abcd"])
    asked = [SimpleNamespace(share=f"{part}/2", out=tmp_path, rehearse=True) for part in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(gpu_steps.times, each, torch.device("cpu")) for each in asked]
    # The first has a and c, the second b and d.
    assert str(workers[0].exception()) == "a: RuntimeError: no such kernel"
    assert str(workers[1].exception()) == "in a turn: RuntimeError: out of memory"
    assert sorted(order) == sorted(f"{name} {word}" for name in "bcd" for word in ("begins", "ends"))
    assert all(order[n].split()[0] == order[n + 1].split()[0] for n in range(0, 6, 2))
