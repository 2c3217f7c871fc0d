"""capsfast.compat: each class takes the place of the published layer of its name."""

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import capsfast
from capsfast import compat, kinds

from .support import plain, published_layers
from .support.published import PUBLISHED, SIZES, Published, float64, votes

B, I, J, D, K = SIZES
# What capsfast.compat has beyond the rows of the table that are routing layers of one result.
MORE = [
    Published(
        "primary capsules",
        lambda k, s: k.CapsuleLayer(8, -1, 3, 4, kernel_size=3, stride=2),
        None,
        None,
        lambda s: (torch.randn(s.B, 3, 9, 9),),
    ),
    Published("no iterations", lambda k, s: k.AgreementRouting(s.I, s.J, 0), None, None, votes),
    Published(
        "with coupling",
        lambda k, s: k.CapsuleLinear(s.J, s.K, s.D, squash=True, return_prob=True, num_iterations=2),
        "JDK",
    ),
    Published("k-means", lambda k, s: k.CapsuleLinear(s.J, s.K, s.D, routing_type="k_means", return_prob=True), "JDK"),
    Published(
        "k-means, own weights",
        lambda k, s: k.CapsuleLinear(s.J, s.K, s.D, s.I, False, "k_means", bias=True, squash=True),
        "JIDK",
    ),
]
ROWS = [row for row in PUBLISHED if row.compat] + MORE
by_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def both(row: Published) -> tuple[nn.Module, nn.Module]:
    """The published layer and the one that takes its place, each made after the same seed."""
    made = []
    for namespace in (published_layers, compat):
        torch.manual_seed(0)
        made.append(row.build(namespace, SIZES))
    return made[0], made[1]


def tensors_of(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


@by_row
def test_state_dicts_are_the_same_and_load_both_ways(row: Published) -> None:
    theirs, ours = both(row)
    for into, source in ((ours, theirs), (theirs, ours)):
        for parameter in source.parameters():
            nn.init.normal_(parameter)
        into.load_state_dict(source.state_dict(), strict=True)
        assert {name: value.shape for name, value in into.state_dict().items()} == {
            name: value.shape for name, value in source.state_dict().items()
        }
        assert all(torch.equal(value, source.state_dict()[name]) for name, value in into.state_dict().items())


@by_row
def test_a_seed_starts_both_with_the_same_parameters(row: Published) -> None:
    theirs, ours = both(row)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())


@by_row
def test_results_and_gradients_are_the_same(row: Published) -> None:
    with float64():
        theirs, ours = both(row)
        for parameter in theirs.parameters():
            nn.init.normal_(parameter, std=0.4)
        ours.load_state_dict(theirs.state_dict())
        given = row.example()
        results = []
        for layer in (theirs, ours):
            leaf = given[0].clone().requires_grad_()
            found = tensors_of(layer(leaf, *given[1:]))
            seeds = [torch.linspace(-1, 1, each.numel()).view(each.shape) for each in found]
            results.append((found, torch.autograd.grad(found, [leaf, *layer.parameters()], seeds)))
    plain.assert_same(results[1], results[0], 1e-10)


@pytest.mark.rows(4)
@by_row
def test_compiles_without_a_graph_break(row: Published) -> None:
    torch._dynamo.reset()
    _, ours = both(row)
    given = row.example()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*given), ours(*given))


def test_is_one_node_for_torch_fx() -> None:
    layer, u = compat.CapsLayer(I, K, J, D, compat.AgreementRouting(I, J, 2)), torch.randn(B, I, K)
    traced = torch.fx.symbolic_trace(nn.Sequential(layer))
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]
    torch.testing.assert_close(traced(u), layer(u))


@pytest.mark.parametrize("kind", kinds.KINDS, ids=lambda kind: f"{kind.name} of {len(kind.arguments)}")
def test_signatures_are_those_of_the_published_layers(kind: kinds.Kind) -> None:
    """Names, order and defaults; keywords of our own come after them."""
    values = {"routing_module": nn.Identity(), "share_weights": False, "kernel_size": 1, "stride": 1}
    values |= {"in_capsules": None} if kind.name == "CapsuleLinear" else {}
    given = {name: values.get(name, 2) for name in kind.arguments[: max(kind.needed, 1)]}
    parameters = []
    for namespace in (published_layers, compat):
        layer = getattr(namespace, kind.name)(**given)
        signature = inspect.signature(type(layer).__init__).parameters
        parameters.append([(p.name, p.default, p.kind) for p in signature.values() if p.kind is not p.KEYWORD_ONLY])
    assert parameters[0] == parameters[1]
    assert [name for name, *_ in parameters[0][1:]] == list(kind.arguments)
    assert sum(default is inspect.Parameter.empty for _, default, _ in parameters[0][1:]) == kind.needed


