"""benchmarks/gpu_check.py without a GPU: budgets, interruptions, the record, the plan, the tables."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from capsfast.bench import record

from ..support.gpu_check import ROOT, outcome, python, run_step

CHECK = ROOT / "benchmarks" / "gpu_check.py"
OURS = "capsfast cpp"


PUBLISHES = """
    import json, os
    json.dump({"found": 3}, open(os.environ["STEP_RESULT"], "w"))
    print("a line", flush=True)
"""


def recorded(folder: Path) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in json.loads((folder / "check.json").read_text())["steps"]}


def test_runner_keeps_results_failures_and_what_was_left_out(gpu: Any, tmp_path: Path, capsys: Any) -> None:
    runner_of = gpu("runner")
    step = runner_of.Step
    runner = runner_of.Runner(tmp_path / "check", 60, {"note": "x"})
    seen = []

    def groups() -> Iterator[list[Any]]:
        yield [step("good", python(PUBLISHES)), step("bad", python("import sys; sys.exit(3)"), echo=False)]
        seen.append(runner.result("good"))
        yield [step("absent", why_not="no such tool"), step("quiet", python("print('hidden')"), echo=False)]

    assert runner.run(groups())
    assert seen == [{"found": 3}]
    steps = recorded(tmp_path / "check")
    assert {name: each["status"] for name, each in steps.items()} == {
        "good": "ok",
        "bad": "failed",
        "absent": "left out",
        "quiet": "ok",
    }
    assert steps["bad"]["reason"] == "exit status 3, see log.txt"
    assert steps["absent"]["reason"] == "no such tool"
    content = json.loads((tmp_path / "check" / "check.json").read_text())
    assert content["complete"] is True and content["note"] == "x"
    printed = capsys.readouterr().out
    assert "good: a line" in printed and "hidden" not in printed
    assert "quiet: hidden" in (tmp_path / "check" / "log.txt").read_text()


def test_runner_runs_a_group_side_by_side(gpu: Any, tmp_path: Path) -> None:
    step = gpu("runner").Step
    runner = gpu("runner").Runner(tmp_path, 60, {})
    wait = """
        import pathlib, sys, time
        pathlib.Path(sys.argv[1]).touch()
        while not pathlib.Path(sys.argv[2]).exists():
            time.sleep(0.01)
    """
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert runner.run([[step("one", [*python(wait), a, b], 30), step("two", [*python(wait), b, a], 30)]])
    assert {each.status for each in runner.outcomes} == {"ok"}


def test_runner_stops_a_late_step_and_its_children(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner_of = gpu("runner")
    monkeypatch.setattr(runner_of, "GRACE_SECONDS", 0.5)
    child = tmp_path / "child"
    stubborn = f"""
        import json, os, signal, subprocess, sys, time
        json.dump({{"partly": 1}}, open(os.environ["STEP_RESULT"], "w"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open({str(child)!r}, "w").write(str(sleeper.pid))
        time.sleep(60)
    """
    runner = runner_of.Runner(tmp_path / "check", 60, {})
    runner.run([[runner_of.Step("late", python(stubborn), 2.0)], [runner_of.Step("next", python("pass"))]])
    steps = recorded(tmp_path / "check")
    assert steps["late"]["status"] == "out of time" and steps["late"]["reason"] == "stopped after 2 s"
    assert steps["late"]["result"] == {"partly": 1}
    assert steps["next"]["status"] == "ok"
    status = Path(f"/proc/{child.read_text()}/stat")
    deadline = time.monotonic() + 5
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the child of a stopped step lives on"
        time.sleep(0.01)


def test_runner_leaves_out_what_there_is_no_time_for(gpu: Any, tmp_path: Path) -> None:
    runner = gpu("runner").Runner(tmp_path, 0.5, {})
    runner.run([[gpu("runner").Step("never", python("pass"))]])
    assert recorded(tmp_path)["never"]["reason"] == "the time is used up"


def wait_for(process: subprocess.Popen[str], text: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_an_interrupted_check_leaves_what_it_had(tmp_path: Path, number: signal.Signals) -> None:
    """The check itself, with the steps of a machine that hangs in the second one."""
    code = f"""
        import sys
        sys.path.insert(0, {str(ROOT / "benchmarks")!r})
        import gpu_check
        from gpu import plan
        from gpu.runner import Step, python

        def groups(self):
            yield [Step("machine", python("-c", {textwrap.dedent(PUBLISHES)!r}))]
            yield [Step("sweep", python("-c", "print('begun', flush=True); import time; time.sleep(60)"), echo=True)]
            yield [Step("never", python("-c", "pass"))]

        plan.Plan.groups = groups
        gpu_check.write_summary = lambda out: print("summary", flush=True)
        sys.argv = ["gpu_check.py"]
        sys.exit(gpu_check.main())
    """
    environment = {**os.environ, "OUT": str(tmp_path)}
    with subprocess.Popen(python(code), env=environment, stdout=subprocess.PIPE, text=True) as process:
        wait_for(process, "begun")
        process.send_signal(number)
        rest = process.stdout.read() if process.stdout else ""
        assert process.wait(30) == 1
    assert "summary" in rest and "interrupted; not ok: sweep" in rest
    content = json.loads((tmp_path / "gpu-check" / "check.json").read_text())
    assert content["complete"] is False
    assert [(each["name"], each["status"]) for each in content["steps"]] == [
        ("machine", "ok"),
        ("sweep", "interrupted"),
    ]
    assert content["steps"][0]["result"] == {"found": 3}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "OUT": str(tmp_path)}
    answer = subprocess.run([sys.executable, str(CHECK)], env=environment, capture_output=True, text=True)
    assert answer.returncode == 2
    assert "finds no CUDA device" in answer.stdout
    assert "nothing to check here" in answer.stdout
    step = recorded(tmp_path / "gpu-check")["machine"]
    assert step["status"] == "failed" and "finds no CUDA device" in step["result"]["missing"]


JUNIT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.test_gpu" name="one"/>
<testcase classname="tests.test_gpu" name="two"><failure message="m">text</failure></testcase>
<testcase classname="tests.test_gpu" name="three"><error message="m">text</error></testcase>
<testcase classname="tests.test_gpu" name="four"><skipped message="needs two GPUs"/></testcase>
</testsuite></testsuites>"""


def test_junit_in_numbers(gpu: Any, tmp_path: Path) -> None:
    path = tmp_path / "tests.xml"
    judged = gpu("reports").judged_pytest
    assert judged(4, path) == ("pytest ended with status 4, see log.txt", {})
    path.write_text(JUNIT)
    wrong, kept = judged(1, path)
    assert wrong == "2 failed: test_gpu::two, test_gpu::three"
    assert (kept["passed"], kept["failed"], kept["skipped"]) == (1, 2, 1)
    assert kept["skips"] == {"needs two GPUs": 1}
    path.write_text('<testsuite><testcase name="one"><skipped message="no"/></testcase></testsuite>')
    assert judged(0, path)[0] == "no test ran"
    path.write_text('<testsuite><testcase name="one"/></testsuite>')
    assert judged(0, path)[0] == ""


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= ERROR SUMMARY: 1 error\n", 1),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n", 1),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0),
        ("killed", None),
    ],
)
def test_sanitizer_in_numbers(gpu: Any, text: str, errors: int | None) -> None:
    assert gpu("reports").sanitizer_errors(text) == errors
    wrong, kept = gpu("reports").judged_sanitizer(9 if errors else 0, text)
    assert kept["errors"] == errors
    assert bool(wrong) == (errors != 0)


