"""Votes of capsules that were unfolded from an image, with a gradient that needs less memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...calls import checks
from ...environment.private_torch import forward_level
from ...passes import Moments
from .votes import PassVotes

Fold = Callable[[Tensor], Tensor]


class UnfoldedVotes(PassVotes):
    """Votes of poses ``u`` unfolded from an image. Each pass has its own gradient to the image.

    Autograd would add up the gradients of ``u`` from all passes first, which takes two tensors as large as the unfolded
    poses. Here the gradient of each pass is folded into a gradient of the image at once.

    Args:
        votes: votes of ``u``, without a gradient to the image.
        image: the poses before unfolding.
        fold: turns a gradient of ``u`` into a gradient of the image; differentiable.
    """

    def __init__(self, votes: PassVotes, image: Tensor, fold: Fold) -> None:
        vars(self).update(vars(votes))
        self._unfolded, self._image, self._fold = votes.tensors[0], image, fold
        self._renew()
        self.u = self.tensors[0]

    def _renew(self) -> None:
        """Gives the next pass a gradient of its own."""
        u = unfolded(self._image, self._unfolded, self._fold)
        self.tensors = (u, *self.tensors[1:])
        if self.call is not None:
            self.call = replace(self.call, u=u.flatten(2))  # poses of any rank

    def moments(self, **arguments: Any) -> Moments:
        self._renew()
        return super().moments(**arguments)

    def agree(self, num_iterations: int, **options: Any) -> Any:
        self._renew()
        return super().agree(num_iterations, **options)

    def _gaussians(self, *given: Any) -> tuple[Tensor, Tensor] | None:
        self._renew()
        return super()._gaussians(*given)


def unfolded(image: Tensor, windows: Tensor, fold: Fold) -> Tensor:
    """``windows``, which were unfolded from the image, with a gradient to the image."""
    return _Unfolded.apply(image, windows, fold)  # type: ignore[no-any-return]


def folds_by_pass(image: Tensor) -> bool:
    """Whether the image needs a gradient and our own autograd function can compute it."""
    if not checks.is_eager(image) or forward_level() >= 0:
        return False
    return torch.is_grad_enabled() and image.requires_grad


class _Unfolded(torch.autograd.Function):
    """Returns ``unfolded``; ``fold`` turns its gradient into the gradient of the image."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, unfolded: Tensor, fold: Fold) -> Tensor:
        ctx.fold = fold
        return unfolded.view_as(unfolded)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.fold(gradient), None, None
