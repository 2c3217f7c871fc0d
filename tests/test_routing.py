"""What both ops do on every backend: values, gradients, dtypes, shapes, strides, bad numbers, empty sums.

Shapes are written for dynamic_routing; route_votes takes them without K.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import capsfast

from .support.accuracy import assert_close, check, check_scores
from .support.backends import ALL_DTYPES, Backend, Shape, assert_path, recorded_ops
from .support.problems import (
    CASES,
    COMBINED,
    EMULATED,
    LOADED,
    LOADED_OUT,
    PLAIN,
    Case,
    Op,
    Problem,
    call,
    run,
    with_one_leader,
)

pytestmark = pytest.mark.kernels

SMALL = Shape(3, 7, 4, 5, 6)
# Every size is on both sides of some tile: 1, below, at and above 8 and 16.
SHAPES = (
    *EMULATED,
    (1, 113, 10, 16, 8),
    (2, 3, 2, 3, 1),
    (2, 63, 1, 16, 8),
    (3, 1, 5, 8, 4),
    (5, 63, 10, 16, 8),
    (15, 7, 3, 8, 3),
    (16, 113, 10, 16, 8),
    (17, 31, 5, 17, 4),
    (33, 13, 4, 32, 16),
    (16, 9, 6, 1, 33),
    (4, 6, 33, 16, 16),
    (65, 4, 3, 33, 2),
    (2, 2, 1100, 3, 4),
    (17, 3, 400, 8, 8),
    (1, 100_000, 2, 1, 1),
    (2, 1153, 10, 16, 8),
    # K in blocks and what is left of them, under whole vectors of rows and others; many output capsules whose dW is
    # added up in place.
    (18, 7, 3, 16, 11),
    (33, 9, 4, 32, 24),
    (16, 11, 5, 8, 12),
    (17, 5, 100, 16, 7),
    (17, 5, 8, 6, 5),
    (18, 9, 200, 12, 8),
)


@pytest.mark.rows(triton=(5, 40))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.of_the_weight(case=[Case(shared=True)])
@pytest.mark.emulated(route_votes={"case": COMBINED})
@pytest.mark.against_reference
def test_every_option(backend: Backend, op: Op, case: Case, dtype: torch.dtype) -> None:
    # Batches of 5 and 19: kernels have one way for few samples and one for many.
    both = (Shape(5, 11, 4, 6, 3), Shape(19, 9, 3, 16, 8))
    for shape in (Shape(17, 3, 4, 5, 3),) if backend.emulated else both:
        check(op.make(shape, case, dtype, backend.device), backend)


@pytest.mark.rows(12, triton=(1, 12))
@pytest.mark.shapes(*SHAPES)
@pytest.mark.parametrize("case", [PLAIN, LOADED, LOADED_OUT, Case(shared=True)], ids=str)
@pytest.mark.of_the_weight(case=[Case(shared=True)])
@pytest.mark.emulated(shape=EMULATED)
@pytest.mark.against_reference
def test_every_shape(backend: Backend, op: Op, shape: Shape, case: Case) -> None:
    check(op.make(shape, case, torch.float32, backend.device), backend)


# The bound itself, two times the error of the float32 einsum, at the sizes people train.
@pytest.mark.rows(4)
@pytest.mark.shapes(
    (1, 1152, 10, 16, 8), (16, 1152, 10, 16, 8), (128, 128, 10, 16, 8), (33, 64, 32, 16, 16), (2, 20_000, 4, 8, 8)
)
@pytest.mark.parametrize("case", [PLAIN, LOADED, Case(shared=True, gradient="last")], ids=str)
@pytest.mark.against_reference
def test_float32_is_as_exact_as_einsum(backend: Backend, op: Op, shape: Shape, case: Case) -> None:
    check(op.make(shape, case, torch.float32, backend.device), backend, slack=1)


@pytest.mark.needs(torch.float64)
@pytest.mark.shapes(*SHAPES)
@pytest.mark.against_reference
def test_every_shape_in_float64(backend: Backend, op: Op, shape: Shape) -> None:
    check(op.make(shape, LOADED_OUT, torch.float64, backend.device), backend)


@pytest.mark.shapes(
    (1, 1, 1, 1, 1), (5, 63, 10, 16, 8), (17, 31, 5, 17, 4), (16, 9, 6, 1, 33), (2, 2, 300, 3, 4), (17, 2, 3, 6, 20)
)
@pytest.mark.parametrize("case", [PLAIN, LOADED, Case(shared=True, gradient="last"), LOADED_OUT], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.emulated(dtype=[torch.bfloat16], case=[LOADED, Case(shared=True, gradient="last"), LOADED_OUT])
@pytest.mark.against_reference
def test_sixteen_bits(backend: Backend, op: Op, shape: Shape, case: Case, dtype: torch.dtype) -> None:
    got = check(op.make(shape, case, dtype, backend.device), backend)
    assert {value.dtype for value in got.values()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_with_float32_parameters(backend: Backend, op: Op, dtype: torch.dtype) -> None:
    problem = op.make(SMALL, Case(logits="IJ", bias=True), dtype, backend.device)
    wide = {name: problem.inputs[name].float() for name in ("logits", "bias")}
    got = run(replace(problem, inputs=problem.inputs | wide), backend.name)
    wanted = run(problem.to(torch.float64), "reference")
    assert {got[name].dtype for name in ("v", *(f"d{name}" for name in op.tensors))} == {dtype}
    assert got["dlogits"].dtype == got["dbias"].dtype == torch.float32
    for name, value in got.items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_outputs_have_the_dtype_of_the_input(backend: Backend, op: Op, dtype: torch.dtype) -> None:
    v, c = call(problem := op.make(SMALL, PLAIN, dtype, backend.device), problem.inputs, backend.name)
    assert v.dtype == c.dtype == dtype
    assert v.shape == (SMALL.B, SMALL.J, SMALL.D)
    assert c.shape == (SMALL.B, SMALL.I, SMALL.J)


def test_without_coupling_only_v_comes_back(backend: Backend, op: Op) -> None:
    problem = op.make(SMALL, PLAIN, backend.widest, backend.device)
    alone = call(problem, problem.inputs, backend.name, return_coupling=False)
    v, _ = call(problem, problem.inputs, backend.name, return_coupling=True)
    assert isinstance(alone, torch.Tensor)
    assert_close(alone, v, double=1e-12)


@pytest.mark.parametrize("case", [PLAIN, LOADED, Case(shared=True), Case(coupling=False)], ids=str)
def test_the_backend_that_was_asked_for_ran(backend: Backend, op: Op, case: Case) -> None:
    problem = op.make(SMALL, case, backend.widest, backend.device)
    with recorded_ops() as ops:
        run(problem, backend.name)
    assert_path(backend, op.name, ops)
    with recorded_ops() as ops:
        run(problem, backend.name, need=())
    assert_path(backend, op.name, ops, backward=False)


@pytest.mark.needs(torch.float64)
@pytest.mark.parametrize("case", [case for case in CASES if case.gradient == "full"], ids=str)
def test_gradients_are_the_finite_differences(backend: Backend, op: Op, case: Case) -> None:
    problem = op.make(Shape(2, 3, 3, 2, 2), case, device=backend.device)
    leaves = [value.clone().requires_grad_() for value in problem.inputs.values()]

    def function(*tensors: torch.Tensor) -> Any:
        return call(problem, dict(zip(problem.inputs, tensors, strict=True)), backend.name)

    torch.autograd.gradcheck(function, leaves, fast_mode=True, nondet_tol=0.0)


@pytest.mark.parametrize("case", [PLAIN, LOADED, LOADED_OUT], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["sliced", "transposed"])
@pytest.mark.shapes((5, 11, 4, 6, 3), (17, 9, 3, 16, 8), (17, 3, 4, 5, 3))
@pytest.mark.emulated(shape=[(17, 3, 4, 5, 3)], case=[LOADED, LOADED_OUT])
@pytest.mark.against_reference
def test_strides_do_not_matter(
    backend: Backend, op: Op, shape: Shape, layout: str, dtype: torch.dtype, case: Case
) -> None:
    check(op.make(shape, case, dtype, backend.device).laid_out(layout), backend)


SUBSETS = (("poses",), ("weight",), ("logits",), ("bias",), ("poses", "bias"), ("weight", "logits"), ())


@pytest.mark.of_the_weight(need=[("weight",), ("weight", "logits")])
@pytest.mark.parametrize("need", SUBSETS, ids="+".join)
@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("B", [2, 17])
@pytest.mark.emulated(B=[2], softmax=["out"], route_votes={"softmax": ["in"]})
def test_only_some_inputs_need_a_gradient(
    backend: Backend, op: Op, B: int, softmax: str, need: tuple[str, ...]
) -> None:
    case = Case(softmax=softmax, logits="IJ", bias=True)
    problem = op.make(Shape(B, 7, 3, 5, 4), case, backend.widest, backend.device)
    need = tuple(dict.fromkeys(name if name in problem.inputs else op.poses for name in need))
    everything, some = run(problem, backend.name), run(problem, backend.name, need)
    assert some.keys() == {"v", "c", *(f"d{name}" for name in need)}
    for name, value in some.items():
        assert_close(value, everything[name], double=1e-11)


@pytest.mark.parametrize("used", [0, 1], ids=["v", "c"])
@pytest.mark.parametrize(
    "case", [PLAIN, LOADED, Case(gradient="last", logits="IJ"), Case(num_iterations=1, logits="IJ")], ids=str
)
def test_only_one_output_is_used(backend: Backend, op: Op, case: Case, used: int) -> None:
    problem = op.make(SMALL, case, backend.widest, backend.device)

    def gradients(name: str) -> list[torch.Tensor]:
        inputs = {key: value.clone().requires_grad_() for key, value in problem.inputs.items()}
        out = call(problem, inputs, name)[used]
        grad = (problem.dv, problem.dc)[used]
        return list(torch.autograd.grad(out, list(inputs.values()), grad, allow_unused=True, materialize_grads=True))

    for got, wanted in zip(gradients(backend.name), gradients("reference"), strict=True):
        assert_close(got, wanted)


def test_backward_twice_through_a_retained_graph(backend: Backend, op: Op) -> None:
    problem = op.make(SMALL, LOADED, backend.widest, backend.device)
    poses = problem.inputs[op.poses].requires_grad_()
    v, _ = call(problem, problem.inputs, backend.name)
    first = torch.autograd.grad(v, poses, problem.dv, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(v, poses, problem.dv)[0])


@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("B", "sample"), [(3, 1), (17, 0), (17, 16)])
@pytest.mark.emulated(B=[3], bad=[math.inf], route_votes={"bad": [math.nan]})
def test_nan_and_inf_stay_in_their_sample(
    backend: Backend, op: Op, B: int, sample: int, bad: float, softmax: str
) -> None:
    problem = op.make(Shape(B, 9, 3, 16, 8), Case(softmax=softmax, coupling=False), torch.float32, backend.device)
    clean = run(problem, backend.name)
    problem.inputs[op.poses].view(B, 9, -1)[sample, 4, 5] = bad
    got = run(problem, backend.name)
    others = [n for n in range(B) if n != sample]
    for name in ("v", f"d{op.poses}"):
        # A bad pose is in all votes of its input capsule, a bad vote in the sum of one output capsule.
        assert not got[name][sample].isfinite().all(), name
        assert op.poses == "votes" or not got[name][sample].isfinite().any(), name
        assert torch.equal(got[name][others], clean[name][others]), name
    if op.poses == "u":
        # Every sample adds to dW, so it must not look healthy.
        assert got["dweight"][4].isnan().all()


@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("B", [3, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.emulated(B=[3], dtype=[torch.float32])
def test_masked_capsules_may_hold_anything(backend: Backend, op: Op, dtype: torch.dtype, B: int, softmax: str) -> None:
    case = Case(softmax=softmax, mask=True, logits="BIJ")
    problem = op.make(Shape(B, 9, 3, 16, 8), case, dtype, backend.device)
    dead = ~problem.masks["mask"]
    problem.inputs[op.poses][dead] = 0
    clean = run(problem, backend.name)
    problem.inputs[op.poses][dead] = math.nan
    problem.inputs[op.poses][0][dead[0]] = math.inf
    got = run(problem, backend.name)
    for name, value in got.items():
        assert torch.equal(value, clean[name]), name
    assert not got[f"d{op.poses}"][dead].any()
    assert not got["dlogits"][dead].any()
    assert not got["c"][dead].any()


@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("B", [3, 17])
@pytest.mark.emulated(B=[3], leaky=[False])
def test_masks_that_leave_nothing(backend: Backend, op: Op, B: int, leaky: bool, softmax: str) -> None:
    case = Case(softmax=softmax, leaky=leaky, mask=True, out_mask=True)
    problem = op.make(Shape(B, 9, 3, 16, 8), case, torch.float32, backend.device)
    problem.masks["mask"][0] = False
    problem.masks["out_mask"][1] = False
    got = check(problem, backend)
    for name in ("v", f"d{op.poses}", "c"):
        assert not got[name][:2].any(), name


@pytest.mark.parametrize("softmax", ["out", "in"])
def test_out_mask_is_the_layer_without_these_capsules(backend: Backend, op: Op, softmax: str) -> None:
    problem = op.make(Shape(3, 9, 5, 4, 4), Case(softmax=softmax, out_mask=True), backend.widest, backend.device)
    keep = torch.tensor([True, False, True, True, False], device=backend.device)
    problem.masks["out_mask"][:] = keep
    got = run(problem, backend.name)

    def kept(name: str, value: torch.Tensor) -> torch.Tensor:
        axis = {"weight": 1, "votes": 2}.get(name)
        return value if axis is None else value.index_select(axis, keep.nonzero()[:, 0])

    inputs = {name: kept(name, value) for name, value in problem.inputs.items()}
    part = replace(problem, inputs=inputs, masks={}, gradients={"v": problem.dv[:, keep], "c": problem.dc[..., keep]})
    wanted = run(part, backend.name)
    assert_close(got["v"][:, keep], wanted["v"], double=1e-7)
    assert_close(got["c"][..., keep], wanted["c"], double=1e-7)
    assert not got["v"][:, ~keep].any()
    for name in op.tensors:
        found, same = got[f"d{name}"], wanted[f"d{name}"]
        assert_close(kept(name, found), same, double=1e-7)
        # Nothing where it was taken out.
        torch.testing.assert_close(found.double().square().sum(), same.double().square().sum(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("logits", ["IJ", "BIJ"])
@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("B", [3, 17])
@pytest.mark.emulated(B=[3], leaky=[True], logits=["IJ"], route_votes={"logits": ["BIJ"]})
@pytest.mark.against_reference
def test_huge_logits(
    backend: Backend, op: Op, B: int, dtype: torch.dtype, softmax: str, leaky: bool, logits: str
) -> None:
    case = Case(softmax=softmax, leaky=leaky, logits=logits)
    problem = op.make(Shape(B, 9, 4, 16, 8), case, dtype, backend.device)
    given = problem.inputs["logits"]
    # All samples, or every second one.
    huge = given if logits == "IJ" else given[::2].transpose(0, 1)
    huge[0] = 1e4
    huge[1] = -1e4
    huge[2] = torch.tensor([1e4, -1e4, 0.0, 1e4])
    huge[3] = torch.tensor([-math.inf, 0.0, -math.inf, 1.0])
    huge[4, ..., 1:] = -math.inf
    huge[5] = -math.inf
    check(problem, backend)


@pytest.mark.parametrize("softmax", ["out", "in"])
def test_huge_capsules_saturate_and_stay_finite(backend: Backend, op: Op, softmax: str) -> None:
    # Agreements of 1e5 and more: the coupling is one-hot, and exp of them would overflow.
    shape = Shape(17, 4, 4, 16, 8) if backend.emulated else Shape(17, 9, 4, 16, 8)
    problem = op.make(shape, Case(softmax=softmax), torch.float32, backend.device)
    problem.inputs[op.poses] *= 1e5
    got = run(problem, backend.name)
    assert all(value.isfinite().all() for value in got.values())
    length = got["v"].norm(dim=-1)
    assert (length < 1e-5).logical_or((length - 1).abs() < 1e-5).all()  # 0: no input capsule agrees
    sums = got["c"].sum(2 if softmax == "out" else 1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.parametrize("logits", ["IJ", "BIJ"])
@pytest.mark.parametrize("I", [1, 5])
@pytest.mark.emulated(logits=["BIJ"])
def test_logits_of_all_the_coupling_have_no_gradient(backend: Backend, op: Op, I: int, logits: str) -> None:
    for shape in (Shape(17, I, 3, 12, 4), Shape(3, I, 2, 16, 8))[: 1 if backend.emulated else 2]:
        problem = op.make(shape, Case(softmax="in", logits=logits), torch.float32, backend.device)
        check_scores(with_one_leader(problem), backend)


@pytest.mark.parametrize("squash", ["paper", "half", "eps_outside", "exp", "unit", "identity"])
@pytest.mark.of_the_weight(zero=["weight"])
@pytest.mark.parametrize("zero", ["poses", "weight"])
@pytest.mark.parametrize("B", [3, 17])
@pytest.mark.emulated(B=[3], zero=["poses"])
def test_zero_vectors_have_finite_gradients(backend: Backend, op: Op, B: int, zero: str, squash: str) -> None:
    problem = op.make(Shape(B, 9, 4, 16, 8), Case(squash=squash), torch.float32, backend.device)
    problem.inputs[op.poses if zero == "poses" else op.tensors[-1]].zero_()
    got = run(problem, backend.name)
    assert not got["v"].any()
    assert all(value.isfinite().all() for value in got.values())
    for name, value in run(problem, "reference").items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-4 * float(value.abs().max()))


@pytest.mark.parametrize("case", [PLAIN, LOADED, Case(shared=True, softmax="in"), LOADED_OUT], ids=str)
@pytest.mark.of_the_weight(empty=["K"])
@pytest.mark.parametrize("empty", Shape._fields)
@pytest.mark.emulated(case=[LOADED, LOADED_OUT])
def test_empty_sizes(backend: Backend, op: Op, empty: str, case: Case) -> None:
    shape = SMALL._replace(**{empty: 0})
    problem = op.make(shape, case, torch.float32, backend.device)
    got = run(problem, backend.name)
    B, I, J, D, _ = shape
    assert got["v"].shape == (B, J, D)
    assert got["c"].shape == (B, I, J)
    for name, value in problem.inputs.items():
        assert got[f"d{name}"].shape == value.shape
    wanted = run(problem.to(torch.float64), "reference")
    for name, value in got.items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=1e-5, atol=1e-6)
    if not case.bias and empty in "IK":
        assert not got["v"].any()


@pytest.mark.of_the_weight(empty=["K"])
@pytest.mark.parametrize("empty", ["I", "K"])
def test_an_empty_sum_still_gets_its_bias(backend: Backend, op: Op, empty: str) -> None:
    problem = op.make(SMALL._replace(**{empty: 0}), Case(bias=True), backend.widest, backend.device)
    got = run(problem, backend.name)
    wanted = capsfast.squash(problem.inputs["bias"]).expand(SMALL.B, -1, -1)
    assert_close(got["v"], wanted, double=1e-7)
    assert got["dbias"].abs().max() > 0


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("case", [PLAIN, LOADED, Case(shared=True)], ids=str)
@pytest.mark.shapes((1, 257, 10, 16, 8), (3, 113, 10, 16, 8), (33, 63, 10, 16, 8), (2, 5, 300, 8, 4))
@pytest.mark.emulated(threads=[])
def test_repeats_are_bitwise_equal(
    backend: Backend, op: Op, shape: Shape, case: Case, threads: int, two_threads: None
) -> None:
    torch.set_num_threads(threads)
    problem = op.make(shape, case, torch.float32, backend.device)
    first = run(problem, backend.name)
    for _ in range(5):
        again = run(problem, backend.name)
        assert all(torch.equal(value, again[name]) for name, value in first.items())


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.emulated(threads=[])
@pytest.mark.shapes((1, 257, 10, 16, 8), (33, 63, 10, 16, 8), (70, 9, 5, 8, 4), (33, 3, 4, 16, 8), (2, 3, 3, 2, 2))
@pytest.mark.against_reference
def test_more_threads_are_as_exact_as_one(
    backend: Backend, op: Op, shape: Shape, threads: int, two_threads: None
) -> None:
    torch.set_num_threads(threads)
    check(op.make(shape, PLAIN, torch.float32, backend.device), backend)
    check(op.make(shape, LOADED, torch.float32, backend.device), backend)


def test_samples_do_not_depend_on_their_batch(backend: Backend, op: Op) -> None:
    shape = Shape(33, 3, 4, 5, 3) if backend.emulated else Shape(33, 13, 4, 16, 8)
    problem: Problem = op.make(shape, LOADED, torch.float32, backend.device)
    whole = run(problem, backend.name)
    for n in (0, 16, 32):
        alone = replace(
            problem,
            inputs={k: v if k in ("weight", "bias") else v[n : n + 1] for k, v in problem.inputs.items()},
            masks={k: v[n : n + 1] for k, v in problem.masks.items()},
            gradients={name: value[n : n + 1] for name, value in problem.gradients.items()},
        )
        got = run(alone, backend.name)
        for name in ("v", "c", f"d{op.poses}"):
            torch.testing.assert_close(got[name][0], whole[name][n], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.emulated(layout=["contiguous"], route_votes={"layout": ["transposed"]})
def test_inputs_are_left_alone(backend: Backend, op: Op, layout: str) -> None:
    problem = op.make(SMALL, LOADED, torch.float32, backend.device).laid_out(layout)
    before = {name: value.clone() for name, value in (problem.inputs | problem.masks).items()}
    run(problem, backend.name)
    for name, value in (problem.inputs | problem.masks).items():
        assert torch.equal(value, before[name]), name
