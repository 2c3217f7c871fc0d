"""compat.averaged_routing: logits averaged over the batch, against plain code, and without votes in memory."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capsfast.compat import averaged_routing, masked_after_routing

from .support.accuracy import assert_accurate
from .support.backends import Largest, Shape
from .support.layers import without_samples
from .support.problems import CASES, LOADED_OUT, PLAIN, Case, Problem, make
from .test_reference import by_definition

SHAPE = Shape(5, 4, 3, 4, 3)
# An out_mask, or a mask with a softmax over the inputs, would give each sample another softmax.
CALLS = [replace(case, out_mask=False, mask=case.mask and case.softmax == "out") for case in CASES]
CALLS = list(dict.fromkeys(CALLS))


def call(problem: Problem, **changed: Tensor) -> tuple[Tensor, Tensor]:
    given: dict[str, Any] = {**problem.inputs, **problem.masks, **changed}
    u, weight = given.pop("votes", None), given.pop("weight", None)
    u = given.pop("u", u)
    options = problem.case.arguments
    return averaged_routing(u, weight, **given, **(options | {"return_coupling": True}))  # type: ignore[no-any-return]


def gradients(problem: Problem) -> tuple[Tensor, ...]:
    leaves = {name: value.detach().requires_grad_() for name, value in problem.inputs.items()}
    v, c = call(problem, **leaves)
    sent = ((v * problem.dv).sum() + (c * problem.dc).sum()).to(v.dtype)
    return v, c, *torch.autograd.grad(sent, list(leaves.values()), materialize_grads=True)


@pytest.mark.parametrize("op", ["dynamic_routing", "route_votes"])
@pytest.mark.parametrize("case", CALLS, ids=str)
def test_it_is_its_definition(case: Case, op: str) -> None:
    problem = make(SHAPE, case, op)
    for got, wanted in zip(call(problem), by_definition(problem, averaged=True), strict=True):
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("op", ["dynamic_routing", "route_votes"])
@pytest.mark.parametrize("case", [PLAIN, Case(leaky=True, mask=True, logits="BIJ", bias=True, shared=True)], ids=str)
def test_gradients_are_the_finite_differences(case: Case, op: str) -> None:
    problem = make(Shape(2, 3, 3, 2, 2), case, op)
    leaves = [value.clone().requires_grad_() for value in problem.inputs.values()]

    def function(*tensors: Tensor) -> Any:
        return call(problem, **dict(zip(problem.inputs, tensors, strict=True)))

    torch.autograd.gradcheck(function, leaves)
    torch.autograd.gradgradcheck(function, leaves, fast_mode=True, atol=1e-4)


def test_the_last_gradient_alone_counts_the_agreement_as_constant() -> None:
    """The gradient of one iteration whose logits are the sum of all agreements before."""
    problem = make(SHAPE, Case(gradient="last"))
    v, c, du, dweight = gradients(problem)
    prior = c.mean(0).log()
    once = replace(problem, case=Case(num_iterations=1), inputs=problem.inputs | {"logits": prior})
    for got, wanted in zip((v, du, dweight), (gradients(once)[0], *gradients(once)[2:4]), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_are_wide(dtype: torch.dtype) -> None:
    problem = make(Shape(17, 7, 4, 6, 5), replace(LOADED_OUT, out_mask=False), dtype=dtype)
    got, truth = call(problem), call(problem.to(torch.float64))
    narrow = call(problem.to(torch.float32).to(dtype))
    for name, value, right, plain in zip("vc", got, truth, narrow, strict=True):
        assert value.dtype == dtype
        assert_accurate(name, value, right, plain, slack=4)


@pytest.mark.parametrize("case", [PLAIN, Case(shared=True, gradient="last")], ids=str)
def test_votes_are_not_in_memory(case: Case) -> None:
    shape = Shape(64, 40, 6, 16, 4)
    problem = make(shape, case, dtype=torch.float32)
    problem.gradients["c"].zero_()
    with Largest() as largest:
        gradients(problem)
    assert 0 < largest.numel < shape.B * shape.I * shape.J * shape.D / 4


def test_masked_capsules_may_hold_anything() -> None:
    problem = make(SHAPE, Case(mask=True))
    problem.masks["mask"][:, 3] = False
    problem.inputs["u"][~problem.masks["mask"]] = 0
    clean = gradients(problem)
    problem.inputs["u"][~problem.masks["mask"]] = torch.nan
    problem.inputs["weight"][3] = torch.inf
    assert all(torch.equal(*pair) for pair in zip(gradients(problem), clean, strict=True))


def test_autocast_casts_as_for_the_op() -> None:
    problem = make(SHAPE, Case(bias=True), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        v, c = call(problem)
    assert v.dtype == c.dtype == torch.bfloat16
    torch.testing.assert_close(v.float(), call(problem)[0], rtol=0.03, atol=0.03)


@pytest.mark.parametrize("function", [averaged_routing, masked_after_routing], ids=lambda each: each.__name__)
@pytest.mark.parametrize(("B", "I"), [(0, 4), (2, 0), (0, 0)])
@pytest.mark.parametrize("own", [True, False, None], ids=["weight", "shared", "votes"])
def test_no_sample_and_no_input_capsule(function: Any, B: int, I: int, own: bool | None) -> None:
    J, D, K = 3, 4, 5

    def make(batch: int) -> tuple[Any, list[Tensor]]:
        count, some = (B, I) if batch == 0 else (2, 4)
        mask = torch.ones(count, some, dtype=torch.bool)
        if own is None:
            return lambda votes, bias: function(votes, None, bias=bias, mask=mask), [
                torch.randn(count, some, J, D),
                bias,
            ]
        given = [torch.randn(count, some, K), torch.randn(some if own else 1, J, D, K)]
        return lambda u, W, logits: function(u, W, logits=logits, mask=mask), [*given, torch.randn(count, some, J)]

    bias = torch.zeros(J, D)
    (v,) = without_samples(make)
    assert v.shape == (B, J, D) and not v.any()


def test_what_makes_samples_differ_is_refused() -> None:
    u, weight, mask = torch.randn(2, 3, 4), torch.randn(3, 5, 6, 4), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="mask needs softmax='out', got softmax='in'"):
        averaged_routing(u, weight, mask=mask, softmax="in")
    with pytest.raises(ValueError, match=r"u must be \[B, I, K\] or votes"):
        averaged_routing(torch.randn(2, 3, 4, 4), torch.randn(3, 5, 4, 4))
    with pytest.raises(ValueError, match=r"averaged_routing: num_iterations must be at least 1"):
        averaged_routing(u, weight, 0)
