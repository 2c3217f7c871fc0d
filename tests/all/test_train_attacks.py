"""``capsfast.train``: images changed by an attack."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("lightning")
pytest.importorskip("matplotlib")

from capsfast import train
from capsfast.train import ImageData, fgsm, pgd

from ..support.training import learner_for, margin


def test_fgsm_is_a_step_along_the_sign() -> None:
    images, slope = torch.rand(4, 1, 3, 3), torch.randn(4, 1, 3, 3)
    found = fgsm(lambda x: (slope * x).sum(), images, 0.25)
    torch.testing.assert_close(found, (images + 0.25 * slope.sign()).clamp(0, 1))
    # The gradient of (x - a)^2 points away from a.
    found = fgsm(lambda x: (x - 0.5).square().sum(), images, 0.125)
    torch.testing.assert_close(found, (images + 0.125 * torch.where(images > 0.5, 1.0, -1.0)).clamp(0, 1))
    assert not found.requires_grad and images.grad is None


def test_pgd_follows_hand_made_steps() -> None:
    target = torch.rand(3, 1, 4, 4)
    images = torch.rand(3, 1, 4, 4)
    x = images.clone()
    for _ in range(3):
        x = x + 0.05 * torch.sign(-2 * (target - x))
        x = torch.minimum(torch.maximum(x, images - 0.1), images + 0.1).clamp(0, 1)
    found = pgd(lambda x: (x - target).square().sum(), images, 0.1, steps=3, step_size=0.05)
    torch.testing.assert_close(found, x)


def test_pgd_stays_near_and_starts_at_random() -> None:
    images, slope = torch.rand(4, 1, 3, 3), torch.randn(4, 1, 3, 3)

    def attacked(**more: Any) -> Tensor:
        return pgd(lambda x: (slope * x).sum(), images, 0.1, **more)

    assert (attacked(steps=4) - images).abs().max() <= 0.1 + 1e-6
    torch.testing.assert_close(attacked(steps=10), (images + 0.1 * slope.sign()).clamp(0, 1))
    draws = [attacked(steps=1, step_size=1e-3, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert (draws[2] - images).abs().max() <= 0.1 + 1e-6 and draws[2].min() >= 0 and draws[2].max() <= 1


def test_attacks_reject() -> None:
    for attack in (fgsm, pgd):
        with pytest.raises(ValueError, match="eps must be 0 or positive"):
            attack(torch.sum, torch.rand(1, 1, 2, 2), -0.1)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        pgd(torch.sum, torch.rand(1, 1, 2, 2), 0.1, steps=0)


def test_attacks_raise_the_margin_loss_of_a_network(folder: Path) -> None:
    images = ImageData(str(folder))
    learner = learner_for(images).eval()
    batch = images.sets.test.batch(torch.arange(8))
    loss = learner.class_loss_of(batch.labels)
    lengths = learner.model(batch.images).lengths
    torch.testing.assert_close(loss(batch.images), margin(lengths, torch.eye(4)[batch.labels]).sum())
    once, often = fgsm(loss, batch.images, 0.1), pgd(loss, batch.images, 0.1)
    assert loss(batch.images) < loss(once) <= loss(often) + 1e-4
    seen: list[Tensor] = []

    def attack(loss: Any, images: Tensor) -> Tensor:
        seen.append(images)
        return torch.zeros_like(images)

    # The attacked images are classified: all are black and have one class.
    found = train.evaluate(learner, images.sets.test, attack=attack)
    assert found.confusion is not None and (found.confusion.sum(0) > 0).sum() == 1
    assert torch.equal(seen[0], images.sets.test.batch(torch.arange(20)).images)
