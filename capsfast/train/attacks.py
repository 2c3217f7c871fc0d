"""Attacks: images that raise a loss, within ``eps`` of the given images in every pixel."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..calls import checks

Loss = Callable[[Tensor], Tensor]  # images [B, C, H, W] to one number


def lead(scores: Tensor, labels: Tensor) -> Tensor:
    """By how much the best wrong class leads the true class, or the worst of several: a goal of attacks.

    It has a gradient where a network is sure too, and the margin loss has none. Carlini, Wagner (2017) raise the same
    difference, of logits.

    Args:
        scores: ``[B, J]``, such as activations or log-probabilities.
        labels: true classes, ``[B]`` or ``[B, n]``.

    Returns:
        ``[B]``.
    """
    true = labels[:, None].flatten(1)
    return scores.scatter(1, true, -torch.inf).amax(1) - scores.gather(1, true).amin(1)


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
    eps = checks.plain(eps)
    checks.positive("capsfast.train.fgsm", "eps", eps, zero=True)
    return _steps(loss, images, images, eps, 1, eps)


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
    eps, steps, step_size = checks.plain((eps, steps, step_size))
    checks.positive("capsfast.train.pgd", "eps", eps, zero=True)
    checks.integer("capsfast.train.pgd", "steps", steps)
    start = images
    if generator is not None:
        noise = torch.rand(images.shape, generator=generator).to(images) * 2 - 1
        start = (images + eps * noise).clamp(0, 1)
    return _steps(loss, images, start, eps, steps, 2.5 * eps / steps if step_size is None else step_size)


def _steps(loss: Loss, images: Tensor, moved: Tensor, eps: float, steps: int, size: float) -> Tensor:
    for _ in range(steps):
        moved = moved.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(loss(moved), moved)
        moved = moved.detach() + size * gradient.sign()
        moved = torch.maximum(torch.minimum(moved, images + eps), images - eps).clamp(0, 1)
    return moved.detach()
