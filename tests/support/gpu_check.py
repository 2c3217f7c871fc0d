"""What the tests of benchmarks/gpu_check.py share."""

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def outcome(gpu: Any, name: str, **result: Any) -> Any:
    return gpu("runner").Outcome(name, "ok", result=result)


def run_step(gpu: Any, monkeypatch: pytest.MonkeyPatch, name: str, result: Path, *words: str) -> dict[str, Any]:
    monkeypatch.setenv("STEP_RESULT", str(result))
    monkeypatch.setattr(sys, "argv", [name, *words])
    gpu(name).main()
    return json.loads(result.read_text())
