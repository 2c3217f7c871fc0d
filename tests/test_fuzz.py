"""Random shapes, strides, options and dtypes of routings and passes on every backend, against the float64 reference."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

import capsfast
from capsfast.nn import InterestCapsules, RoutedCaps

from .support import plain
from .support.accuracy import check
from .support.backends import Backend, Shape, named
from .support.passes import CASES as PASSES
from .support.plain import gradients
from .support.problems import CASES, LAYOUTS, OPS, PASS_OPS, AnyCase, Case, Op, Problem, make, relayout, run, stretched
from .support.routings import ALONE, ROUTINGS, randomize

pytestmark = [pytest.mark.kernels, pytest.mark.drawn]


def drawn(cases: Sequence[AnyCase], **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Cases whose fields have the values that they have in ``cases``, in any combination."""
    names = [field.name for field in fields(cases[0])]
    values = {name: st.sampled_from(sorted({getattr(case, name) for case in cases})) for name in names}
    others = {"poses": st.sampled_from((0, 0, 2, 3)), "spatial": st.sampled_from(((), (), (3,), (2, 5)))}
    return st.builds(type(cases[0]), **values | others | more)


routings = drawn(CASES)
# Only a softmax can be leaky. The log-sum-exp is left out, because it is infinite where masks leave nothing.
passes = drawn(PASSES, leaky=st.just(False), lse=st.just(False))
# 16, 17, 31, 32 and 33 are edges of a tile; other sizes go up to 20.
size = st.one_of(st.integers(1, 20), st.sampled_from((16, 17, 31, 32, 33)))
shapes = st.builds(Shape, B=size, I=size, J=size, D=size, K=size).filter(lambda shape: shape.work <= 400_000)
few = st.integers(1, 4)
small_shapes = st.builds(Shape, B=st.sampled_from((1, 3, 16, 17)), I=few, J=st.integers(1, 9), D=size, K=size)
seeds = st.integers(0, 1000)
# Powers of ten that lengthen the votes of a routing with a squash. Between 10 and 1e4 the coupling saturates, and both
# definitions may magnify a rounding more than the three runs of the reference show.
lengths = st.sampled_from((0, 0, 0, 0, 5, 6, 7, 8, 9))


def shapes_for(backend: Backend) -> Any:
    return small_shapes if backend.emulated else shapes


