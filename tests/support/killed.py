"""Kills training runs: ``python -m tests.support.killed IMAGES OUT``. Each run has a folder in OUT.

One process loads torch and Lightning and forks all runs, so many runs cost little.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .training import trained

# Seconds after the first checkpoint; a step and its checkpoint take about 0.02.
TIMES = [0.0, 0.005, 0.01, 0.05, 0.2]
# At which checkpoints runs are killed. Each step writes one.
MOMENTS = {"writing": [1, 4], "written": [5], "renaming": [7], "renamed": [6]}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half(path: Path, content: Any) -> None:
    with path.open("wb") as file:
        file.write(memoryview(content)[: len(content) // 2])
        file.flush()
        die()


def set_trap(moment: str, call: int) -> None:
    """Makes the process die at this moment of writing the ``call``-th file."""
    owner, name = {"writing": (Path, "write_bytes"), "written": (os, "fsync")}.get(moment, (Path, "replace"))
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def trapped(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < call:
            return original(*arguments)
        if moment == "writing":
            half(*arguments)
        if moment == "renamed":
            original(*arguments)
        die()

    setattr(owner, name, trapped)


def run(images: Path, out: Path, prepare: Callable[[], None], seconds: float | None, **more: Any) -> None:
    pid = os.fork()
    if pid == 0:
        prepare()
        trained(images, out, checkpoint_every=1, **more)
        os._exit(0)
    if seconds is not None:
        while not (out / "step.ckpt").exists() and os.waitpid(pid, os.WNOHANG) == (0, 0):
            time.sleep(0.001)
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (out, status)


def main(images: Path, out: Path) -> None:
    for seconds in TIMES:
        run(images, out / f"after-{seconds}", lambda: None, seconds, epochs=1000)
    for moment, calls in MOMENTS.items():
        for call in calls:
            run(images, out / f"{moment}-{call}", lambda moment=moment, call=call: set_trap(moment, call), None)  # type: ignore[misc]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
