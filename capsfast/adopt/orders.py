"""Orders of axes as text, and the views that convert between them.

A letter is an axis: B, I, J, D or K. ``1`` is an axis of length 1. Letters in brackets are one flattened axis, the last
letter fastest: the weight ``[I, K, J*D]`` has the order ``"IK(JD)"``.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor

from .. import kinds
from ..calls import checks
from ..environment.private_torch import constant_while_tracing
from ..kinds import spelled

# Methods of a tensor with their arguments, one after the other.
Steps = tuple[tuple[str, tuple[object, ...]], ...]


class Sizes(NamedTuple):
    """I, J: numbers of input and output capsules. K, D: sizes of an input and an output capsule; K is 0 for votes."""

    I: int
    J: int
    D: int
    K: int


F = TypeVar("F", bound=Callable[..., Any])


def kept(function: F) -> F:
    """Caches the answers: a layer asks the same at every call, and reading an order takes longer than a kernel of a
    small batch. torch.compile takes the answer as a constant; it would warn about functools.cache.
    """
    memory = functools.cache(function)

    @constant_while_tracing
    @functools.wraps(function)
    def answer(*args: Any) -> Any:
        return memory(*args)

    return cast(F, answer)


axes = kept(kinds.axes)


@kept
def letters(order: str) -> str:
    """The letters of an order, without axes of length 1: ``"1IK(JD)"`` to ``"IKJD"``."""
    return "".join(axes(order)).replace("1", "")


@kept
def steps_from(order: str, wanted: str, expanded: str, sizes: Sizes) -> Steps:
    """Views that turn ``order`` into the axes ``wanted``. Missing axes in ``expanded`` get their size, others 1."""
    lengths = sizes._asdict()
    steps: list[tuple[str, tuple[object, ...]]] = []
    place = 0
    for axis in axes(order):
        if axis == "1":
            steps.append(("squeeze", (place,)))
            continue
        if len(axis) > 1:
            # One length can be left open: B or I, which may differ between calls.
            opened = next((letter for letter in "BI" if letter in axis), axis[0])
            steps.append(("unflatten", (place, tuple(-1 if axi == opened else lengths[axi] for axi in axis))))
        place += len(axis)
    present = [wanted_one for wanted_one in wanted if wanted_one in letters(order)]
    turn = tuple(letters(order).index(letter) for letter in present)
    if turn != tuple(range(len(turn))):
        steps.append(("permute", turn))
    steps += [("unsqueeze", (n,)) for n, wanted_one in enumerate(wanted) if wanted_one not in present]
    if missing := {*expanded} - {*present}:
        steps.append(("expand", tuple(lengths[wanted_one] if wanted_one in missing else -1 for wanted_one in wanted)))
    return tuple(steps)


@kept
def steps_to(order: str, given: str) -> Steps:
    """Views that turn the axes ``given`` into ``order``."""
    steps: list[tuple[str, tuple[object, ...]]] = []
    turn = tuple(given.index(letter) for letter in letters(order))
    if turn != tuple(range(len(turn))):
        steps.append(("permute", turn))
    for place, axis in enumerate(axes(order)):
        if axis == "1":
            steps.append(("unsqueeze", (place,)))
        elif len(axis) > 1:
            steps.append(("flatten", (place, place + len(axis) - 1)))
    return tuple(steps)


def follow(tensor: Tensor, steps: Steps) -> Tensor:
    for method, arguments in steps:
        tensor = getattr(tensor, method)(*arguments)
    return tensor


def as_code(steps: Steps) -> str:
    return "".join(f".{method}({', '.join(map(repr, arguments))})" for method, arguments in steps)


def check(op: str, name: str, tensor: object, axes: tuple[str, ...]) -> Tensor:
    """The tensor, if it has these axes; raises an error otherwise."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor {spelled(axes)}, got {type(tensor).__name__}")
    sizes = [size for axis, size in zip(axes, tensor.shape, strict=False) if axis == "1"]
    if tensor.dim() != len(axes) or sizes.count(1) < len(sizes):
        raise ValueError(f"{op}: {name} must be {spelled(axes)}, got {checks.shape_of(tensor)}")
    return tensor
