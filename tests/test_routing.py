"""All four functions on every backend: values, gradients, dtypes, shapes, strides, the op that ran.

Shapes are for a weight; route_votes and votes_pass ignore K. test_routing_edges.py tests bad numbers, masks and empty
sums.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import capsfast
from capsfast.ops import shared_weights

from .support.accuracy import assert_close, check, check_scores
from .support.backends import Backend, Shape, assert_path, recorded_ops
from .support.passes import CASES as PASS_CASES
from .support.passes import EACH_WAY, EVERYTHING, LINEAR, LINEAR_WAYS, QUADRATIC, SHARED, WAYS, normalized
from .support.passes import LOADED as LOADED_PASS
from .support.problems import (
    CASES,
    EMULATED,
    LOADED,
    LOADED_OUT,
    PLAIN,
    STEPPED,
    AnyCase,
    Case,
    Op,
    PassCase,
    call,
    laid_out,
    make,
    run,
    with_one_leader,
)

pytestmark = [pytest.mark.kernels, pytest.mark.every_op]

# Sizes around tiles: 1, and below, at and above 8 and 16.
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
    # K in blocks with a rest, with whole and partial vectors of rows; many output capsules whose dW is added up in
    # place.
    (18, 7, 3, 16, 11),
    (33, 9, 4, 32, 24),
    (16, 11, 5, 8, 12),
    (17, 5, 100, 16, 7),
    (17, 5, 8, 6, 5),
    (18, 9, 200, 12, 8),
)
# Rows and columns of pose matrices: R of 4, 1, 5, 16; and more outputs than are held at a time.
OF_POSES = (
    ((3, 11, 4, 16, 4), 4),
    ((19, 9, 3, 6, 3), 2),
    ((17, 5, 2, 3, 5), 3),
    ((18, 37, 5, 10, 2), 2),
    ((16, 6, 3, 32, 8), 2),
    ((20, 3, 130, 16, 4), 4),
)
# Positions: fewer and more than the lanes, and than half the lanes; one axis and three; more outputs than are held at a
# time; a single position.
OF_POSITIONS = (
    ((2, 5, 4, 5, 1), (3, 7)),
    ((1, 3, 3, 16, 1), (37,)),
    ((3, 2, 2, 3, 1), (2, 3, 2)),
    ((2, 70, 3, 8, 1), (16,)),
    ((1, 4, 130, 8, 1), (17,)),
    ((3, 5, 4, 5, 1), (1, 1)),
)
POSES = tuple(
    replace(case, poses=2)
    for case in (
        PLAIN,
        LOADED,
        Case(gradient="last", logits="IJ", coupling=False),
        Case(shared=True, mask=True, squash_last=False),
        Case(squash="unit", last_squash="paper", sharpness=2.0, accumulate=False),
        PassCase(),
        PassCase(query=True, shared="I"),
        PassCase(query=True, precision=True, mask=True, shared="J", second=True),
        PassCase(query=True, shared="IJ"),
        QUADRATIC,
        EVERYTHING,
        normalized(EVERYTHING, "in"),
    )
)
# More than half a tile of positions, and fewer, for which kernels have half the width.
POSITIONS = tuple(
    replace(case, spatial=spatial)
    for spatial, cases in {
        (5,): (PLAIN, Case(num_iterations=1), LINEAR, replace(SHARED, weights=False), *EACH_WAY[2:]),
        (3, 6): (
            LOADED,
            LOADED_OUT,
            Case(gradient="last", logits="IJ", coupling=False),
            Case(softmax="in", squash_last=False),
            Case(squash="unit", last_squash="half", sharpness=2.0, accumulate=False, out_mask=True),
            QUADRATIC,
            PassCase(),
            PassCase(logits="IJ", activation=True, weights=True, lse=True),
            *EACH_WAY[:2],
        ),
    }.items()
    for case in cases
)
# Cases that together run every line, for tests that do not vary options.
FULL = (
    LOADED,
    LOADED_OUT,
    EVERYTHING,
    normalized(EVERYTHING, "in"),
    *LINEAR_WAYS,
    *(replace(case, poses=2) for case in (LOADED, EVERYTHING)),
    *(replace(case, spatial=(3, 5)) for case in (LOADED, EVERYTHING)),
)
each_full = pytest.mark.parametrize("case", FULL, ids=str)


def sizes(backend: Backend, case: AnyCase, *more: tuple[int, ...]) -> list[Shape]:
    """Few samples and many, which take different kernels. more: sizes for cases without positions and poses."""
    if case.spatial:
        return [Shape(2, 2, 2, 3, 1) if backend.emulated else Shape(2, 4, 3, 6, 1)]
    if backend.emulated:
        return [Shape(3, 5, 4, 6, 3)]
    return [Shape(3, 7, 4, 6, 5), Shape(18, 7, 4, 6, 5), *([] if case.poses else map(Shape._make, more))]


@pytest.mark.rows(triton=(2, 6))
@pytest.mark.parametrize("case", [*CASES, *STEPPED, *PASS_CASES, *POSES, *POSITIONS], ids=str)
@pytest.mark.against_reference
def test_every_option(backend: Backend, op: Op, case: AnyCase) -> None:
    few, many = (5, 11, 4, 6, 3), (19, 9, 3, 16, 8)
    shapes = [(2, 3, 3, 4, 1)] if case.spatial else [few, many]
    if backend.emulated and not case.spatial:
        shapes = [(17, 3, 3, 8, 4) if case.poses else (17, 3, 4, 5, 3)]
    for shape in shapes:
        for dtype in {torch.float32, backend.widest}:
            check(op.make(Shape._make(shape), case, dtype, backend.device), backend)


@pytest.mark.parametrize("case", [Case(squash="unit", last_squash="half", wide=True, coupling=False)], ids=str)
@pytest.mark.against_reference
def test_a_wide_output_is_not_rounded(backend: Backend, op: Op, case: AnyCase) -> None:
    for shape in sizes(backend, case):
        assert check(op.make(shape, case, torch.bfloat16, backend.device), backend)["v"].dtype == torch.float32


@pytest.mark.only(weight=True, linear=False)
@pytest.mark.rows(triton=(2, 4))
@pytest.mark.parametrize(
    "case",
    [
        *(replace(case, shared=True) for case in (LOADED, LOADED_OUT, PLAIN, Case(gradient="last", logits="IJ"))),
        *(normalized(replace(LOADED_PASS, activation=True), how) for how in WAYS),
        PassCase(shared="I"),
        replace(LOADED_PASS, shared="IJ"),
    ],
    ids=str,
)
@pytest.mark.against_reference
def test_a_shared_weight_without_votes(
    backend: Backend, op: Op, case: AnyCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way that large calls take."""
    monkeypatch.setattr(shared_weights, "WORTH_IT", dict.fromkeys(shared_weights.WORTH_IT, -(2**60)))
    for shape in sizes(backend, case):
        problem = op.make(shape, case, torch.float32, backend.device)
        check(problem, backend)
        if backend.name == "triton" or (backend.fused and op.family is PassCase):
            with recorded_ops() as ops:
                run(problem, backend.name, need=())
            assert "aten::bmm" in ops and f"capsfast::{backend.prefix}routing_pass" in ops


