"""The part of benchmarks/gpu_check.py that looks at single kernels, without a GPU: names, predictions, ncu, tables."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ..support.gpu_check import outcome, python, run_step

ROWS = "capsfast::cuda::rows::"
# As CUPTI and ncu write them, and as the compiler does.
NAMES = {
    "forward": (
        f"void {ROWS}accumulate_kernel<{ROWS}Rows<20, 1, true, ({ROWS}Options)0>, false>({ROWS}AccumulateArgs<false>)",
        f"void {ROWS}accumulate_kernel<{ROWS}Rows<(int)20, (int)1, (bool)1, ({ROWS}Options)0>, (bool)0>"
        f"({ROWS}AccumulateArgs<T2>)",
        "void accumulate_kernel<Rows<20, 1, 1, 0>, 0>(AccumulateArgs<T2>)",
        "_ZN8capsfast4cuda4rows17accumulate_kernelINS1_4RowsILi20ELi1ELb1ELNS1_7OptionsE0EEELb0EEEvNS1_14Accumulate"
        "ArgsIXT0_EEE",
    ),
    "backward": (
        f"void {ROWS}accumulate_kernel<{ROWS}Rows<20, 1, false, ({ROWS}Options)0>, true>({ROWS}AccumulateArgs<true>)",
        f"void {ROWS}accumulate_kernel<{ROWS}Rows<(int)20, (int)1, (bool)0, ({ROWS}Options)0>, (bool)1>"
        f"({ROWS}AccumulateArgs<T2>)",
        "_ZN8capsfast4cuda4rows17accumulate_kernelINS1_4RowsILi20ELi1ELb0ELNS1_7OptionsE0EEELb1EEEvNS1_14Accumulate"
        "ArgsIXT0_EEE",
    ),
    "gradient": (f"void {ROWS}gradient_kernel<{ROWS}Rows<20, 1, true, ({ROWS}Options)0> >({ROWS}GradientArgs)",),
    "join_kernel": (
        "void capsfast::cuda::join_kernel<float>(capsfast::cuda::JoinArgs<float>)",
        "_ZN8capsfast4cuda11join_kernelIfEEvNS0_8JoinArgsIT_EE",
    ),
    "moment_gradient_kernel": ("void capsfast::cuda::moment_gradient_kernel<float>(capsfast::cuda::Args<float>)",),
    "Memset": ("Memset (Device)",),
}
FORWARD, BACKWARD, GRADIENT, JOIN = (NAMES[kind][0] for kind in ("forward", "backward", "gradient", "join_kernel"))
TOGETHER = (FORWARD, BACKWARD, GRADIENT, JOIN)
UPDATE = (
    "void capsfast::cuda::update_kernel<capsfast::cuda::ForwardSteps<float>>"
    "(capsfast::cuda::UpdateArgs<capsfast::cuda::ForwardSteps<float>>)"
)
APART = (*(FORWARD, UPDATE) * 3, *(BACKWARD, UPDATE) * 2, GRADIENT, JOIN)


def test_kernels_by_name(gpu: Any) -> None:
    for kind, names in NAMES.items():
        for name in names:
            assert gpu("predicted").kind_of(name) == kind, name


def test_passes_of_launches(gpu: Any) -> None:
    predicted = gpu("predicted")

    def passes(names: tuple[str, ...]) -> list[list[str]]:
        return [each for each in predicted.passes_of([predicted.kind_of(name) for name in names], 3) if each]

    assert passes(TOGETHER) == [["unweighted", "forward", "forward"], ["backward"] * 2, ["gradient"]]
    assert [name for each in passes(APART) for name in each] == [name for each in passes(TOGETHER) for name in each]
    assert {len(each) for each in passes(APART)} == {1}
    # One iteration has one pass and, but for the gradient, no backward.
    assert predicted.passes_of(["forward", "gradient"], 1) == [["unweighted"], ["gradient"]]


def test_prediction_is_the_busiest_of_three(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = gpu("predicted")
    monkeypatch.setattr(predicted, "PRODUCT_CLOCKS", 1.0)
    costs = {"a": predicted.Cost(400, 10, 10), "b": predicted.Cost(4, 200, 10), "c": predicted.Cost(4, 2, 30)}
    monkeypatch.setitem(predicted.COSTS, "float32", costs)
    on = predicted.Device(100, 1e9)
    # Nine tiles of samples.
    for name, clocks, limit in (("a", 100, "issue"), ("b", 200, "L1/shared"), ("c", 30, "tensor")):
        found = on.predict([name], 130, 50, "float32")
        assert found.seconds == pytest.approx(9 * 50 * clocks / 100 / 1e9) and found.limit == limit
    both = on.predict(["a", "b"], 130, 50, "float32")
    assert both.seconds == pytest.approx(9 * 50 * 300 / 100 / 1e9)
    assert both.instructions == 9 * 50 * 404 and both.limit == "issue, L1/shared"
    # One product for three.
    assert predicted.COSTS["bfloat16"]["forward"].products == 20


def trace_of(names: tuple[str, ...], calls: int) -> dict[str, Any]:
    events: list[dict[str, Any]] = [{"cat": "cpu_op", "name": "aten::empty", "ts": 0.0, "dur": 3.0}, {"ph": "M"}]
    for n in range(calls):
        for k, name in enumerate(names):
            args = {"registers per thread": 200 + k, "shared memory": 1024, "grid": [132, 1, 1], "block": [256, 1, 1]}
            # The first two calls are slow; 10, 11, ... µs in the others.
            dur = (100.0 if n < 2 else 10.0) + k
            events.append({"cat": "kernel", "name": name, "ts": 1000.0 * n + k, "dur": dur, "args": args})
    return {"traceEvents": events[::-1]}


def test_launches_of_a_trace(gpu: Any) -> None:
    kernels = gpu("kernels")
    found = kernels.launches(trace_of(TOGETHER, 6))
    assert [each.name for each in found[:4]] == list(TOGETHER)
    columns = kernels.positions(found, 6, 2)
    assert [len(column) for column in columns] == [4] * 4
    rows = kernels.rows_of(columns, kernels.layers()[0], gpu("predicted").Device(132, 2e9))
    assert [(row["kernel"], row["us"], row["registers"]) for row in rows] == [
        ("forward", 10.0, 200),
        ("backward", 11.0, 201),
        ("gradient", 12.0, 202),
        ("join_kernel", 13.0, 203),
    ]
    assert rows[0]["predicted_instructions"] == 8 * 1152 * (165 + 2 * 344) and "predicted_us" not in rows[3]
    # A launch too few: by name.
    assert [len(column) for column in kernels.positions(found[1:], 6, 2)] == [6, 6, 6, 5]


FAKE_NCU = """#!/usr/bin/env python3
import json, os, sys
words = sys.argv[1:]
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(json.dumps([words, os.environ.get("CAPSFAST_COOPERATIVE")]) + "\\n")
names = json.load(open(os.environ["FAKE_NAMES"]))
if "--query-metrics" in words:
    print("Device NVIDIA H100\\n----\\nMetric Name  Metric Type\\n----")
    for name in names["known"]:
        print(f"{name}   Counter   inst   # of things")
