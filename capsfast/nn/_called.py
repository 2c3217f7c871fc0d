"""Errors of layers that are taken for other layers of the same name: which one was called, and which one fits."""

from typing import Any, NoReturn

from torch import Tensor

from .. import checks, kinds
from ._layer import Layer


class Called(Layer):
    """A layer whose constructor says, when a call does not fit, which class of :mod:`capsfast.compat` it fits.

    _kinds: those that may be meant.
    """

    _kinds: tuple[kinds.Kind, ...] = kinds.KINDS

    @classmethod
    def _instead(cls, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        text = ""
        fitting = [
            kind for kind in kinds.called_with(cls._kinds, len(args), kwargs) if f"capsfast.compat.{kind.name}" != op
        ]
        if fitting:
            text = f"; {kinds.listed(fitting)} can be called so"
            if any(kind.of_votes for kind in fitting) and op != "capsfast.nn.RoutingByAgreement":
                text += ", and for votes capsfast.nn.RoutingByAgreement"
        return f"{text}; see {kinds.TABLE}"


def refuse_votes(op: str, u: object, *others: object) -> NoReturn:
    """A layer was called with votes, or with more than one argument, as layers of votes are."""
    got = checks.shape_of(u) if isinstance(u, Tensor) else type(u).__name__
    if others:
        got += f" and {len(others)} more"
    raise TypeError(
        f"{op}: takes u [B, in_caps, in_dim] and all else by keyword, got {got}; for votes [B, I, J, D], as "
        f"layer(votes) or layer(votes, batch_size), use capsfast.nn.RoutingByAgreement or "
        f"capsfast.compat.DynamicRouting(num_iterations); see {kinds.TABLE}"
    )
