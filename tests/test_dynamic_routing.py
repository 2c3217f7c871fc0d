"""capsfast.dynamic_routing on every backend: what has to do with its weight. The rest is in test_routing.py."""

import math
from dataclasses import replace

import pytest
import torch

import capsfast

from .support.accuracy import assert_close, check
from .support.backends import Backend, Shape
from .support.problems import LOADED, PLAIN, Case, make, run

pytestmark = pytest.mark.kernels

OP = "dynamic_routing"
SMALL = Shape(3, 7, 4, 5, 6)


def test_defaults_are_those_of_the_paper(backend: Backend) -> None:
    problem = make(SMALL, Case(coupling=False), OP, backend.widest, backend.device)
    v = capsfast.dynamic_routing(problem.inputs["u"], problem.inputs["weight"], backend=backend.name)
    assert_close(v, run(problem, "reference", need=())["v"], double=1e-12)


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
    # What v.sum().backward() sends.
    problem.gradients["v"] = torch.ones((), device=backend.device).expand(problem.dv.shape)
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


@pytest.mark.rows(triton=0)
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