@pytest.mark.rows(8, triton=(1, 8))
@pytest.mark.shapes(*SHAPES)
@pytest.mark.against_reference
def test_every_shape(backend: Backend, op: Op, shape: Shape) -> None:
    moments = PassCase(center=True, second=True)  # of equal coupling
    cases: tuple[AnyCase, ...] = (LOADED, LOADED_OUT, Case(shared=True), LINEAR, *EACH_WAY[:2], *LINEAR_WAYS, moments)
    if backend.name == "triton" and shape.J > 100:
        cases = (LOADED, LOADED_OUT, *EACH_WAY[:1])  # interpreted, a case takes ten seconds
    for case in cases:
        if not op.takes(case) or (backend.linear and not case.linear):
            continue
        for dtype in {torch.float32, backend.widest} if case == LOADED_OUT else {torch.float32}:
            check(op.make(shape, case, dtype, backend.device), backend)


@pytest.mark.rows(triton=(0, 2))
@pytest.mark.parametrize(
    ("case", "size"),
    [
        *((replace(case, poses=rows), size) for size, rows in OF_POSES for case in (LOADED, EVERYTHING)),
        *((replace(case, spatial=spatial), size) for size, spatial in OF_POSITIONS for case in (LOADED, EVERYTHING)),
    ],
    ids=str,
)
@pytest.mark.against_reference
def test_every_shape_of_pose_matrices_and_positions(
    backend: Backend, op: Op, case: AnyCase, size: tuple[int, ...]
) -> None:
    check(op.make(Shape._make(size), case, backend.widest, backend.device), backend)