def test_kinds_are_the_published_ones() -> None:
    """Every row of the table is of one kind, with this weight, and every kind has a row."""
    found = []
    for row in PUBLISHED:
        if row.compat:
            weight = row.weight or row.logits
            of_row = [
                kind
                for kind in kinds.KINDS
                if row.name.startswith(kind.name)
                and (not kind.parameters if weight is None else (row.order or "IJ") in kind.parameters.get(weight, ()))
            ]
            found += [kind for kind in of_row if kind.name == re.split(r" of|,", row.name)[0]]
    assert all(kind in found for kind in kinds.KINDS)
    assert {kind.name for kind in kinds.KINDS} < set(compat.__all__)


@pytest.mark.parametrize("make", [lambda: compat.DynamicRouting(I, J, K, D), lambda: compat.DigitCaps(I, J, K, D)])
def test_an_axis_of_length_1_in_front_of_the_weight(make: Callable[[], Any]) -> None:
    """A checkpoint has it or not, and is saved as it came. The parameter and its optimizer stay as they are."""
    layer, u = make(), torch.randn(B, I, K)
    parameter, own = layer.W, layer.W.shape
    optimizer = torch.optim.Adam(layer.parameters())
    for shape in ((I, J, D, K), (1, I, J, D, K), (I, J, D, K)):
        state = {"W": torch.randn(shape)}
        W = state["W"]
        layer.load_state_dict(state)
        saved = layer.state_dict()["W"]
        assert torch.equal(saved, W) and state["W"] is W and saved.data_ptr() == parameter.data_ptr()
        assert torch.equal(pickle.loads(pickle.dumps(layer)).state_dict()["W"], W)
        torch.testing.assert_close(layer(u), capsfast.dynamic_routing(u, W.view(I, J, D, K)))
        layer(u).sum().backward()
        optimizer.step()
        assert layer.W is parameter and parameter.shape == own == parameter.grad.shape
        assert layer.state_dict(keep_vars=True)["W"] is parameter
    layer.load_state_dict({"W": torch.zeros(1, I, J, D, K)}, assign=True)
    assert layer.W.shape == own and layer.state_dict()["W"].shape == (1, I, J, D, K) and not layer(u).any()
    with pytest.raises(RuntimeError, match="size mismatch for W"):
        layer.load_state_dict({"W": torch.randn(J, I, D, K)})


def test_the_checkpoint_of_an_optimizer_has_the_shape_of_the_parameter() -> None:
    layer = compat.DynamicRouting(I, J, K, D)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.randn(B, I, K)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    for turned, fits in ((lambda value: value[0], False), (lambda value: value[0][None], True)):
        of_W = {name: turned(value) if value.dim() else value for name, value in state["state"][0].items()}
        optimizer.load_state_dict({**state, "state": {0: of_W}})
        with nullcontext() if fits else pytest.raises(RuntimeError, match="shape"):
            optimizer.step()


class Derived(compat.DynamicRouting):
    """Of either form, as it is called."""


class DerivedOfCapsules(compat.DynamicRouting):
    def __init__(self, size: int) -> None:
        super().__init__(I, J, K, size, 2, eps=1e-6)
        self.more = nn.Linear(size, 2)

    def forward(self, u: Tensor) -> Tensor:
        return self.more(super().forward(u))  # type: ignore[no-any-return]


class DerivedOfVotes(compat.DynamicRouting):
    def __init__(self) -> None:
        super().__init__(2)


def test_classes_derived_from_dynamic_routing() -> None:
    u, votes = torch.randn(B, I, K), torch.randn(B, I, J, D)
    layer = Derived(I, J, K, D)
    assert torch.equal(layer(x=u), capsfast.dynamic_routing(u, layer.W[0]))
    assert torch.equal(Derived(2)(votes, B), capsfast.route_votes(votes, 2))
    assert torch.equal(Derived(num_iterations=2)(u_hat=votes, batch_size=B), capsfast.route_votes(votes, 2))
    assert torch.equal(DerivedOfVotes()(votes), capsfast.route_votes(votes, 2))
    other = DerivedOfCapsules(D)
    assert other(u).shape == (B, J, 2) and other.eps == 1e-6 and repr(other).startswith("DerivedOfCapsules(")
    for made in (layer, other):
        for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert type(copied) is type(made) and torch.equal(copied(u), made(u))
    with pytest.raises(TypeError, match=r"DynamicRouting: takes .* missing a required argument: 'in_dim'"):
        Derived(I, J)
    with pytest.raises(ValueError, match=r"x must be \[B, in_capsules=7"):
        layer(votes[..., 0])


@pytest.mark.parametrize("make", [lambda: compat.DynamicRouting(2), lambda: compat.DynamicRouting(I, J, K, D, 2)])
def test_both_forms_of_dynamic_routing_copy_and_pickle(make: Callable[[], Any]) -> None:
    layer = make()
    given = torch.randn(B, I, K) if list(layer.parameters()) else torch.randn(B, I, J, D)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer) and isinstance(other, compat.DynamicRouting)
        assert torch.equal(other(given), layer(given)) and repr(other) == repr(layer)
    assert repr(layer).startswith("DynamicRouting(") and "num_iterations=2" in repr(layer)


