"""The table of calls for which the CUDA kernels go before Triton's: how it is applied, and that records bear it out."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from capsfast import backend, measured, toolchain
from capsfast.bench import record
from capsfast.bench.cases import DIRECTIONS, Case
from capsfast.bench.measure import Row
from capsfast.bench.results import Results
from capsfast.measured import Call, Faster

RECORDS = Path(__file__).parent.parent / "benchmarks" / "results"
CANONICAL = Call("dynamic_routing", torch.float32, 128, 1152, 10, 16, 8)
LARGE_BATCHES = Faster(
    "h200.json",
    (9, 0),
    "dynamic_routing",
    (torch.float32,),
    *(range(16, 513), range(1, 2000), range(1, 65), range(16, 17), range(8, 9)),
)
GPU = torch.device("cuda", 0)


def contradictions(entry: Faster, results: Results) -> list[str]:
    """What of a record speaks against an entry of the table."""
    inside, against = 0, []
    for case in results.cases:
        if not entry.holds(Call(case.op, case.torch_dtype, case.B, case.I, case.J, case.D, case.K)):
            continue
        cuda, triton = (results.seconds(case, f"capsfast {name}") for name in ("cuda", "triton"))
        inside += cuda is not None and triton is not None
        if cuda is not None and triton is not None and cuda >= triton:
            against.append(case.name)
    return against if inside >= 2 else [*against, f"{inside} cases measured"]


def rows(**seconds: float) -> list[Row]:
    """The canonical case in both directions, timed for each backend."""
    return [
        Row(dataclasses.replace(Case(), direction=each), f"capsfast {name}", "ok", seconds={"median": time})
        for each in DIRECTIONS
        for name, time in seconds.items()
    ]


def test_a_record_bears_out_every_entry() -> None:
    for entry in measured.FASTER:
        assert contradictions(entry, Results(record.load(RECORDS / entry.record)[1])) == [], entry


def test_a_record_can_contradict_an_entry() -> None:
    assert contradictions(LARGE_BATCHES, Results(rows(cuda=1.0, triton=2.0))) == []
    assert len(contradictions(LARGE_BATCHES, Results(rows(cuda=2.0, triton=1.0)))) == 2
    assert contradictions(LARGE_BATCHES, Results(rows(cuda=1.0))) == ["0 cases measured"]
    assert contradictions(LARGE_BATCHES._replace(D=range(8, 9)), Results(rows(cuda=1.0, triton=2.0))) == [
        "0 cases measured"
    ]


@pytest.mark.parametrize(
    ("change", "held"),
    [
        ({}, True),
        ({"B": 512}, True),
        ({"B": 513}, False),
        ({"B": 15}, False),
        ({"D": 32}, False),
        ({"K": 16}, False),
        ({"dtype": torch.bfloat16}, False),
        ({"op": "route_votes", "K": 0}, False),
    ],
)
def test_which_calls_an_entry_holds(change: dict[str, Any], held: bool) -> None:
    assert LARGE_BATCHES.holds(CANONICAL._replace(**change)) == held


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where both backends are there, and an entry in the table."""
    monkeypatch.setattr(measured, "FASTER", (LARGE_BATCHES,))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(toolchain, "interpreting", lambda: False)
    monkeypatch.setattr(backend, "_absence", lambda name: "")
    monkeypatch.setattr(backend, "_unsuitable", lambda name, device: "")
    monkeypatch.setattr(backend, "_forced", None)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("capability", "call", "chosen"),
    [
        ((9, 0), CANONICAL, "cuda"),
        ((8, 0), CANONICAL, "triton"),
        ((9, 0), CANONICAL._replace(B=1), "triton"),
    ],
)
def test_the_table_decides_between_the_two(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], call: Call, chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert backend.select("capsfast.dynamic_routing", GPU, None, {}, lambda: call) == chosen
    # Who asks for a backend gets it.
    assert backend.select("capsfast.dynamic_routing", GPU, "triton", {}, lambda: call) == "triton"


@pytest.mark.usefixtures("gpu")
def test_without_the_cuda_kernels_the_table_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_absence", lambda name: "not built" if name == "cuda" else "")
    assert backend.select("capsfast.dynamic_routing", GPU, None, {}, lambda: CANONICAL) == "triton"