# The bound itself, twice the error of the float32 einsum, at real sizes.
@pytest.mark.rows(4)
@pytest.mark.shapes((1, 1152, 10, 16, 8), (128, 128, 10, 16, 8), (33, 64, 32, 16, 16), (2, 20_000, 4, 8, 8))
@pytest.mark.parametrize(
    "case",
    [
        PLAIN,
        LOADED,
        Case(shared=True, gradient="last"),
        replace(QUADRATIC, query=True),
        normalized(QUADRATIC, "in"),
    ],
    ids=str,
)
@pytest.mark.against_reference
def test_float32_is_as_exact_as_einsum(backend: Backend, op: Op, shape: Shape, case: AnyCase) -> None:
    check(op.make(shape, case, torch.float32, backend.device), backend, slack=1)


@pytest.mark.parametrize(
    "case",
    [
        Case(softmax="in", logits="IJ"),
        Case(softmax="in", logits="BIJ"),
        PassCase(query=True, prior=True, logits="BIJ", weights=True, normalize="in"),
        PassCase(query=True, logits="IJ", lse=True, normalize="in"),
        replace(QUADRATIC, query=True, logits="BIJ", weights=True, normalize="in"),
    ],
    ids=str,
)
def test_scores_of_all_the_coupling_have_no_gradient(backend: Backend, op: Op, case: AnyCase) -> None:
    for I in (1, 5):
        for shape in (Shape(17, I, 3, 12, 4), Shape(3, I, 2, 16, 8))[: 1 if backend.emulated else 2]:
            check_scores(with_one_leader(op.make(shape, case, torch.float32, backend.device)), backend)


@pytest.mark.passes
@pytest.mark.against_reference
def test_a_center_near_the_mean_keeps_the_variance(backend: Backend) -> None:
    """Votes 100 from the origin with deviations of 0.1, which a second moment about 0 would lose."""
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*FULL, Case(shared=True, gradient="last"), QUADRATIC], ids=str)
@pytest.mark.against_reference
def test_sixteen_bits(backend: Backend, op: Op, case: AnyCase, dtype: torch.dtype) -> None:
    for shape in sizes(backend, case, (5, 63, 10, 16, 8), (17, 31, 5, 17, 4), (16, 9, 6, 1, 33)):
        found = check(op.make(shape, case, dtype, backend.device), backend)
        wide = {"mass", "first", "second", "log_sum"}
        assert all((value.dtype == torch.float32) == (name in wide) for name, value in found.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [Case(logits="IJ", bias=True), LOADED_PASS, EVERYTHING], ids=str)
def test_sixteen_bits_with_float32_parameters(backend: Backend, op: Op, case: AnyCase, dtype: torch.dtype) -> None:
    problem = op.make(Shape(3, 7, 4, 5, 6), case, dtype, backend.device)
    wide = {name: value.float() for name, value in problem.inputs.items() if name not in op.tensors}
    got = run(replace(problem, inputs=problem.inputs | wide), backend.name)
    wanted = run(problem.to(torch.float64), "reference")
    assert {got[f"d{name}"].dtype for name in op.tensors} == {dtype}
    assert {got[f"d{name}"].dtype for name in wide} == {torch.float32}
    for name, value in got.items():
        atol = 0.05 if op.family is Case else 0.05 * wanted[name].abs().max().item()
        torch.testing.assert_close(value.double(), wanted[name], rtol=0.05, atol=atol)


def test_defaults_are_those_of_the_paper(backend: Backend, op: Op) -> None:
    """Also tests that outputs that were not asked for are not returned."""
    case = Case(coupling=False) if op.family is Case else PassCase()
    problem = op.make(Shape(3, 7, 4, 5, 6), case, backend.widest, backend.device)
    found = getattr(capsfast, op.name)(*problem.inputs.values(), backend=backend.name)
    if op.family is PassCase:
        assert (found.second, found.weights, found.lse) == (None, None, None)
    else:
        assert isinstance(found, Tensor)
    for name, value in case.outputs(found).items():
        assert_close(value, run(problem, "reference", need=())[name], double=1e-12)


@pytest.mark.parametrize(
    "case", [PLAIN, Case(shared=True), Case(coupling=False), LINEAR, SHARED, PassCase(), *FULL], ids=str
)
def test_the_backend_that_was_asked_for_ran(backend: Backend, op: Op, case: AnyCase) -> None:
    problem = op.make(sizes(backend, case)[0], case, backend.widest, backend.device)
    with recorded_ops() as ops:
        run(problem, backend.name)
    if case is SHARED:
        # A single product makes votes that all output capsules share.
        assert (f"capsfast::{backend.prefix}routing_pass" in ops) == backend.fused
        return
    if case == Case(shared=True) and backend.name == "cpp":
        assert {"capsfast::factored_routing", "capsfast::factored_routing_backward"} <= set(ops)
        return
    assert_path(backend, op.name, ops)
    with recorded_ops() as ops:
        run(problem, backend.name, need=())
    assert_path(backend, op.name, ops, backward=False)


