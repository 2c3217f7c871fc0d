"""A step: what ncu counts of the rows kernels, with all passes in one launch and with a launch for each."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from capsfast.bench.cases import CANONICAL

from . import ncu
from .common import publish
from .kernels import MODES
from .layers import BATCHES, layers

# Every batch size where launches are few; two dtypes where each pass has one.
LAYERS = {"together": ("layers", BATCHES), "apart": ("dtypes", BATCHES[:1])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ncu", required=True, help="the program")
    program = parser.parse_args().ncu
    clock = ncu.Clock()
    metrics = ncu.known(program, min(20.0, clock.left))
    found: list[dict[str, Any]] = []
    bad = []
    for mode, (name, batches) in LAYERS.items():
        try:
            with tempfile.TemporaryDirectory() as folder:
                kernels = ncu.counters(program, metrics, name, MODES[mode], Path(folder), clock)
        except RuntimeError as error:
            bad.append(f"{mode}: {error}")
            continue
        calls = ncu.by_call(kernels)
        cases = layers(batches)
        if len(calls) != len(cases):
            bad.append(f"{mode}: {len(calls)} calls of {len(cases)}")
        for case, each in zip(cases, calls, strict=False):
            launches = ncu.with_passes(each, CANONICAL.r)
            found.append({"mode": mode, "dtype": case.dtype, "B": case.B, "launches": launches})
            for launch in launches:
                counts = ", ".join(f"{key} {value:.6g}" for key, value in launch.items() if isinstance(value, float))
                print(f"{mode}, {case.dtype} B={case.B}, {launch['kernel']}: {counts}", flush=True)
        publish({"counters": found, "metrics": metrics})
    if bad:
        raise SystemExit("; ".join(bad))


if __name__ == "__main__":
    main()
