"""Other numbers for a tensor, by which it is seen whether its numbers matter."""

from collections.abc import Iterator

import torch
from torch import Tensor

NEAR_AND_FAR = (0.0, 1.0, -1.0, 0.3, 1e9, -1e9)
INTEGERS = (0, 1, -1, 10**6)


def others(value: Tensor) -> Iterator[Tensor]:
    """Of the same shape and dtype. What is safe for a tensor that holds indices comes first."""
    yield value.roll(1, 0) if value.dim() else value
    yield value.reshape(-1).flip(0).view(value.shape)
    if value.dtype == torch.bool:
        yield from (~value, torch.zeros_like(value), torch.ones_like(value))
    elif value.is_floating_point() or value.is_complex():
        yield value + torch.linspace(-1, 1, value.numel(), device=value.device).view(value.shape).to(value.dtype)
        most = torch.finfo(value.dtype).max
        yield from (torch.full_like(value, min(max(number, -most), most)) for number in NEAR_AND_FAR)
        yield torch.full_like(value, -float("inf"))
    else:
        limits = torch.iinfo(value.dtype)
        yield value.clamp_min(limits.min + 1) - 1
        yield value.clamp_max(limits.max - 1) + 1
        for number in INTEGERS:
            yield torch.full_like(value, min(max(number, limits.min), limits.max))


def truths(mask: Tensor) -> Iterator[Tensor]:
    """A mask of numbers with others where it is not 0, which are all True to capsfast."""
    for number in (2, -1, 0.3):
        if mask.is_floating_point() or isinstance(number, int):
            yield (mask != 0).to(mask.dtype) * number