# Orders of the axes of votes and weights in other layers.
ORDERS = ((1, 0, 3, 2), (0, 2, 3, 1), (0, 1, 3, 2), (3, 2, 1, 0), (1, 0, 2, 3), (0, 3, 1, 2))


@pytest.mark.parametrize("layout", [*ORDERS, "sliced", "transposed"], ids=str)
@pytest.mark.parametrize("case", [*FULL, LINEAR], ids=str)
@pytest.mark.rows((8, 16), triton=(1, 2), emulated=(2, 4))
@pytest.mark.against_reference
def test_strides_do_not_matter(backend: Backend, op: Op, layout: str | tuple[int, ...], case: AnyCase) -> None:
    for shape in sizes(backend, case, (2, 9, 3, 16, 8), (17, 9, 3, 16, 8)):
        for dtype in (torch.float32, torch.bfloat16):
            problem = op.make(shape, case, dtype, backend.device)
            if isinstance(layout, str):
                problem = laid_out(problem, layout)
            else:
                name = op.tensors[-1]
                value = problem.inputs[name].movedim((0, 1, 2, 3), layout).contiguous()
                problem.inputs[name] = value.movedim(layout, (0, 1, 2, 3))
            check(problem, backend)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("case", [Case(logits="BIJ"), PassCase(query=True, logits="BIJ")], ids=str)
@pytest.mark.rows(emulated=(1, 2))
@pytest.mark.against_reference
def test_expanded_tensors(backend: Backend, op: Op, case: AnyCase, axis: int) -> None:
    for shape in sizes(backend, case, (17, 9, 3, 16, 8)):
        problem = op.make(shape, case, torch.float32, backend.device)
        for name in (*op.tensors, "logits"):
            value = problem.inputs[name]
            if axis < value.dim() and (axis, name) != (1, "weight"):  # else all votes of a capsule would be equal
                problem.inputs[name] = value.narrow(axis, 0, 1).expand(value.shape)
        # The gradient that v.sum().backward() sends.
        result = "v" if op.family is Case else "first"
        size = problem.gradients[result].shape
        problem.gradients[result] = torch.ones((), device=backend.device).expand(size)
        check(problem, backend)


@each_full
def test_only_some_inputs_need_a_gradient(backend: Backend, op: Op, case: AnyCase) -> None:
    for shape in sizes(backend, case):
        problem = op.make(shape, case, backend.widest, backend.device)
        everything = run(problem, backend.name)
        outputs = everything.keys() - {f"d{name}" for name in problem.inputs}
        for need in (
            *((name,) for name in problem.inputs),
            tuple(problem.inputs)[::2],
            tuple(problem.inputs)[1::2],
            (),
        ):
            some = run(problem, backend.name, need)
            assert some.keys() == {*outputs, *(f"d{name}" for name in need)}
            for name, value in some.items():
                assert_close(value, everything[name], double=1e-11)


@pytest.mark.parametrize(
    "case",
    [PLAIN, LOADED, Case(gradient="last", logits="IJ"), Case(num_iterations=1, logits="IJ"), *FULL[2:]],
    ids=str,
)
def test_only_one_output_is_used(backend: Backend, op: Op, case: AnyCase) -> None:
    problem = op.make(sizes(backend, case)[0], case, backend.widest, backend.device)
    leaves = [value.requires_grad_() for value in problem.inputs.values()]
    for used, output in case.outputs(call(problem, problem.inputs, backend.name)).items():
        alone = {name: value if name == used else torch.zeros_like(value) for name, value in problem.gradients.items()}
        wanted = run(replace(problem, gradients=alone), "reference")
        sent = problem.gradients[used].to(output.dtype)
        got = torch.autograd.grad(output, leaves, sent, materialize_grads=True, retain_graph=True)
        for name, value in zip(problem.inputs, got, strict=True):
            assert_close(value, wanted[f"d{name}"])


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", [PLAIN, LOADED, Case(shared=True), LINEAR, *EACH_WAY[:2]], ids=str)
@pytest.mark.against_reference
def test_any_number_of_threads_is_exact_and_repeats_its_bits(
    backend: Backend, op: Op, case: AnyCase, threads: None
) -> None:
    many = ((1, 257, 10, 16, 8), 2), ((33, 63, 10, 16, 8), 3), ((2, 5, 300, 8, 4), 7), ((33, 3, 4, 16, 8), 7)
    for shape, number in (((3, 7, 4, 5, 6), 2),) if backend.emulated else many:
        torch.set_num_threads(number)
        problem = op.make(Shape._make(shape), case, torch.float32, backend.device)
        first = check(problem, backend)
        for _ in range(1 if backend.emulated else 3):
            again = run(problem, backend.name)
            assert all(torch.equal(value, again[name]) for name, value in first.items())


