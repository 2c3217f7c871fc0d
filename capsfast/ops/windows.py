"""The ops that copy the input capsules of windows, and add them back to the image.

``capsfast::unfold_windows`` returns ``capsules [windows, I, K]`` of a box of windows of an image ``[B, types, K,
*size]``; ``capsfast::fold_windows`` adds such capsules to the image. capsfast/windows.py has the geometry. The ops have
no gradients and are never part of a program: they serve eager calls whose gradient is known, one as that of the other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..environment import native
from ..environment.private_torch import below_autograd

# kernel_size, stride, padding, dilation, box
Geometry = tuple[Sequence[int], ...]


def unfold(image: Tensor, geometry: Geometry) -> Tensor | None:
    """The capsules of the box; None if no kernel serves the image."""
    if native.extension is None or image.device.type != "cpu":
        return None
    with below_autograd():
        return torch.ops.capsfast.unfold_windows.default(image, *geometry)  # type: ignore[no-any-return]


def fold(image: Tensor, capsules: Tensor, geometry: Geometry) -> bool:
    """Adds the capsules to the image; False if no kernel serves the image."""
    if native.extension is None or image.device.type != "cpu":
        return False
    with below_autograd():
        torch.ops.capsfast.fold_windows.default(image, capsules.contiguous(), *geometry)
    return True
