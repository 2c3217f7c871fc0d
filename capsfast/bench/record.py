"""Records of measurements: machine, versions and commit with the results, in a JSON file."""

import dataclasses
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..environment import native
from ..storage.files import write_text
from .measure import Row, without_paths

FORMAT = 1


def _read(path: str, pattern: str) -> str:
    try:
        match = re.search(pattern, Path(path).read_text())
    except OSError:
        return ""
    return match[1].strip() if match else ""


def machine(device: torch.device) -> dict[str, Any]:
    """CPU model, cores, torch's threads, memory, and the GPU if a GPU is measured."""
    # The model name on a virtual machine often hides the generation ("AMD EPYC"); these numbers tell it.
    numbers = [_read("/proc/cpuinfo", rf"(?m)^{key}\s*:\s*(\d+)") for key in ("cpu family", "model", "stepping")]
    kib = _read("/proc/meminfo", r"MemTotal:\s+(\d+) kB")
    facts: dict[str, Any] = {
        "cpu": _read("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor() or platform.machine(),
        "family_model_stepping": "-".join(numbers) if all(numbers) else None,
        # macOS and Windows can't say which cores the process may use.
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(int(kib) / 2**20, 1) if kib else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": device.type,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = properties.name
        facts["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        facts["compute_capability"] = f"{properties.major}.{properties.minor}"
    return facts


def machine_name(facts: dict[str, Any]) -> str:
    """The file stem for a kind of machine, such as ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", (facts.get("gpu") or facts["cpu"]).lower()).strip("-")


def _triton() -> str | None:
    # Importing triton takes a second and is not needed for the version.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def versions() -> dict[str, Any]:
    return {
        "capsfast": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton(),
        "cuda": torch.version.cuda,
        "system": f"{platform.system()} {platform.machine()}",
    }


def commit() -> dict[str, Any] | None:
    """The commit of the package's checkout and whether files were changed since; None if there is no checkout."""
    root = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # An installed copy, or a checkout without .git, may lie in another project's checkout.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return None
        changed = git("status", "--porcelain", "--", "capsfast", "csrc")
        return {"hash": git("rev-parse", "HEAD"), "changed": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return None


def build_info() -> dict[str, Any] | None:
    """The build information of the extension, None without extension."""
    ask = getattr(native.extension, "build_info", None)
    built = ask() if callable(ask) else ask
    return json.loads(without_paths(json.dumps(built, default=str))) if isinstance(built, dict) else None


def environment(device: torch.device) -> dict[str, Any]:
    return {
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
        "build": build_info(),
    }


def save(path: Path, surroundings: dict[str, Any], rows: Sequence[Row]) -> None:
    """Writes the complete record or nothing: an interruption leaves the previous record."""
    # One row per line, so that git shows readable changes.
    lines = ",\n".join("  " + json.dumps(dataclasses.asdict(row)) for row in rows)
    text = f'{{"format": {FORMAT},\n "environment": {json.dumps(surroundings)},\n "rows": [\n{lines}\n]}}\n'
    write_text(path, text)


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """The environment and the rows of a record.

    Raises:
        OSError: the file can't be read.
        ValueError: not a record of this format.
    """
    try:
        content = json.loads(path.read_text())
        if content["format"] == FORMAT and content["environment"]["machine"]:
            return content["environment"], [Row.from_dict(fields) for fields in content["rows"]]
    except OSError:
        raise
    except Exception:  # not text, not JSON, or of another shape, such as a script's own rows
        pass
    raise ValueError(f"{path.name} is not a capsfast measurement of format {FORMAT}")
