"""benchmarks/gpu_check.py without a GPU: time limits, interruptions, the record, a rehearsal."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import Check, Step
from capsfast.bench import record

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
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        with contextlib.suppress(OSError):
            if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.1)
                continue
        return True
    return False


def test_steps_are_kept_with_what_they_found(tmp_path: Path) -> None:
    check = Check(tmp_path, 1)
    check.run(
        python("good", """print('a line\\n@{"found": 3}')"""),
        python("bad", "import sys; sys.exit('wrong | here')"),
        python("without", """print('@{"left_out": "no such backend"}')"""),
        Step("absent", [], 1, why_not="no such tool"),
        at_once=2,
    )
    status = facts(tmp_path, "status")
    assert [status[each] for each in ("good", "bad", "without", "absent")] == ["ok", "failed", "left out", "left out"]
    assert facts(tmp_path, "found") == {"good": 3} and check.bad() == ["bad"]
    assert "good | a line\n" in (tmp_path / "check.log").read_text()
    page = (tmp_path / "check.md").read_text()
    assert "Not complete." in page and "| bad | failed | 0 | wrong / here |" in page
    assert "| absent | left out | 0 | no such tool |" in page and "| without | left out | 0 | no such backend |" in page


def test_a_late_step_names_its_call_and_ends_with_its_children(tmp_path: Path) -> None:
    check = Check(tmp_path, 1)
    check.run(python("late", WAIT, seconds=1.5), python("beside", ""), at_once=2)
    assert facts(tmp_path, "status") == {"late": "out of time", "beside": "ok"}
    assert facts(tmp_path, "reason")["late"] == "stopped after 2 s in: call number two"
    assert ended(facts(tmp_path, "child")["late"])
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
    answer = run(tmp_path, "--rehearse", "--also", "counters")
    assert answer.returncode == 0, answer.stdout
    folder = tmp_path / "gpu-check"
    status = facts(folder, "status")
    assert {name for name, each in status.items() if each == "left out"} == {"build", "counters"}
    assert set(status.values()) == {"ok", "left out"}
    assert {"smoke cpp-routing both graph", "smoke cpp-em both", "warm 1", "times", "test_gpu"} < set(status)
    surroundings, rows = record.load(folder / facts(folder, "record")["times"])
    assert surroundings["machine"]["cpu"] and {row.status for row in rows} == {"ok"}
    assert len({row.case for row in rows}) == 5
    page = (folder / "check.md").read_text()
    assert "no number counts" in page and "Not complete" not in page
    assert "| B=2 I=16 |" in page and "| `capsfast::dynamic_routing` |" in page
