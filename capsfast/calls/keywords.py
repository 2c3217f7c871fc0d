"""Errors for unknown keywords of functions and constructors: the message names the keyword that may be meant."""

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypedDict, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

# Argument names of this package, each with the names that other code gives the same argument.
OTHER_NAMES = {
    "num_iterations": "iterations iters n_iterations n_iters num_iters num_iter routings n_routings num_routing "
    "num_routings n_routing routing_iterations routing_iters num_routing_iterations num_routes r",
    "in_caps": "in_capsules input_caps num_in_caps num_in_capsules in_num_caps num_caps_in",
    "out_caps": "out_capsules output_caps num_out_caps num_out_capsules out_num_caps num_caps_out",
    "in_dim": "in_caps_dim in_capsule_dim in_dim_caps dim_caps_in in_d",
    "out_dim": "out_caps_dim out_capsule_dim out_dim_caps dim_caps_out out_d",
    "weight": "W",
    "votes": "u_hat priors",
}
_MEANT = {name: own for own, names in OTHER_NAMES.items() for name in names.split()}


def meant(name: str, known: Collection[str]) -> str:
    """Returns " (did you mean num_iterations?)", or "" if no known name is close."""
    our_name = _MEANT.get(name)
    close = [our_name] if our_name in known else difflib.get_close_matches(name, known, 1, 0.7)
    return f" (did you mean {close[0]}?)" if close else ""


def unexpected(name: str, known: Collection[str]) -> str:
    return f"got an unexpected keyword argument '{name}'{meant(name, known)}"


def takes(signature: inspect.Signature) -> str:
    """The signature as text: "(u, weight, num_iterations=3) and options by keyword"."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    plain = [
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in signature.parameters.values()
        if parameter.kind in by_position
    ]
    options = " and options by keyword" if len(plain) < len(signature.parameters) else ""
    return f"({', '.join(plain)}){options}"


class NoMore(TypedDict):
    """For ``**unknown: Unpack[NoMore]``: type checkers then refuse every further keyword."""


def closed(function: Function) -> Function:
    """Hides the last parameter ``**unknown`` from a function's signature. The function gives it to :func:`refuse`.

    A wrapper that catches TypeError would add up to a microsecond to every call, and a frame to torch.compile.
    """
    *own, _ = inspect.signature(function).parameters.values()
    function.__signature__ = inspect.signature(function).replace(parameters=own)  # type: ignore[attr-defined]
    return function


def with_keywords_of(other: Callable[..., Any]) -> Callable[[Function], Function]:
    """Replaces ``**options`` in a function's signature by the keywords of ``other``, which receives them."""

    def shown(function: Function) -> Function:
        *own, _ = inspect.signature(function).parameters.values()
        names = [parameter.name for parameter in own]
        handed = inspect.signature(other).parameters.values()
        own += [
            parameter
            for parameter in handed
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in names
        ]
        function.__signature__ = inspect.signature(function).replace(parameters=own)  # type: ignore[attr-defined]
        return function

    return shown


def check(function: Callable[..., Any], given: Mapping[str, object], known: type, op: str = "") -> None:
    """
    Raises:
        TypeError: a keyword is not in the TypedDict ``known``.
    """
    unknown = {name: value for name, value in given.items() if name not in known.__annotations__}
    if unknown:
        refuse(function, unknown, op)


def refuse(function: Callable[..., Any], unknown: Mapping[str, object], op: str = "") -> NoReturn:
    """
    Raises:
        TypeError: always; the message names the first unknown keyword.
    """
    signature, name = inspect.signature(function), next(iter(unknown))
    op = op or f"capsfast.{function.__name__}"
    raise TypeError(f"{op}: takes {takes(signature)}, {unexpected(name, signature.parameters)}")
