"""Routing of votes that exist, as a module."""

from typing import Any

from torch import Tensor

from .. import checks
from ..functional import route_votes
from ..options import Options
from . import _arguments
from ._dynamic import RoutingLayer


class RoutingByAgreement(RoutingLayer):
    """Routing by agreement over given votes (Sabour, Frosst, Hinton 2017, procedure 1): ``votes -> v``.

    It has no parameters.

    Args:
        num_iterations: weighted sums formed, at least 1.
        top_k: each input capsule keeps so many outputs, see :class:`capsfast.DynamicRouting`.
        softmax, gradient, leaky, squash, eps, squash_last, share_batch_logits, backend: see
            :func:`capsfast.dynamic_routing`.

    Shapes: ``votes [B, I, J, D]`` to ``v [B, J, D]``.

    Raises:
        ValueError, TypeError: options that the function rejects.
    """

    _op = "capsfast.nn.RoutingByAgreement"

    def __init__(
        self,
        num_iterations: int = 3,
        *,
        top_k: int | None = None,
        softmax: str = "out",
        gradient: str = "full",
        leaky: bool = False,
        squash: str = "paper",
        eps: float = 1e-8,
        squash_last: bool = True,
        share_batch_logits: bool = False,
        backend: str | None = None,
    ) -> None:
        options = Options(num_iterations, softmax, gradient, leaky, squash, eps, squash_last)
        super().__init__(options, share_batch_logits, top_k, backend)

    def forward(
        self,
        votes: Tensor,
        batch_size: int | None = None,
        *,
        logits: Tensor | None = None,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        out_mask: Tensor | None = None,
        return_coupling: bool = False,
    ) -> Any:
        """``votes [B, I, J, D]`` to ``v [B, J, D]``, with ``return_coupling`` also ``c [B, I, J]``.

        ``batch_size`` is what some code passes besides; if given, it must be B.
        """
        _arguments.floats(self._op, "votes", votes, "[B, I, J, D]")
        _arguments.batch_size(self._op, batch_size, votes)
        if self.top_k is not None and self.top_k > votes.shape[2]:
            raise ValueError(
                f"{self._op}: top_k must be at most J={votes.shape[2]}, got {self.top_k} "
                f"(votes {checks.shape_of(votes)})"
            )
        return self._route(
            route_votes,
            votes,
            logits=logits,
            bias=bias,
            mask=mask,
            out_mask=out_mask,
            return_coupling=return_coupling,
        )
