"""Runs a function in two processes that form a gloo group. What fails in one of them fails in the caller."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

WORLD = 2


def _one(rank: int, function: Callable[[int], None], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    try:
        function(rank)
    finally:
        dist.destroy_process_group()


def on_two_ranks(function: Callable[[int], None], folder: Path) -> None:
    """``function(rank)`` of a module that a new process can import."""
    torch.multiprocessing.spawn(_one, args=(function, str(folder)), nprocs=WORLD)
