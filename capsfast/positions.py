"""Axes of positions, which votes that a convolution made have behind the others: one axis for the ops, or none."""

from torch import Tensor

from ._torch import surely
from .axes import axes_of


def alone(spatial: tuple[int, ...]) -> bool:
    """Whether there are axes of positions that hold a single one: it is routed as votes without such axes are.

    A size that a traced graph learns only when it runs counts as more.
    """
    return bool(spatial) and all(surely(size == 1) for size in spatial)


def of_votes(votes: Tensor, J: int, spatial: tuple[int, ...]) -> Tensor:
    """Votes ``[B, I, J or 1, D, S]`` as the ops take them.

    Without the axis of a single position; else of all J, with stride 0 where output capsules share them.
    """
    return votes.squeeze(-1) if alone(spatial) else votes.expand(-1, -1, J, -1, -1)


def spread(name: str, value: Tensor | None, spatial: tuple[int, ...]) -> Tensor | None:
    """An argument with an axis B: to one axis for all positions, or none for a single one.

    What has no axes of positions holds everywhere. Nothing happens if ``spatial`` is empty.
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
    return value.unsqueeze(-1).expand(*value.shape, count)


def restore(value: Tensor, spatial: tuple[int, ...]) -> Tensor:
    """The opposite for a result, which ends in one axis for all positions, or in none for a single one."""
    if alone(spatial):
        return value.reshape(*value.shape, *spatial)
    return value.reshape(*value.shape[:-1], *spatial) if len(spatial) > 1 else value


def to_samples(value: Tensor) -> Tensor:
    """``[B, ..., S]`` to ``[B S, ...]``: positions as samples."""
    return value.movedim(-1, 1).flatten(0, 1)


def as_samples(value: Tensor | None, spatial: tuple[int, ...]) -> Tensor | None:
    """to_samples() where there are positions: ``spatial``, of one size or none.

    An empty tensor of one axis, for what was not asked for, stays.
    """
    return value if value is None or not spatial or value.dim() == 1 else to_samples(value)


def from_samples(value: Tensor, B: int, *spatial: int) -> Tensor:
    """``[B S, ...]`` to ``[B, ..., *spatial]``, where S is the product of these sizes; a size may be 1."""
    n = len(spatial)
    return value.reshape(B, *spatial, *value.shape[1:]).movedim(tuple(range(1, n + 1)), tuple(range(-n, 0)))


def as_positions(value: Tensor, B: int, spatial: tuple[int, ...]) -> Tensor:
    """The opposite of as_samples(), contiguous."""
    return value if not spatial or value.dim() == 1 else from_samples(value, B, spatial[0]).contiguous()
