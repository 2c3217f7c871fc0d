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


@pytest.mark.parametrize(
    ("model", "loss", "count"),
    [("capsnet", "margin", 1), ("capsnet", "margin", 2), ("capsnet", "spread", 1), ("cnn", "cross-entropy", 1)],
)
def test_attacks_move_images_of_which_the_network_is_sure(model: str, loss: str, count: int) -> None:
    """The labels are the most active classes, and all images keep the margins of the losses that have some."""
    options = {"channels": [2], "hidden": [4]} if model == "cnn" else {"conv_channels": 6, "primary_groups": 2}
    learner = train.Learner(model, 1, 8, 4, loss=loss, options=options).eval()
    learner.class_loss.margin.m_plus, learner.class_loss.margin.m_minus = 0.0, 1.0
    learner.class_loss.spread.start = learner.class_loss.spread.end = -1.0
    images = torch.rand(8, 1, 8, 8)
    poses, lengths = learner.classify(images)
    labels = lengths.topk(count, dim=1).indices.squeeze(1)
    if model == "capsnet":
        assert torch.equal(fgsm(learner.class_loss_of(labels), images, 0.1), images)
    lead, scores = learner.lead_of(labels), poses[:, :, 0] if model == "cnn" else lengths
    ranked = scores.sort(1, descending=True).values
    torch.testing.assert_close(lead(images), (ranked[:, count] - ranked[:, count - 1]).sum())
    once, often = fgsm(lead, images, 0.1), pgd(lead, images, 0.1)
    assert (once != images).flatten(1).any(1).all()
    assert lead(images) < lead(once) <= lead(often) + 1e-4


def test_the_class_loss_of_a_batch(folder: Path) -> None:
    images = ImageData(str(folder))
    learner = learner_for(images).eval()
    batch = images.sets.test.batch(torch.arange(8))
    lengths = learner.model(batch.images).lengths
    expected = margin(lengths, torch.eye(4)[batch.labels]).sum()
    torch.testing.assert_close(learner.class_loss_of(batch.labels)(batch.images), expected)


@pytest.mark.parametrize("fooling", [0, 1])
def test_the_worse_of_two_attacks_counts(folder: Path, fooling: int) -> None:
    """One of the two calls leaves all images as they are, the other takes the light away from half of them."""
    images = ImageData(str(folder))
    learner = learner_for(images).eval()
    batch = images.sets.test.batch(torch.arange(20))
    black = torch.where(torch.arange(20)[:, None, None, None] < 10, 0.0, batch.images)
    goals: list[Any] = []

    def attack(goal: Any, images: Tensor) -> Tensor:
        goals.append(goal(images).item())
        return black if len(goals) - 1 == fooling else images

    found = train.evaluate(learner, images.sets.test, attack=attack)
    assert goals == [each(batch.labels)(batch.images).item() for each in (learner.class_loss_of, learner.lead_of)]
    clean, dark = (learner.classify(x).activations.argmax(1) for x in (batch.images, black))
    both = (clean == batch.labels) & (dark == batch.labels)
    assert 0 < both.sum() < (clean == batch.labels).sum() and found.right == both.sum() == found.found
    first, second = (clean, dark) if fooling else (dark, clean)
    guessed = torch.where(first == batch.labels, second, first)
    assert found.confusion is not None
    torch.testing.assert_close(found.confusion.sum(0), torch.bincount(guessed, minlength=4))


def test_evaluate_classifies_the_attacked_images(folder: Path) -> None:
    images = ImageData(str(folder))
    learner = learner_for(images).eval()
    seen: list[Tensor] = []

    def attack(loss: Any, images: Tensor) -> Tensor:
        seen.append(images)
        return torch.zeros_like(images)

    # The attacked images are classified: all are black and have one class.
    found = train.evaluate(learner, images.sets.test, attack=attack)
    assert found.confusion is not None and (found.confusion.sum(0) > 0).sum() == 1
    assert torch.equal(seen[0], images.sets.test.batch(torch.arange(20)).images)
