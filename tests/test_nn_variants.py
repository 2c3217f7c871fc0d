"""Low-rank, grouped and sparse routing, and routing of given votes, against dense plain routing."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import capsfast
from capsfast.nn import ClassCaps, DigitCaps, PrimaryCaps, RoutingByAgreement

from .support import plain
from .support.backends import Backend, assert_path, recorded_ops
from .support.plain import assert_same, on_cpu

B, I, J, D, K = 5, 12, 6, 4, 3
INF = float("inf")


def layer_of(by: Backend, **options: Any) -> capsfast.DynamicRouting:
    layer = capsfast.DynamicRouting(I, J, K, D, backend=by.name, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.7)
    return layer


def of_inputs(rows: Tensor) -> Tensor:
    """A row of each input capsule: those of a type, which lie behind one another, have one."""
    return torch.stack([rows[i * len(rows) // I] for i in range(I)])


def dense_weight(layer: capsfast.DynamicRouting) -> Tensor:
    """[I, J, D, K], zero between groups."""
    weight = layer.W
    if layer.U is not None:
        weight = torch.stack([torch.stack([U_i @ V_j.T for V_j in layer.V]) for U_i in of_inputs(layer.U)])
    elif layer.A is None and weight.shape[0] > 1:
        weight = of_inputs(weight)
    if layer.A is not None:
        weight = torch.stack([torch.stack([W_j @ A_i for W_j in layer.W[0]]) for A_i in of_inputs(layer.A)])
    elif weight.shape[1] < J:
        weight = torch.cat([weight] * layer.groups, 1)
    return weight * same_group(layer.groups)[:, :, None, None]


def same_group(groups: int) -> Tensor:
    """bool [I, J]"""
    return (torch.arange(I) * groups // I)[:, None] == (torch.arange(J) * groups // J)[None]


def dense_logits(given: Tensor | None, groups: int) -> Tensor:
    """Logits [..., I, J / groups] to [..., I, J], -inf between groups."""
    full = torch.zeros(I, J, dtype=torch.float64) if given is None else torch.cat([given] * groups, -1)
    return full.masked_fill(~same_group(groups), -INF)


def sparse_logits(votes: Tensor, logits: Tensor, bias: Tensor | None, top_k: int, softmax: str) -> Tensor:
    """[B, I, J], -inf but for the outputs to which an input capsule has the largest coupling after one pass.

    Within a group: the logits of other groups are -inf already.
    """
    with torch.no_grad():
        v, _ = plain.route(votes, 1, logits, bias, softmax)
        coupling = plain.couple(logits + (votes * v[:, None]).sum(-1), softmax)
        place = coupling.argsort(2, descending=True).argsort(2)
    return logits.masked_fill(place >= top_k, -INF)


def gradients(v: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, v.numel(), dtype=v.dtype).view_as(v)
    return list(torch.autograd.grad((v * weights).sum(), leaves))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"shared_weight": True},
    "learned": {"learned_logits": True, "bias": True},
    "in": {"softmax": "in"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "rank": {"rank": 2},
    "groups": {"groups": 3},
    "top_k": {"top_k": 2},
    "rank, groups": {"rank": 2, "groups": 2},
    "all": {"rank": 2, "groups": 2, "top_k": 2},
    "UV": {"rank": 2, "factors": "UV"},
    "UV, groups": {"rank": 2, "factors": "UV", "groups": 3},
}
POSITIONS: dict[str, dict[str, Any]] = {
    "types": {"positions": 4},
    "one type": {"positions": I},
    "types, groups": {"positions": 2, "groups": 3},
    "a type in each group": {"positions": 4, "groups": 3},
    "types, rank": {"positions": 3, "rank": 2},
    "types, UV": {"positions": 3, "rank": 2, "factors": "UV", "groups": 2},
}


ALL = VARIANTS | POSITIONS


@on_cpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("variant", ALL)
def test_variants_are_dense_routing_with_less(by: Backend, variant: str, options: str) -> None:
    if variant in POSITIONS and "shared_weight" in OPTIONS[options]:
        with pytest.raises(ValueError, match="shared_weight=True shares among all types too; leave out positions="):
            layer_of(by, **POSITIONS[variant], shared_weight=True)
        return
    layer = layer_of(by, **ALL[variant], **OPTIONS[options])
    u = torch.randn(B, I, K, dtype=torch.float64, requires_grad=True)
    leaves = [u, *layer.parameters()]
    got, got_c = layer(u, return_coupling=True)
    got_gradients = gradients(got, leaves)

    votes = plain.votes(u, dense_weight(layer))
    logits = dense_logits(layer.logits, layer.groups).expand(B, I, J)
    if layer.top_k is not None:
        logits = sparse_logits(votes, logits, layer.bias, layer.top_k, layer.softmax)
    wanted, c = plain.route(votes, 3, logits, layer.bias, layer.softmax)
    assert_same(got, wanted)
    within = [rows.chunk(layer.groups, 2)[g] for g, rows in enumerate(c.chunk(layer.groups, 1))]
    assert_same(got_c, torch.cat(within, 1))
    for one, other in zip(got_gradients, gradients(wanted, leaves), strict=True):
        assert_same(one, other)


@on_cpu
def test_masks_and_logits_are_cut_with_the_groups(by: Backend) -> None:
    layer = layer_of(by, groups=3)
    u = torch.randn(B, I, K, dtype=torch.float64)
    mask, out_mask = torch.rand(B, I) > 0.4, torch.rand(B, J) > 0.4
    logits = torch.randn(B, I, J // 3, dtype=torch.float64)
    got = layer(u, logits=logits, mask=mask, out_mask=out_mask)
    dense = dense_logits(logits, 3).masked_fill(~(mask[:, :, None] & out_mask[:, None]), -INF)
    wanted, _ = plain.route(plain.votes(u, dense_weight(layer)), 3, dense)
    assert_same(got, wanted)


@on_cpu
def test_top_k_of_all_outputs_is_dense_routing(by: Backend) -> None:
    layer = layer_of(by)
    u = torch.randn(B, I, K, dtype=torch.float64)
    sparse = copy.deepcopy(layer)
    sparse.top_k = J
    assert_same(sparse(u), layer(u))


@on_cpu
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_each_input_capsule_keeps_k_outputs(by: Backend, top_k: int) -> None:
    layer = layer_of(by, top_k=top_k)
    _, c = layer(torch.randn(B, I, K, dtype=torch.float64), return_coupling=True)
    assert torch.equal((c > 0).sum(2), torch.full((B, I), top_k))
    assert_same(c.sum(2), torch.ones(B, I, dtype=torch.float64))


@on_cpu
def test_the_variants_run_on_the_fused_op(by: Backend) -> None:
    u = torch.randn(17, I, K, dtype=torch.float64)
    for options in ({"groups": 3}, {"top_k": 2}):
        with recorded_ops() as ops:
            layer_of(by, **options)(u).sum().backward()
        assert_path(by, "dynamic_routing", ops)


def test_parameters_of_the_variants() -> None:
    def shapes(**options: Any) -> dict[str, tuple[int, ...]]:
        layer = capsfast.DynamicRouting(I, J, K, D, **options)
        return {name: tuple(value.shape) for name, value in layer.state_dict().items()}

    assert shapes(rank=2) == {"W": (1, J, D, 2), "A": (I, 2, K)}
    assert shapes(rank=2, shared_weight=True) == {"W": (1, J, D, 2), "A": (1, 2, K)}
    assert shapes(groups=3, learned_logits=True) == {"W": (I, 2, D, K), "logits": (I, 2)}
    assert shapes(groups=3, shared_weight=True) == {"W": (1, J, D, K)}
    assert shapes(top_k=2) == {"W": (I, J, D, K)}
    assert shapes(rank=2, factors="UV") == {"U": (I, D, 2), "V": (J, K, 2)}
    assert shapes(rank=2, factors="UV", shared_weight=True) == {"U": (1, D, 2), "V": (J, K, 2)}
    assert shapes(positions=4) == {"W": (3, J, D, K)}
    assert shapes(positions=4, rank=2) == {"W": (1, J, D, 2), "A": (3, 2, K)}
    assert shapes(positions=2, groups=3, learned_logits=True) == {"W": (6, 2, D, K), "logits": (I, 2)}


def test_low_rank_starts_with_the_deviation_of_the_full_matrix() -> None:
    layer = capsfast.DynamicRouting(200, 10, 8, 16, rank=4)
    assert layer.A is not None
    full = torch.einsum("jdr,irk->ijdk", layer.W[0], layer.A)
    other = capsfast.DynamicRouting(200, 10, 8, 16, rank=4, factors="UV")
    assert other.U is not None
    for product in (full, torch.einsum("idr,jkr->ijdk", other.U, other.V)):
        assert product.std().item() == pytest.approx(capsfast.DynamicRouting(200, 10, 8, 16).W.std().item(), rel=0.1)


class Rows(TorchDispatchMode):
    """The most rows of a tensor ``[rows, J, D, K]`` that the block makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and each.shape[1:] in ((J, D, K), (J, D, 2)) and not each._is_view():
                self.most = max(self.most, len(each))
        return found


