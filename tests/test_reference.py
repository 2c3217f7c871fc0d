"""The reference against plain code of the papers, with gradients, and against finite differences."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import capsfast

from .support import plain
from .support.backends import Shape
from .support.passes import EACH_WAY, EVERYTHING
from .support.passes import LOADED as LOADED_PASS
from .support.problems import (
    CASES,
    LOADED,
    LOADED_OUT,
    OPS,
    PASS_OPS,
    STEPPED,
    Case,
    Op,
    PassCase,
    Problem,
    batched,
    call,
    make,
    run,
)

SHAPE = Shape(3, 5, 3, 4, 2)


def by_definition(problem: Problem, **more: Any) -> Any:
    """The result of the problem's function: v and the coupling, or moments."""
    given, case = problem.inputs | problem.masks, problem.case
    votes = given.pop("votes") if "votes" in given else plain.votes(given.pop("u"), given.pop("weight"))
    if isinstance(case, PassCase):
        found = plain.moments(votes, case.normalize, case.leaky, **given)
        log_sum = found.pop("log_sum")
        return capsfast.Moments(**found, lse=log_sum if case.lse else None)
    options = case.options._asdict()
    del options["wide"]  # about 16 bits
    return plain.route(votes, kind=options.pop("squash"), **options, **given, **more)


@pytest.mark.rows(20)
@pytest.mark.parametrize("op", [*OPS, *PASS_OPS], ids=str)
@pytest.mark.parametrize("case", [*CASES, *STEPPED, *EACH_WAY], ids=str)
def test_results_and_gradients_are_those_of_the_definition(case: Case | PassCase, op: Op) -> None:
    def definition(problem: Problem, inputs: dict[str, Tensor], _: str | None) -> Any:
        return by_definition(replace(problem, inputs=inputs))

    case = replace(case, coupling=True) if isinstance(case, Case) else case
    problem = op.make(SHAPE, case)
    wanted = run(problem, None, function=definition)
    for name, value in run(problem, "reference").items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("case", [LOADED, LOADED_OUT, EVERYTHING], ids=str)
def test_first_and_second_derivatives_are_the_finite_differences(case: Case | PassCase) -> None:
    problem = make((2, 3, 3, 2, 2), case)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = call(problem, dict(zip(problem.inputs, tensors, strict=True)), "reference")
        return tuple(case.outputs(found).values())

    leaves = [value.clone().requires_grad_() for value in problem.inputs.values()]
    torch.autograd.gradcheck(function, leaves, fast_mode=True)
    torch.autograd.gradgradcheck(function, leaves, fast_mode=True, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_sixteen_bits_are_rounded_once(op: Op, dtype: torch.dtype) -> None:
    """Sums are formed in float32, as in the fused kernels."""
    problem = op.make((4, 50, 6, 8, 5), Case(num_iterations=7, logits="IJ", bias=True), dtype)
    wide = run(problem.to(torch.float32), "reference")
    for name, value in run(problem, "reference").items():
        assert value.dtype == dtype and torch.equal(value, wide[name].to(dtype)), name


@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize("op", OPS, ids=str)
def test_a_mask_after_the_softmax_differs_over_the_input_capsules_alone(op: Op, softmax: str, leaky: bool) -> None:
    """Also: a routing is a loop of passes."""
    problem = op.make(SHAPE, Case(softmax=softmax, leaky=leaky, mask=True, num_iterations=2))
    assert not problem.masks["mask"].all()
    before = run(problem, "reference", need=())["v"]
    one_pass = capsfast.votes_pass if op.tensors == ("votes",) else capsfast.routing_pass
    for given in ({"mask": problem.masks["mask"]}, {"activation": problem.masks["mask"].double()}):
        v = None
        for _ in range(2):
            found = one_pass(*problem.inputs.values(), query=v, normalize=softmax, leaky=leaky, **given)
            v = capsfast.squash(found.first)
        assert v is not None
        assert torch.allclose(v, before, rtol=1e-9) == (softmax == "out" or "mask" in given)


@pytest.mark.parametrize("case", [LOADED, EVERYTHING], ids=str)
def test_pose_matrices_are_vectors_with_a_block_diagonal_weight(case: Case | PassCase) -> None:
    P = 3
    problem = make((4, 7, 4, 6, 2), replace(case, poses=P))
    u, weight = problem.inputs["u"], problem.inputs["weight"]
    blocks = torch.einsum("pn,ijqr->ijprnq", torch.eye(P, dtype=u.dtype), weight)
    I, J, _, R, _, Q = blocks.shape
    vectors = {**problem.inputs, "u": u.flatten(2), "weight": blocks.reshape(I, J, P * R, P * Q)}
    wanted = run(replace(problem, inputs=vectors), "reference")
    wanted["du"] = wanted["du"].view(u.shape)
    wanted["dweight"] = torch.einsum("ijprpq->ijqr", wanted["dweight"].reshape(I, J, P, R, P, Q))
    for name, value in run(problem, "reference").items():
        torch.testing.assert_close(value, wanted[name], msg=name)


@pytest.mark.parametrize("case", [LOADED, LOADED_OUT, *EACH_WAY[:2]], ids=str)
def test_every_position_is_a_sample(case: Case | PassCase) -> None:
    """The same numbers as from a batch with positions as samples."""
    problem = make((2, 4, 3, 6, 1), replace(case, spatial=(3, 7)))
    B, S = 2, 21

    def samples(name: str, value: Tensor) -> Tensor:
        if not batched(name, value):
            return value
        if value.dim() == 2 or name in ("prior", "dprior"):  # without positions
            return value.repeat_interleave(S, 0)
        return value.flatten(-2).movedim(-1, 1).flatten(0, 1)

    wanted = run(problem.map(samples), "reference")
    wanted |= {name: value.unflatten(0, (B, S)).sum(1) for name, value in wanted.items() if name == "dprior"}
    for name, value in run(problem, "reference").items():
        got = value if name == "dprior" else samples(name, value)
        torch.testing.assert_close(got, wanted[name], msg=name)


@pytest.mark.parametrize("op", [*OPS, *PASS_OPS], ids=str)
@pytest.mark.parametrize("case", [Case(logits="BIJ"), LOADED, LOADED_PASS], ids=str)
def test_votes_that_output_capsules_share_are_repeated_votes(case: Case | PassCase, op: Op) -> None:
    problem = op.make(SHAPE, case)
    name, axis = ("weight", 1) if "weight" in problem.inputs else ("votes", 2)
    one = problem.inputs[name].narrow(axis, 0, 1)
    alike = run(replace(problem, inputs=problem.inputs | {name: one}), "reference")
    wanted = run(replace(problem, inputs=problem.inputs | {name: one.expand(problem.inputs[name].shape)}), "reference")
    wanted[f"d{name}"] = wanted[f"d{name}"].sum(axis, keepdim=True)
    for each, value in alike.items():
        torch.testing.assert_close(value, wanted[each], msg=each)
