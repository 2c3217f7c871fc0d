"""Weights and votes that all output capsules share: 16 bits and empty sizes, on every backend that serves them."""

import pytest
import torch

import capsfast

from .support import passes, problems
from .support.backends import Backend, Shape
from .support.passes import PassCase
from .support.problems import Case, run

pytestmark = pytest.mark.passes  # of what the CUDA kernels do not serve

SMALL = Shape(3, 7, 4, 6, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [9, 1])
@pytest.mark.rows(triton=(0, 0))  # as the others: torch's product, then float32
def test_votes_are_not_rounded_to_sixteen_bits(backend: Backend, rows: int, dtype: torch.dtype) -> None:
    shape, case = Shape(2, 9, 17, 7, 3), Case(num_iterations=4, softmax="in", logits="IJ", bias=True)
    moments = passes.make(shape, PassCase(query=True, center=True, second=True, weights=True), dtype=dtype)
    for problem in (problems.make(shape, case, dtype=dtype), moments):
        problem = problem.to(dtype, backend.device)
        problem.inputs["weight"] = problem.inputs["weight"][:rows, :1]
        wide = run(problem.to(torch.float32, backend.device), backend.name)
        for name, value in run(problem, backend.name).items():
            assert torch.equal(value, wide[name].to(value.dtype)), (problem.op, name)


@pytest.mark.parametrize("empty", ["B", "I", "J"])
@pytest.mark.parametrize("rows", ["own", "shared"])
def test_empty_sizes(backend: Backend, rows: str, empty: str) -> None:
    B, I, J, D, K = SMALL._replace(**{empty: 0})
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(I, J, dtype=dtype, device=backend.device)
        for vectors, matrices in (((K,), (D, K)), ((2, K), (K, D // 2))):
            u, weight = (
                torch.randn(size, device=backend.device).to(dtype).requires_grad_()
                for size in ((B, I, *vectors), (I if rows == "own" else 1, 1, *matrices))
            )
            v = capsfast.dynamic_routing(u, weight, logits=logits, backend=backend.name)
            m = capsfast.routing_pass(u, weight, logits=logits, backend=backend.name)
            assert v.shape == m.first.shape == (B, J, D) and not v.any() and not m.first.any()
            for gradient in torch.autograd.grad(v.sum() + m.first.sum(), (u, weight)):
                assert not gradient.any()


@pytest.mark.parametrize("stride", [1, 2])
def test_votes_that_no_output_takes(backend: Backend, stride: int) -> None:
    """They are copied where they have 16 bits or gaps, to memory that must have room for them."""
    for dtype in (torch.float32, torch.bfloat16):
        votes = torch.randn(2, 9, 1, 16 * stride, device=backend.device).to(dtype).requires_grad_()
        logits = torch.zeros(9, 0, dtype=dtype, device=backend.device)
        v = capsfast.route_votes(votes[..., ::stride], logits=logits, backend=backend.name)
        (gradient,) = torch.autograd.grad(v.sum(), votes)
        assert v.shape == (2, 0, 16) and not gradient.any()
