"""capsfast.route_votes on every backend. What it shares with dynamic_routing is tested more widely there."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import capsfast

from .support.accuracy import assert_close, check
from .support.backends import Backend, Shape, assert_path, recorded_ops
from .support.problems import (
    CASES,
    COMBINED,
    LOADED,
    LOADED_OUT,
    PLAIN,
    Case,
    call,
    make,
    relayout,
    run,
    without_shared,
)

pytestmark = pytest.mark.kernels

OP = "route_votes"
SMALL = Shape(3, 7, 4, 5, 1)
# K does not exist here.
EMULATED = ((17, 5, 4, 5, 1), (2, 3, 5, 17, 1), (2, 4, 200, 3, 1), (18, 1, 330, 2, 1))
SHAPES = (
    *EMULATED,
    (1, 1, 1, 1, 1),
    (1, 113, 10, 16, 1),
    (2, 3, 2, 3, 1),
    (2, 63, 1, 16, 1),
    (3, 1, 5, 8, 1),
    (5, 63, 10, 16, 1),
    (15, 7, 3, 8, 1),
    (16, 113, 10, 16, 1),
    (17, 31, 5, 17, 1),
    (33, 13, 4, 32, 1),
    (65, 4, 3, 33, 1),
    (2, 2, 1000, 3, 1),
    (17, 3, 257, 8, 1),
    (1, 100_000, 2, 1, 1),
    (2, 1153, 10, 16, 1),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", without_shared(CASES), ids=str)
@pytest.mark.emulated(case=without_shared(COMBINED))
def test_every_option(backend: Backend, case: Case, dtype: torch.dtype) -> None:
    both = (Shape(5, 11, 4, 6, 1), Shape(19, 9, 3, 16, 1))
    for shape in (Shape(17, 3, 4, 5, 1),) if backend.emulated else both:
        check(make(shape, case, OP, dtype, backend.device), backend)


@pytest.mark.shapes(*SHAPES)
@pytest.mark.parametrize("case", [PLAIN, LOADED, LOADED_OUT], ids=str)
@pytest.mark.emulated(shape=EMULATED)
def test_every_shape(backend: Backend, shape: Shape, case: Case) -> None:
    check(make(shape, case, OP, torch.float32, backend.device), backend)


@pytest.mark.shapes((1, 1152, 10, 16, 1), (33, 512, 10, 16, 1))
@pytest.mark.parametrize("case", [PLAIN, LOADED], ids=str)
def test_float32_is_as_exact_as_einsum(backend: Backend, shape: Shape, case: Case) -> None:
    check(make(shape, case, OP, torch.float32, backend.device), backend, slack=1)


@pytest.mark.shapes((1, 1, 1, 1, 1), (5, 63, 10, 16, 1), (17, 31, 5, 17, 1), (2, 2, 300, 3, 1), (17, 2, 3, 6, 1))
@pytest.mark.parametrize("case", [PLAIN, LOADED, Case(gradient="last"), LOADED_OUT], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.emulated(dtype=[torch.bfloat16], shape=[(2, 2, 300, 3, 1), (17, 2, 3, 6, 1)])
def test_sixteen_bits(backend: Backend, shape: Shape, case: Case, dtype: torch.dtype) -> None:
    got = check(make(shape, case, OP, dtype, backend.device), backend)
    assert {value.dtype for value in got.values()} == {dtype}


@pytest.mark.parametrize("case", [PLAIN, LOADED, Case(coupling=False)], ids=str)
def test_the_backend_that_was_asked_for_ran(backend: Backend, case: Case) -> None:
    problem = make(SMALL, case, OP, backend.widest, backend.device)
    with recorded_ops() as ops:
        run(problem, backend.name)
    assert_path(backend, OP, ops)
    with recorded_ops() as ops:
        run(problem, backend.name, need=())
    assert_path(backend, OP, ops, backward=False)


@pytest.mark.needs(torch.float64)
@pytest.mark.parametrize("case", [case for case in without_shared(CASES) if case.gradient == "full"], ids=str)
def test_gradients_are_the_finite_differences(backend: Backend, case: Case) -> None:
    problem = make(Shape(2, 3, 3, 2, 1), case, OP, device=backend.device)
    leaves = [value.clone().requires_grad_() for value in problem.inputs.values()]

    def function(*tensors: torch.Tensor) -> Any:
        return call(problem, dict(zip(problem.inputs, tensors, strict=True)), backend.name)

    torch.autograd.gradcheck(function, leaves, fast_mode=True, nondet_tol=0.0)


@pytest.mark.parametrize("case", [PLAIN, LOADED, LOADED_OUT], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["sliced", "transposed"])
@pytest.mark.shapes((5, 11, 4, 6, 1), (17, 9, 3, 16, 1), (17, 3, 4, 5, 1))
@pytest.mark.emulated(shape=[(17, 3, 4, 5, 1)], case=[LOADED], dtype=[torch.float32])
def test_strides_do_not_matter(backend: Backend, shape: Shape, layout: str, dtype: torch.dtype, case: Case) -> None:
    check(make(shape, case, OP, dtype, backend.device).laid_out(layout), backend)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("B", [2, 17])
@pytest.mark.emulated(B=[2])
def test_expanded_votes(backend: Backend, B: int, axis: int) -> None:
    problem = make(Shape(B, 9, 3, 16, 1), PLAIN, OP, torch.float32, backend.device)
    votes = problem.inputs["votes"]
    problem.inputs["votes"] = votes.narrow(axis, 0, 1).expand(votes.shape)
    check(problem, backend)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 2, 3, 1), (3, 2, 1, 0), (1, 0, 2, 3)], ids=str)
@pytest.mark.parametrize("B", [2, 17])
@pytest.mark.emulated(B=[2], order=[(3, 2, 1, 0)])
def test_votes_stored_in_the_orders_of_other_layers(backend: Backend, B: int, order: tuple[int, ...]) -> None:
    problem = make(Shape(B, 9, 3, 16, 1), LOADED_OUT, OP, torch.float32, backend.device)
    inverse = [order.index(axis) for axis in range(4)]
    problem.inputs["votes"] = problem.inputs["votes"].permute(inverse).contiguous().permute(order)
    check(problem, backend)


@pytest.mark.parametrize("case", [*without_shared([PLAIN, LOADED, LOADED_OUT]), Case(gradient="last")], ids=str)
@pytest.mark.parametrize("B", [3, 17])
@pytest.mark.emulated(B=[3], case=[LOADED, LOADED_OUT])
def test_it_is_dynamic_routing_after_the_votes(backend: Backend, B: int, case: Case) -> None:
    problem = make(Shape(B, 9, 3, 16, 8), case, dtype=backend.widest, device=backend.device)
    inputs = dict(problem.inputs)
    u, weight = inputs.pop("u"), inputs.pop("weight")
    votes = torch.einsum("ijdk,bik->bijd", weight, u)
    over_votes = run(replace(problem, op=OP, inputs={"votes": votes} | inputs), backend.name)
    whole = run(problem, backend.name)
    dvotes = over_votes.pop("dvotes")
    for name, value in over_votes.items():
        assert_close(value, whole[name])
    assert_close(torch.einsum("bijd,ijdk->bik", dvotes, weight), whole["du"])
    assert_close(torch.einsum("bijd,bik->ijdk", dvotes, u), whole["dweight"])


@pytest.mark.parametrize("need", [("votes",), ("logits",), ("bias",), ("votes", "bias"), ()], ids="+".join)
@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("B", [2, 17])
@pytest.mark.emulated(B=[2], softmax=["in"])
def test_only_some_inputs_need_a_gradient(backend: Backend, B: int, softmax: str, need: tuple[str, ...]) -> None:
    case = Case(softmax=softmax, logits="IJ", bias=True)
    problem = make(Shape(B, 7, 3, 5, 1), case, OP, backend.widest, backend.device)
    everything, some = run(problem, backend.name), run(problem, backend.name, need)
    assert some.keys() == {"v", "c", *(f"d{name}" for name in need)}
    for name, value in some.items():
        assert_close(value, everything[name], double=1e-11)


@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("B", "sample"), [(3, 1), (17, 0), (17, 16)])
@pytest.mark.emulated(B=[3], bad=[math.nan])
def test_nan_and_inf_stay_in_their_sample(backend: Backend, B: int, sample: int, bad: float, softmax: str) -> None:
    problem = make(Shape(B, 9, 3, 16, 1), Case(softmax=softmax, coupling=False), OP, torch.float32, backend.device)
    clean = run(problem, backend.name)
    problem.inputs["votes"][sample, 4, 1, 5] = bad
    got = run(problem, backend.name)
    others = [n for n in range(B) if n != sample]
    for name in ("v", "dvotes"):
        assert not got[name][sample].isfinite().all(), name
        assert torch.equal(got[name][others], clean[name][others]), name


@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("B", [3, 17])
@pytest.mark.emulated(B=[3])
def test_masked_capsules_may_hold_anything(backend: Backend, B: int, softmax: str) -> None:
    case = Case(softmax=softmax, mask=True, logits="BIJ")
    problem = make(Shape(B, 9, 3, 16, 1), case, OP, torch.float32, backend.device)
    dead = ~problem.masks["mask"]
    problem.inputs["votes"][dead] = 0
    clean = run(problem, backend.name)
    problem.inputs["votes"][dead] = math.nan
    got = run(problem, backend.name)
    for name, value in got.items():
        assert torch.equal(value, clean[name]), name
    for name in ("dvotes", "dlogits", "c"):
        assert not got[name][dead].any(), name


@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("B", [3, 17])
@pytest.mark.emulated(B=[3])
def test_huge_logits(backend: Backend, B: int, softmax: str) -> None:
    problem = make(Shape(B, 9, 4, 16, 1), Case(softmax=softmax, logits="BIJ"), OP, torch.float32, backend.device)
    logits = problem.inputs["logits"]
    logits[:, 0] = 1e4
    logits[:, 1] = -1e4
    logits[1, 2] = torch.tensor([1e4, -1e4, 0.0, 1e4])
    logits[:, 3] = torch.tensor([-math.inf, 0.0, -math.inf, 1.0])
    check(problem, backend)


@pytest.mark.parametrize("squash", ["paper", "half", "eps_outside", "exp", "unit", "identity"])
@pytest.mark.parametrize("B", [3, 17])
@pytest.mark.emulated(B=[3], squash=["paper"])
def test_zero_votes_have_finite_gradients(backend: Backend, B: int, squash: str) -> None:
    problem = make(Shape(B, 9, 4, 16, 1), Case(squash=squash), OP, torch.float32, backend.device)
    problem.inputs["votes"].zero_()
    got = run(problem, backend.name)
    assert not got["v"].any()
    assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("case", [PLAIN, LOADED, LOADED_OUT], ids=str)
@pytest.mark.parametrize("empty", ["B", "I", "J", "D"])
@pytest.mark.emulated(case=[LOADED])
def test_empty_sizes(backend: Backend, empty: str, case: Case) -> None:
    shape = SMALL._replace(**{empty: 0})
    problem = make(shape, case, OP, torch.float32, backend.device)
    got = run(problem, backend.name)
    for name, value in problem.inputs.items():
        assert got[f"d{name}"].shape == value.shape
    wanted = run(problem.to(torch.float64), "reference")
    for name, value in got.items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=1e-5, atol=1e-6)
    if empty == "I" and not case.bias:
        assert not got["v"].any()


def test_defaults_are_those_of_the_paper(backend: Backend) -> None:
    problem = make(SMALL, Case(coupling=False), OP, backend.widest, backend.device)
    v = capsfast.route_votes(problem.inputs["votes"], backend=backend.name)
    assert_close(v, run(problem, "reference", need=())["v"], double=1e-12)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.emulated(threads=[])
@pytest.mark.shapes((1, 257, 10, 16, 1), (33, 63, 10, 16, 1), (2, 5, 300, 8, 1))
def test_repeats_are_bitwise_equal(backend: Backend, shape: Shape, threads: int, two_threads: None) -> None:
    torch.set_num_threads(threads)
    problem = make(shape, LOADED, OP, torch.float32, backend.device)
    first = run(problem, backend.name)
    for _ in range(5):
        again = run(problem, backend.name)
        assert all(torch.equal(value, again[name]) for name, value in first.items())


def test_inputs_are_left_alone(backend: Backend) -> None:
    problem = make(SMALL, LOADED, OP, torch.float32, backend.device)
    problem.inputs["votes"] = relayout(problem.inputs["votes"], "transposed")
    before = {name: value.clone() for name, value in (problem.inputs | problem.masks).items()}
    run(problem, backend.name)
    for name, value in (problem.inputs | problem.masks).items():
        assert torch.equal(value, before[name]), name
