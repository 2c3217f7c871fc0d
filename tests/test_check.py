"""capsfast.bench.check: families of kernels against float64, in processes that may fail in any way."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from capsfast.bench import check
from capsfast.bench.cases import Case
from capsfast.bench.contenders import contender
from capsfast.bench.problems import FUNCTIONS, RoutingCase
from capsfast.calls.options import Options
from capsfast.environment import native

CPU, ROOT = torch.device("cpu"), Path(__file__).resolve().parent.parent
needs_extension = pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")


def test_every_backend_and_every_op_has_a_family() -> None:
    assert {family.backend for family in check.FAMILIES.values()} == {"cpp", "triton", "cuda"}
    for backend in ("cpp", "triton"):
        ops = {family.op for family in check.FAMILIES.values() if family.backend == backend}
        assert {"dynamic_routing", "route_votes", "routing_pass", "em"} <= ops
    assert set(check.families("cpu")) == {name for name in check.FAMILIES if name.startswith("cpp")}
    assert set(check.families("cuda")) == check.FAMILIES.keys() - set(check.families("cpu"))


def test_the_first_calls_of_a_family_have_all_its_cases() -> None:
    for name, family in check.FAMILIES.items():
        found = check.calls(name)
        assert {call.case for call in found[: len(family.cases)]} == set(family.cases)
        assert len(set(found)) == len(family.shapes) * len(family.cases) * len(family.dtypes)


def test_a_case_has_the_defaults_of_the_options() -> None:
    assert RoutingCase().options == Options().checked("")


@needs_extension
@pytest.mark.parametrize("name", ["cpp votes", "cpp EM"])
def test_right_kernels_are_right(name: str) -> None:
    found = check.compare(check.calls(name)[0], CPU)
    assert found["wrong"] == [] and 0 < found["errors"]["float32"] < 1e-5


def test_a_worker_sets_the_variable_of_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()
    monkeypatch.setenv("CAPSFAST_COLUMNS", "0")
    monkeypatch.setattr(check, "work", lambda *call: seen.append(os.environ["CAPSFAST_COLUMNS"]))
    for name in ("cuda rows", "cuda columns"):
        monkeypatch.setattr(sys, "argv", ["check", name])
        with pytest.raises(SystemExit):
            check.main()
    assert seen == ["0", "1"]


@needs_extension
@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_a_wrong_kernel_is_found(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = FUNCTIONS["route_votes"]

    def wrong(*arguments: Any, backend: str, **options: Any) -> Any:
        found = right(*arguments, backend=backend, **options)
        return found if backend == "reference" else found * factor

    monkeypatch.setitem(FUNCTIONS, "route_votes", wrong)
    reasons = check.compare(check.calls("cpp votes")[0], CPU)["wrong"]
    assert any(reason.startswith("v alone has relative error") for reason in reasons)
    assert any(reason.startswith("dvotes has relative error") for reason in reasons)


@needs_extension
def test_results_that_change_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = FUNCTIONS["route_votes"], iter(range(100))

    def unsteady(*arguments: Any, **options: Any) -> Any:
        return right(*arguments, **options) * (1 + 1e-6 * next(calls))

    monkeypatch.setitem(FUNCTIONS, "route_votes", unsteady)
    reasons = check.compare(check.calls("cpp votes")[0], CPU)["wrong"]
    assert any(reason.startswith("v of a second run") for reason in reasons)


@needs_extension
def test_wrong_em_routing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(name: str) -> Any:
        right = contender(name)

        def make(case: Case) -> Any:
            forward = right.make(case)

            def call(*tensors: torch.Tensor) -> Any:
                poses, activations = forward(*tensors)
                return poses + (poses * float("nan")).detach(), activations

            return call

        return replace(right, make=make)

    monkeypatch.setattr(check, "contender", wrong)
    assert "poses is not finite" in str(check.compare(check.calls("cpp EM")[0], CPU)["wrong"])


# Takes the place of the worker. Call 1 hangs, with a child that keeps its output open; call 3 ends the process; call 4
# is wrong, and the process ends after it; all others are right. Compilers print lines of any kind.
WORKER = """
import json, os, subprocess, sys, time
say = lambda **fact: print("@" + json.dumps(fact), flush=True)
for n in range(int(sys.argv[-1]), 6):
    say(call=n, name=f"call {n}")
    print("{-# a reproducer of a compiler", flush=True)
    print("@ a warning", flush=True)
    if n == 1:
        subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"])
    if n == 3:
        print("an illegal memory access", flush=True)
        os._exit(7)
    say(done=n, errors={"float32": n * 1e-8}, wrong=["v is wrong"] if n == 4 else [])
    if n == 4:
        os._exit(1)
