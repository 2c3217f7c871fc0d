"""A step: what a call costs the host, beside torch.matmul."""

import argparse
import dataclasses

import torch

from capsfast.bench.overhead import MATMUL, ROUNDS, overheads

from .common import publish


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args()
    found = overheads(torch.device(asked.device), 2 if asked.rehearse else ROUNDS)
    publish({"host": {key: {n: dataclasses.asdict(t) for n, t in timings.items()} for key, timings in found.items()}})
    for direction, timings in found.items():
        for name, timing in timings.items():
            ratio = timing.median / timings[MATMUL].median
            print(f"{direction}, {name}: {timing.median * 1e6:.1f} µs, {ratio:.1f} times {MATMUL}", flush=True)


if __name__ == "__main__":
    main()
