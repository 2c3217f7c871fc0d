"""The mean vote of an output capsule."""

import torch
from torch import Tensor

# Below it a mass is 0: no input capsule is coupled, and there is no mean.
LEAST_MASS = 1e-12


def mean_vote(mass: Tensor, first: Tensor) -> Tensor:
    """``first [B, J, D] / mass [B, J]``, and 0 with the gradient of 0 where there is no mass."""
    there = mass > LEAST_MASS
    divisor = torch.where(there, mass, 1.0)[..., None]
    return torch.where(there[..., None], first / divisor, 0.0)
