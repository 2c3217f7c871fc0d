"""A step: one network of full size trained, by the command of docs/training.md."""

import argparse
import json
import subprocess
from pathlib import Path

from .common import publish
from .networks import RUNS, words
from .runner import python


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--run", required=True, choices=sorted(RUNS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args()
    command = python("-m", "capsfast", *words(asked.run, asked.device, asked.out, asked.rehearse))
    subprocess.run(command, check=True)
    record = json.loads((asked.out / "training" / asked.run / "record.json").read_text(encoding="utf-8"))
    publish({name: record[name] for name in ("results", "seconds", "steps", "epochs", "parameters")})


if __name__ == "__main__":
    main()
