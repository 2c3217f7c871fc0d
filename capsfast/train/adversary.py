"""Adversarial training: images of a step are replaced by attacked ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import checks
from ..nn import _arguments
from .attacks import Loss, fgsm, pgd

ATTACKS = ("fgsm", "pgd")


@dataclass(frozen=True)
class Adversary:
    """Attacks the first images of a batch, whose order is random (Kurakin, Goodfellow, Bengio 2017, algorithm 1; with
    PGD and all images the training of Madry et al. 2018).

    Args:
        attack: ``"fgsm"`` or ``"pgd"``.
        eps: largest change of a pixel.
        steps: of PGD, which starts anywhere within eps.
        share: of the images of a batch.

    Raises:
        ValueError: an unknown attack, or a number out of range.
    """

    attack: str
    eps: float = 0.1
    steps: int = 10
    share: float = 1.0

    def __post_init__(self) -> None:
        op = "capsfast.train.Learner"
        checks.choice(op, "adversarial", self.attack, ATTACKS)
        _arguments.positive(op, "adversarial_eps", self.eps)
        _arguments.integer(op, "adversarial_steps", self.steps)
        if not 0 < self.share <= 1:
            raise ValueError(f"{op}: adversarial_share must be above 0 and at most 1, got {checks.shown(self.share)}")

    def count(self, images: int) -> int:
        """How many of so many images are attacked."""
        return round(self.share * images)

    def __call__(self, loss: Loss, images: Tensor, generator: torch.Generator) -> Tensor:
        """``images``: those of :meth:`count`; ``loss``: as for :func:`capsfast.train.fgsm`."""
        if self.attack == "fgsm":
            return fgsm(loss, images, self.eps)
        return pgd(loss, images, self.eps, steps=self.steps, generator=generator)
