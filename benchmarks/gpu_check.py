"""Everything there is to check on a machine with an NVIDIA GPU; make gpu-check.

Needs no network and installs nothing: Python with a CUDA torch, and as far as there are nvcc, pytest,
compute-sanitizer and ncu. README.md beside this says what it does and where the results go.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from gpu.plan import Plan, own_environment
from gpu.runner import FAILED, INTERRUPTED, LATE, OK, Runner, python

HERE = Path(__file__).resolve().parent
SECONDS = 530.0
# Most of it is one training after another: what fits a call of ten minutes.
TRAINING_SECONDS = 590.0
SUMMARY_SECONDS = 60.0


def write_summary(out: Path) -> None:
    """check.md, and the same on the terminal."""
    command = python("-m", "gpu.summary", "--out", str(out))
    try:
        subprocess.run(command, env={**os.environ, **own_environment()}, timeout=SUMMARY_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        print("no summary: it took too long", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"for everything (default {SECONDS:.0f}, with --train {TRAINING_SECONDS:.0f})",
    )
    parser.add_argument("--no-profile", action="store_true", help="without ncu")
    parser.add_argument("--only", default="", help="steps by what their names begin with, such as kernels,sweep,tests")
    parser.add_argument("--train", action="store_true", help="train networks of full size, and nothing else")
    parser.add_argument(
        "--rehearse", action="store_true", help="the same steps on the CPU with small layers: no result"
    )
    asked = parser.parse_args()
    seconds = asked.seconds if asked.seconds is not None else TRAINING_SECONDS if asked.train else SECONDS
    out = Path(os.environ.get("OUT") or HERE / "results").resolve()
    device = "cpu" if asked.rehearse else "cuda"

    runner = Runner(out / "gpu-check", seconds, {"rehearsal": asked.rehearse})
    runner.heed_signals()
    only = [name for name in asked.only.split(",") if name]
    plan = Plan(runner, out, device, not asked.no_profile, only, asked.train)
    complete = runner.run(plan.groups())
    if plan.status("machine") == OK:
        write_summary(out)
    for each in runner.outcomes:
        if each.status != OK:
            print(f"{each.name}: {each.status}: {each.reason}", flush=True)
    if plan.status("machine") != OK:
        print("There is nothing to check here: the step machine says what is missing.", flush=True)
        return 2
    bad = [each.name for each in runner.outcomes if each.status in (FAILED, LATE, INTERRUPTED)]
    print(f"{'complete' if complete else 'interrupted'}; {'not ok: ' + ', '.join(bad) if bad else 'ok'}", flush=True)
    return 0 if complete and not bad else 1


if __name__ == "__main__":
    sys.exit(main())
