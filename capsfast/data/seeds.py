"""Random draws that depend on their purpose, not on earlier draws."""

from typing import Literal

import torch

# Each draw has its own seed, so that resumed and distributed runs need no saved random state.
Purpose = Literal["order", "transform", "attack", "step", "hold_out"]
PURPOSES: tuple[Purpose, ...] = ("order", "transform", "attack", "step", "hold_out")


def seed_for(seed: int, purpose: Purpose, *when: int) -> int:
    """A seed made from a run's seed, the purpose of the draw, and its time (epoch, step, rank)."""
    mixed = int(seed)  # a number of NumPy would overflow
    for number in (PURPOSES.index(purpose), *when):
        mixed = (mixed * 6364136223846793005 + int(number) + 1442695040888963407) % 2**63
    return mixed


def generator(seed: int, purpose: Purpose, *when: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed_for(seed, purpose, *when))