"""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Callable[..., check.Result]:
    """Checks a family of six calls with another worker."""

    def checked(code: str, seconds: float = 60, patience: float = 60, **more: Any) -> check.Result:
        monkeypatch.setattr(check, "WORKER", (sys.executable, "-c", code))
        monkeypatch.setattr(check, "calls", lambda name: [None] * 6)
        monkeypatch.setattr(check, "backends", lambda: {"cpp": SimpleNamespace(reason="")})
        monkeypatch.setitem(check.HANG_SECONDS, "cpp", patience)
        return check.check_families(["cpp votes"], seconds, **more)[0]

    return checked


def test_calls_behind_a_hang_and_a_crash_are_checked(worker: Callable[..., check.Result]) -> None:
    found = worker(WORKER, patience=2)
    assert found.calls == 4 and found.errors == {"float32": 5e-8} and found.status == check.WRONG
    assert found.wrong == [
        "call 1: no answer within 2 s",
        "call 3: the process ended with status 7: an illegal memory access",
        "call 4: v is wrong",
    ]


def test_a_check_that_is_late_is_not_wrong(worker: Callable[..., check.Result]) -> None:
    begin = time.monotonic()
    found = worker(WORKER, seconds=2)
    assert (found.calls, found.wrong, found.status) == (1, [], check.RIGHT)
    found = worker("import time; time.sleep(60)", seconds=0.5, patience=0.1)
    assert (found.calls, found.wrong, found.status) == (0, [], check.LATE)
    assert time.monotonic() - begin < 10  # nobody waits for a child of a worker


def test_a_worker_that_does_not_start_is_wrong_once(worker: Callable[..., check.Result]) -> None:
    found = worker("import sys; sys.exit('no such file')")
    assert found.wrong == ["the start: the process ended with status 1: no such file"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_an_interruption_ends_the_workers(worker: Callable[..., check.Result], tmp_path: Path) -> None:
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        worker(code)
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """Also if the parent was killed. A worker of a family that takes long would use the GPU beside the next check."""
    path = tmp_path / "pid"
    code = f"""
import time
from pathlib import Path
from capsfast.bench import check

check.compare = lambda *call: time.sleep(60)
check.calls = lambda name: [name]
Path({str(path)!r}).write_text(str(__import__("os").getpid()))
check.main()
"""
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}, 'cpp EM'])"
    with subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT) as process:
        waited(path.exists)
        process.kill()
    waited(lambda: not Path("/proc", path.read_text()).exists())


def waited(for_what: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not for_what():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_an_absent_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "backends", lambda: {"cpp": SimpleNamespace(reason="no compiler")})
    (found,) = check.check_families(["cpp votes"], 5)
    assert (found.status, found.absent) == (check.ABSENT, "no compiler")


@needs_extension
def test_the_command(tmp_path: Path) -> None:
    typer = pytest.importorskip("typer.testing")
    from capsfast.cli.app import app

    path = tmp_path / "check.json"
    answer = typer.CliRunner().invoke(app, ["check", "--device", "cpu", "--seconds", "60", "--json", str(path)])
    assert answer.exit_code == 0, answer.output
    lines = [line for line in answer.output.splitlines() if line.startswith("cpp")]
    assert len(lines) == 6 and all(" right: " in line and "float32" in line for line in lines)
    content = json.loads(path.read_text())
    assert {each["status"] for each in content["families"]} == {"right"} and content["environment"]["versions"]
