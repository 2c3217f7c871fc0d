"""Random draws that depend on what they are for, not on what was drawn before."""

from typing import Literal

import torch

# A resumed run and the ranks of a distributed one need no saved random state: each draw has its own name.
Purpose = Literal["order", "transform", "attack", "step"]
PURPOSES: tuple[Purpose, ...] = ("order", "transform", "attack", "step")


def seed_for(seed: int, purpose: Purpose, *when: int) -> int:
    """One number for a run's seed, what is drawn, and when (epoch, step, rank)."""
    mixed = seed
    for each in (PURPOSES.index(purpose), *when):
        mixed = (mixed * 6364136223846793005 + each + 1442695040888963407) % 2**63
    return mixed


def generator(seed: int, purpose: Purpose, *when: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed_for(seed, purpose, *when))
