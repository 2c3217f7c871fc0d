"""Checks of the options of layers and models, worded as in capsfast/calls/checks.py."""

from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, TypedDict, get_args, get_origin

import torch
from torch import Tensor, nn

from ..calls import checks
from ..calls.options import Backend, OptionKeywords

Reduction = Literal["mean", "sum", "none"]
# Floats that may be 0; all others are positive.
FROM_0 = (
    *("m_plus", "m_minus", "lam", "reconstruction_weight", "noise", "momentum", "logits_std", "dropout"),
    *("m_pos", "m_neg", "m_positive", "m_negative", "lambda_"),  # of the losses in capsfast.compat
)
ANY_SIGN = ("initial_beta_a", "initial_beta_u")


class FactoryKwargs(TypedDict, total=False):
    """Device and dtype of the parameters of a layer."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class Backed(FactoryKwargs, total=False):
    """The same, and the backend of a routing."""

    backend: Backend | None


class ParameterKeywords(TypedDict, total=False):
    """The tensors that a call of dynamic routing may take."""

    logits: Tensor | None
    mask: Tensor | None
    out_mask: Tensor | None


class AgreementKeywords(OptionKeywords, Backed, total=False):
    """The keywords of a layer with dynamic routing."""


def option(op: str, name: str, annotation: Any, value: object) -> None:
    """Checks an argument of a constructor by its annotation: an int is at least 1, a float is positive and finite.

    Annotations with several types are not checked here.
    """
    kinds = get_args(annotation)
    if NoneType in kinds:  # X | None
        if value is None:
            return
        kinds = tuple(kind for kind in kinds if kind is not NoneType)
        annotation = kinds[0] if len(kinds) == 1 else None
    if get_origin(annotation) is Literal:
        checks.choice(op, name, value, get_args(annotation))
    elif annotation is bool:
        checks.boolean(op, name, value)
    elif annotation is int:
        checks.integer(op, name, value)
    elif name == "eps":
        checks.positive_eps(op, value)
    elif annotation is float:
        checks.finite(op, name, value) if name in ANY_SIGN else checks.positive(op, name, value, name in FROM_0)


def batch_size(op: str, value: object, votes: Tensor) -> None:
    """Checks a batch size, which some code passes with the votes. torch.jit.trace turns sizes into 0-d tensors."""
    value = checks.plain(value)
    if value is None:
        return
    whole = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if not whole and not (isinstance(value, Tensor) and value.dim() == 0):
        raise TypeError(
            f"{op}: batch_size must be an int, got {checks.shown(value)}; logits, bias and masks go by keyword"
        )
    if value != votes.shape[0]:
        raise ValueError(f"{op}: batch_size must be B={votes.shape[0]}, got {value} (votes {checks.shape_of(votes)})")


def pair(op: str, name: str, value: int | Sequence[int], least: int = 1) -> tuple[int, int]:
    """An int for both axes, or (vertical, horizontal)."""
    vertical, horizontal = for_axes(op, name, value, 2, least)
    return vertical, horizontal


def for_axes(op: str, name: str, value: int | Sequence[int], axes: int, least: int = 1) -> tuple[int, ...]:
    """An int for all axes of an image, or an int for every axis."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) == axes:
        for entry in value:
            checks.integer(op, name, entry, least)
        return tuple(value)
    if isinstance(value, bool) or not isinstance(value, int):
        many = ("a sequence of one int", "two of them", "three of them")[axes - 1]
        raise TypeError(f"{op}: {name} must be an int or {many}, got {checks.shown(value)}")
    checks.integer(op, name, value, least)
    return (value,) * axes


def sizes(op: str, name: str, value: object, least: int = 1) -> tuple[int, ...]:
    """A sequence of at least so many ints, each at least 1."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{op}: {name} must be a sequence of ints, got {checks.shown(value)}")
    for size in value:
        checks.integer(op, name, size)
    if len(value) < least:
        raise ValueError(f"{op}: {name} must hold at least {least} of them, got {checks.shown(tuple(value))}")
    return tuple(value)


def image_shape(op: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or len(value) != 3:
        raise ValueError(f"{op}: image_shape must be (channels, height, width), got {checks.shown(value)}")
    for size in value:
        checks.integer(op, "image_shape", size)
    return tuple(value)


def for_all_axes(value: object, each: object) -> bool:
    """Whether :func:`for_axes` makes this value of the int ``each``."""
    return isinstance(value, tuple) and all(one == each for one in value)


def divides(op: str, name: str, value: int, groups: int) -> None:
    if value % groups:
        raise ValueError(f"{op}: groups must divide {name}, got groups={groups} and {name}={value}")


def window_grid(
    op: str,
    size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, ...]:
    """The number of windows of a convolution that fit into ``size``, along each axis."""
    grid = tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel_size, stride, padding, dilation, strict=True)
    )
    if min(grid) < 1:
        window, gaps, image, edge = (" x ".join(map(str, values)) for values in (kernel_size, dilation, size, padding))
        raise ValueError(
            f"{op}: a window of {window} (dilation {gaps}) must fit into the input with its padding, "
            f"got {image} with padding {edge}; use a smaller kernel_size"
        )
    return grid


def conv_grid(op: str, size: Sequence[int], conv: nn.Conv2d) -> tuple[int, int]:
    """The number of windows of this convolution that fit into ``size`` (height, width)."""
    padding: Sequence[int] = conv.padding  # type: ignore[assignment]
    height, width = window_grid(op, size, conv.kernel_size, conv.stride, padding, conv.dilation)
    return height, width


def floats(op: str, name: str, value: Tensor, shape: str) -> None:
    checks.tensor(op, name, value, shape)
    checks.floating(op, name, value)


def sized(op: str, name: str, value: Tensor, shape: str, **sizes: int) -> None:
    """As :func:`floats`; also checks the lengths of the axes that are named in ``sizes``."""
    floats(op, name, value, shape)
    axes = shape.strip("[]").split(", ")
    if any(size != sizes.get(axis, size) for axis, size in zip(axes, value.shape, strict=True)):
        wanted = ", ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in axes)
        raise ValueError(f"{op}: {name} must be [{wanted}], got {checks.shape_of(value)}")


def activation_of(op: str, activation: Tensor, poses: Tensor, shape: str) -> None:
    """Checks the activations of an image of capsules ``[B, types, K, *spatial]``."""
    floats(op, "activation", activation, shape)
    if activation.shape != (*poses.shape[:2], *poses.shape[3:]):
        raise ValueError(
            f"{op}: activation must be {shape} of poses {checks.shape_of(poses)}, got {checks.shape_of(activation)}"
        )