@pytest.mark.parametrize("case", [LOADED, LOADED_PASS, EVERYTHING], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_inputs_are_left_alone_and_a_graph_is_used_twice(backend: Backend, op: Op, case: AnyCase, layout: str) -> None:
    problem = laid_out(op.make(Shape(3, 7, 4, 5, 6), case, torch.float32, backend.device), layout)
    before = {name: value.clone() for name, value in (problem.inputs | problem.masks).items()}
    leaves = {name: value.detach().requires_grad_() for name, value in problem.inputs.items()}
    output = next(iter(case.outputs(call(problem, leaves, backend.name)).values()))
    needed = list(leaves.values())
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(output.square().sum(), needed, retain_graph=True, **options)
    for one, other in zip(first, torch.autograd.grad(output.square().sum(), needed, **options), strict=True):
        assert torch.equal(one, other)
    for name, value in (problem.inputs | problem.masks).items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("case", [PLAIN, LOADED_OUT, Case(softmax="in")], ids=str)
@pytest.mark.only(linear=False)
def test_votes_that_output_capsules_share(backend: Backend, op: Op, case: Case) -> None:
    """A J of size 1. test_reference.py shows that it equals repeated votes."""
    shape = Shape(3, 4, 3, 5, 3) if backend.emulated else Shape(18, 21, 5, 16, 8)
    problem = op.make(shape, replace(case, logits="BIJ", shared=True), torch.float32, backend.device)
    name, axis = op.tensors[-1], 2 if op.tensors == ("votes",) else 1
    problem.inputs[name] = problem.inputs[name].narrow(axis, 0, 1)
    check(problem, backend)


@pytest.mark.passes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [9, 1])
@pytest.mark.rows(triton=(0, 0))  # as on other backends: torch's product, then float32
def test_votes_that_are_shared_are_not_rounded_to_sixteen_bits(backend: Backend, rows: int, dtype: torch.dtype) -> None:
    shape, case = Shape(2, 9, 17, 7, 3), Case(num_iterations=4, softmax="in", logits="IJ", bias=True)
    for problem in (
        make(shape, case),
        make(shape, PassCase(query=True, center=True, second=True, weights=True)),
    ):
        problem = problem.to(dtype, backend.device)
        problem.inputs["weight"] = problem.inputs["weight"][:rows, :1]
        wide = run(problem.to(torch.float32, backend.device), backend.name)
        for name, value in run(problem, backend.name).items():
            assert torch.equal(value, wide[name].to(value.dtype)), (problem.op, name)


@pytest.mark.passes
def test_shared_votes_that_no_output_takes(backend: Backend) -> None:
    """Votes with 16 bits or gaps are copied, to memory that must have room for them."""
    for dtype in (torch.float32, torch.bfloat16):
        for stride in (1, 2):
            votes = torch.randn(2, 9, 1, 16 * stride, device=backend.device).to(dtype).requires_grad_()
            logits = torch.zeros(9, 0, dtype=dtype, device=backend.device)
            v = capsfast.route_votes(votes[..., ::stride], logits=logits, backend=backend.name)
            (gradient,) = torch.autograd.grad(v.sum(), votes)
            assert v.shape == (2, 0, 16) and not gradient.any()
        for vectors, matrices in (((5,), (6, 5)), ((2, 5), (5, 3))):
            sizes_of = {"u": (3, 7, *vectors), "weight": (7, 1, *matrices)}
            u, weight = (torch.randn(size, device=backend.device).to(dtype) for size in sizes_of.values())
            logits = torch.zeros(7, 0, dtype=dtype, device=backend.device)
            v = capsfast.dynamic_routing(u, weight.requires_grad_(), logits=logits, backend=backend.name)
            m = capsfast.routing_pass(u, weight, logits=logits, backend=backend.name)
            assert v.shape == m.first.shape == (3, 0, 6)
            assert not torch.autograd.grad(v.sum() + m.first.sum(), weight)[0].any()
