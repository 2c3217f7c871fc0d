"""capsfast.bench.check: families of kernels against float64, in processes that may fail in any way."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import capsfast
from capsfast.backend import BACKENDS
from capsfast.bench import check
from capsfast.bench.problems import FUNCTIONS

CPU = torch.device("cpu")
needs_extension = pytest.mark.skipif(
    not capsfast.backends()["cpp"].available, reason=capsfast.backends()["cpp"].reason or "there"
)


def test_every_backend_and_every_op_has_a_family() -> None:
    assert {family.backend for family in check.FAMILIES.values()} == BACKENDS.keys() - {"reference"}
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


@needs_extension
@pytest.mark.parametrize("name", ["cpp votes", "cpp EM"])
def test_right_kernels_are_right(name: str) -> None:
    found = check.compare(check.calls(name)[0], CPU)
    assert found["wrong"] == [] and 0 < found["errors"]["float32"] < 1e-5


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
    assert "v of a second call has other bits" in check.compare(check.calls("cpp votes")[0], CPU)["wrong"]


# Takes the place of the worker. Call 1 hangs, call 3 ends the process, call 4 is wrong, all others are right.
WORKER = """
import json, os, sys, time
for n in range(int(sys.argv[-1]), 6):
    print(json.dumps({"call": n, "name": f"call {n}"}), flush=True)
    if n == 1:
        time.sleep(60)
    if n == 3:
        print("an illegal memory access", flush=True)
        os._exit(7)
    wrong = ["v is wrong"] if n == 4 else []
    print(json.dumps({"done": n, "errors": {"float32": n * 1e-8}, "wrong": wrong}), flush=True)
"""


def watched(worker: str, monkeypatch: pytest.MonkeyPatch, seconds: float, hang_seconds: float) -> check.Result:
    monkeypatch.setattr(check, "WORKER", (sys.executable, "-c", worker))
    monkeypatch.setattr(check, "calls", lambda name: [None] * 6)
    monkeypatch.setattr(check, "backends", lambda: {"cpp": BackendState("")})
    monkeypatch.setitem(check.HANG_SECONDS, "cpp", hang_seconds)
    (found,) = check.check(["cpp votes"], seconds)
    return found


class BackendState:
    def __init__(self, reason: str) -> None:
        self.reason = reason


def test_calls_behind_a_hang_and_a_crash_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = watched(WORKER, monkeypatch, seconds=60, hang_seconds=2)
    assert found.calls == 4 and found.errors == {"float32": 5e-8} and found.status == check.WRONG
    assert found.wrong == [
        "call 1: no answer within 2 s",
        "call 3: the process ended with status 7: an illegal memory access",
        "call 4: v is wrong",
    ]


def test_a_check_that_is_late_is_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    found = watched(WORKER, monkeypatch, seconds=1.5, hang_seconds=60)
    assert (found.calls, found.wrong, found.status) == (1, [], check.RIGHT)
    found = watched("import time; time.sleep(60)", monkeypatch, seconds=0.5, hang_seconds=60)
    assert (found.calls, found.wrong, found.status) == (0, [], check.LATE)


def test_a_worker_that_does_not_start_is_wrong_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = watched("import sys; sys.exit('no such file')", monkeypatch, seconds=60, hang_seconds=60)
    assert found.wrong == ["the start: the process ended with status 1: no such file"]


def test_an_absent_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "backends", lambda: {"cpp": BackendState("no compiler")})
    (found,) = check.check(["cpp votes"], 5)
    assert (found.status, found.absent) == (check.ABSENT, "no compiler")


@needs_extension
def test_the_command(tmp_path: Path) -> None:
    typer = pytest.importorskip("typer.testing")
    from capsfast.cli.app import app

    path = tmp_path / "check.json"
    answer = typer.CliRunner().invoke(app, ["check", "--device", "cpu", "--seconds", "60", "--json", str(path)])
    assert answer.exit_code == 0, answer.output
    lines = [line for line in answer.output.splitlines() if line.startswith("cpp")]
    assert len(lines) == 5 and all(" right: " in line and "float32" in line for line in lines)
    content = json.loads(path.read_text())
    assert {each["status"] for each in content["families"]} == {"right"} and content["environment"]["versions"]
