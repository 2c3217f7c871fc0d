"""capsfast.route_votes on every backend: what has to do with votes that exist. The rest is in test_routing.py."""

from dataclasses import replace

import pytest
import torch

import capsfast

from .support.accuracy import assert_close, check
from .support.backends import Backend, Shape
from .support.problems import LOADED, LOADED_OUT, PLAIN, Case, make, run, without_shared

pytestmark = pytest.mark.kernels

OP = "route_votes"
SMALL = Shape(3, 7, 4, 5, 1)


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
    shape = Shape(B, 3, 3, 5, 1) if backend.emulated else Shape(B, 9, 3, 16, 1)
    problem = make(shape, LOADED_OUT, OP, torch.float32, backend.device)
    inverse = [order.index(axis) for axis in range(4)]
    problem.inputs["votes"] = problem.inputs["votes"].permute(inverse).contiguous().permute(order)
    check(problem, backend)


@pytest.mark.parametrize("case", [*without_shared([PLAIN, LOADED, LOADED_OUT]), Case(gradient="last")], ids=str)
@pytest.mark.parametrize("B", [3, 17])
@pytest.mark.emulated(B=[3], case=[LOADED, LOADED_OUT])
def test_it_is_dynamic_routing_after_the_votes(backend: Backend, B: int, case: Case) -> None:
    shape = Shape(B, 3, 3, 5, 4) if backend.emulated else Shape(B, 9, 3, 16, 8)
    problem = make(shape, case, dtype=backend.widest, device=backend.device)
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


def test_defaults_are_those_of_the_paper(backend: Backend) -> None:
    problem = make(SMALL, Case(coupling=False), OP, backend.widest, backend.device)
    v = capsfast.route_votes(problem.inputs["votes"], backend=backend.name)
    assert_close(v, run(problem, "reference", need=())["v"], double=1e-12)
