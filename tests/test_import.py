"""``import capsfast`` is light: torch, and next to nothing besides."""

import statistics
import subprocess
import sys

import torch

HEAVY = ("lightning", "lightning_fabric", "pytorch_lightning", "matplotlib", "sklearn", "rich", "typer", "tensorboard")
OWN = ("capsfast.bench", "capsfast.cli", "capsfast.data", "capsfast.train")
SECONDS = 0.1


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_nothing_heavy_is_imported() -> None:
    modules = set(python("import capsfast, sys; print(*sys.modules)").split())
    by_torch = set(python("import torch, sys; print(*sys.modules)").split())
    assert "capsfast.models" in modules
    found = {name for name in modules - by_torch if name.split(".")[0] in (*HEAVY, "triton") or name.startswith(OWN)}
    assert not found
    assert not {name for name in modules - by_torch if name.startswith("torch.distributed.tensor")}


def test_it_costs_a_tenth_of_a_second_on_top_of_torch() -> None:
    """Timed inside of a process that has torch, so that torch's own seconds don't hide it; the median of three."""
    code = "import torch, time; start = time.perf_counter(); import capsfast; print(time.perf_counter() - start)"
    assert statistics.median(float(python(code)) for _ in range(3)) <= SECONDS, torch.__version__
