"""The input capsules of windows of an image: unfolding them, and adding their gradients to the image's."""

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from .calls import checks
from .calls.precision import wide_dtype
from .calls.windows import Box, Geometry, clipped
from .environment.private_torch import forward_level
from .ops import windows as ops


class Windows(Geometry):
    """Windows of images that do what :class:`Geometry` describes, by a kernel if one serves the image."""

    __slots__ = ()

    def unfold(self, image: Tensor, box: Box | None = None) -> Tensor:
        """The input capsules ``[windows, I, K]`` of the windows of a box, or of all windows; 0 in the padding."""
        box = box or self.all_of(image.shape[0])
        recorded = torch.is_grad_enabled() and image.requires_grad
        if not recorded and image.dtype in checks.FLOATING and checks.is_eager(image) and forward_level() < 0:
            capsules = ops.unfold(image, self, box)
            if capsules is not None:
                return capsules
        return _windows(self, image, box)

    def fold_into(self, image: Tensor, capsules: Tensor, box: Box) -> None:
        """Adds ``capsules [windows, I, K]`` of a box to their places; capsules of padding are dropped.

        Each element of the image is rounded once.
        """
        if capsules.dtype == image.dtype and ops.fold_into(image, capsules, self, box):
            return
        samples, *windows = box
        counts = [last - first for first, last in windows]
        capsules = capsules.reshape(-1, *counts, image.shape[1], *self.kernel_size, image.shape[2])
        axes = [*zip(windows, counts, *self, strict=True)]
        covered = [(count - 1) * s + d * (k - 1) + 1 for _, count, _, k, s, _, d in axes]
        size = (capsules.shape[0], *covered, image.shape[1], image.shape[2])  # with the padding
        total = capsules.new_zeros(size, dtype=wide_dtype(capsules.dtype))
        for place in itertools.product(*map(range, self.kernel_size)):
            seen = total
            for axis, (at, (_, count, _, _, s, _, d)) in enumerate(zip(place, axes, strict=True)):
                seen = _every(seen, 1 + axis, at * d, count, s)
            of_place = capsules
            for at in place:  # the axes of the window follow the axes of the grid and the types
                of_place = of_place.select(2 + len(counts), at)
            seen.add_(of_place)
        part = image[slice(*samples)]
        for axis, ((first, _), _, n, _, s, p, _) in enumerate(axes):
            start, stop = first * s - p, first * s - p + covered[axis]
            begin, end = min(max(start, 0), n), min(max(stop, 0), n)
            part = part.narrow(3 + axis, begin, end - begin)
            total = total.narrow(1 + axis, min(max(begin - start, 0), covered[axis]), end - begin)
        part.add_(total.movedim((-2, -1), (1, 2)))


def _windows(windows: Windows, image: Tensor, box: Box) -> Tensor:
    """:meth:`Windows.unfold` by functions of torch, which have every derivative."""
    image = image[slice(*box[0])]
    padding: list[int] = []  # Dynamo does not trace list[int]()
    axes = [*zip(box[1:], *windows, strict=True)]
    for axis, ((first, last), n, k, s, p, d) in enumerate(axes):
        begin, end, *around = clipped(first * s - p, (last - 1) * s - p + d * (k - 1) + 1, n)
        image = image.narrow(3 + axis, begin, end - begin)
        padding = [*around, *padding]
    if any(padding):
        image = F.pad(image, padding)
    for _, _, k, s, _, d in axes:
        # Appends the axis of the window, which brings the next axis of the image to the place of this one.
        image = image.unfold(3, d * (k - 1) + 1, s)[..., ::d]
        image = image.movedim(3, -2)
    # Now [B, types, K, places along an axis, window along this axis, the same of the next axis, ..].
    count = len(axes)
    grid, window = range(3, 3 + 2 * count, 2), range(4, 4 + 2 * count, 2)
    return image.permute(0, *grid, 1, *window, 2).flatten(1 + count, 1 + 2 * count).flatten(0, count)


def _every(value: Tensor, axis: int, start: int, count: int, step: int) -> Tensor:
    """``count`` elements along the axis, ``step`` apart; a view."""
    size, stride = [*value.shape], [*value.stride()]
    size[axis], stride[axis] = count, stride[axis] * step
    return value.as_strided(size, stride, value.storage_offset() + start * value.stride(axis))
