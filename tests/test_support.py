"""Tests of the helpers: a test suite that cannot fail proves nothing."""

import math

import pytest
import torch

from .support.accuracy import assert_accurate
from .support.backends import Shape
from .support.problems import LAYOUTS, make, relayout, run


def test_fresh_memory_is_nan() -> None:
    assert torch.empty(100).isnan().all()
    assert torch.ones(1).new_empty(10, dtype=torch.float64).isnan().all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 3, 2), (2, 2, 3, 4), (0, 3), (1, 1)])
def test_layouts_keep_values(layout: str, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    assert torch.equal(relayout(value, layout), value)
    if value.numel() > 1 and layout != "contiguous":
        assert not relayout(value, layout).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_accuracy_accepts_the_plain_result_and_rejects_worse(dtype: torch.dtype) -> None:
    truth = torch.randn(50, 20, dtype=torch.float64)
    plain = truth.to(dtype)
    truth = plain.double() if dtype == torch.float64 else truth
    assert_accurate("x", plain, truth, plain)
    outlier, missing = plain.clone(), plain.clone()
    outlier[3, 4] += 0.1
    missing[:, 7] = 0
    hole = plain.clone()
    hole[0, 0] = math.nan
    for wrong in (outlier, missing, hole, torch.zeros_like(plain), plain * 1.03, plain[:, :19], plain.to(torch.half)):
        with pytest.raises(AssertionError):
            assert_accurate("x", wrong, truth, plain)


def test_accuracy_rejects_a_bias_within_the_largest_error() -> None:
    truth = torch.randn(100, 100, dtype=torch.float64)
    plain = truth.to(torch.bfloat16)
    plain[0, 0] += 0.5  # makes the largest error useless as a guard
    biased = (truth + 0.002).to(torch.bfloat16)
    with pytest.raises(AssertionError, match="bias"):
        assert_accurate("x", biased, truth, plain)


def test_accuracy_rejects_a_wrong_direction_where_the_plain_result_is_poor() -> None:
    truth = torch.randn(100, dtype=torch.float64)
    plain = (truth * 0.3).to(torch.bfloat16)
    with pytest.raises(AssertionError, match="cosine"):
        assert_accurate("x", torch.randn(100).to(torch.bfloat16) * 0.1, truth, plain)


def test_problems_are_neither_uniform_nor_saturated() -> None:
    for shape in (Shape(5, 63, 10, 16, 8), Shape(4, 5, 3, 2, 2)):
        found = run(make(shape), "reference")
        J = shape.J
        assert 1.5 / J < found["c"].amax(2).mean() < 0.95
        assert found["dweight"].abs().max() > 1e-3
