"""Where the windows of a convolution over an image of capsules lie."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

Box = tuple[tuple[int, int], ...]  # [start, end) of the samples, then of the windows along each axis


def clipped(start: int, stop: int, size: int) -> tuple[int, int, int, int]:
    """The part ``[begin, end)`` of an axis that lies in ``[start, stop)``, and how much padding is before and after."""
    begin = min(max(start, 0), size)
    end = min(max(stop, begin), size)
    before = min(max(-start, 0), stop - start)
    return begin, end, before, stop - start - before - (end - begin)


class Geometry(NamedTuple):
    """The windows of a convolution over an image ``[B, types, K, *size]``. Fields have an entry for each axis of size.

    The input capsules of a window are in the order (type, *place in the window): I = types · ``area``. Windows are in
    the order (sample, *place in ``grid``).
    """

    size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of windows along each axis."""
        axes = zip(self.size, self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes)

    @property
    def places(self) -> int:
        """The number of windows of a sample."""
        return math.prod(self.grid)

    @property
    def area(self) -> int:
        """The number of places in a window."""
        return math.prod(self.kernel_size)

    def all_of(self, samples: int) -> Box:
        """The box of all windows."""
        return tuple((0, count) for count in (samples, *self.grid))

    def inside(self, box: Box | None = None, device: torch.device | None = None) -> Tensor | None:
        """Which places of the windows of a box are not padding, bool ``[windows of a sample, area]``; None without
        padding."""
        if not any(self.padding):
            return None
        bounds = self.all_of(0)[1:] if box is None else box[1:]
        axes = zip(bounds, self.size, self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        inside = torch.ones((), dtype=torch.bool, device=device)
        for (first, last), n, k, s, p, d in axes:
            at = torch.arange(first, last, device=device)[:, None] * s - p + torch.arange(k, device=device) * d
            inside = inside.unsqueeze(-1).unsqueeze(-1) & ((at >= 0) & (at < n))
        order = [*range(0, inside.dim(), 2), *range(1, inside.dim(), 2)]
        return inside.permute(order).reshape(-1, self.area)
