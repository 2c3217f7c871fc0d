"""Label-aware attention, and scores of items: values, gradients, users who lack interests."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from capsfast.nn import LabelAwareAttention, interest_scores

from .support.plain import assert_same, gradients
from .test_nn_interest_caps import LENGTHS, B, D, I, J, K, made, rand


@pytest.mark.parametrize(("power", "signed"), [(0, False), (1, False), (2, False), (3, False), (2.5, True), (2, True)])
def test_label_aware_attention(power: float, signed: bool) -> None:
    v, items = rand(B, J, D), rand(B, 2, D)
    mask = torch.tensor([[True, False, True]]).expand(B, J)
    found = LabelAwareAttention(power, signed=signed)(v, items, mask)
    for n, k in itertools.product(range(B), range(2)):
        scores = torch.stack([items[n, k] @ v[n, j] for j in (0, 2)])
        powers = scores.sign() * scores.abs() ** power if signed else scores**power
        weights = powers.exp() / powers.exp().sum()
        torch.testing.assert_close(found[n, k], weights[0] * v[n, 0] + weights[1] * v[n, 2])
    one = LabelAwareAttention(power, signed=signed)
    torch.testing.assert_close(one(v, items[:, 0]), one(v, items)[:, 0])


@pytest.mark.parametrize("power", [0.0, 1.0, 1.001, 1.5, 2.0, 2.5, 151.0])
@pytest.mark.parametrize("signed", [False, True])
def test_gradients_where_users_lack_interests(power: float, signed: bool) -> None:
    power = power if signed else round(power)
    layer = made(count="floor", dtype=torch.float32)
    u, items = torch.randn(B, I, K), torch.randn(B, D)
    items[0] = 0.0
    found = layer(u, LENGTHS)
    assert not found.vectors[~found.mask].any() and not found.vectors[3].any()
    read = LabelAwareAttention(power, signed=signed)
    v = found.vectors.detach().requires_grad_()
    e = items.clone().requires_grad_()
    found_gradients = torch.autograd.grad(read(v, e, found.mask).sum(), (v, e))
    assert all(bool(gradient.isfinite().all()) for gradient in found_gradients)
    assert not found_gradients[0][~found.mask].any()
    read(found.vectors, items, found.mask).sum().backward()
    assert layer.W.grad is not None and bool(layer.W.grad.isfinite().all())


@pytest.mark.parametrize("read", [LabelAwareAttention(0), LabelAwareAttention(2), interest_scores], ids=range(3))
def test_an_absent_interest_may_hold_anything(read: Callable[..., Tensor]) -> None:
    mask = torch.tensor([[True, False, True]]).expand(B, J)
    items, vectors = rand(B, D).requires_grad_(), rand(B, J, D)
    found = []
    for absent in (0.0, math.nan):
        v = vectors.masked_fill(~mask[..., None], absent).requires_grad_()
        value = read(v, items, mask)
        found.append((value, *gradients(value, [v, items])))
    assert_same(found[1], found[0])


def test_the_derivative_of_a_signed_power_is_0_at_0() -> None:
    scores = torch.tensor([[[-2.0, -1e-42, 0.0, 1e-45, 0.5]]], requires_grad=True)
    weights = LabelAwareAttention(1.5, signed=True)._weights(scores, None)
    (gradient,) = torch.autograd.grad((weights * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).sum(), scores)
    assert gradient[0, 0, 1:4].tolist() == [0.0, 0.0, 0.0]
    assert gradient[0, 0, [0, 4]].abs().min() > 0.01


def test_users_without_interests() -> None:
    v, items = rand(B, J, D), rand(B, 2, D)
    mask = torch.tensor([True, False, True, True, True])[:, None].expand(B, J)
    for power in (0.0, 1.0, 3.0, math.inf):
        found = LabelAwareAttention(power)(v, items, mask)
        assert not found[1].any() and bool(found[mask[:, 0]].abs().amin() > 0)
        (gradient,) = torch.autograd.grad(found.sum(), v)
        assert bool(gradient.isfinite().all()) and not gradient[1].any()
    scores = interest_scores(v, items[:, 0], mask)
    assert bool((scores[1] == -math.inf).all()) and bool(scores[mask[:, 0]].isfinite().all())


def test_a_large_power_is_a_choice() -> None:
    v, item = 9 * torch.randn(B, J, D), 9 * torch.randn(B, D)
    v.requires_grad_()
    soft, hard = LabelAwareAttention(151.0)(v, item), LabelAwareAttention(math.inf)(v, item)
    soft.sum().backward()
    assert bool(soft.isfinite().all()) and bool(v.grad.isfinite().all())  # type: ignore[union-attr]
    best = (v @ item[..., None])[..., 0].argmax(1)
    assert torch.equal(hard, v[torch.arange(B), best])
    gentle = v.detach() / 40
    close = LabelAwareAttention(25.0)(gentle, item)
    scores = (gentle @ item[..., None])[..., 0]
    clear = (scores.max(1).values > 2) & (scores.topk(2, 1).values.diff(dim=1)[:, 0] < -0.5)
    assert bool(clear.any())
    torch.testing.assert_close(close[clear], LabelAwareAttention(math.inf)(gentle, item)[clear])


def test_scores_when_serving() -> None:
    v, catalogue = rand(B, J, D), rand(11, D)
    mask = torch.tensor([[True, True, False]]).expand(B, J)
    torch.testing.assert_close(interest_scores(v, catalogue), (v @ catalogue.T).amax(1))
    torch.testing.assert_close(interest_scores(v, catalogue, mask), (v[:, :2] @ catalogue.T).amax(1))
    own = rand(B, 7, D)
    torch.testing.assert_close(interest_scores(v, own), torch.einsum("bjd,bnd->bjn", v, own).amax(1))
