"""The result of the models."""

from typing import NamedTuple

from torch import Tensor

from ..environment.private_torch import result


@result
class CapsNetOutput(NamedTuple):
    """lengths ``[B, J]``, or the activations of a routing that has its own; capsules ``[B, J, D]``; reconstruction
    ``[B, C, H, W]`` or None."""

    lengths: Tensor
    capsules: Tensor
    reconstruction: Tensor | None
