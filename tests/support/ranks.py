"""Runs a function in two processes that form a gloo group. A failure in either process fails in the caller."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

WORLD = 2
SECONDS = 120  # enough under load; a run takes a few


def _one(rank: int, function: Callable[[int], None], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    function(rank)
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # Exits without the cleanup of the interpreter. A device mesh and DistributedDataParallel keep the group and its
    # threads after destroy_process_group(). If such a thread frees a tensor's Python object during cleanup, the process
    # aborts ("terminate called without an active exception"), or the destructor waits for the thread while holding the
    # GIL.
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