def plan_of(gpu: Any, out: Path, device: str, seconds: float = 530, **options: Any) -> Any:
    runner = gpu("runner").Runner(out / "gpu-check", seconds, {})
    return gpu("plan").Plan(runner, out, device, **options)


def test_plan_tests_every_gpu_backend(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(10))
    steps = {each.name: each for each in plan_of(gpu, tmp_path, "cuda").tests(["cuda", "triton"])}
    assert list(steps) == ["tests", "tests-rows", "suite-cuda-1", "suite-cuda-2", "suite-triton-1", "suite-triton-2"]
    assert "tests/test_gpu_rows.py" in steps["tests-rows"].command
    assert [steps[f"suite-cuda-{n}"].environment["SHARD"] for n in (1, 2)] == ["0/2", "1/2"]
    marked, suite = steps["tests"].command, steps["suite-triton-1"].command
    assert "tests/test_gpu.py" in marked and marked[marked.index("-m", 3) + 1] == "gpu"
    assert suite[suite.index("--backends") + 1] == "triton" and "tests/test_routing.py" in suite
    assert "tests/test_docs.py" not in suite
    for each in steps.values():
        assert each.environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert each.why_not == ""


@pytest.mark.parametrize("absent", ["pytest", "hypothesis"])
def test_plan_without_the_test_tools(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == absent else find(name, *rest))
    tests, _, suite, *_ = plan_of(gpu, tmp_path, "cuda").tests(["triton"])
    assert f"has no {absent}" in suite.why_not
    # The tests marked gpu do without hypothesis, which tests/conftest.py imports.
    assert bool(tests.why_not) == (absent == "pytest")
    assert ("--noconftest" in tests.command) == (absent == "hypothesis")


