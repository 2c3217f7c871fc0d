"""The helper that runs functions on two ranks: a failure of one rank is a failure of the test."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ..support.ranks import WORLD, on_two_ranks

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")


def _second_fails(rank: int) -> None:
    sum_of_ranks = torch.tensor(float(rank))
    dist.all_reduce(sum_of_ranks)
    assert sum_of_ranks == sum(range(WORLD))
    assert rank != 1, "the second rank failed"


def test_a_failure_of_one_rank(tmp_path: Path) -> None:
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="AssertionError: the second rank failed"):
        on_two_ranks(_second_fails, tmp_path)
