"""All kinds of weights with every routing, and routing of given votes, against plain routing with dense weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import capsfast
from capsfast import nn as caps
from capsfast.environment import native

from .support import plain
from .support.backends import Backend, Largest, assert_path, recorded_ops
from .support.layers import WEIGHTS
from .support.plain import assert_alike, assert_same, gradients, on_cpu
from .support.routings import ROUTINGS as ROWS
from .support.routings import randomize

B, I, J, D, K = 5, 12, 6, 4, 3
INF = float("inf")

# A routing asks the weight for votes and passes; each of these weights makes them differently.
FEW = (caps.FullWeight(4), caps.LowRank(2, "UV"), caps.Groups(3), caps.Groups(2, caps.LowRank(2)))
each_weight = pytest.mark.parametrize("weight", WEIGHTS, ids=str)
OPTIONS: dict[str, dict[str, Any]] = {
    "learned": {"learned_logits": True, "bias": True},
    "in": {"softmax": "in"},
    "all": {
        "gradient": "last",
        "leaky": True,
        "squash": "half",
        "eps": 1e-2,
        "squash_last": False,
        "num_iterations": 2,
    },
}


def layer_of(weight: caps.Weight, **options: Any) -> capsfast.DynamicRouting:
    torch.manual_seed(0)
    layer = capsfast.DynamicRouting(I, J, K, D, weight=weight, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.7)
    return layer


def of_inputs(rows: Tensor) -> Tensor:
    """The row of each input capsule. Capsules of a type follow each other and share a row."""
    return torch.stack([rows[i * len(rows) // I] for i in range(I)])


def dense_weight(layer: caps.RoutedCaps) -> Tensor:
    """[I, J, D, K], zero between groups."""
    if layer.U is not None and layer.V is not None:
        weight = torch.stack([torch.stack([U_i @ V_j.T for V_j in layer.V]) for U_i in of_inputs(layer.U)])
    elif layer.A is not None and layer.W is not None:
        weight = torch.stack([torch.stack([W_j @ A_i for W_j in layer.W[0]]) for A_i in of_inputs(layer.A)])
    else:
        assert layer.W is not None
        weight = of_inputs(layer.W)
        weight = torch.cat([weight] * (J // weight.shape[1]), 1)
    return weight * same_group(layer.held.groups)[:, :, None, None]


def same_group(groups: int) -> Tensor:
    """bool [I, J]"""
    return (torch.arange(I) * groups // I)[:, None] == (torch.arange(J) * groups // J)[None]


def dense_logits(given: Tensor | None, groups: int) -> Tensor:
    """Logits [..., I, J / groups] to [..., I, J], -inf between groups."""
    full = torch.zeros(I, J, dtype=torch.float64) if given is None else torch.cat([given] * groups, -1)
    return full.masked_fill(~same_group(groups), -INF)


@on_cpu
@pytest.mark.parametrize(
    ("weight", "options"),
    [(weight, "learned") for weight in WEIGHTS] + [(weight, other) for weight in FEW for other in ("in", "all")],
    ids=str,
)
def test_it_is_dense_routing_with_less(by: Backend, weight: caps.Weight, options: str) -> None:
    layer = layer_of(weight, backend=by.name, **OPTIONS[options])
    groups = layer.held.groups
    u = torch.randn(B, I, K, dtype=torch.float64, requires_grad=True)
    leaves = [u, *layer.parameters()]
    more = torch.randn(B, I, J // groups, dtype=torch.float64)
    masks = {"mask": torch.rand(B, I) > 0.3, "out_mask": torch.rand(B, J) > 0.3}
    votes = plain.votes(u, dense_weight(layer))
    logits = dense_logits(more if layer.logits is None else layer.logits + more, groups)
    given = layer.routing.options()
    given["kind"] = given.pop("squash")
    given["last_squash"] = given["kind"] if given.pop("squash_last") else "identity"
    wanted, c = plain.route(votes, logits=logits, bias=layer.bias, **given, **masks)
    found, found_c = layer(u, logits=more, **masks, return_coupling=True)
    within = [rows.chunk(groups, 2)[g] for g, rows in enumerate(c.chunk(groups, 1))]
    assert_same(found_c, torch.cat(within, 1))
    assert_alike(found, wanted, leaves)
    if weight == caps.Groups(3):
        with recorded_ops() as ops:
            gradients(layer(u), leaves)
        assert_path(by, "dynamic_routing", ops)


@on_cpu
@pytest.mark.parametrize(
    ("name", "weight"),
    [(name, weight) for name in caps.ROUTINGS for weight in WEIGHTS if name == "em" or weight in FEW],
    ids=str,
)
def test_every_routing_has_every_weight(by: Backend, name: str, weight: caps.Weight) -> None:
    """Without groups, compares with routing by the full matrices."""
    torch.manual_seed(0)
    layer = caps.RoutedCaps(I, J, K, D, routing=name, weight=weight, init_std=0.5, dtype=torch.float64)
    randomize(layer)
    u, activation = torch.randn(B, I, K, dtype=torch.float64), torch.rand(B, I, dtype=torch.float64)
    leaves = [u.requires_grad_(), *layer.parameters()]
    with capsfast.use_backend(by.name):
        found = layer(u, activation)
        assert found.poses.shape == (B, J, D) and found.activations.shape == (B, J)
        if layer.held.groups > 1:
            assert all(tensor.isfinite().all() for tensor in (*found, *gradients(found, leaves)))
            return
        wanted = ROWS[name].definition(plain.votes(u, dense_weight(layer)), activation, layer.routing, u)
        assert_alike(found, wanted, leaves)


def test_self_routing_in_groups_has_learned_logits() -> None:
    whole = caps.RoutedCaps(I, J, K, D, routing="self", weight=caps.Groups(2), learned_logits=True, dtype=torch.float64)
    randomize(whole)
    u, activation = torch.randn(B, I, K, dtype=torch.float64), torch.rand(B, I, dtype=torch.float64)
    found = whole(u, activation).poses
    for group, poses in enumerate(found.chunk(2, 1)):
        own = caps.RoutedCaps(I // 2, J // 2, K, D, routing="self", learned_logits=True, dtype=torch.float64)
        state = {name: value.chunk(2)[group] for name, value in whole.state_dict().items()}
        state["routing.W_route"] = state["routing.W_route"].chunk(2, 1)[group]
        own.load_state_dict(state)
        runs = (each.chunk(2, 1)[group] for each in (u, activation))
        torch.testing.assert_close(own(*runs).poses, poses)


@pytest.mark.parametrize("normalize", ["out", "in", "sigmoid", "none"])
def test_a_pass_over_groups_is_one_with_logits_that_part_them(normalize: str) -> None:
    layer = layer_of(caps.Groups(3))
    u, logits = torch.randn(B, I, K, dtype=torch.float64), torch.randn(B, I, J, dtype=torch.float64)
    mask, out_mask = torch.rand(B, I) > 0.2, torch.rand(B, J) > 0.2
    given: dict[str, Any] = {"activation": torch.rand(B, I, dtype=torch.float64), "second": True}
    for name in ("query", "center", "precision"):
        given[name] = torch.rand(B, J, D, dtype=torch.float64)
    given |= {"prior": torch.randn(B, J, dtype=torch.float64), "normalize": normalize}
    parted = logits.masked_fill(~same_group(3), -INF)
    if normalize == "none":  # coefficients are not normalised
        parted = parted.nan_to_num(neginf=0.0)
        given = {name: given[name] for name in ("activation", "second", "normalize")}
    votes = layer.votes(u, mask, out_mask)
    found = votes.moments(logits=logits, return_weights=True, **given)
    wanted = capsfast.routing_pass(u, dense_weight(layer), logits=parted, mask=mask, out_mask=out_mask, **given)
    assert_same((found.mass, found.first, found.second), (wanted.mass, wanted.first, wanted.second))
    assert found.weights is not None and found.weights.shape == (B, I, J // 3)
    within = torch.cat([run.chunk(3, 2)[g] for g, run in enumerate(logits.chunk(3, 1))], 1)
    assert_same(votes.moments(logits=within, **given).first, wanted.first)


PASSES: list[dict[str, Any]] = [
    {"softmax": "in", "bias": True, "leaky": True},
    {"gradient": "last", "learned_logits": True},
    {"squash_last": False, "bias": True, "squash": "half", "eps": 1e-4, "leaky": True},
]


@on_cpu
@pytest.mark.parametrize("weight", [caps.FullWeight(), caps.Groups(3), caps.LowRank(2)], ids=str)
@pytest.mark.parametrize("options", PASSES, ids=str)
def test_single_passes_are_the_fused_op(by: Backend, options: dict[str, Any], weight: caps.Weight) -> None:
    layer = layer_of(weight, backend=by.name, **options)
    u = torch.randn(B, I, K, dtype=torch.float64, requires_grad=True)
    given = {"mask": torch.rand(B, I) > 0.3, "out_mask": torch.rand(B, J) > 0.3}
    given["logits"] = torch.randn(B, I, J // layer.held.groups, dtype=torch.float64)
    leaves = [u, *layer.parameters()]
    with caps.recorded(layer) as coupling:
        found = layer(u, **given)
    wanted, c = layer(u, **given, return_coupling=True)
    assert_same(coupling[0], c)
    assert_alike(found, wanted, leaves)
    votes = plain.votes(u, dense_weight(layer))
    if layer.held.groups == 1:
        rest = {name: value for name, value in given.items() if name != "logits"} | {"bias": layer.bias}
        by_votes = caps.RoutingByAgreement(backend=by.name, **layer.routing.options())
        assert_same(by_votes(votes, logits=layer.routing.prior(given["logits"]), **rest), found)


@each_weight
def test_parameters(weight: caps.Weight) -> None:
    """Names and shapes must fit checkpoints, the order must fit an optimizer's state."""
    layer = capsfast.DynamicRouting(I, J, K, D, weight=weight, learned_logits=True, bias=True)
    wanted = WEIGHTS[weight] | {"logits": (I, J // weight.groups), "bias": (J, D)}
    assert [*layer.state_dict()] == [*WEIGHTS[weight], "routing.logits", "routing.bias"]
    assert [tuple(parameter.shape) for parameter in layer.parameters()] == [*wanted.values()]
    old = {name: torch.randn(shape) for name, shape in wanted.items()}
    model = nn.Sequential(nn.Identity(), layer)
    model.load_state_dict({f"1.{name}": value for name, value in old.items()})
    for name, value in old.items():
        assert torch.equal(getattr(layer, name), value)


@pytest.mark.skipif(native.extension is None, reason="the definitions form the votes")
def test_what_is_repeated_for_positions() -> None:
    """The rows of W, once. Nothing for a single type, or if u is transformed first."""
    for weight, repeated in (
        (caps.FullWeight(4), True),
        (caps.FullWeight(I), False),
        (caps.LowRank(2, positions=4), False),
    ):
        layer = capsfast.DynamicRouting(I, J, K, D, weight=weight)
        with Largest() as largest, torch.no_grad():
            layer(torch.randn(B, I, K))
        assert (largest.numel == I * J * D * K) if repeated else (largest.numel < I * J * D * 2)


def test_types_that_share_their_matrices_do_not_see_where_they_are() -> None:
    """In the order of PrimaryCaps, positions of a type may be permuted, if the coupling does not tell them apart."""
    primary = caps.PrimaryCaps(1, 4, K, 3, dtype=torch.float64)
    x = torch.randn(B, 1, 7, 5, dtype=torch.float64)
    u = primary(x)
    layer = capsfast.DynamicRouting(4 * 6, J, K, D, positions=6, dtype=torch.float64)
    assert_same(layer(u.unflatten(1, (4, 6)).flip(2).flatten(1, 2)), layer(u))
    assert not torch.allclose(layer(u.unflatten(1, (4, 6)).flip(1).flatten(1, 2)), layer(u))


def test_digit_caps_and_class_caps_are_dynamic_routing() -> None:
    u = torch.randn(B, I, K)
    layer = capsfast.DynamicRouting(I, J, K, D)
    for kind in (caps.DigitCaps, caps.ClassCaps):
        other = kind(I, J, K, D)
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(u), layer(u))
        assert repr(other) == repr(layer).replace("DynamicRouting", kind.__name__)


@on_cpu
def test_routing_by_agreement(by: Backend) -> None:
    for options in ({}, {"softmax": "in", "num_iterations": 4}):
        layer = caps.RoutingByAgreement(backend=by.name, **options)
        votes = torch.randn(B, I, J, D, dtype=torch.float64, requires_grad=True)
        logits, bias = torch.randn(I, J, dtype=torch.float64), torch.randn(J, D, dtype=torch.float64)
        got, got_c = layer(votes, B, logits=logits, bias=bias, return_coupling=True)
        wanted, c = plain.route(votes, layer.num_iterations, logits, bias, layer.softmax)
        assert_same(got_c, c)
        assert_alike(got, wanted, [votes])
        # As existing code calls it.
        for found in (layer(votes, B), layer(votes, batch_size=B), nn.Sequential(layer)(votes)):
            assert torch.equal(found, layer(votes))
        assert not list(layer.parameters())
    with recorded_ops() as ops:
        layer(votes).sum().backward()
    assert_path(by, "route_votes", ops)
    assert repr(layer) == f"RoutingByAgreement(num_iterations=4, backend={by.name!r}, softmax='in')"
