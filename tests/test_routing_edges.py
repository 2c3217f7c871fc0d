"""All four functions on every backend with NaN, masks that leave little, empty sizes and huge numbers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import capsfast

from .support.accuracy import assert_accurate, assert_close, check
from .support.backends import Backend, Shape
from .support.passes import EACH_WAY, EVERYTHING, LINEAR, LINEAR_WAYS, SHARED
from .support.problems import LOADED, PLAIN, AnyCase, Case, Op, PassCase, batched, make, run, stretched
from .test_routing import FULL, sizes

pytestmark = [pytest.mark.kernels, pytest.mark.every_op]


def over(mask: Tensor, value: Tensor) -> Tensor:
    """A mask [B, N, *S] for a tensor [B, N, ..., *S]."""
    return mask.view(*mask.shape[:2], *(1,) * (value.dim() - mask.dim()), *mask.shape[2:])


@pytest.mark.parametrize("case", [PLAIN, Case(softmax="in", coupling=False), LINEAR, *EACH_WAY, *LINEAR_WAYS], ids=str)
def test_nan_and_inf_stay_in_their_sample(backend: Backend, op: Op, case: AnyCase) -> None:
    for shape in sizes(backend, case, (17, 9, 3, 16, 8)):
        for bad, n in ((math.nan, 1), (math.inf, 0), (-math.inf, shape.B - 1)):
            problem = replace(op.make(shape, case, torch.float32, backend.device), masks={})
            clean = run(problem, backend.name)
            problem.inputs[op.poses].view(shape.B, shape.I, -1)[n, 2, 1] = bad
            got = run(problem, backend.name)
            others = [each for each in range(shape.B) if each != n]
            for name in ("v" if op.family is Case else "first", f"d{op.poses}"):
                # A bad pose spoils all votes of its input capsule, a bad vote the sum of one output capsule.
                assert not got[name][n].isfinite().all(), name
            for name, value in got.items():
                if batched(name, value):
                    assert torch.equal(value[others], clean[name][others]), name
            if op.name == "dynamic_routing":
                # Every sample adds to dW, so dW must not look healthy.
                assert got["dweight"][2].isnan().all()


@pytest.mark.rows(triton=0)
@pytest.mark.parametrize("case", [replace(each, mask=False, spatial=(4, 5)) for each in (LOADED, EVERYTHING)], ids=str)
def test_nan_stays_at_its_position(backend: Backend, op: Op, case: AnyCase) -> None:
    problem = op.make(Shape(2, 5, 3, 6, 1), case, backend.widest, backend.device)
    wanted = run(problem, backend.name)
    problem.inputs["votes"][1, 2, :, :, 3, 2] = math.nan
    for name, value in run(problem, backend.name).items():
        if value.dim() < 4 or name == "dprior":
            continue  # a sum over positions
        assert name != "dvotes" or bool(value[1, ..., 3, 2].isnan().any())
        for each in (value, wanted[name]):
            each[1, ..., 3, 2] = 0
        assert_close(value, wanted[name])


@pytest.mark.parametrize("case", [*FULL, *EACH_WAY[2:], Case(softmax="in", mask=True, logits="BIJ")], ids=str)
def test_masked_capsules_may_hold_anything(backend: Backend, op: Op, case: AnyCase) -> None:
    for shape in sizes(backend, case, (17, 9, 3, 16, 8)):
        for dtype in {torch.float32, backend.widest, torch.bfloat16}:
            problem = op.make(shape, case, dtype, backend.device)
            clean = run(problem, backend.name)
            inward, outward = ~problem.masks["mask"], ~problem.masks.get("out_mask", torch.ones(shape.B, shape.J) > 0)
            bad = {name: value.clone() for name, value in problem.inputs.items()}
            for name in {op.poses, "activation", "lse"} & bad.keys():
                bad[name].masked_fill_(over(inward, bad[name]), math.nan)
            for name in {"query", "precision", "center", "prior"} & bad.keys():
                bad[name].masked_fill_(over(outward, bad[name]), math.inf if name == "precision" else math.nan)
            bad[op.poses][0].masked_fill_(over(inward, bad[op.poses])[0], math.inf)
            for name, value in run(replace(problem, inputs=bad), backend.name).items():
                assert torch.equal(value, clean[name]), name
                if name in (f"d{op.poses}", "dactivation", "dlse", "c", "weights"):
                    assert not value.masked_fill(~over(inward, value), 0).any(), name
                if name in ("dquery", "dprecision", "dcenter", "dprior", "mass", "first", "v"):
                    assert not value.masked_fill(~over(outward, value), 0).any(), name


@pytest.mark.rows(triton=0, emulated=(1, 1))
@pytest.mark.parametrize(("B", "J"), [(17, 3), (17, 70), (3, 3)])
def test_the_weight_of_a_masked_capsule_may_hold_anything(backend: Backend, B: int, J: int) -> None:
    for logits in ("", "IJ"):
        problem = make(Shape(B, 9, J, 16, 8), Case(mask=True, logits=logits), dtype=torch.float32)
        problem = problem.to(torch.float32, backend.device)
        problem.masks["mask"][:, 4] = False
        clean = run(problem, backend.name)
        problem.inputs["weight"][4] = math.nan
        got = run(problem, backend.name)
        for name in ("v", "c", "du"):
            torch.testing.assert_close(got[name], clean[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_gradient_of_a_coupling_near_1(backend: Backend, op: Op, dtype: torch.dtype) -> None:
    """One input capsule and the leak share the coupling, so db = c (1 - c) dc: a c of 16 bits would spoil it."""
    case: AnyCase = Case(1, softmax="in") if op.family is Case else PassCase(normalize="in", weights=True)
    problem = op.make(Shape(3, 1, 4, 8, 4), replace(case, leaky=True, logits="BIJ"), dtype, backend.device)
    problem.inputs["logits"].fill_(5)
    got, wanted = run(problem, backend.name), run(problem.to(torch.float64), "reference")
    torch.testing.assert_close(got["dlogits"].cpu().double(), wanted["dlogits"], rtol=0.02, atol=2e-5)


@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case(mask=True, out_mask=True, logits="IJ"),
        Case(softmax="in", mask=True, out_mask=True, logits="BIJ"),
        *EACH_WAY[:2],
        *LINEAR_WAYS,
    ],
    ids=str,
)
def test_masks_that_leave_nothing(backend: Backend, op: Op, case: AnyCase, leaky: bool) -> None:
    """Masks that leave nothing in some samples of a batch, then in all samples."""
    for shape in sizes(backend, case, (17, 9, 3, 16, 8)):
        for last in (0, shape.B):
            problem = op.make(shape, replace(case, leaky=leaky), torch.float32, backend.device)
            problem.masks["mask"][:1] = False
            problem.masks["out_mask"][1:2] = False
            for mask in problem.masks.values():
                mask[:last] = False
            got, wanted = run(problem, backend.name), run(problem, "reference")
            for name, value in got.items():
                torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=1e-4)
                if not last:
                    if name in ("v", "c", "mass", "first", "second", "weights", f"d{op.poses}"):
                        assert not value[:2].any(), name
                elif name == "log_sum":
                    assert bool((value == (0 if leaky else -math.inf)).all())
                else:
                    assert not value.any(), name


@pytest.mark.parametrize(
    "case",
    [
        Case(logits="IJ"),
        Case(softmax="in", logits="BIJ"),
        Case(leaky=True, logits="BIJ"),
        Case(softmax="in", leaky=True, logits="IJ"),
        *(PassCase(query=True, logits="BIJ", normalize=how) for how in ("out", "in", "sigmoid")),
    ],
    ids=str,
)
@pytest.mark.against_reference
def test_huge_logits(backend: Backend, op: Op, case: AnyCase) -> None:
    for shape in ((3, 9, 4, 16, 8),) if backend.emulated else ((3, 9, 4, 16, 8), (17, 9, 4, 16, 8)):
        for dtype in {torch.float32, backend.widest}:
            problem = op.make(Shape._make(shape), case, dtype, backend.device)
            given = problem.inputs["logits"]
            # In all samples, or in every second sample.
            huge = given if case.logits == "IJ" else given[::2].transpose(0, 1)
            huge[0] = 1e4
            huge[1] = -1e4
            huge[2] = torch.tensor([1e4, -1e4, 0.0, 1e4])
            huge[3] = torch.tensor([-math.inf, 0.0, -math.inf, 1.0])
            huge[4, ..., 1:] = -math.inf
            huge[5] = -math.inf
            check(problem, backend)


@pytest.mark.rows(4, triton=4)
@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("normalize", ["out", "in"])
def test_scores_that_overflow(backend: Backend, normalize: str, leaky: bool) -> None:
    """Scores of -inf for all outputs of an input capsule, or for all inputs: no coupling, and no NaN elsewhere."""
    votes = torch.full((3, 4, 5, 6), 1e25, device=backend.device)
    votes[1:] = 1.0
    votes, query = votes.requires_grad_(), torch.full((3, 5, 6), -1e25, device=backend.device)
    found = capsfast.votes_pass(
        votes, query=query, normalize=normalize, leaky=leaky, return_lse=True, backend=backend.name
    )
    assert not found.mass[0].any()
    assert not found.first[0].any()
    assert bool((found.lse[0] == (0 if leaky else -math.inf)).all())
    (dvotes,) = torch.autograd.grad(found.first.sum(), votes)
    assert not dvotes[0].any()
    assert found.first.isfinite().all()
    assert dvotes.isfinite().all()


@pytest.mark.only(linear=False)
def test_an_lse_below_the_logits_overflows_to_infinity(backend: Backend) -> None:
    votes = torch.zeros(1, 4, 2, 3, device=backend.device)
    logits = torch.tensor([60.0, 85.0, 88.5, 1000.0], device=backend.device)[:, None].expand(4, 2)
    lse = torch.zeros(1, 4, device=backend.device)
    r = capsfast.votes_pass(
        votes, logits=logits, normalize="lse", lse=lse, return_weights=True, backend=backend.name
    ).weights
    assert r is not None
    torch.testing.assert_close(r[0, :, 0], logits[:, 0].exp(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("case", [PLAIN, Case(softmax="in")], ids=str)
def test_huge_capsules_saturate_and_stay_finite(backend: Backend, op: Op, case: Case) -> None:
    # Agreements of 1e5 and more, whose exp() would overflow: the coupling is one-hot.
    shape = Shape(17, 4, 4, 16, 8) if backend.emulated else Shape(17, 9, 4, 16, 8)
    problem = op.make(shape, case, torch.float32, backend.device)
    problem.inputs[op.poses] *= 1e5
    got = run(problem, backend.name)
    assert all(value.isfinite().all() for value in got.values())
    length = got["v"].norm(dim=-1)
    assert (length < 1e-5).logical_or((length - 1).abs() < 1e-5).all()  # 0: no input capsule agrees
    sums = got["c"].sum(2 if case.softmax == "out" else 1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.parametrize("exponent", [3, 6, 9])
@pytest.mark.parametrize(
    "case", [PLAIN, Case(softmax="in"), Case(2, "in", squash="unit", bias=True), Case(2, "in", shared=True)], ids=str
)
def test_gradients_of_long_votes(backend: Backend, op: Op, case: Case, exponent: int) -> None:
    """Logits of 1e9, where an ulp is 64: forward and backward must compute the same ones, to have the same coupling."""
    for B in (1, 17) if backend.emulated else (1, 5, 12, 16, 17, 35):
        problem = op.make(Shape(B, 4, 3, 8, 5) if backend.emulated else Shape(B, 9, 10, 8, 8), case, seed=B)
        check(stretched(problem, exponent).to(torch.float32, backend.device), backend, slack=8)


@pytest.mark.parametrize(
    "case",
    [
        *(Case(squash=kind) for kind in ("paper", "half", "eps_outside", "exp", "unit")),
        Case(squash="unit", shared=True),
    ],
    ids=str,
)
def test_the_range_of_the_squash(backend: Backend, op: Op, case: Case) -> None:
    """Weighted sums of 1e16, whose cube is no float32. Where the square is none either, the result is NaN or 0."""
    problem = op.make(Shape(5, 4, 3, 8, 5), case)
    check(stretched(problem, 16).to(torch.float32, backend.device), backend, slack=8)
    v = run(stretched(problem, 22).to(torch.float32, backend.device), backend.name)["v"]
    assert bool((v.isnan() | (v == 0)).all())


@pytest.mark.parametrize("exponent", [1, 2])
@pytest.mark.parametrize("case", [Case(softmax="in", logits="BIJ", leaky=leaky) for leaky in (False, True)], ids=str)
def test_gradients_of_couplings_near_1(backend: Backend, op: Op, case: Case, exponent: int) -> None:
    """db = c (dc - sum c dc) over the input capsules cancels: the sum must be formed of the same dc."""
    for B in (1, 17) if backend.emulated else (5, 16, 35):
        problem = op.make(Shape(B, 5, 3, 8, 5) if backend.emulated else Shape(B, 9, 10, 8, 8), case, seed=B)
        check(stretched(problem, exponent).to(torch.float32, backend.device), backend, slack=4)


@pytest.mark.only(linear=False)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_sum_over_output_capsules_or_positions_is_rounded_once(backend: Backend, dtype: torch.dtype) -> None:
    """The parts cancel: of output capsules as in the first iterations of any routing, of positions in pairs."""
    draw = torch.Generator().manual_seed(0)
    x, dv = torch.randn(2, 20, 1, 8, 3, generator=draw), torch.randn(2, 7, 8, 3, generator=draw).to(dtype).float()
    x, dv = torch.cat([x, x], -1), torch.cat([dv, -dv * (1 - 1 / 16)], -1)
    logits = torch.zeros(2, 20, 7)

    def gradients(kind: torch.dtype, backend: str) -> tuple[Tensor, ...]:
        given = [value.to(dtype).to(kind).requires_grad_() for value in (x, logits)]
        v = capsfast.route_votes(given[0], 6, logits=given[1], backend=backend)
        return torch.autograd.grad(v, given, dv.to(dtype).to(v.dtype))

    for got, truth in zip(gradients(dtype, backend.name), gradients(torch.float64, "reference"), strict=True):
        assert_accurate("d", got, truth, truth.to(dtype), slack=2)


@pytest.mark.parametrize(
    "case", [Case(squash=kind) for kind in ("paper", "half", "eps_outside", "exp", "unit", "identity")], ids=str
)
def test_zero_vectors_have_finite_gradients(backend: Backend, op: Op, case: Case) -> None:
    for shape in ((3, 9, 4, 16, 8),) if backend.emulated else ((3, 9, 4, 16, 8), (17, 9, 4, 16, 8)):
        for zero in op.tensors:
            problem = op.make(Shape._make(shape), case, torch.float32, backend.device)
            problem.inputs[zero].zero_()
            got = run(problem, backend.name)
            assert not got["v"].any()
            assert all(value.isfinite().all() for value in got.values())
            for name, value in run(problem, "reference").items():
                torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-4 * float(value.abs().max()))


@pytest.mark.parametrize("case", [PLAIN, Case(shared=True, softmax="in"), LINEAR, SHARED, *FULL], ids=str)
def test_empty_sizes(backend: Backend, op: Op, case: AnyCase) -> None:
    for empty in Shape._fields:
        if empty == "J" and case is SHARED:
            continue  # a size of 1 for J means one shared vote
        if case.poses and empty == "K":
            continue  # empty matrices are refused
        shape = Shape(3, 7, 4, 6, 5)._replace(**{empty: 0})
        problem = op.make(shape, case, torch.float32, backend.device)
        wanted, got = run(problem.to(torch.float64), "reference"), run(problem, backend.name)
        assert got.keys() == wanted.keys()
        for name, value in got.items():
            torch.testing.assert_close(value.double(), wanted[name], rtol=1e-4, atol=1e-5)
    if case.spatial:
        got = run(
            op.make(Shape(2, 3, 4, 6, 1), replace(case, spatial=(0, 2)), torch.float32, backend.device), backend.name
        )
        assert not any(value.any() for value in got.values())
