"""Attacks: images that raise a loss, within ``eps`` of the given images in every pixel."""

from collections.abc import Callable

import torch
from torch import Tensor

from .. import checks

Loss = Callable[[Tensor], Tensor]  # images [B, C, H, W] to one number


def _gradient(loss: Loss, images: Tensor) -> Tensor:
    images = images.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(loss(images), images)
    return gradient


def fgsm(loss: Loss, images: Tensor, eps: float) -> Tensor:
    """One step along the gradient's sign, the fast gradient sign method (Goodfellow, Shlens, Szegedy 2015, section 4).

    Args:
        loss: a loss summed over images; the gradient of an image must not depend on the other images.
        images: ``[B, C, H, W]`` in [0, 1].
        eps: largest change of a pixel, at least 0.

    Returns:
        ``[B, C, H, W]`` in [0, 1], without gradient.

    Raises:
        ValueError: a negative eps.
    """
    _check_eps("fgsm", eps)
    return (images + eps * _gradient(loss, images).sign()).clamp(0, 1).detach()


def pgd(
    loss: Loss,
    images: Tensor,
    eps: float,
    *,
    steps: int = 10,
    step_size: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Steps along the gradient's sign, each projected back: projected gradient descent (Madry et al. 2018, section 2).

    Args:
        loss, images, eps: see :func:`fgsm`.
        steps: number of steps, at least 1.
        step_size: change of a pixel in a step; default ``2.5 eps / steps``.
        generator: a CPU generator that draws the start within ``eps`` of the images; default: start at the images.

    Returns:
        ``[B, C, H, W]`` in [0, 1], without gradient.

    Raises:
        ValueError: a negative eps, or no steps.
    """
    _check_eps("pgd", eps)
    if steps < 1:
        raise ValueError(f"capsfast.train.pgd: steps must be at least 1, got {checks.shown(steps)}")
    step_size = 2.5 * eps / steps if step_size is None else step_size
    moved = images
    if generator is not None:
        start = torch.rand(images.shape, generator=generator).to(images) * 2 - 1
        moved = (images + eps * start).clamp(0, 1)
    for _ in range(steps):
        moved = moved + step_size * _gradient(loss, moved).sign()
        moved = torch.maximum(torch.minimum(moved, images + eps), images - eps).clamp(0, 1)
    return moved.detach()


def _check_eps(name: str, eps: float) -> None:
    if not eps >= 0:
        raise ValueError(f"capsfast.train.{name}: eps must not be negative, got {checks.shown(eps)}")
