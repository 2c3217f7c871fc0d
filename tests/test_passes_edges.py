"""Both pass ops on every backend with NaN, masks that leave little, empty sizes and huge logits."""

import math
from dataclasses import replace

import pytest
import torch

import capsfast

from .support.accuracy import assert_close
from .support.backends import Backend, Shape
from .support.passes import (
    EACH_WAY,
    EVERYTHING,
    LINEAR,
    LINEAR_WAYS,
    SHARED,
    SMALL,
    WAYS,
    PassCase,
    PassOp,
    normalized,
)
from .support.problems import run

pytestmark = pytest.mark.passes


@pytest.mark.parametrize("how", WAYS)
def test_nan_stays_in_its_sample(backend: Backend, op: PassOp, how: str) -> None:
    for B in (3,) if backend.emulated else (3, 18):
        problem = op.make(SMALL._replace(B=B), normalized(EVERYTHING, how), torch.float32, backend.device)
        problem = replace(problem, masks={})
        wanted = run(problem, backend.name)
        bad = {name: value.clone() for name, value in problem.inputs.items()}
        bad[op.poses][1, 2] = math.nan
        got = run(replace(problem, inputs=bad), backend.name)
        assert bool(got["first"][1].isnan().any())
        keep = [n for n in range(B) if n != 1]
        for name, value in got.items():
            if name == "dweight":
                continue  # a sum over the batch
            torch.testing.assert_close(value[keep], wanted[name][keep])


@pytest.mark.parametrize("case", [*EACH_WAY, *LINEAR_WAYS], ids=str)
@pytest.mark.linear
@pytest.mark.kernels
def test_masked_capsules_may_hold_anything(backend: Backend, op: PassOp, case: PassCase) -> None:
    for B in (3,) if backend.emulated else (3, 18):
        problem = op.make(SMALL._replace(B=B), case, backend.widest, backend.device)
        wanted = run(problem, backend.name)
        inward, outward = ~problem.masks["mask"], ~problem.masks["out_mask"]
        bad = {name: value.clone() for name, value in problem.inputs.items()}
        for name in (op.poses, "activation", "lse"):
            if name in bad:
                bad[name][inward] = math.nan
        for name in ("query", "precision", "center", "prior"):
            if name in bad:
                bad[name][outward] = math.inf if name == "precision" else math.nan
        got = run(replace(problem, inputs=bad), backend.name)
        for name, value in got.items():
            assert_close(value, wanted[name])
            if name in (f"d{op.poses}", "dactivation", "dlse"):
                assert not bool(value[inward].any()), name
            if name in ("dquery", "dprecision", "dcenter", "dprior", "mass", "first"):
                assert not bool(value[outward].any()), name


@pytest.mark.parametrize("empty", Shape._fields)
@pytest.mark.parametrize("case", [LINEAR, EVERYTHING, normalized(EVERYTHING, "in"), SHARED, *LINEAR_WAYS], ids=str)
@pytest.mark.linear
@pytest.mark.kernels
def test_empty_sizes(backend: Backend, op: PassOp, empty: str, case: PassCase) -> None:
    problem = op.make(SMALL._replace(**{empty: 0}), case, backend.widest, backend.device)
    if empty == "J" and case is SHARED:
        return  # size 1 for J says there is one
    wanted, got = run(problem, "reference"), run(problem, backend.name)
    for name, value in got.items():
        assert value.shape == wanted[name].shape, name
        assert_close(value, wanted[name])


@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("case", [*EACH_WAY[:2], *LINEAR_WAYS], ids=str)
@pytest.mark.linear
@pytest.mark.kernels
def test_masks_that_leave_nothing(backend: Backend, op: PassOp, case: PassCase, leaky: bool) -> None:
    case = replace(case, leaky=leaky)
    for B in (2,) if backend.emulated else (2, 17):
        problem = op.make(SMALL._replace(B=B), case, backend.widest, backend.device)
        nothing = {name: torch.zeros_like(mask) for name, mask in problem.masks.items()}
        found = run(replace(problem, masks=nothing), backend.name)
        for name, value in found.items():
            assert not bool(value.isnan().any()), name
            if name == "log_sum":
                assert bool((value == (0 if leaky else -math.inf)).all())
            else:
                assert not bool(value.any()), name


def test_huge_logits(backend: Backend, op: PassOp) -> None:
    for how in WAYS:
        if how == "none":
            continue
        problem = op.make(SMALL, normalized(PassCase(query=True, logits="BIJ"), how), backend.widest, backend.device)
        problem.inputs["logits"] *= 1e4
        if how == "lse":
            problem.inputs["lse"] = problem.inputs["logits"].logsumexp(2)
        wanted = run(problem, "reference")
        for name, value in run(problem, backend.name).items():
            assert bool(value.isfinite().all()), (how, name)
            if name in ("mass", "first"):
                torch.testing.assert_close(value, wanted[name], rtol=2e-2, atol=1e-3)


def test_an_lse_below_the_logits_overflows_to_infinity(backend: Backend) -> None:
    votes = torch.zeros(1, 4, 2, 3, device=backend.device)
    logits = torch.tensor([60.0, 85.0, 88.5, 1000.0], device=backend.device)[:, None].expand(4, 2)
    lse = torch.zeros(1, 4, device=backend.device)
    r = capsfast.votes_pass(
        votes, logits=logits, normalize="lse", lse=lse, return_weights=True, backend=backend.name
    ).weights
    assert r is not None
    torch.testing.assert_close(r[0, :, 0], logits[:, 0].exp(), rtol=1e-4, atol=0)
