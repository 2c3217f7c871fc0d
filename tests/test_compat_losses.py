"""The losses of capsfast.compat against the published ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import capsfast
from capsfast import compat

from .support import plain

B, J, D = 5, 4, 6
MARGINS = (0.8, 0.2, 0.3)


def squares(lengths: Tensor, present: Tensor, m_pos: float, m_neg: float, lambda_: float) -> Tensor:
    return present * F.relu(m_pos - lengths).pow(2) + lambda_ * (1 - present) * F.relu(lengths - m_neg).pow(2)


def of_capsules(v: Tensor, labels: Tensor) -> Tensor:
    lengths, present = torch.sqrt((v**2).sum(-1)), torch.eye(J, dtype=v.dtype)[labels]
    loss = present * F.relu(0.8 - lengths) + 0.3 * (1 - present) * F.relu(lengths - 0.2)
    return loss.sum(dim=-1).mean()


def of_images(images: Tensor, labels: Tensor, classes: Tensor, reconstructions: Tensor) -> Tensor:
    margin = squares(classes, labels, 0.9, 0.1, 0.5).sum()
    error = ((reconstructions - images.view(reconstructions.size(0), -1)) ** 2).sum()
    return (margin + 0.0005 * error) / images.size(0)


def lengths() -> Tensor:
    return torch.rand(B, J, dtype=torch.float64)


def labels() -> Tensor:
    return torch.tensor([0, 3, 1, 1, 2])


def present() -> Tensor:
    return torch.eye(J, dtype=torch.float64)[labels()]


def numbers() -> list[Tensor]:
    images = torch.rand(B, 1, 3, 3, dtype=torch.float64)
    return [images, present(), lengths(), torch.rand(B, 9, dtype=torch.float64)]


CASES: dict[str, tuple[Callable[[], Any], Callable[..., Tensor], Callable[[], list[Tensor]]]] = {
    "lengths": (
        lambda: compat.MarginLoss(*MARGINS),
        lambda x, y: squares(x, present(), *MARGINS).mean(),
        lambda: [lengths(), labels()],
    ),
    "lengths by keyword": (
        lambda: compat.MarginLoss(m_pos=0.8, m_neg=0.2, lambda_=0.3),
        lambda x, y: squares(x, present(), *MARGINS).mean(),
        lambda: [lengths(), labels()],
    ),
    "capsules": (
        lambda: compat.MarginLoss(J, 0.8, 0.2, 0.3),
        of_capsules,
        lambda: [torch.randn(B, J, D, dtype=torch.float64), labels()],
    ),
    "capsules by keyword": (
        lambda: compat.MarginLoss(n_labels=J, m_positive=0.8, m_negative=0.2, lambda_=0.3),
        of_capsules,
        lambda: [torch.randn(B, J, D, dtype=torch.float64), labels()],
    ),
    "paper": (
        lambda: compat.MarginLoss(m_plus=0.8, m_minus=0.2, lambda_=0.3),
        lambda x, y: squares(x, y, *MARGINS).sum(1).mean(),
        lambda: [lengths(), present()],
    ),
    "paper, defaults": (
        compat.MarginLoss,
        lambda x, y: squares(x, y, 0.9, 0.1, 0.5).sum(1).mean(),
        lambda: [lengths(), present()],
    ),
    "images": (compat.CapsuleLoss, of_images, numbers),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_the_same(name: str) -> None:
    torch.manual_seed(0)
    make, published, inputs = CASES[name]
    given = inputs()
    leaves = [each.requires_grad_() for each in given if each.is_floating_point()]
    got, wanted = make()(*given), published(*given)
    plain.assert_same(got, wanted)
    plain.assert_same(
        torch.autograd.grad(got, leaves, allow_unused=True), torch.autograd.grad(wanted, leaves, allow_unused=True)
    )


def test_without_size_average_it_is_the_sum() -> None:
    x = lengths()
    loss = compat.MarginLoss(0.9, 0.1, lambda_=0.5)
    plain.assert_same(loss(x, labels(), size_average=False), squares(x, present(), 0.9, 0.1, 0.5).sum())
    plain.assert_same(loss(x, labels(), False), J * B * loss(x, labels()))


def test_forms_are_one_class_and_keep_their_arguments() -> None:
    for loss in (
        compat.MarginLoss(*MARGINS),
        compat.MarginLoss(J, 0.8, 0.2),
        compat.MarginLoss(lambda_=0.3, m_plus=0.8),
    ):
        assert isinstance(loss, compat.MarginLoss) and repr(loss).startswith("MarginLoss(")
        assert loss.lambda_ == (0.5 if hasattr(loss, "n_labels") else 0.3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: compat.MarginLoss(0.9, 0.1), TypeError, "compat.MarginLoss: takes .* missing .*'lambda_'"),
        (lambda: compat.MarginLoss(m_neg=0.1), TypeError, "compat.MarginLoss: takes .* missing .*'m_pos'"),
        (lambda: compat.MarginLoss(10, 0.9, 0.1)(torch.rand(2, 4, 6), labels()[:2]), ValueError, "n_labels=10"),
        (lambda: compat.MarginLoss(0.9, 0.1, 0.5)(lengths(), labels()[:2]), ValueError, "targets"),
        (
            lambda: compat.CapsuleLoss()(*numbers()[:3], torch.rand(B, 8)),
            ValueError,
            "as many numbers as images",
        ),
    ],
)
def test_what_does_not_fit_is_said(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_the_error_of_the_loss_with_other_keywords_names_the_one_that_fits() -> None:
    for keywords in ({"lambda_": 0.5}, {"n_labels": 10, "m_positive": 0.9, "m_negative": 0.1}):
        with pytest.raises(TypeError, match=r"^capsfast.nn.MarginLoss: takes .*capsfast.compat.MarginLoss"):
            capsfast.nn.MarginLoss(**keywords)


class Derived(compat.MarginLoss):
    pass


class DerivedOfLengths(compat.MarginLoss):
    def __init__(self) -> None:
        super().__init__(*MARGINS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 2 * super().forward(x, y, size_average=False)


def test_classes_derived_from_margin_loss() -> None:
    x, y = lengths(), labels()
    capsules = torch.randn(B, J, D, dtype=torch.float64)
    for made, given in ((MARGINS, x), ((J, *MARGINS), capsules), ((), x)):
        loss = Derived(*made)
        assert torch.equal(loss(given, y), compat.MarginLoss(*made)(given, y)) and repr(loss).startswith("Derived(")
    plain.assert_same(DerivedOfLengths()(x, y), 2 * squares(x, present(), *MARGINS).sum())
    with pytest.raises(TypeError, match=r"compat.MarginLoss: takes .* missing .*'lambda_'"):
        Derived(0.9, 0.1)
