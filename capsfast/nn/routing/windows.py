"""Overlapping windows whose output capsules compete for the input capsules that they share."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...calls.options import Normalize
from ...calls.precision import wide_dtype
from ...passes import Moments
from .votes import Votes, VotesAround

SCORES = ("query", "precision", "prior", "logits")


class Windows(NamedTuple):
    """Where the windows of a convolution lie on an image of ``size``; all pairs are (vertical, horizontal).

    ``grid`` is the number of windows. The input capsules of a window are in the order (type, y, x).
    """

    size: tuple[int, int]
    grid: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def places(self) -> int:
        return self.grid[0] * self.grid[1]

    def log_sum(self, lse: Tensor) -> Tensor:
        """For each input capsule, the log-sum-exp over all its windows, repeated for each of these windows.

        ``[B·windows, I]`` to the same shape. -inf and padding add nothing. 0 if all are -inf.
        """
        area = self.kernel_size[0] * self.kernel_size[1]
        columns = lse.unflatten(0, (-1, self.places)).transpose(1, 2)  # [B, I, windows]
        with torch.no_grad():  # the maximum, subtracted in the exponent; the result does not depend on it
            peak = self._peak(columns.unflatten(1, (-1, area)))
            peak = torch.where(peak.isfinite(), peak, 0.0)
            subtracted = self._unfold(peak)
        total = F.fold(
            (columns - subtracted).exp(), self.size, self.kernel_size, self.dilation, self.padding, self.stride
        )
        total = torch.where(total > 0, total, 1.0)
        return self._unfold(peak + total.log()).transpose(1, 2).flatten(0, 1)

    def _unfold(self, image: Tensor) -> Tensor:
        """``[B, types, H, W]`` to ``[B, I, windows]``."""
        return F.unfold(image, self.kernel_size, self.dilation, self.padding, self.stride)

    def _peak(self, columns: Tensor) -> Tensor:
        """The maximum of each input capsule: ``[B, types, kernel area, windows]`` to ``[B, types, H, W]``."""
        padded = [n + 2 * p for n, p in zip(self.size, self.padding, strict=True)]
        rows, cols = (
            torch.arange(k, device=columns.device)[:, None] * d + torch.arange(n, device=columns.device) * s
            for k, d, n, s in zip(self.kernel_size, self.dilation, self.grid, self.stride, strict=True)
        )  # [kernel, windows] of each axis
        place = rows[:, None, :, None] * padded[1] + cols[None, :, None, :]
        index = place.flatten().expand(*columns.shape[:2], -1)
        image = columns.new_full((*columns.shape[:2], padded[0] * padded[1]), -math.inf)
        image = image.scatter_reduce(2, index, columns.flatten(2), "amax").unflatten(2, padded)
        (top, left), (height, width) = self.padding, self.size
        inside: Tensor = image[..., top : top + height, left : left + width]
        return inside


class Everywhere(NamedTuple):
    """Stands for :class:`Windows` if an input capsule is in the windows of all ``places`` of an image."""

    places: int

    def log_sum(self, lse: Tensor) -> Tensor:
        """As :meth:`Windows.log_sum`."""
        total: Tensor = lse.unflatten(0, (-1, self.places)).logsumexp(1)
        return total.repeat_interleave(self.places, 0)


class WindowVotes(VotesAround):
    """Votes of windows, each a sample. An input capsule has one softmax, over the output capsules of all its windows
    (Hinton, Sabour, Frosst 2018, section 4).

    A softmax over the output capsules takes two passes: the log-sum-exp of each window, summed over all windows of an
    input capsule, then the pass itself. It stores a number for each input capsule in each of its windows.
    Other normalizations run within each window.

    Args:
        votes: B·windows samples, windows last. A mask must treat an input capsule alike in all its windows.
        windows: the places of the windows.
        start: coupling without scores, in the first pass of a routing: ``"child"``: 1 / (J · windows of the input
            capsule); ``"window"``: 1 / J in each window.
    """

    def __init__(self, votes: Votes, windows: Windows | Everywhere, start: str = "child") -> None:
        super().__init__(votes)
        self.windows = windows
        self.start = start

    def moments(
        self, *, normalize: Normalize = "out", leaky: bool = False, return_lse: bool = False, **arguments: Any
    ) -> Moments:
        scores: dict[str, Any] = {name: arguments.get(name) for name in SCORES}
        equal = all(value is None for value in scores.values())
        if normalize != "out" or (equal and self.start == "window"):
            return self.votes.moments(normalize=normalize, leaky=leaky, return_lse=return_lse, **arguments)
        if equal:
            lse = self._equal()
        else:
            of_windows = self.votes.moments(**scores, center=arguments.get("center"), return_lse=True).lse
            assert of_windows is not None
            lse = self.windows.log_sum(of_windows)
        if leaky:
            lse = torch.logaddexp(lse, torch.zeros_like(lse))
        moments_here = self.votes.moments(normalize="lse", lse=lse, **arguments)
        return moments_here._replace(lse=lse) if return_lse else moments_here

    def _equal(self) -> Tensor:
        """The log-sum-exp if all logits are 0, ``[B·windows, I]``."""
        places = self.windows.places
        wide = wide_dtype(self.dtype)
        if self.out_mask is None:
            each = torch.full((places, self.I), self.J // self.groups, dtype=wide, device=self.device).log()
            return self.windows.log_sum(each).repeat(self.B // places, 1)
        of_groups = self.out_mask.unflatten(1, (self.groups, -1)).sum(2).to(wide).log()
        return self.windows.log_sum(of_groups.repeat_interleave(self.I // self.groups, 1))
