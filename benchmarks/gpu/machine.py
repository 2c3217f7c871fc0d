"""Two steps: the machine and its versions; its measured limits. Nothing of it is changed."""

import argparse
import csv
import subprocess

import torch

from capsfast.bench import record
from capsfast.bench.limits import limits

from .common import publish

ASKED = (
    "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,temperature.gpu,power.draw,utilization.gpu"
)


def gpu_state() -> list[dict[str, str]]:
    """What nvidia-smi reads of every GPU, empty where there is none."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [
        dict(zip(ASKED.split(","), (cell.strip() for cell in row), strict=False))
        for row in csv.reader(answer.stdout.splitlines())
    ]


def describe(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        missing = f"torch {torch.__version__} ({built}) finds no CUDA device"
        publish({"missing": missing})
        raise SystemExit(missing)
    found = record.environment(device)
    publish(found)
    print(found["machine"].get("gpu") or found["machine"]["cpu"], found["versions"], flush=True)


def measure(device: torch.device) -> None:
    before = gpu_state()
    found = limits(device)
    publish({"limits": found, "gpu_before": before, "gpu_after": gpu_state()})
    for name, rate in found.items():
        print(f"{name.replace('_', ' ')}: {rate / 1e12:.3g} T", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limits", action="store_true", help="measure them")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if asked.limits:
        measure(device)
    else:
        describe(device)


if __name__ == "__main__":
    main()
