"""Runs a function in two processes that form a gloo group. What fails in one of them fails in the caller."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

WORLD = 2
SECONDS = 120  # under load; a few are usual


def _one(rank: int, function: Callable[[int], None], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    function(rank)
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's tidy end. A device mesh and DistributedDataParallel keep the group and its threads past
    # destroy_process_group(). A thread that frees a tensor's Python object while the interpreter ends is unwound by it,
    # which aborts ("terminate called without an active exception"), or has its destructor wait for it with the GIL.
    os._exit(0)


def on_two_ranks(function: Callable[[int], None], folder: Path) -> None:
    """``function(rank)`` of a module that a new process can import."""
    workers = torch.multiprocessing.spawn(_one, args=(function, str(folder)), nprocs=WORLD, join=False)
    deadline = time.monotonic() + SECONDS
    try:
        while not workers.join(timeout=5):
            assert time.monotonic() < deadline, "the processes hang"
    finally:
        for process in workers.processes:
            process.kill()