elif "--import" in words and "--csv" in words:
    together = "together" in open(words[words.index("--import") + 1]).read()
    print("==WARNING== a line that is no table")
    print(",".join(f'"{each}"' for each in ("ID", "Process ID", "Kernel Name", *names["metrics"])))
    print(",".join('""' for _ in range(3 + len(names["metrics"]))))
    for n, name in enumerate(names["together"] * 8 if together else names["apart"] * 2):
        values = ",".join(f'"{1000 + n:,}"' for _ in names["metrics"])
        print(f'"{n}","17","{name}",{values}')
elif "--import" in words:
    print("details of a report")
else:
    if os.environ.get("FAKE_FAILS") == os.environ["CAPSFAST_COOPERATIVE"]:
        sys.exit("==ERROR== no counters")
    with open(words[words.index("-o") + 1], "w") as report:
        report.write({"1": "together", "0": "apart"}[os.environ["CAPSFAST_COOPERATIVE"]])
"""
KNOWN = ("smsp__inst_executed", "l1tex__data_pipe_lsu_wavefronts", "gpu__time_duration", "gpu__dram_throughput")


@pytest.fixture
def ncu(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that takes the words of ncu and answers in its formats."""
    program = tmp_path / "ncu"
    program.write_text(FAKE_NCU)
    program.chmod(0o755)
    metrics = ["gpu__time_duration.sum", "smsp__inst_executed.sum", "l1tex__data_pipe_lsu_wavefronts.sum"]
    rows = [name for name in APART if "accumulate" in name or "gradient" in name]
    names = {"known": KNOWN, "metrics": metrics, "together": TOGETHER[:3], "apart": rows}
    (tmp_path / "names.json").write_text(json.dumps(names))
    monkeypatch.setenv("FAKE_NAMES", str(tmp_path / "names.json"))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "ncu.log"))
    monkeypatch.setenv("STEP_SECONDS", "60")
    return program


