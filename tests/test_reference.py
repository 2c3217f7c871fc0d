"""The reference against loops over numbers, against finite differences, and against the fused formulas."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import capsfast

from .support import definition, formulas, passes
from .support.backends import Shape
from .support.passes import EVERYTHING, WAYS, normalized
from .support.problems import CASES, Case, Problem, call, make, run

SHAPE = Shape(2, 3, 3, 2, 2)
FULL = [case for case in CASES if case.gradient == "full"]
LAST = [case for case in CASES if case.gradient == "last"]


def votes_of(problem: Problem) -> Any:
    if problem.op == "route_votes":
        return problem.inputs["votes"].numpy()
    return definition.votes(problem.inputs["u"].numpy(), problem.inputs["weight"].numpy())


def by_loops(problem: Problem, **more: Any) -> tuple[Any, Any, Any]:
    case = problem.case
    arrays = {name: problem.inputs[name].numpy() for name in ("logits", "bias") if name in problem.inputs}
    arrays |= {name: value.numpy() for name, value in problem.masks.items()}
    return definition.route(
        votes_of(problem),
        case.num_iterations,
        softmax=case.softmax,
        leaky=case.leaky,
        squash_kind=case.squash,
        eps=case.eps,
        squash_last=case.squash_last,
        **arrays,
        **more,
    )


@pytest.mark.parametrize("op", ["dynamic_routing", "route_votes"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_are_those_of_the_loops(case: Case, op: str) -> None:
    problem = make(SHAPE, replace(case, coupling=True), op)
    got = run(problem, "reference", need=())
    v, c, _ = by_loops(problem)
    np.testing.assert_allclose(got["v"].numpy(), v, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(got["c"].numpy(), c, rtol=1e-10, atol=1e-13)


def outputs(problem: Problem) -> Callable[..., Any]:
    """The call as a function of its floating-point tensors."""

    def function(*tensors: Tensor) -> Any:
        return call(problem, dict(zip(problem.inputs, tensors, strict=True)), "reference")

    return function


def leaves(problem: Problem) -> Sequence[Tensor]:
    return [value.clone().requires_grad_() for value in problem.inputs.values()]


@pytest.mark.parametrize("case", FULL, ids=str)
def test_first_and_second_derivatives_are_the_finite_differences(case: Case) -> None:
    problem = make(SHAPE, case)
    torch.autograd.gradcheck(outputs(problem), leaves(problem), fast_mode=True)
    torch.autograd.gradgradcheck(outputs(problem), leaves(problem), fast_mode=True, atol=1e-4)


@pytest.mark.parametrize("case", [*LAST, Case(gradient="last", squash="half", softmax="in", num_iterations=4)], ids=str)
def test_gradient_last_is_the_derivative_with_a_constant_agreement(case: Case) -> None:
    problem = make(SHAPE, replace(case, coupling=True))
    got = run(problem, "reference")
    _, _, agreement = by_loops(problem)

    def loss() -> float:
        v, c, _ = by_loops(problem, agreement=agreement)
        return float((v * problem.dv.numpy()).sum() + (c * problem.dc.numpy()).sum())

    step = 1e-6
    for name, value in problem.inputs.items():
        flat, found = value.view(-1), got[f"d{name}"].reshape(-1)
        for n in range(flat.numel()):
            kept = flat[n].item()
            flat[n] = kept + step
            above = loss()
            flat[n] = kept - step
            below = loss()
            flat[n] = kept
            assert found[n].item() == pytest.approx((above - below) / (2 * step), rel=1e-6, abs=1e-8), (name, n)


@pytest.mark.parametrize("gradient", ["full", "last"])
@pytest.mark.parametrize("num_iterations", [1, 2, 3, 4, 5])
def test_the_fused_formulas_give_the_same(num_iterations: int, gradient: str) -> None:
    case = Case(num_iterations=num_iterations, gradient=gradient, logits="IJ", coupling=False)
    problem = make(Shape(3, 7, 4, 5, 6), case)
    got = run(problem, "reference")
    u, weight, logits = problem.inputs.values()
    wanted = formulas.fused(u, weight, logits, num_iterations, problem.dv, gradient)
    for name, value in zip(("v", "du", "dweight", "dlogits"), wanted, strict=True):
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", ["dynamic_routing", "route_votes"])
def test_sixteen_bits_are_rounded_once(op: str, dtype: torch.dtype) -> None:
    """Sums are formed in float32, as in the fused kernels."""
    problem = make(Shape(4, 50, 6, 8, 5), Case(num_iterations=7, logits="IJ", bias=True), op, dtype)
    wide = run(problem.to(torch.float32), "reference")
    for name, value in run(problem, "reference").items():
        assert value.dtype == dtype and torch.equal(value, wide[name].to(dtype)), name


def test_the_first_iteration_is_the_mean_of_the_votes() -> None:
    problem = make(SHAPE, Case(num_iterations=1))
    got = run(problem, "reference", need=())
    torch.testing.assert_close(got["c"], torch.full((2, 3, 3), 1 / 3, dtype=torch.float64))
    s = torch.from_numpy(votes_of(problem)).sum(1) / 3
    torch.testing.assert_close(got["v"], capsfast.squash(s))


def test_weight_of_one_row_is_the_weight_repeated() -> None:
    problem = make(SHAPE, Case(shared=True))
    got = run(problem, "reference")
    repeated = replace(problem, inputs={**problem.inputs, "weight": problem.inputs["weight"].repeat(SHAPE.I, 1, 1, 1)})
    wanted = run(repeated, "reference")
    wanted["dweight"] = wanted["dweight"].sum(0, keepdim=True)
    for name, value in got.items():
        torch.testing.assert_close(value, wanted[name])


def test_three_of_these_iterations_are_not_two() -> None:
    # Layers that do not count the first pass need num_iterations + 1; here every weighted sum counts.
    results = [run(make(SHAPE, Case(num_iterations=r)), "reference", need=())["v"] for r in (1, 2, 3, 4)]
    for one, next_one in pairwise(results):
        assert (one - next_one).abs().max() > 1e-4


@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("op", ["dynamic_routing", "route_votes"])
def test_a_mask_after_the_softmax_differs_over_the_input_capsules_alone(op: str, softmax: str, leaky: bool) -> None:
    problem = make(SHAPE, Case(softmax=softmax, leaky=leaky, mask=True, num_iterations=2), op)
    assert not problem.masks["mask"].all()
    before = run(problem, "reference", need=())["v"]
    activation = problem.masks["mask"].double()
    one_pass = capsfast.votes_pass if op == "route_votes" else capsfast.routing_pass
    v = None
    for _ in range(2):
        found = one_pass(*problem.inputs.values(), query=v, normalize=softmax, leaky=leaky, activation=activation)
        v = capsfast.squash(found.first)
    assert v is not None
    if softmax == "out":
        torch.testing.assert_close(v, before)
    else:
        assert (v - before).abs().max() > 1e-3


@pytest.mark.parametrize("how", WAYS)
def test_moments_are_those_of_the_loops(how: str) -> None:
    case = normalized(EVERYTHING, how)
    problem = passes.make((2, 3, 4, 2, 2), case)
    given = {name: value.numpy() for name, value in {**problem.inputs, **problem.masks}.items()}
    found = {
        name: value.detach().numpy() for name, value in case.outputs(call(problem, problem.inputs, "reference")).items()
    }
    for name, value in loops(given, how, case.leaky).items():
        if name in found:
            np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12, err_msg=name)


def loops(given: dict[str, Any], how: str, leaky: bool) -> dict[str, Any]:
    u, W = given["u"], given["weight"]
    (B, I, _), (_, J, D, _) = u.shape, W.shape
    x, b = np.zeros((B, I, J, D)), np.full((B, I, J), -np.inf)
    r, lse = np.zeros((B, I, J)), np.full((B, J if how == "in" else I), -np.inf)
    valid = [q for q in product(range(B), range(I), range(J)) if given["mask"][q[:2]] and given["out_mask"][q[0], q[2]]]
    for n, i, j in valid:
        x[n, i, j] = [sum(W[i, j, d] * u[n, i]) - given["center"][n, j, d] for d in range(D)]
        quadratic = sum(given["precision"][n, j, d] * x[n, i, j, d] ** 2 for d in range(D))
        linear = sum(given["query"][n, j, d] * x[n, i, j, d] for d in range(D))
        b[n, i, j] = given["logits"][n, i, j] + given["prior"][n, j] + linear - quadratic / 2
    for n, i, j in valid:
        group = [q for q in valid if q[0] == n and (q[2] == j if how == "in" else q[1] == i)]
        total = sum(math.exp(b[q]) for q in group) + (1.0 if leaky else 0.0)
        if how in ("out", "in"):
            r[n, i, j] = math.exp(b[n, i, j]) / total
            lse[n, j if how == "in" else i] = math.log(total)
        elif how == "sigmoid":
            r[n, i, j] = 1 / (1 + math.exp(-b[n, i, j]))
        elif how == "lse":
            r[n, i, j] = math.exp(b[n, i, j] - given["lse"][n, i])
        else:
            r[n, i, j] = b[n, i, j]
        r[n, i, j] *= given["activation"][n, i]
    # A leaky softmax over nothing has only its extra entry.
    log_sum = np.where(np.isinf(lse), 0.0, lse) if leaky else lse
    return {
        "mass": r.sum(1),
        "first": (r[..., None] * x).sum(1),
        "second": (r[..., None] * x**2).sum(1),
        "weights": r,
        "log_sum": log_sum,
    }
