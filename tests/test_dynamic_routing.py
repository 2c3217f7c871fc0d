"""capsfast.dynamic_routing on every backend: values, gradients, dtypes, shapes, strides, bad numbers, empty sums."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import capsfast

from .support.accuracy import assert_close, check
from .support.backends import ALL_DTYPES, Backend, Shape, assert_path, recorded_ops
from .support.problems import CASES, LOADED, LOADED_OUT, PLAIN, Case, Problem, call, make, run

pytestmark = pytest.mark.kernels

OP = "dynamic_routing"
SMALL = Shape(3, 7, 4, 5, 6)
# What an emulated backend has time for: tiles of the batch, K in steps, D no power of two, more outputs than one
# program holds, with several input capsules and with several tiles of the batch.
EMULATED = (
    (1, 1, 1, 1, 1),
    (17, 5, 4, 5, 3),
    (2, 3, 5, 17, 4),
    (16, 2, 3, 1, 70),
    (2, 4, 200, 3, 1),
    (18, 1, 330, 2, 1),
)
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
    (2, 2, 1000, 3, 4),
    (17, 3, 257, 8, 8),
    (1, 100_000, 2, 1, 1),
    (2, 1153, 10, 16, 8),
    # K in blocks and what is left of them, under whole vectors of rows and others; many output capsules whose dW is
    # added up in place.
    (18, 7, 3, 16, 11),
    (33, 9, 4, 32, 24),
    (16, 11, 5, 8, 12),
    (17, 5, 100, 16, 7),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option(backend: Backend, case: Case, dtype: torch.dtype) -> None:
    # Batches of 5 and 19: kernels have one way for few samples and one for many.
    both = (Shape(5, 11, 4, 6, 3), Shape(19, 9, 3, 16, 8))
    for shape in (Shape(17, 3, 4, 5, 3),) if backend.emulated else both:
        check(make(shape, case, OP, dtype, backend.device), backend)


@pytest.mark.shapes(*SHAPES)
@pytest.mark.parametrize("case", [PLAIN, LOADED, LOADED_OUT, Case(shared=True)], ids=str)
@pytest.mark.emulated(shape=EMULATED)
def test_every_shape(backend: Backend, shape: Shape, case: Case) -> None:
    check(make(shape, case, OP, torch.float32, backend.device), backend)


# The bound itself, two times the error of the float32 einsum, at the sizes people train.
@pytest.mark.shapes(
    (1, 1152, 10, 16, 8), (16, 1152, 10, 16, 8), (128, 128, 10, 16, 8), (33, 64, 32, 16, 16), (2, 20_000, 4, 8, 8)
)
@pytest.mark.parametrize("case", [PLAIN, LOADED, Case(shared=True, gradient="last")], ids=str)
def test_float32_is_as_exact_as_einsum(backend: Backend, shape: Shape, case: Case) -> None:
    check(make(shape, case, OP, torch.float32, backend.device), backend, slack=1)


@pytest.mark.needs(torch.float64)
@pytest.mark.shapes(*SHAPES)
def test_every_shape_in_float64(backend: Backend, shape: Shape) -> None:
    check(make(shape, LOADED_OUT, OP, torch.float64, backend.device), backend)


@pytest.mark.shapes(
    (1, 1, 1, 1, 1), (5, 63, 10, 16, 8), (17, 31, 5, 17, 4), (16, 9, 6, 1, 33), (2, 2, 300, 3, 4), (17, 2, 3, 6, 20)
)
@pytest.mark.parametrize("case", [PLAIN, LOADED, Case(shared=True, gradient="last"), LOADED_OUT], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.emulated(dtype=[torch.bfloat16], case=[LOADED, Case(shared=True, gradient="last"), LOADED_OUT])
def test_sixteen_bits(backend: Backend, shape: Shape, case: Case, dtype: torch.dtype) -> None:
    got = check(make(shape, case, OP, dtype, backend.device), backend)
    assert {value.dtype for value in got.values()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_with_float32_parameters(backend: Backend, dtype: torch.dtype) -> None:
    problem = make(SMALL, Case(logits="IJ", bias=True), OP, dtype, backend.device)
    wide = {name: problem.inputs[name].float() for name in ("logits", "bias")}
    got = run(replace(problem, inputs=problem.inputs | wide), backend.name)
    wanted = run(problem.to(torch.float64), "reference")
    assert got["v"].dtype == got["du"].dtype == got["dweight"].dtype == dtype
    assert got["dlogits"].dtype == got["dbias"].dtype == torch.float32
    for name, value in got.items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_outputs_have_the_dtype_of_the_input(backend: Backend, dtype: torch.dtype) -> None:
    v, c = call(problem := make(SMALL, PLAIN, OP, dtype, backend.device), problem.inputs, backend.name)
    assert v.dtype == c.dtype == dtype
    assert v.shape == (SMALL.B, SMALL.J, SMALL.D)
    assert c.shape == (SMALL.B, SMALL.I, SMALL.J)


def test_without_coupling_only_v_comes_back(backend: Backend) -> None:
    problem = make(SMALL, PLAIN, OP, backend.widest, backend.device)
    alone = call(problem, problem.inputs, backend.name, coupling=False)
    v, _ = call(problem, problem.inputs, backend.name, coupling=True)
    assert isinstance(alone, torch.Tensor)
    assert_close(alone, v, double=1e-12)


def test_defaults_are_those_of_the_paper(backend: Backend) -> None:
    problem = make(SMALL, Case(coupling=False), OP, backend.widest, backend.device)
    v = capsfast.dynamic_routing(problem.inputs["u"], problem.inputs["weight"], backend=backend.name)
    assert_close(v, run(problem, "reference", need=())["v"], double=1e-12)


@pytest.mark.parametrize("case", [PLAIN, LOADED, Case(shared=True), Case(coupling=False)], ids=str)
def test_the_backend_that_was_asked_for_ran(backend: Backend, case: Case) -> None:
    problem = make(SMALL, case, OP, backend.widest, backend.device)
    with recorded_ops() as ops:
        run(problem, backend.name)
    assert_path(backend, OP, ops)
    with recorded_ops() as ops:
        run(problem, backend.name, need=())
    assert_path(backend, OP, ops, backward=False)


@pytest.mark.needs(torch.float64)
@pytest.mark.parametrize("case", [case for case in CASES if case.gradient == "full"], ids=str)
def test_gradients_are_the_finite_differences(backend: Backend, case: Case) -> None:
    problem = make(Shape(2, 3, 3, 2, 2), case, OP, device=backend.device)
    leaves = [value.clone().requires_grad_() for value in problem.inputs.values()]

    def function(*tensors: torch.Tensor) -> Any:
        return call(problem, dict(zip(problem.inputs, tensors, strict=True)), backend.name)

    torch.autograd.gradcheck(function, leaves, fast_mode=True, nondet_tol=0.0)


@pytest.mark.parametrize("case", [PLAIN, LOADED, LOADED_OUT], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["sliced", "transposed"])
@pytest.mark.shapes((5, 11, 4, 6, 3), (17, 9, 3, 16, 8), (17, 3, 4, 5, 3))
@pytest.mark.emulated(shape=[(17, 3, 4, 5, 3)], case=[LOADED, LOADED_OUT])
def test_strides_do_not_matter(backend: Backend, shape: Shape, layout: str, dtype: torch.dtype, case: Case) -> None:
    check(make(shape, case, OP, dtype, backend.device).laid_out(layout), backend)


@pytest.mark.parametrize("order", [(1, 0, 3, 2), (1, 0, 2, 3), (0, 2, 3, 1), (0, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("B", [2, 17])
@pytest.mark.emulated(B=[2], order=[(1, 0, 3, 2)])
def test_weight_stored_in_the_orders_of_other_layers(backend: Backend, B: int, order: tuple[int, ...]) -> None:
    problem = make(Shape(B, 9, 3, 16, 8), PLAIN, OP, torch.float32, backend.device)
    inverse = [order.index(axis) for axis in range(4)]
    problem.inputs["weight"] = problem.inputs["weight"].permute(inverse).contiguous().permute(order)
    check(problem, backend)


@pytest.mark.parametrize("B", [2, 17])
@pytest.mark.emulated(B=[17])
def test_expanded_inputs(backend: Backend, B: int) -> None:
    problem = make(Shape(B, 9, 3, 16, 8), Case(logits="BIJ"), OP, torch.float32, backend.device)
    problem.inputs["u"] = problem.inputs["u"][:, :1].expand(-1, 9, -1)
    problem.inputs["logits"] = problem.inputs["logits"][:1].expand(B, -1, -1)
    problem.dv = torch.ones((), device=backend.device).expand(problem.dv.shape)  # what v.sum().backward() sends
    check(problem, backend)


@pytest.mark.parametrize("case", [PLAIN, LOADED], ids=str)
@pytest.mark.parametrize("B", [2, 17])
@pytest.mark.emulated(B=[2])
def test_shared_weight_and_expanded_weight_agree(backend: Backend, B: int, case: Case) -> None:
    shape = Shape(B, 9, 3, 16, 8)
    shared = make(shape, replace(case, shared=True), OP, backend.widest, backend.device)
    expanded = replace(shared, inputs=shared.inputs | {"weight": shared.inputs["weight"].expand(9, -1, -1, -1)})
    one, other = run(shared, backend.name), run(expanded, backend.name)
    assert one["dweight"].shape == (1, 3, 16, 8)
    assert other["dweight"].shape == (9, 3, 16, 8)
    other["dweight"] = other["dweight"].sum(0, keepdim=True)
    for name, value in one.items():
        assert_close(value, other[name], double=1e-11)


SUBSETS = (("u",), ("weight",), ("logits",), ("bias",), ("u", "bias"), ("weight", "logits"), ())


@pytest.mark.parametrize("need", SUBSETS, ids="+".join)
@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("B", [2, 17])
@pytest.mark.emulated(B=[2], softmax=["out"])
def test_only_some_inputs_need_a_gradient(backend: Backend, B: int, softmax: str, need: tuple[str, ...]) -> None:
    case = Case(softmax=softmax, logits="IJ", bias=True)
    problem = make(Shape(B, 7, 3, 5, 4), case, OP, backend.widest, backend.device)
    everything, some = run(problem, backend.name), run(problem, backend.name, need)
    assert some.keys() == {"v", "c", *(f"d{name}" for name in need)}
    for name, value in some.items():
        assert_close(value, everything[name], double=1e-11)


@pytest.mark.parametrize("used", [0, 1], ids=["v", "c"])
@pytest.mark.parametrize(
    "case", [PLAIN, LOADED, Case(gradient="last", logits="IJ"), Case(num_iterations=1, logits="IJ")], ids=str
)
def test_only_one_output_is_used(backend: Backend, case: Case, used: int) -> None:
    problem = make(SMALL, case, OP, backend.widest, backend.device)

    def gradients(name: str) -> list[torch.Tensor]:
        inputs = {key: value.clone().requires_grad_() for key, value in problem.inputs.items()}
        out = call(problem, inputs, name)[used]
        grad = (problem.dv, problem.dc)[used]
        return list(torch.autograd.grad(out, list(inputs.values()), grad, allow_unused=True, materialize_grads=True))

    for got, wanted in zip(gradients(backend.name), gradients("reference"), strict=True):
        assert_close(got, wanted)


def test_backward_twice_through_a_retained_graph(backend: Backend) -> None:
    problem = make(SMALL, LOADED, OP, backend.widest, backend.device)
    u = problem.inputs["u"].requires_grad_()
    v, _ = call(problem, problem.inputs, backend.name)
    first = torch.autograd.grad(v, u, problem.dv, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(v, u, problem.dv)[0])


@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("B", "sample"), [(3, 1), (17, 0), (17, 16)])
@pytest.mark.emulated(B=[3], bad=[math.inf])
def test_nan_and_inf_stay_in_their_sample(backend: Backend, B: int, sample: int, bad: float, softmax: str) -> None:
    problem = make(Shape(B, 9, 3, 16, 8), Case(softmax=softmax, coupling=False), OP, torch.float32, backend.device)
    clean = run(problem, backend.name)
    problem.inputs["u"][sample, 4, 5] = bad
    got = run(problem, backend.name)
    others = [n for n in range(B) if n != sample]
    for name in ("v", "du"):
        assert not got[name][sample].isfinite().any(), name
        assert torch.equal(got[name][others], clean[name][others]), name
    # Every sample adds to dW, so it must not look healthy.
    assert got["dweight"][4].isnan().all()


@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("B", [3, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.emulated(B=[3], dtype=[torch.float32])
def test_masked_capsules_may_hold_anything(backend: Backend, dtype: torch.dtype, B: int, softmax: str) -> None:
    case = Case(softmax=softmax, mask=True, logits="BIJ")
    problem = make(Shape(B, 9, 3, 16, 8), case, OP, dtype, backend.device)
    dead = ~problem.masks["mask"]
    problem.inputs["u"][dead] = 0
    clean = run(problem, backend.name)
    problem.inputs["u"][dead] = math.nan
    problem.inputs["u"][0][dead[0]] = math.inf
    got = run(problem, backend.name)
    for name, value in got.items():
        assert torch.equal(value, clean[name]), name
    assert not got["du"][dead].any()
    assert not got["dlogits"][dead].any()
    assert not got["c"][dead].any()


@pytest.mark.parametrize("logits", ["", "IJ"])
@pytest.mark.parametrize("J", [3, 70])
@pytest.mark.parametrize("B", [3, 17])
@pytest.mark.emulated(B=[3], J=[3])
def test_the_weight_of_a_masked_capsule_may_hold_anything(backend: Backend, B: int, J: int, logits: str) -> None:
    problem = make(Shape(B, 9, J, 16, 8), Case(mask=True, logits=logits), OP, torch.float32, backend.device)
    problem.masks["mask"][:, 4] = False
    clean = run(problem, backend.name)
    problem.inputs["weight"] = problem.inputs["weight"].clone()
    problem.inputs["weight"][4] = math.nan
    got = run(problem, backend.name)
    for name in ("v", "c", "du"):
        torch.testing.assert_close(got[name], clean[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("B", [3, 17])
@pytest.mark.emulated(B=[3], leaky=[False])
def test_masks_that_leave_nothing(backend: Backend, B: int, leaky: bool, softmax: str) -> None:
    case = Case(softmax=softmax, leaky=leaky, mask=True, out_mask=True)
    problem = make(Shape(B, 9, 3, 16, 8), case, OP, torch.float32, backend.device)
    problem.masks["mask"][0] = False
    problem.masks["out_mask"][1] = False
    got = check(problem, backend)
    for name in ("v", "du", "c"):
        assert not got[name][:2].any(), name


@pytest.mark.parametrize("softmax", ["out", "in"])
def test_out_mask_is_the_layer_without_these_capsules(backend: Backend, softmax: str) -> None:
    problem = make(Shape(3, 9, 5, 4, 4), Case(softmax=softmax, out_mask=True), OP, backend.widest, backend.device)
    keep = torch.tensor([True, False, True, True, False], device=backend.device)
    problem.masks["out_mask"][:] = keep
    got = run(problem, backend.name)
    weight = problem.inputs["weight"][:, keep]
    part = replace(
        problem,
        inputs=problem.inputs | {"weight": weight},
        masks={},
        dv=problem.dv[:, keep],
        dc=problem.dc[..., keep],
    )
    wanted = run(part, backend.name)
    assert_close(got["v"][:, keep], wanted["v"], double=1e-7)
    assert_close(got["c"][..., keep], wanted["c"], double=1e-7)
    assert_close(got["du"], wanted["du"], double=1e-7)
    assert_close(got["dweight"][:, keep], wanted["dweight"], double=1e-7)
    assert not got["v"][:, ~keep].any()
    assert not got["dweight"][:, ~keep].any()


@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("B", [3, 17])
@pytest.mark.emulated(B=[3], leaky=[True])
def test_huge_logits(backend: Backend, B: int, dtype: torch.dtype, softmax: str, leaky: bool) -> None:
    case = Case(softmax=softmax, leaky=leaky, logits="IJ")
    problem = make(Shape(B, 9, 4, 16, 8), case, OP, dtype, backend.device)
    logits = problem.inputs["logits"]
    logits[0] = 1e4
    logits[1] = -1e4
    logits[2] = torch.tensor([1e4, -1e4, 0.0, 1e4])
    logits[3] = torch.tensor([-math.inf, 0.0, -math.inf, 1.0])
    logits[4, 1:] = -math.inf
    logits[5] = -math.inf
    check(problem, backend)


@pytest.mark.parametrize("softmax", ["out", "in"])
def test_huge_capsules_saturate_and_stay_finite(backend: Backend, softmax: str) -> None:
    # Agreements of 1e5 and more: the coupling is one-hot, and exp of them would overflow.
    shape = Shape(17, 4, 4, 16, 8) if backend.emulated else Shape(17, 9, 4, 16, 8)
    problem = make(shape, Case(softmax=softmax), OP, torch.float32, backend.device)
    problem.inputs["u"] *= 1e5
    got = run(problem, backend.name)
    assert all(value.isfinite().all() for value in got.values())
    length = got["v"].norm(dim=-1)
    assert (length < 1e-5).logical_or((length - 1).abs() < 1e-5).all()  # 0: no input capsule agrees
    sums = got["c"].sum(2 if softmax == "out" else 1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.parametrize("squash", ["paper", "half", "eps_outside", "exp", "unit", "identity"])
@pytest.mark.parametrize("zero", ["u", "weight"])
@pytest.mark.parametrize("B", [3, 17])
@pytest.mark.emulated(B=[3], zero=["u"])
def test_zero_vectors_have_finite_gradients(backend: Backend, B: int, zero: str, squash: str) -> None:
    problem = make(Shape(B, 9, 4, 16, 8), Case(squash=squash), OP, torch.float32, backend.device)
    problem.inputs[zero].zero_()
    got = run(problem, backend.name)
    assert not got["v"].any()
    assert all(value.isfinite().all() for value in got.values())
    for name, value in run(problem, "reference").items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-4 * float(value.abs().max()))


@pytest.mark.parametrize("case", [PLAIN, LOADED, Case(shared=True, softmax="in"), LOADED_OUT], ids=str)
@pytest.mark.parametrize("empty", Shape._fields)
@pytest.mark.emulated(case=[LOADED, LOADED_OUT])
def test_empty_sizes(backend: Backend, empty: str, case: Case) -> None:
    shape = SMALL._replace(**{empty: 0})
    problem = make(shape, case, OP, torch.float32, backend.device)
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


@pytest.mark.parametrize("empty", ["I", "K"])
def test_an_empty_sum_still_gets_its_bias(backend: Backend, empty: str) -> None:
    problem = make(SMALL._replace(**{empty: 0}), Case(bias=True), OP, backend.widest, backend.device)
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
def test_repeats_are_bitwise_equal(backend: Backend, shape: Shape, case: Case, threads: int, two_threads: None) -> None:
    torch.set_num_threads(threads)
    problem = make(shape, case, OP, torch.float32, backend.device)
    first = run(problem, backend.name)
    for _ in range(5):
        again = run(problem, backend.name)
        assert all(torch.equal(value, again[name]) for name, value in first.items())


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.emulated(threads=[])
@pytest.mark.shapes((1, 257, 10, 16, 8), (33, 63, 10, 16, 8), (70, 9, 5, 8, 4), (33, 3, 4, 16, 8), (2, 3, 3, 2, 2))
def test_more_threads_are_as_exact_as_one(backend: Backend, shape: Shape, threads: int, two_threads: None) -> None:
    torch.set_num_threads(threads)
    check(make(shape, PLAIN, OP, torch.float32, backend.device), backend)
    check(make(shape, LOADED, OP, torch.float32, backend.device), backend)


def test_samples_do_not_depend_on_their_batch(backend: Backend) -> None:
    shape = Shape(33, 3, 4, 5, 3) if backend.emulated else Shape(33, 13, 4, 16, 8)
    problem: Problem = make(shape, LOADED, OP, torch.float32, backend.device)
    whole = run(problem, backend.name)
    for n in (0, 16, 32):
        alone = replace(
            problem,
            inputs={k: v if k in ("weight", "bias") else v[n : n + 1] for k, v in problem.inputs.items()},
            masks={k: v[n : n + 1] for k, v in problem.masks.items()},
            dv=problem.dv[n : n + 1],
            dc=problem.dc[n : n + 1],
        )
        got = run(alone, backend.name)
        for name in ("v", "c", "du"):
            torch.testing.assert_close(got[name][0], whole[name][n], rtol=1e-4, atol=1e-5)


def test_inputs_are_left_alone(backend: Backend) -> None:
    problem = make(SMALL, LOADED, OP, torch.float32, backend.device)
    before = {name: value.clone() for name, value in (problem.inputs | problem.masks).items()}
    run(problem, backend.name)
    for name, value in (problem.inputs | problem.masks).items():
        assert torch.equal(value, before[name]), name
