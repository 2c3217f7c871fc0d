"""What a measurement is worth nothing without: machine, versions, commit; and the file it is kept in."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import native
from .._version import __version__
from ..files import write_text
from .measure import Row, without_paths
from .microarchitecture import of_cpuinfo

FORMAT = 1


def _read(path: str, pattern: str) -> str:
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        return ""
    return found[1].strip() if found else ""


def cores() -> int:
    """Those this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine(device: torch.device) -> dict[str, Any]:
    """CPU model and generation, cores, torch's threads, memory, and the GPU if that is what is measured."""
    kib = _read("/proc/meminfo", r"MemTotal:\s+(\d+) kB")
    found: dict[str, Any] = {
        "cpu": _read("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor() or platform.machine(),
        "microarchitecture": of_cpuinfo(_read("/proc/cpuinfo", r"(?s)(.*)")),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(int(kib) / 2**20, 1) if kib else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": device.type,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
    return found


def machine_name(found: dict[str, Any]) -> str:
    """A file stem for the kind of machine, such as ``amd-epyc-zen-5-2-threads``."""
    text = found.get("gpu") or f"{found['cpu']} {found.get('microarchitecture') or ''} {found['threads']} threads"
    text = re.sub(r"\((?:R|TM|C)\)|CPU|Processor|@.*?GHz", " ", text)
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def name(found: dict[str, Any], op: str, sweep: str = "", routing: str = "") -> str:
    """Of a record: that of its machine. One of route_votes alone, of routings or of the sweep long is beside it."""
    words = [machine_name(found)]
    if routing:
        words.append("routings" if routing == "all" else f"routing-{routing}")
    if op == "route_votes":
        words.append("route-votes")
    if sweep == "long":
        words.append("long")
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower())


def _triton() -> str | None:
    # Its import takes a second and is not needed for the version.
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
    """The commit of the checkout the package runs from and whether it was changed since, None elsewhere."""
    root = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # An environment inside another project's checkout is not a checkout of capsfast.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return None
        changed = git("status", "--porcelain", "--", "capsfast", "csrc")
        return {"hash": git("rev-parse", "HEAD"), "changed": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (bool, int, float)) or value is None:
        return value
    return without_paths(str(value))


def build_info() -> dict[str, Any] | None:
    """What the extension says of its own build, None without extension."""
    ask = getattr(native.extension, "build_info", None)
    found = ask() if callable(ask) else ask
    return _plain(found) if isinstance(found, dict) else None


def environment(device: torch.device) -> dict[str, Any]:
    return {
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
        "build": build_info(),
    }


def save(path: Path, surroundings: dict[str, Any], rows: Sequence[Row]) -> None:
    """Writes the record whole or not at all: an interruption leaves the one before."""
    # One row a line: a new measurement is a readable change in git.
    lines = ",\n".join("  " + json.dumps(row.as_dict()) for row in rows)
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
    except ValueError:  # neither JSON nor text
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path.name} is not a capsfast measurement of format {FORMAT}")
    return content["environment"], [Row.from_dict(fields) for fields in content["rows"]]
