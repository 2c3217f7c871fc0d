"""What the models return."""

from typing import NamedTuple

from torch import Tensor


class CapsNetOutput(NamedTuple):
    """lengths ``[B, J]``, with a routing that has activations these; capsules ``[B, J, D]``; reconstruction
    ``[B, C, H, W]`` or None."""

    lengths: Tensor
    capsules: Tensor
    reconstruction: Tensor | None
