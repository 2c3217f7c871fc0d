"""The losses against loops over samples and classes."""

import itertools
import math
import re

import pytest
import torch
from torch import Tensor, nn

from capsfast.models import CapsNetOutput
from capsfast.nn import CapsNetLoss, CouplingEntropy, MarginLoss, ReconstructionLoss, SpreadLoss

B, J, D = 5, 4, 6
LABELS = torch.tensor([3, 0, 0, 2, 1])
SEVERAL = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 0]])


def lengths_of_all_kinds() -> Tensor:
    return torch.rand(B, J, dtype=torch.float64) * 1.1


def margin_by_hand(
    lengths: Tensor, present: Tensor, m_plus: float, m_minus: float, lam: float, power: int
) -> list[float]:
    return [
        sum(
            t * max(0.0, m_plus - a) ** power + lam * (1 - t) * max(0.0, a - m_minus) ** power
            for a, t in zip(row, targets, strict=True)
        )
        for row, targets in zip(lengths.tolist(), present.tolist(), strict=True)
    ]


def reduced(values: list[float], reduction: str) -> Tensor:
    total = {"none": values, "sum": sum(values), "mean": sum(values) / len(values)}[reduction]
    return torch.tensor(total, dtype=torch.float64)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("margins", [(0.9, 0.1, 0.5), (0.7, 0.2, 1.5)], ids=str)
@pytest.mark.parametrize(
    "targets", [LABELS, SEVERAL, SEVERAL.bool(), SEVERAL.double()], ids=["one", "several", "bool", "float"]
)
def test_margin_loss(targets: Tensor, margins: tuple[float, float, float], squared: bool, reduction: str) -> None:
    loss = MarginLoss(*margins, squared=squared, reduction=reduction)
    lengths = lengths_of_all_kinds()
    present = nn.functional.one_hot(targets, J) if targets.dim() == 1 else targets
    wanted = margin_by_hand(lengths, present, *margins, power=2 if squared else 1)
    torch.testing.assert_close(loss(lengths, targets), reduced(wanted, reduction))
    # Capsules of these lengths.
    v = nn.functional.normalize(torch.randn(B, J, D, dtype=torch.float64), dim=-1) * lengths[..., None]
    torch.testing.assert_close(loss(v, targets), reduced(wanted, reduction))


@pytest.mark.parametrize("capsules", [torch.rand(2, 4, 3, 5), torch.rand(2, 4, 6, 3, 5)], ids=["lengths", "capsules"])
def test_a_loss_of_an_image_says_how_to_give_its_positions(capsules: Tensor) -> None:
    classes = torch.randint(4, (2, 3, 5))
    with pytest.raises(ValueError, match=r"every position is a sample: give lengths") as refused:
        MarginLoss()(capsules, classes)
    said = re.findall(r"(?:lengths|targets)(?:\.\w+\([^()]*\))+", str(refused.value))
    several = torch.nn.functional.one_hot(classes, 4).movedim(-1, 1)
    lengths, indices, multi_hot = (
        eval(each, {"lengths": capsules, "targets": targets})
        for each, targets in zip(said, (None, classes, several), strict=True)
    )
    wanted = torch.stack(
        [
            MarginLoss(reduction="none")(capsules[..., y, x], classes[..., y, x])
            for y, x in itertools.product(range(3), range(5))
        ]
    )
    for targets in (indices, multi_hot):
        torch.testing.assert_close(MarginLoss()(lengths, targets), wanted.mean())


def test_margin_loss_of_the_paper_at_known_lengths() -> None:
    loss = MarginLoss()
    assert loss(torch.tensor([[0.9, 0.1, 0.1]]), torch.tensor([0])).item() == 0
    # 0.9^2 for the present class of length 0, 0.5 (1 - 0.1)^2 for a wrong class of length 1.
    assert loss(torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([0])).item() == pytest.approx(0.81 + 0.405)
    # All capsules have length 1, as with randn weights: 9 are wrong.
    assert loss(torch.ones(8, 10), torch.arange(8)).item() == pytest.approx(9 * 0.405)


def test_gradients() -> None:
    lengths = lengths_of_all_kinds().requires_grad_()
    v = torch.randn(B, J, D, dtype=torch.float64, requires_grad=True)
    image = torch.rand(B, 2, 3, dtype=torch.float64, requires_grad=True)
    for loss, inputs in (
        (lambda x: MarginLoss()(x, LABELS), lengths),
        (lambda x: MarginLoss(reduction="none")(x, SEVERAL), v),
        (lambda x: SpreadLoss()(x, LABELS, 3000), lengths),
        (lambda x: ReconstructionLoss()(x, torch.ones_like(x)), image),
        (lambda x: CouplingEntropy()(x.softmax(2)), v),
    ):
        assert torch.autograd.gradcheck(loss, (inputs,))


