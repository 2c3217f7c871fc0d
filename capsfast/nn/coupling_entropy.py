"""The entropy of the coupling."""

import math

import torch
from torch import Tensor

from ..precision import wide_dtype
from . import _arguments
from ._layer import Layer


class CouplingEntropy(Layer):
    """Mean entropy ``-sum c log c`` of the coupling coefficients: 0 if every softmax is one-hot.

    As a term of a loss, it makes each capsule vote for fewer outputs (compare Renzulli, Tartaglione, Grangetto 2022).
    Empty softmaxes (masked capsules) count neither in the sum nor in the mean.

    Args:
        softmax: ``"out"`` or ``"in"``, as in the routing that made the coupling.
        normalize: divide by the entropy of equal coupling, ``log J`` or ``log I``, so that the largest value is 1.

    Shapes: ``coupling [B, I, J]`` to ``[]``; formed in float32 for 16-bit inputs.

    Raises:
        ValueError, TypeError: an option or an input that does not fit.
    """

    def __init__(self, softmax: str = "out", normalize: bool = True) -> None:
        super().__init__()
        self.softmax, self.normalize = softmax, normalize

    def forward(self, coupling: Tensor) -> Tensor:
        _arguments.floats(self._op, "coupling", coupling, "[B, I, J]")
        dim = 2 if self.softmax == "out" else 1
        c = coupling.to(wide_dtype(coupling.dtype))
        # log 1 instead of log 0: c log c is 0 there, and its derivative must be finite.
        entropy = -(c * torch.where(c > 0, c, 1).log()).sum(dim)
        filled = (coupling.detach() > 0).any(dim)
        size = c.shape[dim]
        most = math.log(size) if self.normalize and size > 1 else 1.0
        return entropy.sum() / filled.sum().clamp(min=1) / most