def test_what_is_repeated_for_positions() -> None:
    """The rows of W, once; nothing for a single type, nor where u is transformed first."""
    u = torch.randn(B, I, K)
    for options, rows in (({"positions": 4}, I), ({"positions": I}, 0), ({"positions": 4, "rank": 2}, 0)):
        layer = capsfast.DynamicRouting(I, J, K, D, **options)
        with Rows() as made, torch.no_grad():
            layer(u)
        assert made.most == rows


def test_types_that_share_their_matrices_do_not_see_where_they_are() -> None:
    """The order of PrimaryCaps: what its positions hold may change places, if coupling does not tell them apart."""
    primary = PrimaryCaps(1, 4, K, 3, dtype=torch.float64)
    x = torch.randn(B, 1, 7, 5, dtype=torch.float64)
    u = primary(x)
    layer = capsfast.DynamicRouting(4 * 6, J, K, D, positions=6, dtype=torch.float64)
    assert_same(layer(u.unflatten(1, (4, 6)).flip(2).flatten(1, 2)), layer(u))
    assert not torch.allclose(layer(u.unflatten(1, (4, 6)).flip(1).flatten(1, 2)), layer(u))


@pytest.mark.rows(4)
@on_cpu
@pytest.mark.parametrize("variant", [*VARIANTS, "types", "types, UV"])
def test_copies_dtypes_and_compilation(by: Backend, variant: str) -> None:
    layer = capsfast.DynamicRouting(I, J, K, D, backend=by.name, **ALL[variant])
    u = torch.randn(B, I, K)
    wanted = layer(u)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(u), wanted)
        assert repr(other) == repr(layer)
    for name, value in ALL[variant].items():
        assert f"{name}={value!r}" in repr(layer)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(u), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(u).dtype == torch.bfloat16
    half = copy.deepcopy(layer).bfloat16()(u.bfloat16())
    assert half.dtype == torch.bfloat16
    if "top_k" not in ALL[variant]:  # another rounding chooses other outputs
        torch.testing.assert_close(half.float(), wanted, rtol=0.1, atol=0.02)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rank": ({"rank": 0}, ValueError, "rank must be at least 1, got 0"),
    "rank float": ({"rank": 2.0}, TypeError, "rank must be an int, got 2.0"),
    "groups": ({"groups": 0}, ValueError, "groups must be at least 1, got 0"),
    "groups of inputs": ({"groups": 5}, ValueError, "groups must divide in_caps, got groups=5 and in_caps=12"),
    "groups of outputs": ({"groups": 4}, ValueError, "groups must divide out_caps, got groups=4 and out_caps=6"),
    "top_k": ({"top_k": 7}, ValueError, "top_k must be at most out_caps / groups = 6, got 7"),
    "top_k of a group": ({"top_k": 3, "groups": 3}, ValueError, "top_k must be at most out_caps / groups = 2, got 3"),
    "top_k zero": ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
    "top_k shared": ({"top_k": 2, "share_batch_logits": True}, ValueError, "top_k needs share_batch_logits=False"),
    "factors": ({"factors": "VU", "rank": 2}, ValueError, "factors must be one of 'WA', 'UV', got 'VU'"),
    "factors alone": ({"factors": "UV"}, ValueError, "factors='UV' needs a rank, got none"),
    "positions": ({"positions": 5}, ValueError, "positions must divide in_caps, got positions=5 and in_caps=12"),
    "positions zero": ({"positions": 0}, ValueError, "positions must be at least 1, got 0"),
    "a type in two groups": ({"positions": 6, "groups": 3}, ValueError, "groups must divide in_caps / positions, so"),
    "init_std": ({"init_std": 0.0}, ValueError, "init_std must be positive and finite, got 0.0"),
    "backend": ({"backend": "gpu"}, ValueError, "backend must be one of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    options, error, message = WRONG[case]
    with pytest.raises(error, match=message) as caught:
        capsfast.DynamicRouting(I, J, K, D, **options)
    assert str(caught.value).startswith("capsfast.DynamicRouting: ")


def test_wrong_inputs_of_the_variants() -> None:
    grouped = capsfast.DynamicRouting(I, J, K, D, groups=3)
    u = torch.randn(B, I, K)
    for given, message in (
        ({"mask": torch.ones(B, J, dtype=torch.bool)}, r"mask must be \[B, I\] = \[5, 12\], got \[5, 6\]"),
        ({"out_mask": torch.ones(B, I, dtype=torch.bool)}, r"out_mask must be \[B, J\] = \[5, 6\], got \[5, 12\]"),
        ({"logits": torch.ones(I, J)}, r"logits must be \[I, J\] = \[12, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped(u, **given)
    with pytest.raises(TypeError, match="u and A must have one dtype, got float64 and float32"):
        capsfast.DynamicRouting(I, J, K, D, rank=2)(u.double())
    with pytest.raises(TypeError, match=r"u must be a torch\.Tensor"):
        grouped([1.0])


def test_digit_caps_and_class_caps_are_dynamic_routing() -> None:
    u = torch.randn(B, I, K)
    layer = capsfast.DynamicRouting(I, J, K, D)
    for kind in (DigitCaps, ClassCaps):
        other = kind(I, J, K, D)
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(u), layer(u))
        assert repr(other) == repr(layer).replace("DynamicRouting", kind.__name__)
        with pytest.raises(ValueError, match=rf"capsfast\.nn\.{kind.__name__}: u must be"):
            other(u[:, 1:])
        with pytest.raises(ValueError, match=rf"capsfast\.nn\.{kind.__name__}: in_caps must be at least 1"):
            kind(0, J, K, D)


@on_cpu
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"softmax": "in", "num_iterations": 4}], ids=str)
def test_routing_by_agreement(by: Backend, options: dict[str, Any]) -> None:
    layer = RoutingByAgreement(backend=by.name, **options)
    votes = torch.randn(B, I, J, D, dtype=torch.float64, requires_grad=True)
    logits, bias = torch.randn(I, J, dtype=torch.float64), torch.randn(J, D, dtype=torch.float64)
    got, got_c = layer(votes, B, logits=logits, bias=bias, return_coupling=True)
    prior = logits.expand(B, I, J)
    if layer.top_k is not None:
        prior = sparse_logits(votes, prior, bias, layer.top_k, "out")
    wanted, c = plain.route(votes, layer.num_iterations, prior, bias, layer.softmax)
    assert_same(got, wanted)
    assert_same(got_c, c)
    assert_same(gradients(got, [votes]), gradients(wanted, [votes]))


@on_cpu
def test_routing_by_agreement_is_called_as_existing_code_does(by: Backend) -> None:
    layer = RoutingByAgreement(2, backend=by.name)
    votes = torch.randn(B, I, J, D)
    wanted = capsfast.route_votes(votes, 2, backend=by.name)
    for found in (layer(votes), layer(votes, B), layer(votes, batch_size=B), nn.Sequential(layer)(votes)):
        assert torch.equal(found, wanted)
    assert not list(layer.parameters())
    assert repr(layer) == f"RoutingByAgreement(num_iterations=2, backend={by.name!r})"
    with recorded_ops() as ops:
        layer(votes.requires_grad_()).sum().backward()
    assert_path(by, "route_votes", ops)
    with pytest.raises(ValueError, match="batch_size must be B=5, got 4"):
        layer(votes, 4)
    with pytest.raises(ValueError, match="top_k must be at most J=6, got 7"):
        RoutingByAgreement(top_k=7)(votes)
    with pytest.raises(ValueError, match=r"votes must have shape \[B, I, J, D\]"):
        layer(votes[0])
    with pytest.raises(ValueError, match=r"capsfast\.nn\.RoutingByAgreement: num_iterations must be at least 1"):
        RoutingByAgreement(0)