def test_a_zero_capsule_has_a_finite_gradient() -> None:
    v = torch.zeros(B, J, D, requires_grad=True)
    MarginLoss()(v, LABELS).backward()
    assert v.grad is not None
    assert torch.equal(v.grad, torch.zeros(B, J, D))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reconstruction_loss_sums_over_an_image(reduction: str) -> None:
    images, reconstruction = torch.rand(2, B, 2, 3, 4, dtype=torch.float64)
    pairs = zip(images.flatten(1).tolist(), reconstruction.flatten(1).tolist(), strict=True)
    wanted = [sum((x - y) ** 2 for x, y in zip(*pair, strict=True)) for pair in pairs]
    torch.testing.assert_close(ReconstructionLoss(reduction)(reconstruction, images), reduced(wanted, reduction))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_capsnet_loss_is_the_sum_of_its_parts(reduction: str) -> None:
    lengths, v = lengths_of_all_kinds(), torch.randn(B, J, D, dtype=torch.float64)
    images, reconstruction = torch.rand(2, B, 1, 4, 4, dtype=torch.float64)
    parts = CapsNetLoss(reduction=reduction)(CapsNetOutput(lengths, v, reconstruction), images, LABELS)
    assert parts.margin.equal(MarginLoss(reduction=reduction)(lengths, LABELS))
    assert parts.reconstruction.equal(ReconstructionLoss(reduction)(reconstruction, images))
    torch.testing.assert_close(parts.total, parts.margin + 0.0005 * parts.reconstruction)

    weighted = CapsNetLoss(0.3, 0.8, 0.2, 0.7, squared=False, reduction=reduction)
    other = weighted((lengths, v, reconstruction), images, SEVERAL)
    margin = MarginLoss(0.8, 0.2, 0.7, squared=False, reduction=reduction)(lengths, SEVERAL)
    torch.testing.assert_close(other.total, margin + 0.3 * parts.reconstruction)

    without = weighted((lengths, v, None), images, SEVERAL)
    assert torch.equal(without.total, margin)
    assert torch.equal(without.reconstruction, torch.zeros_like(margin))


def test_capsnet_loss_reads_no_number_from_the_device() -> None:
    """The meta device has no numbers to read."""
    with torch.device("meta"):
        output = CapsNetOutput(torch.empty(B, J), torch.empty(B, J, D), torch.empty(B, 1, 4, 4))
        parts = CapsNetLoss()(output, torch.empty(B, 1, 4, 4), torch.empty(B, dtype=torch.int64))
    assert all(isinstance(part, Tensor) and part.is_meta and part.shape == () for part in parts)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("step", "margin"), [(0, 0.2), (250, 0.375), (1000, 0.9), (5000, 0.9), (-3, 0.2)])
def test_spread_loss_and_its_margin(step: int, margin: float, reduction: str) -> None:
    loss = SpreadLoss(steps=1000, reduction=reduction)
    assert loss.margin(step) == pytest.approx(margin)
    activations = lengths_of_all_kinds()
    wanted = [
        sum(max(0.0, margin - (row[label] - a)) ** 2 for j, a in enumerate(row) if j != label)
        for row, label in zip(activations.tolist(), LABELS.tolist(), strict=True)
    ]
    for given in (step, torch.tensor(step, dtype=torch.float64)):
        torch.testing.assert_close(loss(activations, LABELS, given), reduced(wanted, reduction))


def test_spread_loss_takes_capsules_and_keeps_no_state() -> None:
    loss, v = SpreadLoss(steps=10), torch.randn(B, J, D)
    first = loss(v, LABELS, 0)
    torch.testing.assert_close(loss(v, LABELS, 9), loss(v.norm(dim=2), LABELS, 9))
    assert torch.equal(loss(v, LABELS, 0), first) and not loss.state_dict()


@pytest.mark.parametrize("softmax", ["out", "in"])
def test_coupling_entropy(softmax: str) -> None:
    dim = 2 if softmax == "out" else 1
    c = torch.randn(B, 7, J, dtype=torch.float64).softmax(dim)
    mean = -(c * c.log()).sum(dim).mean()
    assert CouplingEntropy(softmax, normalize=False)(c).item() == pytest.approx(mean)
    assert CouplingEntropy(softmax)(c).item() == pytest.approx(mean / math.log(c.shape[dim]))


def test_coupling_entropy_at_its_ends() -> None:
    entropy = CouplingEntropy()
    assert entropy(torch.full((B, 7, J), 1 / J)).item() == pytest.approx(1)
    chosen = nn.functional.one_hot(torch.randint(J, (B, 7)), J).float().requires_grad_()
    value = entropy(chosen)
    assert value.item() == 0
    value.backward()
    assert chosen.grad is not None
    assert chosen.grad.isfinite().all()
    # Half of the input capsules are masked and must not count.
    half = torch.full((B, 8, J), 1 / J)
    half[:, ::2] = 0
    assert entropy(half).item() == pytest.approx(1)
    assert entropy(torch.zeros(B, 7, J)).item() == 0
    assert entropy(torch.ones(B, 7, 1)).item() == 0
    assert entropy(half.bfloat16()).item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_of_16_bit_numbers_are_formed_in_float32(dtype: torch.dtype) -> None:
    lengths, image = torch.rand(B, J).to(dtype), torch.rand(B, 1, 28, 28).to(dtype)
    for loss, arguments in (
        (MarginLoss(), (lengths, LABELS)),
        (SpreadLoss(), (lengths, LABELS, 5)),
        (ReconstructionLoss(), (image, torch.zeros_like(image))),
    ):
        wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments]
        found = loss(*arguments)
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(loss(*wide).item(), rel=1e-5)
