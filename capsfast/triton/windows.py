"""Unfolds the windows of an image, and adds them back, with one kernel each; capsfast/windows.py is the definition.

The kernels are launched by Triton's ordinary path instead of a plan, because each box of windows would be a plan.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..calls import windows as where
from ..calls.windows import Box
from .config import power_of_two
from .kernels.arguments import Geometry
from .kernels.windows import fold_kernel, unfold_kernel
from .launch import cdiv, compiled_in, programs
from .plan import ALWAYS, on_device

# Neighbours along x in a tile: the lanes of a warp, which then load whole lines of the image.
NEIGHBOURS = 32
# Components of a tile. A thread of four warps then has 16 numbers of it, and a multiprocessor holds seven programs.
COMPONENTS = 64
WARPS = 4
# Unfolding programs take fewer places of their windows until there are this many for each of launch.programs().
ROUNDS = 8


def unfold(image: Tensor, windows: where.Geometry, box: Box) -> Tensor:
    """:meth:`Windows.unfold`, contiguous. image: ``[B, types, K, *size]`` with any strides, one to three axes."""
    samples, *bounds = box
    image = image[slice(*samples)]
    types, K = image.shape[1:3]
    counts = [last - start for start, last in bounds]
    unfolded = image.new_empty(image.shape[0] * math.prod(counts), types * windows.area, K)
    if not unfolded.numel():
        return unfolded
    begins = [start * s - p for (start, _), s, p in zip(bounds, windows.stride, windows.padding, strict=True)]
    constants = _constants(windows, types, K, counts[-1])
    tiles = len(image) * math.prod(counts[:-1]) * cdiv(counts[-1], constants["BX"])
    tiles *= cdiv(types * K, constants["BC"])
    parts = min(windows.area, cdiv(ROUNDS * programs(image.device, WARPS), tiles))
    places = cdiv(windows.area, parts)
    grid = (tiles * cdiv(windows.area, places),)
    with on_device(image.device):
        unfold_kernel[grid](*_arguments(image, unfolded, counts, begins), places, **constants)
    return unfolded


def fold_into(image: Tensor, capsules: Tensor, windows: where.Geometry, box: Box) -> None:
    """:meth:`Windows.fold_into`, in the order of its sums. image: as for :func:`unfold`."""
    samples, *bounds = box
    part, counts, begins = image[slice(*samples)], [], []
    for axis, ((start, last), n, k, s, p, d) in enumerate(zip(bounds, *windows, strict=True)):
        begin, end = start * s - p, (last - 1) * s - p + d * (k - 1) + 1
        inside = min(max(begin, 0), n)
        part = part.narrow(3 + axis, inside, max(min(end, n) - inside, 0))
        counts.append(last - start)
        begins.append(inside - begin)
    if not part.numel() or not capsules.numel():
        return
    types, K = image.shape[1:3]
    constants = _constants(windows, types, K, part.shape[-1])
    tiles = len(part) * math.prod(part.shape[3:-1]) * cdiv(part.shape[-1], constants["BX"])
    grid = (tiles * cdiv(types * K, constants["BC"]),)
    with on_device(image.device):
        fold_kernel[grid](*_arguments(part, capsules.contiguous(), counts, begins), **constants)


def _three(values: Iterable[int], filler: int) -> list[int]:
    """The values for the axes z, y, x. filler: the value of an axis in front that the image lacks."""
    return [filler, filler, *values][-3:]


def _arguments(image: Tensor, capsules: Tensor, counts: list[int], begins: list[int]) -> list[Any]:
    strides = [*image.stride()[:3], *_three(image.stride()[3:], 0)]
    sizes = (*_three(image.shape[3:], 1), *_three(counts, 1), *_three(begins, 0))
    return [image, capsules, *strides, math.prod(image.shape[1:3]), *sizes]


@functools.lru_cache(256)
def _constants(windows: where.Geometry, types: int, K: int, neighbours: int) -> dict[str, Any]:
    """Keyword arguments of a launch. neighbours: how many windows or places lie along x."""
    of_axes = (windows.kernel_size, windows.stride, windows.dilation)
    geometry = Geometry(K, *(value for values in of_axes for value in _three(values, 1)))
    BX, BC = min(NEIGHBOURS, power_of_two(neighbours)), min(COMPONENTS, power_of_two(types * K))
    warps = min(WARPS, max(1, WARPS * BX * BC // (NEIGHBOURS * COMPONENTS)))
    return {"G": compiled_in(geometry), "BC": BC, "BX": BX, "num_warps": warps, **ALWAYS}
