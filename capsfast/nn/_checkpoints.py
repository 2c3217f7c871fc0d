"""Recognises weights of other layers in a state dict."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .. import checks, kinds


def foreign_weights(op: str, state_dict: Mapping[str, Any], prefix: str, W: Tensor) -> list[str]:
    """Messages for weights that are not ``W [I, J, D, K]``, each with the conversion.

    prefix: prefix of the layer's entries. If W is there and fits, other entries are ignored. If W is missing, entries
    with the shape of a weight count as weights: torch does not tell whether loading is strict, and without W the layer
    would keep its initial weight.
    """
    own = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    given = {name: value for name, value in own.items() if "." not in name and isinstance(value, Tensor)}
    if "W" in given:
        given = {"W": given["W"]} if given["W"].shape != W.shape else {}
    sizes = dict(zip("IJDK", W.shape, strict=True))
    return [
        _message(op, name, value, sizes)
        for name, value in given.items()
        if name == "W" or kinds.orders_of(value.shape, sizes)
    ]


def _message(op: str, name: str, value: Tensor, sizes: Mapping[str, int]) -> str:
    orders = kinds.orders_of(value.shape, sizes)
    wanted = f"W [I, J, D, K] = {list(sizes.values())}"
    text = f"{op}: the weight must be {wanted}, got {name} {checks.shape_of(value)}"
    if len(orders) == 1:
        text += f", whose axes are {kinds.spelled(orders[0])}; load {{'W': {kinds.CONVERSIONS[orders[0]]}}}"
    elif orders:
        text += f", whose axes may be {' or '.join(map(kinds.spelled, orders))}"
    if fitting := kinds.with_weight(name, orders):
        text += f"{'' if len(orders) > 1 else ','} or use {kinds.listed(fitting)}"
    return f"{text}; see {kinds.TABLE}"
