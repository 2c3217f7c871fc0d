"""pytest benchmarks: one group for a case, a reason for every skipped contender, no wrong result timed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pytest_benchmark")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this checkout without a build."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "results")
    for folder in ("capsfast", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "benchmarks", "--sweep", "smoke", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "TRITON_INTERPRET": "0"}
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)


def test_contenders_of_a_case_are_one_group_and_missing_backends_are_named(checkout: Path) -> None:
    words = ["-k", "B4-I64-J10-fwd and not compiled", "-rs", "--benchmark-json", "found.json"]
    answer = run(checkout, *words)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"from {checkout / 'capsfast'}" in answer.stdout
    assert "cpp: there is no extension" in answer.stdout and "1 passed, 1 skipped" in answer.stdout
    (found,) = json.loads((checkout / "found.json").read_text())["benchmarks"]
    assert (found["group"], found["name"]) == ("B4-I64-J10-fwd", "test_routing[B4-I64-J10-fwd-eager]")
    assert found["extra_info"]["I"] == 64 and found["extra_info"]["errors"]["v"] < 1e-5


# A plugin that stands for a GPU whose replays take 2 ms, and that refuses the second capture.
FAKED = """
import time, torch
from capsfast.bench import contenders, inputs, measure, timing

sets, captured = inputs.input_sets, []

class Replay:
    def replay(self):
        time.sleep(0.002)

def capture(one):
    captured.append(one)
    if len(captured) > 1:
        raise RuntimeError("no capture")
    return Replay()

torch.cuda.is_available = lambda: True
torch.cuda.get_device_name = lambda: "GPU"
torch.cuda.synchronize = lambda device=None: None
contenders.backends = dict
inputs.input_sets = lambda case, device: sets(case, torch.device("cpu"))
measure.free_bytes = lambda device: None
timing.capture, timing.host_seconds = capture, lambda one, device: 0.25
timing.interleave = lambda steps, *how: {"": timing.Timing.of([0.5])}
"""


def test_on_a_gpu_a_round_is_several_replays_of_a_graph_or_eager_calls(checkout: Path) -> None:
    (checkout / "faked.py").write_text(FAKED)
    answer = run(checkout, "-p", "faked", "--device", "cuda", "-k", "fwd and eager", "--benchmark-json", "found.json")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    graph, eager = json.loads((checkout / "found.json").read_text())["benchmarks"]
    assert graph["group"] == "cuda-B4-I64-J10-fwd" and 0.002 < graph["stats"]["min"] < 0.01
    assert eager["stats"]["iterations"] == 20
    noted = [[each["extra_info"][name] for name in ("timed", "eager", "host")] for each in (graph, eager)]
    assert noted == [["in a CUDA graph", 0.5, 0.25], ["eager; no CUDA graph: RuntimeError: no capture", 0.5, 0.25]]
