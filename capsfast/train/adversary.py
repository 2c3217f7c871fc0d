"""Adversarial training: images of a step are replaced by attacked ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

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
        if self.attack not in ATTACKS:
            raise ValueError(f"{op}: adversarial must be one of {', '.join(ATTACKS)}, got {self.attack!r}")
        if not 0 < self.eps < float("inf"):
            raise ValueError(f"{op}: adversarial_eps must be positive and finite, got {self.eps}")
        if self.steps < 1:
            raise ValueError(f"{op}: adversarial_steps must be at least 1, got {self.steps}")
        if not 0 < self.share <= 1:
            raise ValueError(f"{op}: adversarial_share must be above 0 and at most 1, got {self.share}")

    def count(self, images: int) -> int:
        """How many of so many images are attacked."""
        return round(self.share * images)

    def __call__(self, loss: Loss, images: Tensor, generator: torch.Generator) -> Tensor:
        """``images``: those of :meth:`count`; ``loss``: as for :func:`capsfast.train.fgsm`."""
        if self.attack == "fgsm":
            return fgsm(loss, images, self.eps)
        return pgd(loss, images, self.eps, steps=self.steps, generator=generator)
