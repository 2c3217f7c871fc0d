"""The ops that copy the input capsules of windows, and add such capsules to an image.

``capsfast::unfold_windows`` returns ``capsules [windows, I, K]`` of a box of windows of an image
``[B, types, K, *size]``; ``capsfast::fold_windows`` adds capsules to the image. capsfast/calls/windows.py has the
geometry. CUDA tensors take Triton kernels instead. Both have no gradients and are never part of a program: they serve
eager calls, and one is the gradient of the other.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..backend import choose_for_windows
from ..calls.windows import Box, Geometry
from ..environment.names import PACKAGE
from ..environment.private_torch import below_autograd


class _Ops:
    """The ops, as the functions of capsfast/triton/windows.py."""

    @staticmethod
    def unfold(image: Tensor, windows: Geometry, box: Box) -> Tensor:
        with below_autograd():
            return torch.ops.capsfast.unfold_windows.default(image, *_numbers(windows, box))  # type: ignore[no-any-return]

    @staticmethod
    def fold_into(image: Tensor, capsules: Tensor, windows: Geometry, box: Box) -> None:
        with below_autograd():
            torch.ops.capsfast.fold_windows.default(image, capsules.contiguous(), *_numbers(windows, box))


def _numbers(windows: Geometry, box: Box) -> tuple[Any, ...]:
    return (*windows[1:], [bound for bounds in box for bound in bounds])


# What has the functions of a backend.
_KERNELS: dict[str, Callable[[], Any]] = {
    "cpp": lambda: _Ops,
    "triton": functools.cache(lambda: importlib.import_module(f"{PACKAGE}.triton.windows")),
}


def _kernels(image: Tensor) -> Any:
    chosen = choose_for_windows(image.device)
    return None if chosen is None else _KERNELS[chosen]()


def unfold(image: Tensor, windows: Geometry, box: Box) -> Tensor | None:
    """The capsules of the box; None if no kernel serves the image."""
    kernels = _kernels(image)
    return None if kernels is None else kernels.unfold(image, windows, box)


def fold_into(image: Tensor, capsules: Tensor, windows: Geometry, box: Box) -> bool:
    """Adds the capsules to the image; False if no kernel serves the image."""
    kernels = _kernels(image)
    if kernels is not None:
        kernels.fold_into(image, capsules, windows, box)
    return kernels is not None
