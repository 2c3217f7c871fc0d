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

from .. import native
from .._version import __version__
from ..files import write_text
from ..nn import ROUTINGS
from .measure import Row, without_paths

FORMAT = 1


def _read(path: str, pattern: str) -> str:
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        return ""
    return found[1].strip() if found else ""


# Generations of CPUs, because the model name on a virtual machine often hides them ("AMD EPYC"): name, vendor, family,
# inclusive ranges of models, lowest and highest stepping. The first matching row counts. The numbers come from Linux
# (arch/x86/kernel/cpu/amd.c, arch/x86/include/asm/intel-family.h) and the vendors' specification updates.
AMD, INTEL = "AuthenticAMD", "GenuineIntel"
GENERATIONS: tuple[tuple[str, str, int, tuple[tuple[int, int], ...], tuple[int, int]], ...] = (
    ("Zen+", AMD, 0x17, ((0x08, 0x08), (0x18, 0x18)), (0, 255)),
    ("Zen", AMD, 0x17, ((0x00, 0x2F), (0x50, 0x5F)), (0, 255)),
    ("Zen 2", AMD, 0x17, ((0x30, 0x4F), (0x60, 0x7F), (0x90, 0x91), (0xA0, 0xAF)), (0, 255)),
    ("Zen 3", AMD, 0x19, ((0x00, 0x0F), (0x20, 0x5F)), (0, 255)),
    ("Zen 4", AMD, 0x19, ((0x10, 0x1F), (0x60, 0xAF)), (0, 255)),
    ("Zen 5", AMD, 0x1A, ((0x00, 0x2F), (0x40, 0x4F), (0x60, 0x7F)), (0, 255)),
    ("Skylake-SP", INTEL, 6, ((0x55, 0x55),), (0, 4)),
    ("Cascade Lake", INTEL, 6, ((0x55, 0x55),), (5, 7)),
    ("Cooper Lake", INTEL, 6, ((0x55, 0x55),), (10, 11)),
    ("Ice Lake-SP", INTEL, 6, ((0x6A, 0x6A), (0x6C, 0x6C)), (0, 255)),
    ("Sapphire Rapids", INTEL, 6, ((0x8F, 0x8F),), (0, 255)),
    ("Emerald Rapids", INTEL, 6, ((0xCF, 0xCF),), (0, 255)),
    ("Granite Rapids", INTEL, 6, ((0xAD, 0xAE),), (0, 255)),
)


def microarchitecture(cpuinfo: str) -> str | None:
    """The generation of the first processor in the text of ``/proc/cpuinfo``, None if it is not in the table."""
    found = dict(re.findall(r"^(vendor_id|cpu family|model|stepping)\s*:\s*(\S+)", cpuinfo.partition("\n\n")[0], re.M))
    numbers = [found.get(key, "") for key in ("cpu family", "model", "stepping")]
    if not all(number.isdigit() for number in numbers):
        return None
    family, model, stepping = map(int, numbers)
    for name, *kind, models, (least, most) in GENERATIONS:
        known = kind == [found.get("vendor_id"), family] and least <= stepping <= most
        if known and any(first <= model <= last for first, last in models):
            return name
    return None


def machine(device: torch.device) -> dict[str, Any]:
    """CPU model and generation, cores, torch's threads, memory, and the GPU if a GPU is measured."""
    kib = _read("/proc/meminfo", r"MemTotal:\s+(\d+) kB")
    found: dict[str, Any] = {
        "cpu": _read("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor() or platform.machine(),
        "microarchitecture": microarchitecture(_read("/proc/cpuinfo", r"(?s)(.*)")),
        "cores": len(os.sched_getaffinity(0)),
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
    """The file stem for a kind of machine, such as ``amd-epyc-zen-5-2-threads``."""
    text = found.get("gpu") or f"{found['cpu']} {found.get('microarchitecture') or ''} {found['threads']} threads"
    text = re.sub(r"\((?:R|TM|C)\)|CPU|Processor|@.*?GHz", " ", text)
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def name(found: dict[str, Any], op: str, sweep: str) -> str:
    """The file stem of a record: the machine, then the routing, op or sweep if they are not the default ones."""
    what = f"routing-{op}" if op in ROUTINGS else op
    words = [machine_name(found), *([] if op in ("dynamic_routing", "both") else [what]), *["long"] * (sweep == "long")]
    return "-".join(words).replace("_", "-")


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


def checkout() -> Path | None:
    """The root of the checkout that the package was imported from, None for an installed copy."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "setup.py").is_file() and (root / "benchmarks" / "README.md").is_file() else None


def commit() -> dict[str, Any] | None:
    """The commit of the package's checkout and whether files were changed since; None if there is no checkout."""
    root = checkout()

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # A checkout without .git may lie in another project's checkout.
        if root is None or Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return None
        changed = git("status", "--porcelain", "--", "capsfast", "csrc")
        return {"hash": git("rev-parse", "HEAD"), "changed": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return None


def build_info() -> dict[str, Any] | None:
    """The build information of the extension, None without extension."""
    ask = getattr(native.extension, "build_info", None)
    found = ask() if callable(ask) else ask
    return json.loads(without_paths(json.dumps(found, default=str))) if isinstance(found, dict) else None


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
        if content["format"] == FORMAT:
            return content["environment"], [Row.from_dict(fields) for fields in content["rows"]]
    except (ValueError, TypeError, KeyError):  # not text, not JSON, or of another shape, such as a script's own rows
        pass
    raise ValueError(f"{path.name} is not a capsfast measurement of format {FORMAT}")
