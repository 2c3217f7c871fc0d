"""``import capsfast`` is light: torch, and next to nothing besides."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import capsfast

HEAVY = ("lightning", "lightning_fabric", "pytorch_lightning", "matplotlib", "sklearn", "rich", "typer", "tensorboard")
OWN = tuple(f"capsfast.{name}" for name in ("adopt", "bench", "cli", "compat", "data", "export", "models", "train"))
SECONDS = 0.1


def python(code: str, environment: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def test_nothing_heavy_is_imported() -> None:
    modules = set(python("import capsfast, sys; print(*sys.modules)").split())
    by_torch = set(python("import torch, sys; print(*sys.modules)").split())
    assert "capsfast.nn" in modules
    found = {name for name in modules - by_torch if name.split(".")[0] in (*HEAVY, "triton") or name.startswith(OWN)}
    assert not found
    assert not {name for name in modules - by_torch if name.startswith("torch.distributed.tensor")}


def test_networks_are_imported_when_they_are_asked_for() -> None:
    code = "import capsfast; assert 'models' in dir(capsfast); print(capsfast.models.CapsNet.__name__)"
    assert python(code).strip() == "CapsNet"
    code = "import capsfast; assert 'compat' in dir(capsfast); print(capsfast.compat.Router.__name__)"
    assert python(code).strip() == "Router"
    with pytest.raises(AttributeError, match="module 'capsfast' has no attribute 'magic'"):
        capsfast.magic  # noqa: B018


def test_it_costs_a_tenth_of_a_second_on_top_of_torch(tmp_path: Path) -> None:
    """Of the processor, in a process that has torch, so that torch's own seconds don't hide it; the least of three.

    The first one compiles the package's modules, as it is after an installation.
    """
    code = "import torch, time; start = time.process_time(); import capsfast; print(time.process_time() - start)"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert min(float(python(code, environment)) for _ in range(3)) <= SECONDS, torch.__version__
