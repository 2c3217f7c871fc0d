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
LABELS = torch.tensor([0, 3, 1, 1, 2])
PRESENT = torch.eye(J, dtype=torch.float64)[LABELS]


def squares(lengths: Tensor, present: Tensor, m_pos: float, m_neg: float, lambda_: float) -> Tensor:
    return present * F.relu(m_pos - lengths).pow(2) + lambda_ * (1 - present) * F.relu(lengths - m_neg).pow(2)


def of_lengths(x: Tensor, _: Tensor) -> Tensor:
    return squares(x, PRESENT, *MARGINS).mean()


def of_capsules(v: Tensor, _: Tensor, margins: tuple[float, ...] = MARGINS) -> Tensor:
    lengths, (m_positive, m_negative, lambda_) = torch.sqrt((v**2).sum(-1)), margins
    loss = PRESENT * F.relu(m_positive - lengths) + lambda_ * (1 - PRESENT) * F.relu(lengths - m_negative)
    return loss.sum(dim=-1).mean()


def of_images(images: Tensor, labels: Tensor, classes: Tensor, reconstructions: Tensor) -> Tensor:
    margin = squares(classes, labels, 0.9, 0.1, 0.5).sum()
    error = ((reconstructions - images.view(reconstructions.size(0), -1)) ** 2).sum()
    return (margin + 0.0005 * error) / images.size(0)


def lengths() -> Tensor:
    return torch.rand(B, J, dtype=torch.float64)


def capsules() -> Tensor:
    return torch.randn(B, J, D, dtype=torch.float64)


def numbers() -> list[Tensor]:
    return [torch.rand(B, 1, 3, 3, dtype=torch.float64), PRESENT, lengths(), torch.rand(B, 9, dtype=torch.float64)]


def of_paper(x: Tensor, y: Tensor) -> Tensor:
    return squares(x, y, *MARGINS).sum(1).mean()


def with_lengths() -> list[Tensor]:
    return [lengths(), LABELS]


def with_capsules() -> list[Tensor]:
    return [capsules(), LABELS]


CASES: list[tuple[dict[str, float] | tuple[float, ...], Callable[..., Tensor], Callable[[], list[Tensor]]]] = [
    (MARGINS, of_lengths, with_lengths),
    ({"m_pos": 0.8, "m_neg": 0.2, "lambda_": 0.3}, of_lengths, with_lengths),
    ((J, *MARGINS), of_capsules, with_capsules),
    ({"n_labels": J, "m_positive": 0.8, "m_negative": 0.2, "lambda_": 0.3}, of_capsules, with_capsules),
    ({"n_labels": J, "lambda_": 0.3, "m_negative": 0.2, "m_positive": 0.8}, of_capsules, with_capsules),
    ((1, 0, 0.0), lambda x, _: squares(x, PRESENT, 1, 0, 0).mean(), with_lengths),
    ((J, 1, 0, 0.3), lambda v, _: of_capsules(v, _, (1, 0, 0.3)), with_capsules),
    ({"n_labels": J}, lambda v, _: of_capsules(v, _, (0.9, 0.1, 0.5)), with_capsules),
    ({"m_plus": 0.8, "m_minus": 0.2, "lambda_": 0.3}, of_paper, lambda: [lengths(), PRESENT]),
    ((), lambda x, y: squares(x, y, 0.9, 0.1, 0.5).sum(1).mean(), lambda: [lengths(), PRESENT]),
    ((), of_images, numbers),
]


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-5])
@pytest.mark.parametrize(("arguments", "published", "inputs"), CASES)
def test_losses_and_gradients_are_the_same(
    arguments: Any, published: Callable[..., Tensor], inputs: Callable[[], list[Tensor]], scale: float
) -> None:
    torch.manual_seed(0)
    make = compat.CapsuleLoss if inputs is numbers else compat.MarginLoss
    loss = make(**arguments) if isinstance(arguments, dict) else make(*arguments)
    first, *others = inputs()
    given = [scale * first, *(tensor.clone() for tensor in others)]
    leaves = [tensor.requires_grad_() for tensor in given if tensor.is_floating_point()]
    results = [
        (made, torch.autograd.grad(made, leaves, allow_unused=True)) for made in (loss(*given), published(*given))
    ]
    plain.assert_same(*results)


class Derived(compat.MarginLoss):
    pass


class DerivedOfLengths(compat.MarginLoss):
    def __init__(self) -> None:
        super().__init__(*MARGINS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 2 * super().forward(x, y, size_average=False)


def test_forms_are_one_class_with_the_arguments_as_attributes_and_so_are_classes_derived_from_it() -> None:
    x = lengths()
    for made, given in ((MARGINS, x), ((J, *MARGINS), capsules()), ((), x)):
        loss, derived = compat.MarginLoss(*made), Derived(*made)
        assert repr(loss).startswith("MarginLoss(") and repr(derived).startswith("Derived(")
        assert loss.lambda_ == (0.3 if made else 0.5) and torch.equal(derived(given, LABELS), loss(given, LABELS))
    plain.assert_same(DerivedOfLengths()(x, LABELS), 2 * squares(x, PRESENT, *MARGINS).sum())
    loss = compat.MarginLoss(*MARGINS)
    plain.assert_same(loss(x, LABELS, False), J * B * loss(lengths=x, targets=LABELS))


NN = r"^capsfast.nn.MarginLoss: takes .*capsfast.compat.MarginLoss"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: compat.MarginLoss(0.9, 0.1), TypeError, r"takes \(m_pos, m_neg, lambda_\) or .* got \(0.9, 0.1\)"),
        (lambda: compat.MarginLoss(m_neg=0.1), TypeError, r"compat.MarginLoss: takes .* got \(m_neg=0.1\)"),
        (lambda: Derived(0.9, 0.1), TypeError, r"compat.MarginLoss: takes .* got \(0.9, 0.1\)"),
        (lambda: compat.MarginLoss(10, 0.9, 0.1)(capsules(), LABELS), ValueError, "n_labels=10"),
        (lambda: compat.MarginLoss(0.9, 0.1, 0.5)(lengths(), LABELS[:2]), ValueError, "targets"),
        (lambda: compat.CapsuleLoss()(*numbers()[:3], torch.rand(B, 8)), ValueError, "as many numbers as images"),
        (lambda: capsfast.nn.MarginLoss(lambda_=0.5), TypeError, NN),
        (lambda: capsfast.nn.MarginLoss(n_labels=10, m_positive=0.9, m_negative=0.1), TypeError, NN),
    ],
)
def test_what_does_not_fit_is_said(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
