"""Errors of layers that are taken for other layers of the same name: which one was called, and which one fits."""

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from .. import checks, kinds
from ._layer import Layer


class _Signature:
    """Of the constructor that a class has when it is asked for, without which __new__ hides it in Python 3.10."""

    def __get__(self, layer: object, cls: type) -> inspect.Signature:
        if layer is not None:
            raise AttributeError("__signature__")
        return without_self(cls.__init__)  # type: ignore[misc]


class Called(Layer):
    """A layer whose constructor says, when a call does not fit, which class of :mod:`capsfast.compat` it fits.

    _kinds: those that may be meant.
    """

    _op: str
    _kinds: tuple[kinds.Kind, ...] = kinds.KINDS
    __signature__ = _Signature()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Copies and pickles make an object without arguments. What somebody's own constructor takes is theirs to say.
        if (args or kwargs) and getattr(cls.__init__, "__globals__", {}).get("__name__", "").startswith("capsfast."):
            check_call(cls, args, kwargs)
        return super().__new__(cls)


def without_self(function: Callable[..., Any]) -> inspect.Signature:
    """Of the function itself, not of one that it stands for."""
    signature = inspect.signature(function, follow_wrapped=False)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def check_call(cls: type[Called], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Whether a class of capsfast can be made with these arguments.

    Raises:
        TypeError: no; the message names those that can.
    """
    signature = without_self(cls.__init__)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        op = getattr(cls, "_op", cls.__name__)
        plain = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
        options = " and options by keyword" if len(plain) < len(signature.parameters) else ""
        text = f"{op}: takes ({', '.join(p.name + _default(p) for p in plain)}){options}, {error}"
        fitting = [
            kind for kind in kinds.called_with(cls._kinds, len(args), kwargs) if f"capsfast.compat.{kind.name}" != op
        ]
        if fitting:
            text += f"; {kinds.listed(fitting)} can be called so"
            if any(kind.of_votes for kind in fitting) and op != "capsfast.nn.RoutingByAgreement":
                text += ", and for votes capsfast.nn.RoutingByAgreement"
        raise TypeError(f"{text}; see {kinds.TABLE}") from None


def _default(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is parameter.empty else f"={parameter.default!r}"


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
