"""Routing of given votes, as a module."""

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ..functional import route_votes
from ..kinds import FORMS
from ..options import OptionKeywords
from . import _arguments
from ._layer import Layer
from .routing.agreement import Agreement
from .routing.base import Capsules, lengths


class RoutingByAgreement(Agreement, Layer):
    """Routing by agreement over given votes (Sabour, Frosst, Hinton 2017, procedure 1): ``votes -> v``.

    It has no parameters and no sizes; :class:`AgreementRouting` has both.

    Args:
        num_iterations: number of weighted sums, at least 1.
        options: softmax, squash and so on, and backend: the keywords of :func:`capsfast.dynamic_routing`.

    Shapes: ``votes [B, I, J, D]`` to ``v [B, J, D]``.

    Raises:
        ValueError, TypeError: options that the function rejects.
    """

    _others = FORMS

    def __init__(
        self,
        num_iterations: int = 3,
        *,
        backend: str | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        super().__init__()
        self._hold(num_iterations, options)
        self.backend = backend

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
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``votes [B, I, J, D]`` to ``v [B, J, D]``, with ``return_coupling`` also ``c [B, I, J]``.

        ``batch_size`` exists because some code passes it; if given, it must be B.
        """
        _arguments.floats(self._op, "votes", votes, "[B, I, J, D]")
        _arguments.batch_size(self._op, batch_size, votes)
        return route_votes(  # type: ignore[no-any-return]
            votes,
            **self.options(),
            logits=logits,
            bias=bias,
            mask=mask,
            out_mask=out_mask,
            return_coupling=return_coupling,
            backend=self.backend,
        )

    def capsules(self, votes: Tensor, **given: Any) -> Capsules:
        """Calls the layer and returns its result with the lengths."""
        v = self(votes, **given)
        return Capsules(v, lengths(v))
