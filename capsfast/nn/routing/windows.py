"""Overlapping windows whose output capsules compete for the input capsules that they share."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...calls.options import Normalize
from ...calls.precision import wide_dtype
from ...passes import Moments
from ...windows import Windows
from .votes import Votes, VotesAround

SCORES = ("query", "precision", "prior", "logits")


class Everywhere(NamedTuple):
    """Stands for :class:`Windows` if an input capsule is in the windows of all ``places`` of an image."""

    places: int


def log_sum(windows: Windows | Everywhere, lse: Tensor) -> Tensor:
    """For each input capsule, the log-sum-exp over all its windows, repeated for each of these windows.

    ``[B·windows, I]`` to the same shape. -inf and padding add nothing. 0 if all are -inf.
    """
    if isinstance(windows, Everywhere):
        total: Tensor = lse.unflatten(0, (-1, windows.places)).logsumexp(1)
        return total.repeat_interleave(windows.places, 0)
    with torch.no_grad():  # the maximum, subtracted in the exponent; the result does not depend on it
        peak = _peak(windows, lse)
        peak = torch.where(peak.isfinite(), peak, 0.0)
        subtracted = windows.unfold(peak).squeeze(2)
    sums = folded(windows, (lse - subtracted).exp().unsqueeze(2))
    sums = torch.where(sums > 0, sums, 1.0)
    return windows.unfold(peak + sums.log()).squeeze(2)


def folded(windows: Windows, capsules: Tensor) -> Tensor:
    """``[B·windows, I, K]`` to the sums over all windows of an input capsule, ``[B, types, K, *size]``.

    As :meth:`Windows.fold_into`, by functions of torch, which have every derivative; axis by axis.
    """
    axes = len(windows.size)
    types, dim = capsules.shape[1] // windows.area, capsules.shape[2]
    value = capsules.reshape(-1, *windows.grid, types, *windows.kernel_size, dim)
    value = value.movedim((1 + axes, -1), (1, 2))  # [B, types, K, *grid, *window]
    for left, (n, k, s, p, d) in zip(range(axes, 0, -1), zip(*windows, strict=True), strict=True):
        value = value.movedim((3 + left, 3), (-2, -1))  # the axis of the window, and of the grid
        columns = value.reshape(value.shape[0], math.prod(value.shape[1:-1]), value.shape[-1])
        sums = F.fold(columns, (n, 1), (k, 1), (d, 1), (p, 0), (s, 1))
        value = sums.reshape(*value.shape[:-2], n)
    return value


def _peak(windows: Windows, value: Tensor) -> Tensor:
    """The maximum over all windows of an input capsule, ``[B·windows, I]`` to ``[B, types, 1, *size]``."""
    pixels = math.prod(windows.size)
    numbers = torch.arange(1, pixels + 1, device=value.device).view(1, 1, 1, *windows.size)
    place = windows.unfold(numbers).flatten()  # [windows · area]; 0 in the padding
    columns: Tensor = value.unflatten(1, (-1, windows.area)).unflatten(0, (-1, windows.places))
    columns = columns.transpose(1, 2).flatten(2)
    image = columns.new_full((*columns.shape[:2], pixels + 1), -math.inf)
    image = image.scatter_reduce(2, place.expand(*columns.shape[:2], -1), columns, "amax")
    return image[:, :, 1:].reshape(*columns.shape[:2], 1, *windows.size)


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
            lse = log_sum(self.windows, of_windows)
        if leaky:
            lse = torch.logaddexp(lse, torch.zeros_like(lse))
        moments_here = self.votes.moments(normalize="lse", lse=lse, **arguments)
        return moments_here._replace(lse=lse) if return_lse else moments_here

    def _equal(self) -> Tensor:
        """The log-sum-exp if all logits are 0, ``[B·windows, I]``."""
        places = self.windows.places
        wide = wide_dtype(self.dtype)
        if self.out_mask is None:
            of_window = torch.full((places, self.I), self.J // self.groups, dtype=wide, device=self.device).log()
            return log_sum(self.windows, of_window).repeat(self.B // places, 1)
        of_groups = self.out_mask.unflatten(1, (self.groups, -1)).sum(2).to(wide).log()
        return log_sum(self.windows, of_groups.repeat_interleave(self.I // self.groups, 1))