def test_shards_share_all_tests(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hook:
        def pytest_deselected(self, items: list[int]) -> None:
            gone.extend(items)

    kept, gone = [], []
    for part in range(3):
        items = list(range(10))
        monkeypatch.setenv("SHARD", f"{part}/3")
        gpu("shard").pytest_collection_modifyitems(type("Config", (), {"hook": Hook()}), items)
        kept += items
    assert sorted(kept) == list(range(10))
    assert len(gone) == 2 * 10


def test_a_shard_of_the_suite_runs(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of the plan, with a backend of this machine and one file of the suite."""
    plan = plan_of(gpu, tmp_path, "cuda")
    step = plan.tests(["reference"])[2]
    words = [word for word in step.command if not word.startswith("tests/") or word == "tests/test_backend.py"]
    plan.runner.run([[type(step)(step.name, words, 100, {**step.environment, "SHARD": "1/6"}, judge=step.judge)]])
    (found,) = plan.runner.outcomes
    assert found.status == "ok" and found.result["passed"] > 0, found
    assert not list(tmp_path.rglob("*.xml"))


def test_plan_watches_with_the_tools_there_are(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(gpu, tmp_path, "cuda")
    monkeypatch.setattr(gpu("plan"), "tool", lambda name, *places: None)
    steps = plan.sanitizers({}, "")
    assert [each.name for each in steps] == ["memcheck", "racecheck", "initcheck", "synccheck"]
    assert {each.why_not for each in steps} == {"compute-sanitizer is not installed"}
    assert {each.why_not for each in plan.ncu_steps({}, "")} == {"ncu is not installed"}
    monkeypatch.setattr(gpu("plan"), "tool", lambda name, *places: f"bin/{name}")
    for each in plan.sanitizers({}, ""):
        assert each.command[:3] == ["bin/compute-sanitizer", "--tool", each.name] and each.why_not == ""
        assert each.environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    counters, profile = plan.ncu_steps({}, "")
    assert counters.why_not == profile.why_not == ""
    for each in counters, profile:
        assert each.command[each.command.index("--ncu") + 1] == "bin/ncu"
    assert {each.why_not for each in plan.ncu_steps({}, "no cuda")} == {"no cuda"}
    without = plan_of(gpu, tmp_path, "cuda", profile=False)
    assert {each.why_not for each in without.ncu_steps({}, "")} == {"--no-profile"}


FOUND = ("machine", "limits", "build")


def planned(gpu: Any, plan: Any, monkeypatch: pytest.MonkeyPatch, fused: list[str]) -> list[list[Any]]:
    """The groups after "backends", of a machine that has all tools."""
    monkeypatch.setattr(gpu("plan"), "tool", lambda name, *places: f"bin/{name}")
    plan.runner.outcomes += [outcome(gpu, name) for name in FOUND] + [outcome(gpu, "backends", fused=fused)]
    return list(plan.groups())[3:]


def test_plan_ends_without_a_device_and_goes_on_without_a_build(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(gpu, tmp_path, "cuda")
    groups = plan.groups()
    assert [each.name for each in next(groups)] == ["machine"]
    plan.runner.outcomes.append(gpu("runner").Outcome("machine", "failed"))
    assert list(groups) == []

    plan = plan_of(gpu, tmp_path, "cuda")
    groups = plan.groups()
    next(groups)
    plan.runner.outcomes.append(outcome(gpu, "machine"))
    assert [each.name for each in next(groups)] == ["limits", "build"]
    plan.runner.outcomes.append(gpu("runner").Outcome("build", "failed"))
    assert [each.name for each in next(groups)] == ["backends"]
    plan.runner.outcomes.append(outcome(gpu, "backends", fused=["triton"]))
    rest = list(groups)
    by_name = {each.name: each for group in rest for each in group}
    assert by_name["kernels"].why_not == by_name["counters"].why_not == "the backend cuda is not there"
    assert not any(each.why_not for name, each in by_name.items() if name.startswith(("sweep", "host", "tests")))


def test_plan_begins_with_what_tells_most_and_ends_with_ncu(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = planned(gpu, plan_of(gpu, tmp_path, "cuda"), monkeypatch, ["triton", "cuda"])
    # Alone: what is timed.
    assert [[each.name for each in group] for group in groups if len(group) == 1] == [
        *(["kernels"], ["sweep"], ["sweep-tuned"], ["host"], ["first-call"], ["sweep-rest"], ["counters"], ["profile"])
    ]
    (beside,) = (group for group in groups if len(group) > 1)
    assert groups.index(beside) == 3 and not any(each.why_not for group in groups for each in group)
    # What comes before ncu leaves it its time, and one slow step does not take all of it.
    ncu = gpu("plan").COUNTER_SECONDS + gpu("plan").PROFILE_SECONDS
    assert all(each.seconds <= 530 - ncu for group in groups for each in group)
    assert sum(max(each.seconds for each in group) for group in groups[:4]) + ncu <= 530


def test_plan_keeps_the_last_of_the_time_for_ncu(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {
        each.name: each
        for group in planned(gpu, plan_of(gpu, tmp_path, "cuda", seconds=115), monkeypatch, ["cuda"])
        for each in group
    }
    late = [name for name, each in steps.items() if each.why_not == "the time that is left is kept for ncu"]
    assert late == ["sweep-tuned", "host", "first-call", "sweep-rest"]
    assert steps["counters"].why_not == steps["profile"].why_not == ""


def test_plan_of_some_steps(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(gpu, tmp_path, "cuda", seconds=115, only=["kernels", "sweep-", "suite"])
    groups = planned(gpu, plan, monkeypatch, ["cuda"])
    chosen = [each.name for group in groups for each in group if not each.why_not]
    assert [name for name in chosen if not name.startswith("suite-cuda-")] == ["kernels", "sweep-tuned", "sweep-rest"]
    assert any(name.startswith("suite-cuda-") for name in chosen)
    first = [each for group in list(plan.groups())[:3] for each in group]
    assert {each.name: each.why_not for each in first} == {
        "machine": "",
        "limits": "not asked for",
        "build": "",
        "backends": "",
    }


def test_the_steps_on_the_cpu(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """What a rehearsal runs, in one process: backends, sweep in two parts, host, summary."""
    pytest.importorskip("capsfast._C")
    cpu = ("--device", "cpu")
    out = tmp_path / "out"
    runner = gpu("runner").Runner(out / "gpu-check", 60, {"rehearsal": True})

    def step(name: str, module: str, *words: str) -> dict[str, Any]:
        found = run_step(gpu, monkeypatch, module, tmp_path / f"{name}.json", *words)
        runner._keep(outcome(gpu, name, **found))
        return found

    assert "missing" not in step("machine", "machine", *cpu)
    assert "cpp" in step("backends", "backends", *cpu)["fused"]
    runner._keep(outcome(gpu, "limits", limits={"copy_bytes_per_second": 1e10, "matmul_flops_per_second": 1e11}))
    swept = step("sweep", "sweep", *cpu, "--rehearse", "--cases", "targets", "--out", str(out))
    assert swept["not_reached"] == []
    path = out / swept["record"]
    surroundings, rows = record.load(path)
    assert surroundings["limits"]["copy_bytes_per_second"] == 1e10
    assert {row.status for row in rows} == {"ok"}
    monkeypatch.setenv("PYTHONPATH", gpu("plan").own_environment()["PYTHONPATH"])
    assert step("kernels", "kernels", *cpu, "--rehearse")["kernels"][0]["launches"] == []
    tuned = step("sweep-tuned", "sweep", *cpu, "--rehearse", "--cases", "tuned", "--out", str(out))
    assert tuned["record"] == swept["record"] and len(record.load(path)[1]) == len(rows)
    more = step("sweep-rest", "sweep", *cpu, "--rehearse", "--cases", "rest", "--out", str(out))
    assert more["record"] == swept["record"] and len(record.load(path)[1]) > len(rows)
    monkeypatch.setattr("capsfast.bench.overhead.CALLS", 1)
    assert OURS in step("host", "host", *cpu, "--rehearse")["host"]["forward"]
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["summary", "--out", str(out)])
    gpu("summary").main()
    page = (out / "gpu-check" / "check.md").read_text()
    assert "no number counts" in page and "Not complete." in page
    assert page.count(OURS) > 5 and "## Times" not in capsys.readouterr().out
    assert "copy 0.01 TB/s" in page
    assert not any(
        word.startswith("/") for word in (out / "gpu-check" / "check.json").read_text().replace('"', " ").split()
    )


def test_a_wrong_result_fails_the_sweep(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from capsfast.bench.contenders import Contender

    def wrong(case: Any) -> Any:
        return lambda *tensors: 0 * sum(each.sum() for each in tensors) + torch.zeros(case.B, case.J, case.D)

    broken = Contender("capsfast broken", wrong, lambda case: 0)
    monkeypatch.setattr(gpu("sweep"), "able", lambda *arguments: [broken])
    monkeypatch.setattr(gpu("sweep"), "CASES", gpu("sweep").CASES[:2])
    words = ("--device", "cpu", "--rehearse", "--cases", "targets", "--out", str(tmp_path))
    with pytest.raises(SystemExit, match=r"capsfast broken on .* wrong: v has relative error"):
        run_step(gpu, monkeypatch, "sweep", tmp_path / "result.json", *words)
    # The record is there all the same.
    assert {row.status for row in record.load(next(tmp_path.glob("*-rehearsal.json")))[1]} == {"wrong"}


def test_exercise_runs_what_the_tools_watch(gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("capsfast._C")
    for words in (["--shapes", "1"], ["--profile"], ["--profile", "layers"]):
        monkeypatch.setattr(sys, "argv", ["exercise", "--device", "cpu", "--backend", "cpp", *words])
        gpu("exercise").main()
        assert capsys.readouterr().out.startswith("cpp")


def test_gpu_state_is_what_nvidia_smi_reads(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU X, 580.1, 345 MHz, 1980 MHz, 3201 MHz, 3201 MHz, 30, 75.1 W, 0 %'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (state,) = gpu("machine").gpu_state()
    assert state["name"] == "GPU X" and state["clocks.sm"] == "345 MHz" and state["utilization.gpu"] == "0 %"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gpu("machine").gpu_state() == []
