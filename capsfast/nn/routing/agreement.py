"""Dynamic routing as one of the routings."""

from typing import Any

import torch
from torch import Tensor, nn

from ... import checks
from ...options import Options
from .. import _arguments
from .base import Capsules, IterativeRouting, lengths
from .votes import Votes


class AgreementRouting(IterativeRouting):
    """Dynamic routing (Sabour, Frosst, Hinton 2017, procedure 1).

    Where votes are made or given it is the fused op :func:`capsfast.dynamic_routing` or :func:`capsfast.route_votes`;
    across windows it is passes. The activation of an output capsule is its length. :class:`capsfast.DynamicRouting` is
    the same as a layer with more options.

    Parameters: ``logits [in_caps, out_caps]`` on request.

    Args:
        num_iterations: weighted sums formed, at least 1.
        learned_logits: a parameter for the log prior of the coupling, starting at 0.
        gradient, squash, eps, squash_last: see :func:`capsfast.dynamic_routing`.
        all others: as for :class:`Routing`.
    """

    logits: nn.Parameter | None

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        *,
        num_iterations: int = 3,
        learned_logits: bool = False,
        gradient: str = "full",
        squash: str = "paper",
        eps: float = 1e-8,
        squash_last: bool = True,
        **made: Any,
    ) -> None:
        super().__init__(in_caps, out_caps, in_dim, out_dim, num_iterations=num_iterations, **made)
        Options(num_iterations, "out", gradient, False, squash, eps, squash_last).check(self.op)
        checks.boolean(self.op, "learned_logits", learned_logits)
        self.gradient = gradient
        self.squash = squash
        self.eps = eps
        self.squash_last = squash_last
        start = torch.zeros(in_caps, out_caps, **self._made) if learned_logits else None
        self.register_parameter("logits", None if start is None else nn.Parameter(start))

    def weight_std(self, summed: int) -> float:
        return 0.1  # of the authors' code

    def route(self, votes: Votes, activation: Tensor | None) -> Capsules:
        v = votes.agree(
            self.num_iterations,
            logits=self.logits,
            gradient=self.gradient,
            squash=self.squash,
            eps=self.eps,
            squash_last=self.squash_last,
        )
        return Capsules(v, lengths(v))

    def extra_repr(self) -> str:
        text = super().extra_repr() + (", learned_logits=True" if self.logits is not None else "")
        return text + _arguments.changed(self, gradient="full", squash="paper", eps=1e-8, squash_last=True)