@st.composite
def calls(draw: Any, backend: Backend) -> tuple[Op, Shape, AnyCase]:
    op = draw(st.sampled_from(OPS if backend.linear else (*OPS, *PASS_OPS)))
    shape, case = draw(shapes_for(backend)), draw(routings if op.family is Case else passes)
    case = replace(
        case,
        poses=case.poses if "weight" in op.tensors and not backend.linear else 0,
        spatial=case.spatial if "votes" in op.tensors and not backend.linear else (),
    )
    shape = op.fit(shape._replace(D=max(shape.D // (case.poses or 1), 1) * (case.poses or 1)))
    if isinstance(case, Case):
        # A unit vector of one component is a sign; its gradient is only the rounding error of 1 - 1.
        assume(shape.D > 1 or case.squash != "unit")
    elif "J" in case.shared or shape.J == 1:
        case = replace(case, prior=True)  # something must tell the number of output capsules
    return op, shape, case


@st.composite
def problems(draw: Any, backend: Backend, dtype: torch.dtype) -> Problem:
    """Every tensor gets its own strides."""
    op, shape, case = draw(calls(backend))
    problem = make(shape, case, op.name, dtype, seed=draw(seeds))
    says_J = isinstance(case, Case) and (case.logits or case.bias or case.out_mask)
    if op.name == "route_votes" and says_J and not backend.linear and draw(st.booleans()):
        problem.inputs["votes"] = problem.inputs["votes"][:, :, :1]  # one vote for all output capsules
    elif isinstance(case, Case) and case.squash != "identity" and dtype != torch.float64:
        problem = stretched(problem, draw(lengths))
    return problem.map(lambda _, value: relayout(value, draw(st.sampled_from(LAYOUTS))))


def explain(problem: Problem) -> None:
    tensors = problem.inputs | problem.masks | problem.gradients
    described = [f"{name} {tuple(value.shape)} strides {value.stride()}" for name, value in tensors.items()]
    note(f"{problem.op}, {problem.case}: " + ", ".join(described))


def for_all(backend: Backend, *strategies: Any) -> Callable[[Callable[..., None]], None]:
    """Calls the decorated function with drawn arguments, fewer times on an emulated backend."""
    everywhere = settings.default.max_examples
    chosen = settings(max_examples=max(2, everywhere // 10) if backend.emulated else everywhere)
    return lambda function: chosen(given(*strategies)(function))()


# bfloat16 draws the same problems as float32.
@pytest.mark.rows(triton=(1, 2))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_as_exact_as_the_reference(backend: Backend, dtype: torch.dtype) -> None:
    @for_all(backend, problems(backend, dtype))
    def _(problem: Problem) -> None:
        explain(problem)
        check(problem.to(dtype, backend.device), backend, slack=16)


def test_empty(backend: Backend) -> None:
    sizes = st.sets(st.sampled_from(Shape._fields), min_size=1)

    @for_all(backend, calls(backend), sizes)
    def _(call: tuple[Op, Shape, AnyCase], empty: set[str]) -> None:
        op, shape, case = call
        assume(not case.poses or not empty & {"D", "K"})  # refused
        assume(empty != {"K"} or "weight" in op.tensors)  # given votes have no K
        problem = make(shape._replace(**dict.fromkeys(empty, 0)), case, op.name, torch.float32, backend.device)
        explain(problem)
        got, wanted = run(problem, backend.name), run(problem.to(torch.float64), "reference")
        assert got.keys() == wanted.keys()
        for name, value in got.items():
            torch.testing.assert_close(value.cpu().double(), wanted[name], rtol=1e-4, atol=1e-5)


@st.composite
def activations(draw: Any) -> Tensor:
    """[B, I] with B = 0 too, and the same inactive input capsules in all samples; at least one is active."""
    I = draw(st.integers(1, 6))
    active = draw(st.lists(st.booleans(), min_size=I, max_size=I).filter(any))
    generator = torch.Generator().manual_seed(draw(seeds))
    drawn = 0.1 + 0.8 * torch.rand(draw(st.sampled_from((0, 1, 3))), I, generator=generator, dtype=torch.float64)
    return drawn * torch.tensor(active)


@plain.on_cpu
@pytest.mark.parametrize("name", ROUTINGS)
def test_layers_with_few_active_capsules(name: str, by: Backend) -> None:
    @for_all(by, activations(), st.integers(1, 4), st.sampled_from(ROUTINGS[name].options), seeds)
    def _(activation: Tensor, J: int, options: dict[str, Any], seed: int) -> None:
        # A batch norm needs a spread.
        assume(activation.shape[0] != 1 or not ALONE.get(name))
        torch.manual_seed(seed)
        B, I = activation.shape
        layer = RoutedCaps(I, J, 4, 4, routing=name, init_std=0.5, dtype=torch.float64, **options)
        randomize(layer)
        leaves = [torch.randn(B, I, 4, dtype=torch.float64), activation, *layer.parameters()]
        u, a = (leave.requires_grad_() for leave in leaves[:2])
        with capsfast.use_backend(by.name):
            found = gradients(tuple(layer(u, a)), leaves)
        wanted = gradients(ROUTINGS[name].definition(plain.votes(u, layer.W), a, layer.routing, u), leaves)
        for got, exact in zip(found, wanted, strict=True):
            size = float(exact.abs().max()) if exact.numel() else 0.0
            torch.testing.assert_close(got, exact, rtol=0, atol=1e-7 * size + 1e-12)


def test_histories_of_any_lengths() -> None:
    layer = InterestCapsules(3, 4, 4, max_length=5, dtype=torch.float64)

    @for_all(named("reference"), st.lists(st.integers(0, 5), max_size=4), seeds)
    def _(lengths: list[int], seed: int) -> None:
        torch.manual_seed(seed)
        histories = [torch.randn(length, 4, dtype=torch.float64) for length in lengths]
        values = torch.cat([layer.W.new_empty(0, 4), *histories]).detach().requires_grad_()
        padded = torch.stack(
            [layer.W.new_zeros(5, 4), *(F.pad(history, (0, 0, 0, 5 - len(history))) for history in histories)]
        )
        padded = padded[1:].detach().requires_grad_()
        dense = layer(padded, torch.tensor(lengths, dtype=torch.int64)).vectors
        jagged = layer(values, offsets=torch.tensor([0, *lengths]).cumsum(0)).vectors
        torch.testing.assert_close(jagged, dense)
        received = torch.randn_like(dense)
        # An error if the result does not depend on one of them.
        of_padded, wanted = torch.autograd.grad(dense, [padded, layer.W], received)
        of_values, found = torch.autograd.grad(jagged, [values, layer.W], received)
        torch.testing.assert_close(found, wanted)
        parts = [of_padded[user, :length] for user, length in enumerate(lengths)]
        torch.testing.assert_close(of_values, torch.cat([of_values[:0], *parts]))
