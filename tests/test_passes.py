"""What both pass ops compute on every backend: values, gradients, dtypes, shapes, strides, the op that ran.

Shapes are written for routing_pass; votes_pass takes them without K.
"""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import capsfast

from .support import passes
from .support.accuracy import assert_close, check, check_scores
from .support.backends import Backend, Shape, assert_path, recorded_ops
from .support.passes import (
    CASES,
    EACH_WAY,
    EVERYTHING,
    LINEAR,
    LINEAR_WAYS,
    LOADED,
    QUADRATIC,
    SHARED,
    SMALL,
    WAYS,
    PassCase,
    PassOp,
    normalized,
)
from .support.problems import call, relayout, run, with_one_leader

pytestmark = pytest.mark.passes

SHAPES = (
    (2, 4, 200, 3, 1),
    (18, 1, 330, 2, 1),
    (1, 1, 1, 1, 1),
    (17, 5, 4, 5, 3),
    (2, 3, 5, 17, 4),
    (1, 113, 10, 16, 8),
    (16, 9, 6, 1, 33),
    (33, 40, 4, 32, 16),
    (18, 9, 200, 12, 8),
    (65, 70, 10, 16, 8),
    (2, 1153, 10, 16, 8),
)


@pytest.mark.rows(triton=(4, 20))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.against_reference
@pytest.mark.linear
@pytest.mark.kernels
def test_every_case(backend: Backend, op: PassOp, case: PassCase, dtype: torch.dtype) -> None:
    # Few samples and many: kernels have a way for each.
    both = (Shape(3, 11, 4, 6, 3), Shape(19, 9, 3, 16, 8))
    for shape in (Shape(17, 3, 4, 5, 3),) if backend.emulated else both:
        check(op.make(shape, case, dtype, backend.device), backend)


@pytest.mark.shapes(*SHAPES)
@pytest.mark.parametrize("case", [LINEAR, *EACH_WAY[:2]], ids=str)
@pytest.mark.against_reference
@pytest.mark.linear
@pytest.mark.kernels
def test_every_shape(backend: Backend, op: PassOp, shape: Shape, case: PassCase) -> None:
    check(op.make(shape, case, torch.float32, backend.device), backend)


# Whole tiles of samples, chunks of input capsules, blocks of rows, output capsules whose votes are held; and parts.
@pytest.mark.rows(triton=(0, 2))
@pytest.mark.shapes(
    (32, 70, 10, 16, 8), (17, 35, 3, 5, 4), (16, 9, 1, 3, 33), (16, 5, 200, 12, 8), (48, 33, 10, 16, 16)
)
@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("activation", [False, True])
@pytest.mark.against_reference
def test_second_moments_of_equal_coupling(
    backend: Backend, op: PassOp, shape: Shape, activation: bool, leaky: bool
) -> None:
    case = PassCase(center=True, activation=activation, leaky=leaky, second=True)
    for dtype in {torch.float32, backend.widest}:
        check(op.make(shape, case, dtype, backend.device), backend)


@pytest.mark.rows(4)
@pytest.mark.shapes((1, 1152, 10, 16, 8), (64, 256, 10, 16, 8), (2, 10_000, 4, 8, 8))
@pytest.mark.parametrize("case", [replace(QUADRATIC, query=True), normalized(QUADRATIC, "in")], ids=str)
@pytest.mark.against_reference
def test_float32_is_as_exact_as_einsum(backend: Backend, op: PassOp, shape: Shape, case: PassCase) -> None:
    check(op.make(shape, case, torch.float32, backend.device), backend, slack=1)


@pytest.mark.parametrize(
    "case",
    [
        PassCase(query=True, prior=True, logits="BIJ", weights=True, normalize="in"),
        PassCase(query=True, logits="IJ", lse=True, normalize="in"),
        replace(QUADRATIC, query=True, logits="BIJ", weights=True, normalize="in"),
    ],
    ids=str,
)
@pytest.mark.parametrize("I", [1, 5])
@pytest.mark.linear
@pytest.mark.kernels
def test_scores_of_all_the_coupling_have_no_gradient(backend: Backend, op: PassOp, I: int, case: PassCase) -> None:
    for shape in (Shape(17, I, 3, 12, 4), Shape(3, I, 2, 16, 8))[: 1 if backend.emulated else 2]:
        check_scores(with_one_leader(op.make(shape, case, torch.float32, backend.device)), backend)


@pytest.mark.against_reference
def test_a_center_near_the_mean_keeps_the_variance(backend: Backend) -> None:
    """Votes 100 from the origin with deviations of 0.1: their second moment about 0 would hold nothing of those."""
    draw = torch.Generator().manual_seed(0)
    mean = 100 + torch.randn(4, 1, 5, 6, generator=draw, dtype=torch.float64)
    votes = mean + 0.1 * torch.randn(4, 50, 5, 6, generator=draw, dtype=torch.float64)
    truth = votes.var(1, unbiased=False)
    center = mean[:, 0].float()
    found = capsfast.votes_pass(
        votes.float().to(backend.device), center=center.to(backend.device), second=True, backend=backend.name
    )
    assert found.second is not None
    mass = found.mass[..., None]
    variance = found.second / mass - (found.first / mass) ** 2
    torch.testing.assert_close(variance.cpu().double(), truth, rtol=1e-3, atol=0)


