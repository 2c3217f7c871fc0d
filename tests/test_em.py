"""Properties of EM routing alone: schedules, far votes, no mass."""

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import capsfast
from capsfast.nn import EMRouting, RoutedCaps

from .support import plain
from .support.backends import Backend
from .support.plain import gradients

f64 = torch.float64


def em(**options: Any) -> EMRouting:
    return EMRouting(9, 3, 4, 5, **options)


def test_schedule_of_inverse_temperatures() -> None:
    default = em(final=0.02).inverse_temperatures
    assert default == pytest.approx((0.02 * 0.05, 0.02 * 0.0975, 0.02 * 0.142625))
    assert em(inverse_temperature=2, num_iterations=2).inverse_temperatures == (2, 2)
    assert em(inverse_temperature=[1, 2, 3]).inverse_temperatures == (1, 2, 3)
    assert "inverse_temperatures=(1, 2, 3)" in repr(em(inverse_temperature=(1, 2, 3)))


def test_parameters() -> None:
    assert {name: tuple(value.shape) for name, value in em().named_parameters()} == {"beta_a": (3,), "beta_u": (3,)}
    assert em(component_beta=True).beta_u.shape == (3, 5)
    assert not em().beta_a.any() and not em().beta_u.any()
    routing = em(initial_beta_a=-0.5, initial_beta_u=2)
    assert (routing.beta_a == -0.5).all() and (routing.beta_u == 2).all()
    assert (em(cost="mass").beta_u == -1).all()


def test_a_fresh_capsule_is_neither_on_nor_off() -> None:
    """For input capsules of length 1, with any sizes."""
    for in_caps, K in ((72, 16), (400, 8)):
        torch.manual_seed(0)
        layer = RoutedCaps(in_caps, 10, K, 16, routing="em")
        found = layer(F.normalize(torch.randn(64, in_caps, K), dim=2), torch.rand(64, in_caps))
        assert found.activations.min() > 0.2 and found.activations.max() < 0.6


@plain.on_cpu
def test_far_votes_do_not_cancel(by: Backend) -> None:
    """Votes around 300 with a deviation of 0.1, whose variance raw moments would lose."""
    torch.manual_seed(0)
    u, weight, activation = torch.randn(7, 300, 5), 0.1 * torch.randn(300, 4, 6, 5), torch.rand(7, 300)
    u[..., 0], weight[..., 0] = 1, 300 + 0.1 * torch.randn(300, 4, 6)
    with capsfast.use_backend(by.name):
        for options in ({}, {"momentum": 0.1}, {"isotropic": True, "cost_scale": "inputs"}):
            routing = EMRouting(300, 4, 5, 6, floor=1e-4, final=1, **options)  # type: ignore[arg-type]
            found = routing((u, weight), activation)
            exact = copy.deepcopy(routing).double()((u.double(), weight.double()), activation.double())
            torch.testing.assert_close(found.poses.double(), exact.poses, rtol=1e-6, atol=1e-4)
            torch.testing.assert_close(found.activations.double(), exact.activations, rtol=0, atol=2e-3)
    assert exact.activations.std() > 0.005


def test_no_mass() -> None:
    """A sample without active capsules has poses 0; one output capsule without mass keeps a finite pose."""
    torch.manual_seed(0)
    layer = RoutedCaps(9, 3, 4, 5, routing="em", dtype=f64)
    u = torch.randn(3, 9, 4, dtype=f64, requires_grad=True)
    activation = torch.rand(3, 9, dtype=f64)
    activation[0] = 0
    activation.requires_grad_()
    found = layer(u, activation)
    assert not found.poses[0].any() and found.poses[1:].all()
    everything = gradients(tuple(found), [u, activation, *layer.parameters()])
    assert all(tensor.isfinite().all() for tensor in everything) and not everything[0][0].any()
    with torch.no_grad():  # the other two capsules are so far away that nothing couples to them
        layer.W[:, 1:] += 1e4 * torch.randn(9, 2, 5, 4, dtype=f64)
    assert all(
        gradient.isfinite().all() for gradient in gradients(tuple(layer(u, activation)), [u, *layer.parameters()])
    )


def test_activations_weigh_as_copies_do() -> None:
    """An activation of 2 counts the capsule twice."""
    torch.manual_seed(0)
    u, weight = torch.randn(2, 9, 4, dtype=f64), torch.randn(9, 3, 5, 4, dtype=f64)
    twice = torch.cat([u, u[:, 3:4]], 1), torch.cat([weight, weight[3:4]])
    activation = torch.ones(2, 9, dtype=f64)
    activation[:, 3] = 2
    one, other = em(dtype=f64), EMRouting(10, 3, 4, 5, dtype=f64)
    plain.assert_same(tuple(one((u, weight), activation)), tuple(other(twice)))


def test_scale_of_the_cost() -> None:
    """With "mean", output activations do not depend on the scale of input activations; with "sum" they do."""
    torch.manual_seed(0)
    u, weight, activation = torch.randn(2, 9, 4, dtype=f64), torch.randn(9, 3, 5, 4, dtype=f64), torch.rand(2, 9)
    for scale, same in (("mean", True), ("sum", False), ("inputs", False)):
        routing = em(cost_scale=scale, dtype=f64)
        one, half = routing((u, weight), activation.double()), routing((u, weight), activation.double() / 2)
        assert torch.allclose(one.activations, half.activations) == same
    by_inputs, by_number = em(cost_scale="inputs", dtype=f64), em(cost_scale=3 / 9, dtype=f64)
    plain.assert_same(tuple(by_inputs((u, weight))), tuple(by_number((u, weight))))
