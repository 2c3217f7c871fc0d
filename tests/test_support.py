"""A test suite that cannot fail proves nothing: fresh memory is NaN, and the comparison of all ops rejects errors."""

import math

import pytest
import torch

from .support.accuracy import assert_accurate


def test_fresh_memory_is_nan() -> None:
    assert torch.empty(100).isnan().all()
    assert torch.ones(1).new_empty(10, dtype=torch.float64).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_accuracy_accepts_the_plain_result_and_rejects_worse(dtype: torch.dtype) -> None:
    truth = torch.randn(100, 100, dtype=torch.float64)
    plain = truth.to(dtype)
    truth = plain.double() if dtype == torch.float64 else truth
    assert_accurate("x", plain, truth, plain)
    outlier, missing, hole = plain.clone(), plain.clone(), plain.clone()
    outlier[3, 4] += 0.1
    missing[:, 7], hole[0, 0] = 0, math.nan
    for wrong in (outlier, missing, hole, torch.zeros_like(plain), plain * 1.03, plain[:, :99], plain.to(torch.half)):
        with pytest.raises(AssertionError):
            assert_accurate("x", wrong, truth, plain)
    if dtype == torch.bfloat16:
        poor, biased = plain.clone(), (truth + 0.002).to(dtype)
        poor[0, 0] += 0.5  # makes the largest error useless as a guard
        with pytest.raises(AssertionError, match="bias"):
            assert_accurate("x", biased, truth, poor)
        with pytest.raises(AssertionError, match="cosine"):
            assert_accurate("x", torch.randn(100, 100).to(dtype) * 0.1, truth, (truth * 0.3).to(dtype))