@pytest.mark.parametrize("case", [QUADRATIC, EACH_WAY[1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.against_reference
def test_sixteen_bits(backend: Backend, op: PassOp, case: PassCase, dtype: torch.dtype) -> None:
    for B in (3, 17):
        found = check(op.make(Shape(B, 4, 4, 5, 6), case, dtype, backend.device), backend)
        assert {found[name].dtype for name in ("mass", "first", "second")} == {torch.float32}
        assert {found[f"d{name}"].dtype for name in op.tensors} == {dtype}


def test_sixteen_bits_beside_float32_parameters(backend: Backend, op: PassOp) -> None:
    problem = op.make(SMALL, EVERYTHING, torch.bfloat16, backend.device)
    wide = {name: value.float() for name, value in problem.inputs.items() if name not in op.tensors}
    found = run(replace(problem, inputs=problem.inputs | wide), backend.name)
    assert {found[f"d{name}"].dtype for name in wide} == {torch.float32}
    wanted = run(problem.to(torch.float64), "reference")
    for name, value in found.items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=0.05, atol=0.05 * wanted[name].abs().max().item())


@pytest.mark.parametrize("case", [LINEAR, EVERYTHING, SHARED], ids=str)
@pytest.mark.linear
@pytest.mark.kernels
def test_the_backend_that_was_asked_for_ran(backend: Backend, op: PassOp, case: PassCase) -> None:
    problem = op.make(SMALL, case, backend.widest, backend.device)
    with recorded_ops() as ops:
        run(problem, backend.name)
    if case is SHARED:
        # One product makes the votes that all output capsules share.
        assert (f"capsfast::{backend.prefix}routing_pass" in ops) == backend.fused
    else:
        assert_path(backend, op.name, ops)


@pytest.mark.parametrize("case", [LINEAR, SHARED, *EACH_WAY], ids=str)
@pytest.mark.needs(torch.float64)
@pytest.mark.linear
def test_gradients_are_the_finite_differences(backend: Backend, op: PassOp, case: PassCase) -> None:
    problem = op.make(Shape(2, 3, 3, 2, 2), case, torch.float64, backend.device)
    names = list(problem.inputs)

    def outputs(*values: Tensor) -> tuple[Tensor, ...]:
        found = case.outputs(call(problem, dict(zip(names, values, strict=True)), backend.name))
        return tuple(value.masked_fill(value.isinf(), 0) for value in found.values())

    # Only forwards of fused backends are differentiated, so check_undefined_grad covers gradients that are absent.
    leaves = [value.clone().requires_grad_() for value in problem.inputs.values()]
    assert torch.autograd.gradcheck(outputs, leaves, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("layout", ["sliced", "transposed"])
@pytest.mark.parametrize("case", [EVERYTHING, LOADED, SHARED], ids=str)
@pytest.mark.linear
@pytest.mark.kernels
def test_strides_do_not_matter(backend: Backend, op: PassOp, case: PassCase, layout: str) -> None:
    for B in (3,) if backend.emulated else (3, 18):
        problem = op.make(SMALL._replace(B=B), case, backend.widest, backend.device)
        wanted, got = run(problem, backend.name), run(problem.laid_out(layout), backend.name)
        for name, value in got.items():
            assert_close(value, wanted[name])


@pytest.mark.parametrize(
    "case", [EVERYTHING, normalized(EVERYTHING, "in"), normalized(EVERYTHING, "lse"), LOADED], ids=str
)
@pytest.mark.linear
@pytest.mark.kernels
def test_only_some_gradients_are_needed(backend: Backend, op: PassOp, case: PassCase) -> None:
    problem = op.make(SMALL, case, backend.widest, backend.device)
    wanted = run(problem, backend.name)
    for name in problem.inputs:
        got = run(problem, backend.name, need=(name,))
        assert_close(got[f"d{name}"], wanted[f"d{name}"])


@pytest.mark.parametrize("case", [EVERYTHING, normalized(EVERYTHING, "in"), *LINEAR_WAYS], ids=str)
@pytest.mark.parametrize("used", ["mass", "first", "second", "weights", "log_sum"])
@pytest.mark.linear
@pytest.mark.kernels
def test_only_one_output_is_used(backend: Backend, op: PassOp, case: PassCase, used: str) -> None:
    if used == "second" and not case.second:
        return
    problem = op.make(SMALL, case, backend.widest, backend.device)
    alone = {name: value if name == used else torch.zeros_like(value) for name, value in problem.gradients.items()}
    wanted = run(replace(problem, gradients=alone), "reference")
    leaves = {name: value.clone().requires_grad_() for name, value in problem.inputs.items()}
    output = case.outputs(call(problem, leaves, backend.name))[used]
    got = torch.autograd.grad(
        output,
        list(leaves.values()),
        problem.gradients[used].to(output.dtype),
        allow_unused=True,
        materialize_grads=True,
    )
    for name, value in zip(leaves, got, strict=True):
        assert_close(value, wanted[f"d{name}"])


@pytest.mark.parametrize("how", WAYS)
def test_the_definition_is_that_of_the_loops(how: str) -> None:
    """The reference against loops over numbers that share nothing with it."""
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
    # A leaky softmax over nothing is that of its one more entry.
    log_sum = np.where(np.isinf(lse), 0.0, lse) if leaky else lse
    return {
        "mass": r.sum(1),
        "first": (r[..., None] * x).sum(1),
        "second": (r[..., None] * x**2).sum(1),
        "weights": r,
        "log_sum": log_sum,
    }


@pytest.mark.parametrize("case", [LINEAR, EVERYTHING, normalized(EVERYTHING, "in")], ids=str)
@pytest.mark.linear
@pytest.mark.kernels
def test_repeats_are_bitwise_equal(backend: Backend, op: PassOp, case: PassCase) -> None:
    shape = SMALL if backend.emulated else Shape(19, 70, 5, 9, 7)
    problem = op.make(shape, case, backend.widest, backend.device)
    first, second = run(problem, backend.name), run(problem, backend.name)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.linear
@pytest.mark.kernels
def test_a_loop_of_passes_is_dynamic_routing(backend: Backend, softmax: str) -> None:
    shape = (2, 3, 4, 5, 3) if backend.emulated else (19, 30, 5, 16, 8)
    problem = passes.make(shape, PassCase(), "routing_pass", backend.widest, backend.device)
    u, W = (problem.inputs[name].requires_grad_() for name in ("u", "weight"))
    V: Tensor | None = None
    for _ in range(3):
        v = capsfast.squash(capsfast.routing_pass(u, W, query=V, normalize=softmax, backend=backend.name).first)
        V = v if V is None else V + v
    wanted = capsfast.dynamic_routing(u, W, 3, softmax=softmax, backend=backend.name)
    assert_close(v.detach(), wanted.detach(), double=1e-9)
    for got, want in zip(*(torch.autograd.grad(out.sum(), (u, W)) for out in (v, wanted)), strict=True):
        assert_close(got, want, double=1e-8)


@pytest.mark.parametrize("function", ["dynamic_routing", "route_votes"])
@pytest.mark.parametrize("case", ["plain", "loaded", "in"])
def test_votes_that_output_capsules_share(backend: Backend, function: str, case: str) -> None:
    """A size 1 for J in the routing ops: equal to the votes repeated, in every gradient."""
    B, I, J, D, K = (3, 4, 3, 5, 3) if backend.emulated else (18, 21, 5, 16, 8)
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64).to(backend.device, backend.widest)

    inputs = {"logits": normal(B, I, J)}
    if function == "dynamic_routing":
        inputs |= {"u": normal(B, I, K), "weight": normal(1, 1, D, K) / K**0.5}
        name, size = "weight", (I, J, D, K)
    else:
        inputs |= {"votes": normal(B, I, 1, D)}
        name, size = "votes", (B, I, J, D)
    options: dict[str, Any] = {"num_iterations": 3, "softmax": "in" if case == "in" else "out"}
    if case == "loaded":
        inputs["bias"] = normal(J, D)
        options |= {
            "mask": (torch.rand(B, I, generator=draw) > 0.3).to(backend.device),
            "out_mask": (torch.rand(B, J, generator=draw) > 0.3).to(backend.device),
        }
    results = []
    for repeated, which in ((False, backend.name), (True, "reference")):
        leaves = {key: value.clone().requires_grad_() for key, value in inputs.items()}
        given = leaves | {name: leaves[name].expand(size)} if repeated else leaves
        v = getattr(capsfast, function)(**given, **options, backend=which)
        assert v.shape == (B, J, D)
        results.append([v.detach(), *torch.autograd.grad(v.square().sum(), list(leaves.values()))])
    for got, want in zip(*results, strict=True):
        assert_close(got, want, double=1e-9)


def test_inputs_are_left_alone(backend: Backend, op: PassOp) -> None:
    problem = op.make(SMALL, EVERYTHING, backend.widest, backend.device)
    before = {name: value.clone() for name, value in problem.inputs.items()}
    run(replace(problem, inputs={n: relayout(v, "transposed") for n, v in problem.inputs.items()}), backend.name)
    run(problem, backend.name)
    for name, value in before.items():
        assert torch.equal(value, problem.inputs[name])
