"""benchmarks/gpu_check.py without a GPU: time limits, interruptions, results, a rehearsal."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from capsfast.bench import record

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "benchmarks" / "gpu_check.py"
WAIT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(os.environ["STEP_RESULT"], "w").write('{"child": %d}' % child.pid)
print("waiting", flush=True)
time.sleep(60)
"""


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", CHECK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in json.loads((folder / "check.json").read_text())["steps"]}


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


def test_steps_are_kept_with_what_they_found(check: ModuleType, tmp_path: Path) -> None:
    run = check.Check(tmp_path / "check", 60)
    publish = 'import os; open(os.environ["STEP_RESULT"], "w").write("{\\"found\\": 3}"); print("a line")'
    run.run(check.Step("good", python(publish)), check.Step("bad", python("import sys; sys.exit('wrong | here')")))
    run.run(check.Step("absent", why_not="no such tool"))
    steps = kept(tmp_path / "check")
    assert [steps[name]["status"] for name in ("good", "bad", "absent")] == ["ok", "failed", "left out"]
    assert steps["good"]["result"] == run.result("good") == {"found": 3}
    assert (tmp_path / "check" / "good.log").read_text() == "a line\n"
    page = (tmp_path / "check" / "check.md").read_text()
    assert "Not complete." in page and "| bad | failed | 0 |  | wrong / here |" in page
    assert "| absent | left out | 0 |  | no such tool |" in page


def test_a_late_step_ends_with_its_children_and_the_rest_is_left_out(check: ModuleType, tmp_path: Path) -> None:
    run = check.Check(tmp_path, 3)
    run.run(check.Step("late", python(WAIT), seconds=1.5), check.Step("beside", python("")))
    late = kept(tmp_path)["late"]
    assert (late["status"], late["reason"]) == ("out of time", "stopped after 2 s")
    assert ended(late["result"]["child"])
    run.end = time.monotonic()
    run.run(check.Step("next", python("")))
    assert kept(tmp_path)["next"]["reason"] == "the time is used up"
    assert kept(tmp_path)["beside"]["status"] == "ok"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupted_check_leaves_what_it_had(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
    import sys
    from pathlib import Path
    sys.path.insert(0, {str(CHECK.parent)!r})
    import gpu_check
    check = gpu_check.Check(Path({str(tmp_path / "check")!r}), 60)
    check.heed_signals()
    check.run(gpu_check.Step("before", [sys.executable, "-c", ""]))
    check.run(gpu_check.Step("during", [sys.executable, "-c", {WAIT!r}]))
    check.run(gpu_check.Step("after", [sys.executable, "-c", ""]))
    """
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as process:
        log = tmp_path / "check" / "during.log"
        end = time.monotonic() + 30
        while not (log.exists() and log.read_text()):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(number)
        process.communicate(timeout=30)
    steps = kept(tmp_path / "check")
    assert [each["status"] for each in steps.values()] == ["ok", "interrupted", "left out"]
    assert ended(steps["during"]["result"]["child"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "OUT": str(tmp_path)}
    answer = subprocess.run([sys.executable, str(CHECK)], env=environment, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 2
    assert "finds no CUDA device" in answer.stdout and "there is nothing to check here" in answer.stdout


def test_what_pytest_and_the_sanitizer_say(check: ModuleType) -> None:
    passed = "....\n3 passed, 1 skipped in 2.00s\n"
    assert check.judged_pytest(0, passed) == ("", {"passed": 3, "skipped": 1})
    failed = "FAILED tests/test_a.py::test_b[x] - no\n1 failed, 2 passed in 1.00s\n"
    assert check.judged_pytest(1, failed)[0] == "1 failed: tests/test_a.py::test_b[x]"
    assert check.judged_pytest(0, "2 skipped in 1.00s\n")[0] == "no test ran"
    assert check.judged_pytest(2, "")[0] == "pytest ended with status 2"
    assert check.judged_sanitizer(0, "========= ERROR SUMMARY: 0 errors\n") == ("", {"errors": 0})
    races = "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n"
    assert check.judged_sanitizer(9, races) == ("1 errors, exit status 9", {"errors": 1})
    assert check.judged_sanitizer(0, "") == ("no summary", {"errors": 0})


def test_every_backend_and_every_gpu_file_is_tested(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    steps = {step.name: step for step in check.tests(["cuda", "triton"], rehearse=False)}
    marked = [path.stem for path in (ROOT / "tests").glob("test_*.py") if "mark.gpu" in path.read_text()]
    shares = [name for name in steps if name.startswith("suite")]
    assert set(steps) - set(shares) == set(marked)
    assert shares == [f"suite-{name}-{n}" for name in ("cuda", "triton") for n in (1, 2, 3, 4, 5)]
    assert [steps[name].environment["SHARD"] for name in shares[:5]] == [f"{n}/5" for n in range(5)]
    assert "tests/test_routing.py" in " ".join(steps["suite-cuda-1"].command)
    assert {check.sanitizers("cuda")[n].name for n in range(4)} == set(check.SANITIZERS)


def test_a_rehearsal_runs_the_steps(tmp_path: Path) -> None:
    environment = {**os.environ, "OUT": str(tmp_path), "TORCHDYNAMO_DISABLE": "1"}
    words = [sys.executable, str(CHECK), "--rehearse"]
    answer = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stdout
    steps = kept(tmp_path / "gpu-check")
    left_out = {name for name, each in steps.items() if each["status"] == "left out"}
    assert left_out == {"build", "profile"} and {each["status"] for each in steps.values()} == {"ok", "left out"}
    assert steps["test_gpu"]["counts"]["collected"] > 40
    surroundings, rows = record.load(tmp_path / steps["sweep"]["result"]["record"])
    assert surroundings["machine"]["cpu"] and {row.status for row in rows} == {"ok"}
    assert len({row.case for row in rows}) == 4 and steps["sweep"]["result"]["not_reached"] == []
    assert steps["cost"]["result"]["cost"]["cpp"]["compiled"]["host forward"] > 0
    page = (tmp_path / "gpu-check" / "check.md").read_text()
    assert "no number counts" in page and "Not complete" not in page
    assert "| host forward |" in page and "| B=2 I=16 |" in page
