"""Inverted dot-product attention routing."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Capsules, IterativeRouting
from .votes import Votes


class InvertedAttentionRouting(IterativeRouting):
    """Inverted dot-product attention (Tsai, Srivastava, Goh, Salakhutdinov 2020, procedure 1).

    ``pose_j = LayerNorm(sum_i softmax_j(vote_ij . pose_j) vote_ij)``, starting with poses 0. Nothing accumulates. After
    the LayerNorm all poses are about equally long. The activation is the sigmoid of the paper's classifier, a linear
    map of the pose that all output capsules share.

    :class:`capsfast.models.InvertedAttentionCapsNet` updates several layers at once.

    Parameters: ``gain [out_dim]`` and ``shift [out_dim]`` of the LayerNorm, starting at 1 and 0; ``readout [out_dim]``
    and ``offset []``, the classifier.

    Args:
        out_dim: D, at least 2: a LayerNorm of one number is a constant.
        num_iterations: number of passes, each of which forms new poses. The first has equal coupling.
        scaled: divide the agreement by ``sqrt(out_dim)``, as in the authors' code but not in the paper's equation 2.
        learned_readout: False omits the classifier, and activations are 1: for a layer whose activations are not used.
        all others: as for :class:`Routing`.
    """

    independent = True
    readout: nn.Parameter | None
    offset: nn.Parameter | None

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        *,
        num_iterations: int = 2,
        scaled: bool = False,
        learned_readout: bool = True,
        **made: Any,
    ) -> None:
        super().__init__(in_caps, out_caps, in_dim, out_dim, num_iterations=num_iterations, **made)
        if out_dim < 2:
            raise ValueError(f"{self._op}: out_dim must be at least 2, got 1; a LayerNorm of one number is a constant")
        self.scaled = scaled
        self.gain = nn.Parameter(torch.ones(out_dim, **self._made))
        self.shift = nn.Parameter(torch.zeros(out_dim, **self._made))
        self.register_parameter("readout", None)
        self.register_parameter("offset", None)
        if learned_readout:
            limit = out_dim**-0.5
            self.readout = nn.Parameter(torch.empty(out_dim, **self._made).uniform_(-limit, limit))
            self.offset = nn.Parameter(torch.zeros((), **self._made))

    def weight_std(self, summed: int) -> float:
        # As in the authors' code: with equal coupling the first sum does not grow with the number of input capsules.
        return float((self.out_caps / (self.in_caps * summed)) ** 0.5)

    def query(self, pose: Tensor) -> Tensor:
        """The query of a pass for poses ``[B, J, D]``."""
        return pose / math.sqrt(self.out_dim) if self.scaled else pose

    def update(self, votes: Votes, pose: Tensor | None) -> Tensor:
        """The next poses ``[B, J, D]`` from the last poses (None for 0), by one pass."""
        s = votes.moments(query=None if pose is None else self.query(pose)).first
        return F.layer_norm(s, (self.out_dim,), self.gain.to(s.dtype), self.shift.to(s.dtype))

    def logit(self, pose: Tensor) -> Tensor:
        """``[B, J, D]`` to ``[B, J]``, the logits of the activations."""
        if self.readout is None or self.offset is None:
            raise RuntimeError(f"{self._op}: there is no classifier; build the routing with learned_readout=True")
        return (pose * self.readout).sum(-1) + self.offset

    def route(self, votes: Votes, activation: Tensor | None, pose: Tensor | None = None) -> Capsules:
        """``pose [B, J, D]``: the poses that the routing starts with, None for 0."""
        for _ in range(self.num_iterations):
            pose = self.update(votes, pose)
        assert pose is not None
        return Capsules(pose, self.logit(pose).sigmoid() if self.readout is not None else torch.ones_like(pose[..., 0]))
