"""Pose matrices: input capsules [B, I, P, Q] and weights [I, J, Q, R], whose votes are matrices [P, R]."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import capsfast

from .support import problems
from .support.accuracy import assert_close, check
from .support.backends import Backend, assert_path, recorded_ops
from .support.passes import EVERYTHING, LINEAR, QUADRATIC, PassCase, make_either, normalized
from .support.problems import LOADED, PLAIN, Case, Problem, run

pytestmark = pytest.mark.passes  # of what the CUDA kernels do not serve

CASES = (
    PLAIN,
    LOADED,
    Case(gradient="last", logits="IJ", coupling=False),
    Case(shared=True, mask=True, squash_last=False),
    LINEAR,
    QUADRATIC,
    EVERYTHING,
    normalized(EVERYTHING, "in"),
    PassCase(),
    PassCase(query=True, shared="I"),
    PassCase(query=True, precision=True, mask=True, shared="J", second=True),
    PassCase(query=True, shared="IJ"),
)
# Shape, then rows P: D = P R, K = Q. R of 4, 1, 5, 16 and more outputs than are held at a time.
SHAPES = (
    ((3, 11, 4, 16, 4), 4),
    ((19, 9, 3, 6, 3), 2),
    ((17, 5, 2, 3, 5), 3),
    ((18, 37, 5, 10, 2), 2),
    ((16, 6, 3, 32, 8), 2),
    ((20, 3, 130, 16, 4), 4),
)


def make(
    shape: tuple[int, ...], poses: int, case: Case | PassCase, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> Problem:
    return make_either(shape, replace(case, poses=poses), dtype, device)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.against_reference
def test_every_case(backend: Backend, case: Case | PassCase) -> None:
    for shape, poses in (((17, 3, 3, 8, 4), 2),) if backend.emulated else (SHAPES[0], SHAPES[1]):
        check(make(shape, poses, case, torch.float32, backend.device), backend)


@pytest.mark.rows(triton=0)
@pytest.mark.parametrize(("shape", "poses"), SHAPES, ids=str)
@pytest.mark.parametrize("case", [LOADED, EVERYTHING], ids=str)
@pytest.mark.against_reference
def test_every_shape(backend: Backend, shape: tuple[int, ...], poses: int, case: Case | PassCase) -> None:
    check(make(shape, poses, case, backend.widest, backend.device), backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.against_reference
def test_sixteen_bits(backend: Backend, dtype: torch.dtype) -> None:
    check(make((17, 4, 3, 8, 4), 2, EVERYTHING, dtype, backend.device), backend)


@pytest.mark.parametrize("case", [LOADED, EVERYTHING], ids=str)
def test_they_are_vectors_with_a_block_diagonal_weight(backend: Backend, case: Case | PassCase) -> None:
    shape, P = ((5, 3, 2, 6, 2) if backend.emulated else (18, 7, 4, 6, 2)), 3
    problem = make(shape, P, case, backend.widest, backend.device)
    u, weight = problem.inputs["u"], problem.inputs["weight"]
    B, I = u.shape[:2]
    blocks = torch.einsum("pn,ijqr->ijprnq", torch.eye(P, dtype=u.dtype, device=u.device), weight)
    _, J, _, R, _, Q = blocks.shape
    vectors = {**problem.inputs, "u": u.reshape(B, I, P * Q), "weight": blocks.reshape(I, J, P * R, P * Q)}
    wanted = run(replace(problem, inputs=vectors), backend.name)
    found = run(problem, backend.name)
    for name, value in found.items():
        if name == "du":
            assert_close(value.flatten(2), wanted[name])
        elif name == "dweight":
            of_blocks = torch.einsum("ijprpq->ijqr", wanted[name].reshape(I, J, P, R, P, Q))
            assert_close(value, of_blocks)
        else:
            assert_close(value, wanted[name])


@pytest.mark.parametrize("layout", ["sliced", "transposed"])
def test_strides_do_not_matter(backend: Backend, layout: str) -> None:
    shape = (9, 3, 2, 6, 3) if backend.emulated else (18, 7, 4, 6, 3)
    problem = make(shape, 2, EVERYTHING, backend.widest, backend.device)
    wanted, got = run(problem, backend.name), run(problem.laid_out(layout), backend.name)
    for name, value in got.items():
        assert_close(value, wanted[name])


def test_what_a_masked_capsule_holds_plays_no_part(backend: Backend) -> None:
    shape = (9, 3, 2, 6, 3) if backend.emulated else (17, 5, 3, 6, 3)
    problem = make(shape, 2, EVERYTHING, backend.widest, backend.device)
    wanted = run(problem, backend.name)
    u = problem.inputs["u"].masked_fill(~problem.masks["mask"][:, :, None, None], math.nan)
    got = run(replace(problem, inputs={**problem.inputs, "u": u}), backend.name)
    for name, value in got.items():
        assert_close(value, wanted[name])


def test_the_backend_that_was_asked_for_ran(backend: Backend) -> None:
    for case, op in ((PLAIN, "dynamic_routing"), (QUADRATIC, "routing_pass")):
        problem = make((17, 3, 3, 8, 4), 2, case, backend.widest, backend.device)
        with recorded_ops() as ops:
            run(problem, backend.name)
        assert_path(backend, op, ops)


@pytest.mark.parametrize("case", [PLAIN, QUADRATIC], ids=str)
@pytest.mark.needs(torch.float64)
def test_gradients_are_the_finite_differences(backend: Backend, case: Case | PassCase) -> None:
    problem = make((2, 3, 3, 4, 2), 2, case, torch.float64, backend.device)

    def outputs(*values: Tensor) -> tuple[Tensor, ...]:
        found = problems.call(problem, dict(zip(problem.inputs, values, strict=True)), backend.name)
        return tuple(problem.case.outputs(found).values())

    leaves = [value.clone().requires_grad_() for value in problem.inputs.values()]
    assert torch.autograd.gradcheck(outputs, leaves, atol=1e-6, rtol=1e-4)


@pytest.mark.fused
def test_compiled(backend: Backend) -> None:
    problem = make((17, 3, 3, 8, 4), 2, EVERYTHING, backend.widest, backend.device)
    call = torch.compile(
        lambda inputs: problems.call(problem, inputs, backend.name).first,
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    assert_close(call(problem.inputs), problems.call(problem, problem.inputs, backend.name).first)


def test_what_does_not_fit_is_named() -> None:
    u, weight = torch.randn(2, 3, 4, 5), torch.randn(3, 6, 5, 7)
    moments = capsfast.routing_pass(u, weight, query=torch.zeros(2, 6, 28))
    assert moments.first.shape == (2, 6, 28)
    with pytest.raises(ValueError, match=r"weight must be \[I, J, Q, R\] with Q=5, .* got 7"):
        capsfast.routing_pass(u, weight.transpose(2, 3))
    with pytest.raises(ValueError, match=r"query must be \[B, J, D\] = \[2, 6, 28\], got \[2, 6, 7\]"):
        capsfast.routing_pass(u, weight, query=torch.zeros(2, 6, 7))
    with pytest.raises(ValueError, match=r"must not be empty, got u \[2, 3, 0, 5\]"):
        capsfast.dynamic_routing(u[:, :, :0], weight)
