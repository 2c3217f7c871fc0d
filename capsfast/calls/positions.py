"""Axes of positions, the last axes of votes that a convolution made. The ops take one such axis, or none."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..environment.private_torch import surely
from .axes import axes_of


def alone(spatial: tuple[int, ...]) -> bool:
    """Whether the axes of positions hold a single position, which is routed like votes without such axes.

    A size that a traced graph learns only at run time counts as more than one.
    """
    return len(spatial) > 0 and all(surely(size == 1) for size in spatial)


def spread(name: str, value: Tensor | None, spatial: tuple[int, ...]) -> Tensor | None:
    """An argument with an axis B, with one axis for all positions, or none for a single position.

    An argument without axes of positions is expanded to all positions. 16-bit numbers become float32 before: otherwise
    the gradient would be a sum of rounded numbers. If ``spatial`` is empty, the argument is returned as it is.
    """
    if value is None or not spatial:
        return value
    axes = axes_of(name, value)
    if axes[0] != "B":
        return value
    if alone(spatial):
        return value.reshape(value.shape[: len(axes)])
    if value.dim() > len(axes):
        return value.flatten(len(axes))
    count = 1
    for size in spatial:
        count *= size
    value = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    return value.unsqueeze(-1).expand(*value.shape, count)


def restoring(B: int, spatial: tuple[int, ...], as_samples: bool) -> Callable[[Tensor], Tensor]:
    """A function that restores the axes of positions of a result.

    The result has one axis for all positions, or none for a single position; with ``as_samples`` positions are samples.
    """

    def restore(value: Tensor) -> Tensor:
        if as_samples:
            return from_samples(value, B, *spatial)
        kept = value.shape if alone(spatial) else value.shape[:-1]
        return value.reshape(*kept, *spatial) if len(spatial) > 1 or alone(spatial) else value

    return restore


def to_samples(value: Tensor) -> Tensor:
    """``[B, ..., S]`` to ``[B S, ...]``: positions as samples."""
    return value.movedim(-1, 1).flatten(0, 1)


def as_samples(value: Tensor | None, spatial: tuple[int, ...]) -> Tensor | None:
    """to_samples() if there are positions; ``spatial`` has one size or none.

    An empty tensor with one axis, a result that was not requested, is returned as it is.
    """
    return value if value is None or not spatial or value.dim() == 1 else to_samples(value)


def from_samples(value: Tensor, B: int, *spatial: int) -> Tensor:
    """``[B S, ...]`` to ``[B, ..., *spatial]``, where S is the product of the sizes in spatial; a size may be 1."""
    n = len(spatial)
    return value.reshape(B, *spatial, *value.shape[1:]).movedim(tuple(range(1, n + 1)), tuple(range(-n, 0)))


def as_positions(value: Tensor, B: int, spatial: tuple[int, ...]) -> Tensor:
    """The inverse of as_samples(); the result is contiguous."""
    return value if not spatial or value.dim() == 1 else from_samples(value, B, spatial[0]).contiguous()