def test_counters_of_every_launch(gpu: Any, ncu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_step(gpu, monkeypatch, "counters", tmp_path / "result.json", "--ncu", str(ncu))
    assert found["metrics"]["instructions"] == "smsp__inst_executed.sum"
    assert found["metrics"]["dram"].startswith("gpu__dram_throughput.") and "tensor" not in found["metrics"]
    assert [(each["mode"], each["dtype"], each["B"]) for each in found["counters"]] == [
        *(("together", dtype, B) for dtype in ("float32", "bfloat16") for B in (128, 256, 512, 1024)),
        ("apart", "float32", 128),
        ("apart", "bfloat16", 128),
    ]
    assert [each["passes"] for each in found["counters"][-1]["launches"]] == [
        *(["unweighted"], ["forward"], ["forward"], ["backward"], ["backward"], ["gradient"])
    ]
    assert found["counters"][1]["launches"][0]["instructions"] == 1003
    calls = [json.loads(text) for text in (tmp_path / "ncu.log").read_text().splitlines()]
    for words, _ in calls:
        # Nothing but reading of the device: its clocks stay.
        assert "--clock-control" not in words or words[words.index("--clock-control") + 1] == "none"
    assert [value for words, value in calls if "--metrics" in words] == ["1", "0"]


def test_counters_of_one_mode_stay_when_the_other_fails(
    gpu: Any, ncu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAILS", "0")
    with pytest.raises(SystemExit, match=r"apart: exit status 1: ==ERROR== no counters"):
        run_step(gpu, monkeypatch, "counters", tmp_path / "result.json", "--ncu", str(ncu))
    assert len(json.loads((tmp_path / "result.json").read_text())["counters"]) == 8


def test_what_ncu_watches_ends_with_it(gpu: Any, tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = f"""
        import subprocess, sys, time
        open({str(child)!r}, "w").write(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(60)
    """
    with pytest.raises(RuntimeError, match="stopped after 2 s"):
        gpu("ncu").call(python(code), 2.0)
    status = Path(f"/proc/{child.read_text()}/stat")
    deadline = time.monotonic() + 5
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_profile_lies_beside_where_to_look(
    gpu: Any, ncu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["profile", "--ncu", str(ncu), "--out", str(tmp_path)])
    gpu("profile").main()
    text = (tmp_path / "profile.txt").read_text()
    assert text.startswith("Profiles of the rows kernels") and text.count("details of a report") == 2
    assert {path.name for path in tmp_path.glob("*.ncu-rep")} == {"profile-apart.ncu-rep", "profile-together.ncu-rep"}
    (tmp_path / "profile-together.ncu-rep").unlink()
    monkeypatch.setenv("FAKE_FAILS", "1")
    with pytest.raises(SystemExit, match="together: exit status 1"):
        gpu("profile").main()
    assert (tmp_path / "profile.txt").read_text().count("details of a report") == 1


def test_summary_of_kernels(gpu: Any, tmp_path: Path) -> None:
    kernels, predicted = gpu("kernels"), gpu("predicted")
    case, on = kernels.layers()[0], predicted.Device(132, 2e9)
    calls = []
    for mode, names in (("together", TOGETHER), ("apart", APART)):
        rows = kernels.rows_of(kernels.positions(kernels.launches(trace_of(names, 4)), 4, 2), case, on)
        calls.append(
            {"mode": mode, "dtype": "float32", "B": 128, "hertz": 2e9, "multiprocessors": 132} | {"launches": rows}
        )
    counted = {"kernel": "forward", "passes": ["unweighted", "forward", "forward"], "instructions": 9e6, "issue": 61.5}
    counters = [{"mode": "together", "dtype": "float32", "B": 128, "launches": [counted]}]
    runner = gpu("runner").Runner(tmp_path / "gpu-check", 60, {})
    runner._keep(outcome(gpu, "kernels", kernels=calls))
    runner._keep(outcome(gpu, "counters", counters=counters))
    page = gpu("summary").page(tmp_path)
    assert "132 multiprocessors at 2000 to 2000 MHz" in page
    lines = {text.split("|")[1].strip(): text for text in page.splitlines() if text.startswith("| float32 B=128")}
    # Of equal launches of a call one is left here.
    assert len(lines) == len(TOGETHER) + 1 + 6 + 1
    forward = lines["float32 B=128 together: forward (unweighted, forward, forward)"]
    assert "| 9 / 7.86 |" in forward and "| 61.5 |" in forward and "| 10.0 |" in forward
    assert "| - / 3.17 |" in lines["float32 B=128 apart: forward (forward)"]
    assert "| 46.0 |" in lines["float32 B=128 together: all"]


def test_summary_by_batch_size(gpu: Any) -> None:
    from capsfast.bench.measure import Row
    from capsfast.bench.results import Results

    layer = gpu("layers").layers()[1]
    row = Row(layer, "capsfast cuda", "ok", "", {"median": 50e-6}, clock="graph", event_seconds={"median": 60e-6})
    slow = Row(layer, "torch.compile einsum", "failed", "out of memory")
    text = gpu("summary").batches_table(Results([row, slow]))
    assert "| float32 forward+backward B=256 | 50.0 / 60.0 | failed |" in text
    assert text.count("\n") == 2
