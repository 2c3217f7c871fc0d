"""share_batch_logits without votes: values, gradients and memory of the products in ops/_batch_logits.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import capsfast
from capsfast.ops import _batch_logits

from .support.accuracy import assert_accurate, assert_close
from .support.backends import Largest, Shape
from .support.problems import CASES, LOADED_OUT, PLAIN, Case, Problem, call, make, run

pytestmark = pytest.mark.filterwarnings("ignore:capsfast. share_batch_logits:UserWarning")

SHAPE = Shape(17, 7, 4, 6, 5)
SERVED = [replace(case, out_mask=False, mask=case.mask and case.softmax == "out") for case in CASES]
SERVED = list(dict.fromkeys(SERVED))


def shared(problem: Problem) -> Problem:
    return replace(problem, overrides={"share_batch_logits": True})


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call that could be served by products whether it was."""
    found: list[bool] = []
    asked = _batch_logits.serves

    def remember(*arguments: Any) -> bool:
        found.append(asked(*arguments))
        return found[-1]

    monkeypatch.setattr(_batch_logits, "serves", remember)
    return found


def agree(problem: Problem) -> None:
    got, wanted = run(problem, None), run(problem, "reference")
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        assert value.dtype == wanted[name].dtype
        assert_close(value, wanted[name])


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_it_is_the_definition(case: Case, served: list[bool]) -> None:
    agree(shared(make(SHAPE, case)))
    agree(shared(make(SHAPE, replace(case, poses=2))))
    assert served == [True, True]


@pytest.mark.parametrize("case", [Case(out_mask=True), Case(softmax="in", mask=True)], ids=str)
def test_what_makes_samples_differ_is_for_the_reference(case: Case, served: list[bool]) -> None:
    agree(shared(make(SHAPE, case)))
    assert served == [False]


def test_a_weight_that_outputs_share_is_for_the_reference(served: list[bool]) -> None:
    u, weight, logits = torch.randn(3, 7, 5), torch.randn(7, 1, 6, 5), torch.randn(7, 4)
    options = {"logits": logits, "share_batch_logits": True}
    v = capsfast.dynamic_routing(u, weight, **options)  # type: ignore[arg-type]
    wide = capsfast.dynamic_routing(u, weight.expand(7, 4, 6, 5), **options)  # type: ignore[arg-type]
    torch.testing.assert_close(v, wide)
    assert served == [True]


numbers = st.integers(0, 5)


@settings(max_examples=settings.default.max_examples // 2)
@given(case=st.sampled_from(SERVED), shape=st.builds(Shape, B=numbers, I=numbers, J=numbers, D=numbers, K=numbers))
def test_any_sizes(case: Case, shape: Shape) -> None:
    if shape.D == 1:
        case = replace(case, squash="paper" if case.squash == "unit" else case.squash)
    agree(shared(make(shape, case)))


@pytest.mark.parametrize("case", [PLAIN, Case(leaky=True, mask=True, logits="BIJ", shared=True)], ids=str)
def test_gradients_are_the_finite_differences(case: Case) -> None:
    problem = shared(make(Shape(2, 3, 3, 2, 2), case))
    leaves = [value.clone().requires_grad_() for value in problem.inputs.values()]

    def function(*tensors: Tensor) -> Any:
        return call(problem, dict(zip(problem.inputs, tensors, strict=True)), None)

    torch.autograd.gradcheck(function, leaves)
    torch.autograd.gradgradcheck(function, leaves, fast_mode=True, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [PLAIN, replace(LOADED_OUT, out_mask=False)], ids=str)
def test_as_exact_as_the_reference_in_its_dtype(case: Case, dtype: torch.dtype) -> None:
    problem = shared(make(SHAPE, case, dtype=dtype))
    got, plain, truth = run(problem, None), run(problem, "reference"), run(problem.to(torch.float64), "reference")
    for name, value in got.items():
        assert_accurate(name, value, truth[name], plain[name], slack=4)


@pytest.mark.parametrize("case", [PLAIN, Case(shared=True, gradient="last"), Case(poses=4, logits="IJ")], ids=str)
def test_votes_are_not_in_memory(case: Case) -> None:
    shape = Shape(64, 40, 6, 16, 4)
    problem = shared(make(shape, replace(case, coupling=False), dtype=torch.float32))
    with Largest() as largest:
        run(problem, None)
    assert 0 < largest.numel < shape.B * shape.I * shape.J * shape.D / 4


def test_masked_capsules_may_hold_anything() -> None:
    problem = shared(make(SHAPE, Case(mask=True)))
    problem.masks["mask"][:, 3] = False
    problem.inputs["u"][~problem.masks["mask"]] = 0
    clean = run(problem, None)
    problem.inputs["u"][~problem.masks["mask"]] = torch.nan
    problem.inputs["weight"][3] = torch.inf
    got = run(problem, None)
    for name in ("v", "c", "du", "dweight"):
        assert torch.equal(got[name], clean[name]), name


def test_autocast() -> None:
    problem = shared(make(SHAPE, Case(bias=True, coupling=False), dtype=torch.float32))
    wanted = run(problem.to(torch.bfloat16).to(torch.float32), None)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(problem, None)
    assert got["v"].dtype == torch.bfloat16
    assert got["du"].dtype == torch.float32
    for name, value in got.items():
        torch.testing.assert_close(value.float(), wanted[name], rtol=0.03, atol=0.03)


@pytest.mark.slow
def test_a_compiled_call_serves_all_batches() -> None:
    torch._dynamo.reset()
    from torch._dynamo.testing import CompileCounterWithBackend

    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(capsfast.dynamic_routing, fullgraph=True, dynamic=True, backend=graphs)
    counts = []
    for B in (3, 18):
        u, weight = torch.randn(B, 7, 6).requires_grad_(), torch.randn(7, 4, 5, 6).requires_grad_()
        results = [route(u, weight, share_batch_logits=True) for route in (compiled, capsfast.dynamic_routing)]
        torch.testing.assert_close(*results)
        both = [torch.autograd.grad(v.square().sum(), (u, weight)) for v in results]
        torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)
        counts.append(graphs.frame_count)
    assert len(set(counts)) == 1, counts
    torch._dynamo.reset()


def test_func_grad_is_that_of_autograd() -> None:
    u, weight = torch.randn(3, 7, 6), torch.randn(7, 4, 5, 6).requires_grad_()

    def loss(weight: Tensor) -> Tensor:
        found: Tensor = capsfast.dynamic_routing(u, weight, gradient="last", share_batch_logits=True)
        return found.square().sum()

    (wanted,) = torch.autograd.grad(loss(weight), weight)
    torch.testing.assert_close(torch.func.grad(loss)(weight.detach()), wanted)


def test_the_warning_points_at_the_caller() -> None:
    with pytest.warns(UserWarning, match="a sample's result depends on the others") as caught:
        capsfast.dynamic_routing(torch.randn(3, 7, 6), torch.randn(7, 4, 5, 6), share_batch_logits=True)
    assert [warning.filename for warning in caught] == [__file__]
