"""Votes with axes of positions, [B, I, J, D, *spatial], as a convolution leaves them."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import capsfast
from capsfast import native
from capsfast.bench import memory

from .support import problems
from .support.accuracy import assert_close, check
from .support.backends import Backend, assert_path, recorded_ops
from .support.passes import EVERYTHING, LINEAR, QUADRATIC, PassCase, make_either, normalized
from .support.problems import LOADED, LOADED_OUT, PLAIN, Case, Problem, run

pytestmark = pytest.mark.passes  # of what the CUDA kernels do not serve

CASES = (
    PLAIN,
    LOADED,
    LOADED_OUT,
    Case(num_iterations=1),
    Case(gradient="last", logits="IJ", coupling=False),
    Case(softmax="in", squash_last=False),
    LINEAR,
    QUADRATIC,
    PassCase(),
    PassCase(logits="IJ", activation=True, weights=True, lse=True),
    *(normalized(EVERYTHING, how) for how in ("out", "in", "sigmoid", "none", "lse")),
)
# Shape, then positions: fewer and more than lanes and than half of them, one axis and three, more outputs than are held
# at a time, a single one.
SHAPES = (
    ((2, 5, 4, 5, 1), (3, 7)),
    ((1, 3, 3, 16, 1), (37,)),
    ((3, 2, 2, 3, 1), (2, 3, 2)),
    ((2, 70, 3, 8, 1), (16,)),
    ((1, 4, 130, 8, 1), (17,)),
    ((2, 3, 4, 9, 1), (2, 2)),
    ((3, 5, 4, 5, 1), (1, 1)),
)


def make(
    shape: tuple[int, ...],
    spatial: tuple[int, ...],
    case: Case | PassCase,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> Problem:
    return make_either(shape, replace(case, spatial=spatial), dtype, device)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.against_reference
def test_every_case(backend: Backend, case: Case | PassCase) -> None:
    # More than half a tile of positions, and less: kernels of half the width.
    for spatial in ((3, 6), (5,))[: 1 if backend.emulated else 2]:
        check(make((2, 3, 3, 4, 1), spatial, case, torch.float32, backend.device), backend)


@pytest.mark.parametrize(("shape", "spatial"), SHAPES, ids=str)
@pytest.mark.parametrize("case", [LOADED, EVERYTHING], ids=str)
@pytest.mark.against_reference
def test_every_shape(backend: Backend, shape: tuple[int, ...], spatial: tuple[int, ...], case: Case | PassCase) -> None:
    check(make(shape, spatial, case, backend.widest, backend.device), backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.against_reference
def test_sixteen_bits(backend: Backend, dtype: torch.dtype) -> None:
    check(make((2, 3, 3, 4, 1), (17,), EVERYTHING, dtype, backend.device), backend)


@pytest.mark.parametrize("case", [LOADED, LOADED_OUT, EVERYTHING, normalized(EVERYTHING, "in")], ids=str)
def test_every_position_is_a_sample(backend: Backend, case: Case | PassCase) -> None:
    """The same numbers without positions, from a batch that has them as samples."""
    shape = (2, 2, 2, 3, 1) if backend.emulated else (2, 4, 3, 6, 1)
    problem = make(shape, (3, 7), case, backend.widest, backend.device)
    B, S, device = 2, 21, backend.device

    def samples(name: str, value: Tensor) -> Tensor:
        if name in ("logits", "bias", "dlogits", "dbias") and value.dim() == 2:
            return value
        if value.dim() == 2 or name in ("prior", "dprior"):  # without positions
            return value.repeat_interleave(S, 0)
        return value.flatten(-2).movedim(-1, 1).flatten(0, 1)

    alone = replace(
        problem,
        inputs={name: samples(name, value) for name, value in problem.inputs.items()},
        masks={name: samples(name, value) for name, value in problem.masks.items()},
        gradients={name: samples(name, value) for name, value in problem.gradients.items()},
    )
    got, wanted = run(problem, backend.name), run(alone, backend.name)
    for name, value in got.items():
        if name == "dprior":
            assert_close(value.to(device), wanted[name].unflatten(0, (B, S)).sum(1))
        else:
            assert_close(samples(name, value), wanted[name])


@pytest.mark.parametrize("spatial", [(1,), (1, 1)], ids=str)
@pytest.mark.parametrize("J", [1, 3])
def test_a_single_position_is_routed_as_votes_without(backend: Backend, spatial: tuple[int, ...], J: int) -> None:
    draw = torch.Generator().manual_seed(0)
    votes = torch.randn(2, 5, J, 4, generator=draw).to(backend.device)
    logits, query = (torch.randn(2, *sizes, generator=draw).to(backend.device) for sizes in ((5, 3), (3, 4)))
    there = (Ellipsis, *(None,) * len(spatial))
    asked: dict[str, Any] = {"return_coupling": True, "backend": backend.name}
    v, c = capsfast.route_votes(votes[there], logits=logits[there], **asked)
    wanted = capsfast.route_votes(votes, logits=logits, **asked)
    assert torch.equal(v, wanted[0][there]) and torch.equal(c, wanted[1][there])
    given: dict[str, Any] = {"query": query, "second": True, "return_lse": True, "backend": backend.name}
    moments = capsfast.votes_pass(votes[there], logits=logits[there], **given)
    for got, alone in zip(moments, capsfast.votes_pass(votes, logits=logits, **given), strict=True):
        assert got is alone is None or torch.equal(got, alone[there])


@pytest.mark.parametrize("layout", ["sliced", "transposed", "channels last"])
def test_strides_do_not_matter(backend: Backend, layout: str) -> None:
    shape = (2, 2, 2, 3, 1) if backend.emulated else (2, 4, 3, 6, 1)
    problem = make(shape, (3, 7), EVERYTHING, backend.widest, backend.device)
    if layout == "channels last":
        votes = problem.inputs["votes"]
        other = votes.flatten(1, 3).contiguous(memory_format=torch.channels_last).unflatten(1, votes.shape[1:4])
        moved = replace(problem, inputs={**problem.inputs, "votes": other})
    else:
        moved = problem.laid_out(layout)
    wanted, got = run(problem, backend.name), run(moved, backend.name)
    for name, value in got.items():
        assert_close(value, wanted[name])


@pytest.mark.rows(triton=0)
def test_what_a_masked_capsule_holds_plays_no_part(backend: Backend) -> None:
    for case in (LOADED, EVERYTHING):
        problem = make((2, 5, 3, 6, 1), (4, 5), case, backend.widest, backend.device)
        wanted = run(problem, backend.name)
        votes = problem.inputs["votes"].masked_fill(~problem.masks["mask"][:, :, None, None], math.nan)
        got = run(replace(problem, inputs={**problem.inputs, "votes": votes}), backend.name)
        for name, value in got.items():
            assert_close(value, wanted[name])


@pytest.mark.rows(triton=0)
def test_nan_stays_at_its_position(backend: Backend) -> None:
    for case in (replace(LOADED, mask=False), replace(EVERYTHING, mask=False)):
        problem = make((2, 5, 3, 6, 1), (4, 5), case, backend.widest, backend.device)
        wanted = run(problem, backend.name)
        votes = problem.inputs["votes"].clone()
        votes[1, 2, :, :, 3, 2] = math.nan
        got = run(replace(problem, inputs={**problem.inputs, "votes": votes}), backend.name)
        for name, value in got.items():
            if value.dim() < 4 or name == "dprior":
                continue  # a sum over positions
            elsewhere = torch.ones_like(value, dtype=torch.bool)
            elsewhere[1, ..., 3, 2] = False
            assert_close(value[elsewhere], wanted[name][elsewhere])
        assert bool(got["dvotes"][1, ..., 3, 2].isnan().any())


@pytest.mark.parametrize("case", [PLAIN, LINEAR], ids=str)
def test_an_empty_axis(backend: Backend, case: Case | PassCase) -> None:
    for shape, spatial in (((0, 3, 2, 4, 1), (2, 2)), ((2, 0, 2, 4, 1), (2, 2)), ((2, 3, 2, 4, 1), (0, 2))):
        problem = make(shape, spatial, case, torch.float32, backend.device)
        wanted, got = run(problem, "reference"), run(problem, backend.name)
        for name, value in got.items():
            assert value.shape == wanted[name].shape
            assert_close(value, wanted[name])


def test_the_backend_that_was_asked_for_ran(backend: Backend) -> None:
    for case, op in ((PLAIN, "route_votes"), (QUADRATIC, "votes_pass")):
        problem = make((2, 3, 3, 4, 1), (3, 6), case, backend.widest, backend.device)
        with recorded_ops() as ops:
            run(problem, backend.name)
        assert_path(backend, op, ops)


@pytest.mark.rows(triton=0)
@pytest.mark.rows(1)
@pytest.mark.fused
@pytest.mark.parametrize("spatial", [(3, 6), (1,)], ids=str)
@pytest.mark.parametrize("case", [PLAIN, EVERYTHING], ids=str)
def test_compiled(backend: Backend, case: Case | PassCase, spatial: tuple[int, ...]) -> None:
    problem = make((2, 3, 3, 4, 1), spatial, case, backend.widest, backend.device)

    def first(inputs: dict[str, Tensor]) -> Tensor:
        return problems.call(problem, inputs, backend.name)[0]

    call = torch.compile(first, fullgraph=True, dynamic=True, backend="aot_eager")
    inputs = {name: value.clone().requires_grad_() for name, value in problem.inputs.items()}
    got, wanted = call(inputs), first(problem.inputs)
    assert_close(got, wanted)
    (dvotes,) = torch.autograd.grad(got.square().sum(), inputs["votes"])
    plain = {name: value.clone().requires_grad_() for name, value in problem.inputs.items()}
    assert_close(dvotes, torch.autograd.grad(first(plain).square().sum(), plain["votes"])[0])


def test_a_size_that_only_the_run_knows() -> None:
    votes = torch.randn(2, 3, 4, 5, 6)
    torch._dynamo.decorators.mark_unbacked(votes, 4)
    call = torch.compile(capsfast.route_votes, fullgraph=True, backend="aot_eager")
    assert_close(call(votes), capsfast.route_votes(votes))


@pytest.mark.fused
def test_ops_take_a_single_position(backend: Backend) -> None:
    """As a graph asks for that was traced with more. The functions do without its axis."""
    votes = torch.randn(2, 3, 3, 4, 6, device=backend.device)
    none = (None,) * 9
    for name, arguments in (
        ("votes_pass", (None, *none, 3, "in", False, True, False, True, True)),
        ("route_votes", (None, *none[:4], 3, 2, "in", "full", False, "paper", 1e-8, True, False, True)),
    ):
        found = []
        for given in (votes[..., :1], votes):
            leaf = given.clone().requires_grad_()
            outputs = backend.op(name)(leaf, *arguments)
            first = next(output for output in outputs if output.dim() == 4)
            found.append([*outputs, *torch.autograd.grad(first.square().sum(), leaf)])
        compared = [(got, wanted) for got, wanted in zip(*found, strict=True) if got.dim() > 1 and got.shape[-1] == 1]
        assert len(compared) >= 3  # results and dvotes
        for got, wanted in compared:
            assert_close(got, wanted[..., :1])


@pytest.mark.fused
def test_opcheck(backend: Backend) -> None:
    votes = torch.randn(2, 3, 3, 4, 6, device=backend.device, requires_grad=True)
    none = (None,) * 9
    arguments = (votes, None, *none, 3, "in", False, True, False, True, True)
    torch.library.opcheck(backend.op("votes_pass"), arguments, test_utils=("test_schema", "test_faketensor"))
    arguments = (votes, None, *none[:4], 3, 2, "in", "full", False, "paper", 1e-8, True, False, True)
    torch.library.opcheck(backend.op("route_votes"), arguments, test_utils=("test_schema", "test_faketensor"))


def test_votes_that_outputs_share(backend: Backend) -> None:
    votes = torch.randn(2, 4, 1, 6, 3, 5, device=backend.device, requires_grad=True)
    query = torch.randn(2, 3, 6, 3, 5, device=backend.device)
    found = capsfast.votes_pass(votes, query=query, backend=backend.name)
    wanted = capsfast.votes_pass(votes.expand(-1, -1, 3, -1, -1, -1), query=query, backend="reference")
    assert_close(found.first, wanted.first)
    (got,) = torch.autograd.grad(found.first.square().sum(), votes)
    assert_close(got, torch.autograd.grad(wanted.first.square().sum(), votes)[0])


def test_what_does_not_fit_is_named() -> None:
    votes = torch.randn(2, 3, 4, 5, 6, 7)
    v = capsfast.route_votes(votes, mask=torch.ones(2, 3, dtype=torch.bool))
    assert v.shape == (2, 4, 5, 6, 7)
    with pytest.raises(ValueError, match=r"mask must have shape \[B, I, 6, 7\], got \[2, 3, 42\]"):
        capsfast.route_votes(votes, mask=torch.ones(2, 3, 42, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"query must be .* positions \[6, 7\], got \[2, 4, 5, 7, 6\]"):
        capsfast.votes_pass(votes, query=torch.zeros(2, 4, 5, 7, 6))


GROWTH = """
import torch, capsfast
from capsfast.bench.memory import _reset_peak, _resident

def call(votes):
    v = capsfast.route_votes(votes)
    return torch.autograd.grad(v, votes, torch.ones_like(v))[0]

def make(*spatial):
    return torch.ones(2, 8, 8, 16, *spatial, requires_grad=True)

call(make(4, 4))
votes = make(64, 64)
_reset_peak()
before = _resident()["VmRSS"]
dvotes = call(votes)
v = 2 * 4 * votes.numel() // 8  # v and its gradient
print((_resident()["VmHWM"] - before - 4 * dvotes.numel() - v) / (4 * votes.numel()))
"""


@pytest.mark.slow
@pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")
@pytest.mark.skipif(bool(memory.why_not()), reason=memory.why_not())
def test_memory_grows_by_less_than_a_twentieth_of_the_votes() -> None:
    root = Path(capsfast.__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, cwd=root)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 0.05