def test_a_routing_module_with_hooks_or_of_another_class_gets_the_votes() -> None:
    seen = []
    layer = compat.CapsLayer(I, K, J, D, compat.AgreementRouting(I, J, 2))
    u = torch.randn(B, I, K)
    wanted = layer(u)
    layer.routing_module.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape))
    torch.testing.assert_close(layer(u), wanted)
    assert seen == [(B, I, J, D)]
    other = copy.deepcopy(layer)
    other.routing_module._forward_pre_hooks.clear()
    other.routing_module.register_full_backward_hook(lambda module, into, out: seen.append(into[0].shape))
    other(u.requires_grad_()).sum().backward()
    assert seen == 2 * [(B, I, J, D)]
    layer = compat.CapsLayer(I, K, J, D, compat.DynamicRouting(2))
    assert layer(u).shape == (B, J, D)
    layer = compat.CapsLayer(I, K, J, D, compat.AgreementRouting(I, J, 2))
    layer.routing_module.forward = lambda votes: votes.sum(1)  # type: ignore[method-assign]
    assert torch.equal(layer(u), torch.einsum("bik,ikn->bin", u, layer.weights).view(B, I, J, D).sum(1))


@by_row
def test_zeros_have_finite_gradients(row: Published) -> None:
    """Layers without eps have NaN there."""
    _, ours = both(row)
    given = row.example()
    leaf = torch.zeros_like(given[0]).requires_grad_()
    found = tensors_of(ours(leaf, *given[1:]))
    gradients = torch.autograd.grad(found, [leaf, *ours.parameters()], [torch.ones_like(each) for each in found])
    assert all(each.isfinite().all() for each in (*found, *gradients))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: compat.DenseCapsule(0, 6, 4, 5), ValueError, "DenseCapsule: in_num_caps must be at least 1, got 0"),
        (lambda: compat.Router(7, 4, 6, 5, 3.0), TypeError, "Router: iterations must be an int, got 3.0"),
        (lambda: compat.Router(7, 4, 6, 5), TypeError, r"Router: takes \(in_caps, out_caps, in_d, out_d, iterations\)"),
        (
            lambda: compat.DigitCaps(in_num_caps=7, in_dim_caps=6, out_num_caps=4, out_dim_caps=5),
            TypeError,
            "DigitCaps: takes .* capsfast.compat.DenseCapsule can be called so",
        ),
        (
            lambda: compat.DynamicRouting(7, 4),
            TypeError,
            "DynamicRouting: takes .* missing a required argument: 'in_dim'",
        ),
        (lambda: compat.CapsuleLayer(8, -1, 3, 4), ValueError, "needs kernel_size and stride, got None and None"),
        (lambda: compat.DynamicRoutingLayer(7, 4, 6, 5, 3, 1), TypeError, "share_weights must be True or False, got 1"),
        (lambda: compat.CapsuleLayer(4, 0, 6, 5), ValueError, "num_route_nodes must be at least 1, got 0"),
        (lambda: compat.AgreementRouting(7, 4, -1), ValueError, "n_iterations must be at least 0, got -1"),
        (lambda: compat.CapsLayer(7, 6, 4, 5, 3), TypeError, "routing_module must be a module, got int"),
        (
            lambda: compat.CapsLayer(7, 6, 4, 5, compat.AgreementRouting(4, 7, 3)),
            ValueError,
            "routing_module must be for input_caps=7 and output_caps=4, got one for 4 and 7",
        ),
        (lambda: compat.CapsuleLinear(4, 6, 5, 7), ValueError, "share_weight=True is for any number .* in_capsules=7"),
        (lambda: compat.CapsuleLinear(4, 6, 5, share_weight=False), TypeError, "in_capsules must be an int, got None"),
        (
            lambda: compat.CapsuleLinear(4, 6, 5, routing_type="em"),
            ValueError,
            "routing_type must be one of .* got 'em'",
        ),
        (lambda: compat.DigitCaps(7, 4, 6, 5, eps=0.0), ValueError, "eps must be positive"),
        (
            lambda: compat.DigitCapsules(7, 6, 4, 5)(torch.randn(2, 6, 7)),
            ValueError,
            r"DigitCapsules: x must be \[B, num_caps_in=7, dim_caps_in=6\], got \[2, 6, 7\]",
        ),
        (lambda: compat.DenseCapsule(7, 6, 4, 5)(torch.randn(7, 6)), ValueError, r"x must have shape \[B, I, K\]"),
        (lambda: compat.CapsuleLayer(4, 7, 6, 5)("x"), TypeError, r"x must be a torch.Tensor \[B, I, K\], got str"),
        (lambda: compat.DynamicRouting(3)(torch.randn(2, 7, 4, 5), 3), ValueError, "batch_size must be B=2, got 3"),
    ],
)
def test_what_does_not_fit_is_said(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^capsfast.compat..*{message}"):
        call()
