"""A step: the first call of a process, kernels compiled anew, then from the disk; one process each."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .common import fused_backends, publish


def in_a_process(name: str, device: str, cache: str, rehearse: bool) -> dict[str, float]:
    words = [sys.executable, "-m", "gpu.first_call", "--device", device, "--backend", name]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    answer = subprocess.run(words + ["--rehearse"] * rehearse, capture_output=True, text=True, env=environment)
    if answer.returncode != 0:
        raise SystemExit(f"{name} failed:\n{answer.stderr}")
    return json.loads(answer.stdout.splitlines()[-1])


def measure(name: str, device: str, rehearse: bool) -> dict[str, float]:
    """Seconds of the first forward, of the first forward and backward after it, and of the same once more."""
    import torch

    from capsfast.bench.cases import CANONICAL
    from capsfast.bench.contenders import OURS, contender
    from capsfast.bench.inputs import input_set, step

    small = {"B": 2, "I": 16} if rehearse else {}
    case = dataclasses.replace(CANONICAL, direction="forward+backward", **small)
    where = torch.device(device)
    inputs = input_set(case, where)
    forward = contender(OURS + name).make(case)
    both = step(forward, case, [inputs])

    def timed(call) -> float:
        begin = time.perf_counter()
        call()
        if where.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    timed(lambda: torch.randn(64, 64, device=where) @ torch.randn(64, 64, device=where))
    return {
        "forward": timed(lambda: forward(*inputs.tensors)),
        "forward+backward": timed(lambda: both(0)),
        "again": timed(lambda: both(0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", help="measure it in this process")
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args()
    if asked.backend:
        print(json.dumps(measure(asked.backend, asked.device, asked.rehearse)))
        return
    found = {}
    for name in fused_backends(asked.device):
        with tempfile.TemporaryDirectory() as cache:
            cold = in_a_process(name, asked.device, cache, asked.rehearse)
            kernels = len(list(Path(cache).rglob("*.cubin")))
            warm = in_a_process(name, asked.device, cache, asked.rehearse)
        found[name] = {"cold": cold, "from_disk": warm, "kernels_compiled": kernels}
        publish({"first_call": found})
        print(f"{name}: {kernels} kernels compiled; seconds: {cold}; from the disk {warm}", flush=True)


if __name__ == "__main__":
    main()
