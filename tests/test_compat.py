"""capsfast.compat: each class replaces the published layer of its name."""

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import capsfast
from capsfast import compat, kinds

from .support import published_layers
from .support.layers import assert_resets, without_samples
from .support.published import PUBLISHED, SIZES, Published, float64, votes

B, I, J, D, K = SIZES


def linear(name: str, order: str, **options: Any) -> Published:
    return Published(name, lambda k, s: k.CapsuleLinear(s.J, s.K, s.D, **options), order, "weight")


# Classes of capsfast.compat that are not in the table of routing layers with one result.
MORE = [
    Published(
        "coupling", lambda k, s: k.DynamicRouting(n_in=s.I, n_out=s.J, in_dim=s.K, out_dim=s.D, n_iters=2), "IJDK"
    ),
    Published(
        "primary capsules",
        lambda k, s: k.CapsuleLayer(8, -1, 3, 4, kernel_size=3, stride=2),
        None,
        None,
        lambda s: (torch.randn(s.B, 3, 9, 9),),
    ),
    Published("no iterations", lambda k, s: k.AgreementRouting(s.I, s.J, 0), None, None, votes),
    linear("with coupling", "JDK", routing_type="dynamic", squash=True, num_iterations=2),
    linear("k-means", "JDK"),
    linear("k-means, bias", "JDK", return_prob=True),
    linear("k-means, own weights", "JIDK", in_capsules=SIZES.I, share_weight=False, bias=True),
]
ROWS = [row for row in PUBLISHED if row.compat] + MORE
by_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def both(row: Published) -> tuple[nn.Module, nn.Module]:
    """The published layer and its replacement, each made with the same seed."""
    made = []
    for namespace in (published_layers, compat):
        torch.manual_seed(0)
        made.append(row.build(namespace, SIZES))
    return made[0], made[1]


def tensors_of(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


@by_row
def test_parameters_start_alike_load_both_ways_and_are_copied(row: Published) -> None:
    theirs, ours = both(row)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())
    for into, source in ((ours, theirs), (theirs, ours)):
        for parameter in source.parameters():
            nn.init.normal_(parameter)
        into.load_state_dict(source.state_dict(), strict=True)
        assert all(torch.equal(value, source.state_dict()[name]) for name, value in into.state_dict().items())
    given = row.example()
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(copied) is type(ours) and repr(copied) == repr(ours)
        assert all(
            torch.equal(*pair) for pair in zip(tensors_of(copied(*given)), tensors_of(ours(*given)), strict=True)
        )


@pytest.mark.rows(100)
@by_row
def test_a_reset_makes_a_new_module(row: Published) -> None:
    assert_resets(lambda: row.build(compat, SIZES))


@pytest.mark.rows(80)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-5])
@by_row
def test_results_and_gradients_are_the_same_and_finite_for_zeros(row: Published, scale: float) -> None:
    """Small inputs tell where an eps is. Layers without eps have NaN for zeros."""
    with float64():
        theirs, ours = both(row)
        for parameter in theirs.parameters():
            nn.init.normal_(parameter, std=0.4)
        ours.load_state_dict(theirs.state_dict())
        given = row.example()
        results = []
        for layer, factor in ((theirs, scale), (ours, scale), (ours, 0)):
            leaf = (factor * given[0]).requires_grad_()
            found = tensors_of(layer(leaf, *given[1:]))
            seeds = [torch.linspace(-1, 1, tensor.numel()).view(tensor.shape) for tensor in found]
            results.append((found, torch.autograd.grad(found, [leaf, *layer.parameters()], seeds)))
    for got, wanted in zip(*([*found, *grads] for found, grads in results[:2]), strict=True):
        # 1e-20, the smallest eps, stands for none, so that short capsules differ a little.
        assert (got - wanted).abs().max() <= 1e-10 * wanted.abs().max() * (1 if scale == 1 else 100)
    assert all(tensor.isfinite().all() for part in results[2] for tensor in part)


@pytest.mark.rows(20)
@by_row
def test_no_sample(row: Published) -> None:
    found = without_samples(lambda batch: (row.build(compat, SIZES), row.inputs(SIZES._replace(B=batch))))
    assert {tensor.shape[1 if row.out.startswith("JB") else 0] for tensor in found} == {0}


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


CLASSES = [form for form in kinds.FORMS if not form.instead]


@pytest.mark.parametrize("form", CLASSES, ids=lambda form: f"{form.name}{form.published()}")
def test_forms_are_called_as_the_published_layers(form: kinds.Form) -> None:
    """Names, order and defaults; our own eps comes last."""
    own = {"routing_module": nn.Identity(), "num_route_nodes": 2, "bias": True}
    call = form.published().parameters
    needed = [name for name, parameter in call.items() if parameter.default is parameter.empty or name == "bias"]
    given = {name: own.get(name, 2) for name in needed}
    theirs = getattr(published_layers, form.name)(**given or {"num_iterations": 2})
    parameters = inspect.signature(type(theirs)).parameters.values()
    assert [(parameter.name, parameter.default, parameter.kind) for parameter in parameters] == [
        (parameter.name, parameter.default, parameter.kind) for parameter in call.values()
    ]
    assert {*re.findall(r"\w+", getattr(compat, form.name).__doc__)} >= {*call}


def test_every_form_has_a_published_layer_and_a_class() -> None:
    rows = [re.split(r" of|,", row.name)[0] for row in PUBLISHED if row.compat]
    assert {form.name for form in CLASSES} == {*rows} < {*compat.__all__}
    weights = {(row.weight or row.logits, kinds.axes(row.order or "IJ")) for row in PUBLISHED if row.compat}
    assert {(form.layout.weight, form.layout.axes) for form in CLASSES if form.layout.weight} <= weights


LOWER = {"num_lower": I, "num_higher": J, "lower_dim": K, "higher_dim": D}


@pytest.mark.parametrize("layer", [compat.DynamicRouting(I, J, K, D), compat.DigitCaps(**LOWER)])
def test_an_axis_of_length_1_in_front_of_the_weight(layer: Any) -> None:
    """A checkpoint may have the axis, and is saved as it was loaded. The parameter keeps its shape."""
    u = torch.randn(B, I, K)
    parameter, own = layer.W, layer.W.shape
    optimizer = torch.optim.Adam(layer.parameters())
    for shape in ((I, J, D, K), (1, I, J, D, K), (I, J, D, K)):
        W = torch.randn(shape)
        state = {"W": W}
        layer.load_state_dict(state)
        saved = layer.state_dict()["W"]
        assert torch.equal(saved, W) and state["W"] is W and saved.data_ptr() == parameter.data_ptr()
        for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(copied.state_dict()["W"], W)
        torch.testing.assert_close(layer(u), capsfast.dynamic_routing(u, W.view(I, J, D, K)))
        layer(u).sum().backward()
        optimizer.step()
        assert layer.W is parameter and parameter.shape == own == parameter.grad.shape
    layer.load_state_dict({"W": torch.zeros(1, I, J, D, K)}, assign=True)
    assert layer.W.shape == own and not layer(u).any()
    with pytest.raises(RuntimeError, match="size mismatch for W"):
        layer.load_state_dict({"W": torch.randn(J, I, D, K)})


@pytest.mark.rows(80)
@pytest.mark.parametrize("other", [False, True], ids=["as made", "other axis"])
@pytest.mark.parametrize("row", [row for row in ROWS if row.weight or row.logits], ids=lambda row: row.name)
def test_a_weight_with_or_without_an_axis_of_length_1_loads_back(row: Published, other: bool) -> None:
    """Layers with the same arguments have the weight with and without the axis."""
    theirs, ours = both(row)
    path, _, name = (row.weight or row.logits or "").rpartition(".")
    part = theirs.get_submodule(path)
    w = torch.randn_like(getattr(part, name))
    if other:
        setattr(part, name, nn.Parameter(w[0] if len(w) == 1 else w[None]))
    wanted = {name: value.clone() for name, value in theirs.state_dict().items()}
    nn.Sequential(ours).load_state_dict({f"0.{name}": value for name, value in wanted.items()})
    for parameter in theirs.parameters():
        nn.init.zeros_(parameter)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert all(torch.equal(value, wanted[name]) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize(
    ("layer", "name", "shape", "said"),
    [
        (
            compat.DigitCaps(num_lower=K, num_higher=I, lower_dim=J, higher_dim=D),
            "W",
            (I, J, D, K),
            "(num_lower=7, num_higher=4, lower_dim=6, higher_dim=5)",
        ),
        (compat.DigitCaps(**LOWER), "W", (1, J, I, D, K), "(in_dim=6, in_caps=7, num_caps=4, dim_caps=5)"),
        (compat.DigitCaps(**LOWER), "W", (J, I, D, K), "(in_dim=6, in_caps=7, num_caps=4, dim_caps=5)"),
        (compat.DynamicRouting(I, J, K, D), "weight", (I, J, K, D), "(num_input_capsules=7, num_output_capsules=4, "),
        (compat.DynamicRouting(I, K, J, D), "W", (I, J, D, K), "(n_in=7, n_out=4, "),
    ],
)
def test_a_weight_of_sizes_in_another_order_says_how_its_layer_is_called(
    layer: nn.Module, name: str, shape: tuple[int, ...], said: str
) -> None:
    with pytest.raises(RuntimeError) as found:
        nn.Sequential(layer).load_state_dict({f"0.{name}": torch.zeros(shape)})
    assert f"{type(layer).__name__}{said}" in str(found.value) and "see docs/migration.md" in str(found.value)


class Derived(compat.DynamicRouting):
    """Its arguments decide which form it is."""


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
    layer, other, wanted = Derived(I, J, K, D), DerivedOfCapsules(D), capsfast.route_votes(votes, 2)
    assert torch.equal(layer(x=u), capsfast.dynamic_routing(u, layer.W[0]))
    assert torch.equal(Derived(2)(votes, B), wanted) and torch.equal(DerivedOfVotes()(votes), wanted)
    assert torch.equal(Derived(num_iterations=2)(u_hat=votes, batch_size=B), wanted)
    assert other(u).shape == (B, J, 2) and other.eps == 1e-6 and repr(other).startswith("DerivedOfCapsules(")
    assert list(inspect.signature(DerivedOfCapsules).parameters) == ["size"]
    for made in (layer, other):
        for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert type(copied) is type(made) and torch.equal(copied(u), made(u))


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


OTHER_CAPSULES = compat.AgreementRouting(4, 7, 3)
POPULAR = {"num_capsules": 4, "num_routes": 7, "in_channels": 6, "out_channels": 5}


TYPES: list[tuple[Callable[[], Any], str]] = [
    (lambda: compat.Router(7, 4, 6, 5, 3.0), "Router: iterations must be an int, got 3.0"),
    (lambda: compat.Router(7, 4, 6, 5), r"Router: takes \(in_caps, .*missing .* 'iterations'; .* can be called so"),
    (
        lambda: compat.DigitCaps(in_num_caps=7, in_dim_caps=6, out_num_caps=4, out_dim_caps=5),
        "DigitCaps: takes .* capsfast.compat.DenseCapsule can be called so",
    ),
    (
        lambda: compat.DigitCaps(7, 6, 4, 5),
        r"by position must mean the same .*, got \(7, 6, 4, 5\), which fits \(num_lower, .* and \(in_capsules, .* and "
        r"\(num_capsules, .*; give them by name",
    ),
    (lambda: type("Own", (compat.DigitCaps,), {})(7, 4, 6, 5, 3), r"DigitCaps: .* fits \(num_lower, .* and \(in_dim, "),
    (
        lambda: compat.CapsuleLinear(4, 6, 5, None, True, "dynamic", 3, True),
        r"fits .*squash=False, \*, similarity='dot'\) and .*bias=True, squash=True, \*, return_prob=False",
    ),
    (lambda: compat.DigitCaps(**POPULAR), "for DigitCaps.* use capsfast.compat.averaged_routing"),
    (lambda: compat.DynamicRouting(7, 4), r"takes \(in_capsules, .* or \(num_iterations=3\) or .*, got \(7, 4\); see"),
    (lambda: Derived(7, 4), r"DynamicRouting: takes .*, got \(7, 4\)"),
    (
        lambda: compat.DynamicRouting(10, 16, True),
        r"got \(10, 16, True\); for DynamicRouting\(j, n, bias_routing\) use capsfast.nn.RoutingByAgreement\(iters\)",
    ),
    (lambda: Derived(2)(torch.randn(2, 7, 4, 5), size=2), r"is called with \(u_hat, batch_size\), got 1 \['size'\]"),
    (lambda: compat.DynamicRoutingLayer(7, 4, 6, 5, 3, 1), "share_weights must be True or False, got 1"),
    (lambda: compat.CapsLayer(7, 6, 4, 5, 3), "routing_module must be a module, got int"),
    (lambda: compat.CapsuleLinear(4, 6, 5, share_weight=False), "in_capsules must be an int, got None"),
    (lambda: compat.CapsuleLayer(4, 7, 6, 5)("x"), r"x must be a torch.Tensor \[B, I, K\], got str"),
]
VALUES: list[tuple[Callable[[], Any], str]] = [
    (lambda: compat.DenseCapsule(0, 6, 4, 5), "DenseCapsule: in_num_caps must be at least 1, got 0"),
    (lambda: compat.DynamicRouting(128), r"must be at most 10, got 128; if that is a size, give all of \(in_capsules"),
    (lambda: compat.CapsuleLayer(8, -1, 3, 4), "needs kernel_size and stride, got None and None"),
    (lambda: compat.CapsuleLayer(4, 0, 6, 5), "num_route_nodes must be at least 1, got 0"),
    (lambda: compat.AgreementRouting(7, 4, -1), "n_iterations must be at least 0, got -1"),
    (lambda: compat.CapsLayer(7, 6, 4, 5, OTHER_CAPSULES), "for input_caps=7 and output_caps=4, got one for 4 and 7"),
    (lambda: compat.CapsuleLinear(4, 6, 5, 7), "share_weight=True is for any number .* in_capsules=7"),
    (lambda: compat.CapsuleLinear(4, 6, 5, similarity="cosine"), "similarity must be one of 'dot', got 'cosine'"),
    (lambda: compat.CapsuleLinear(4, 6, 5, routing_type="em"), "routing_type must be one of .* got 'em'"),
    (lambda: compat.DigitCapsules(7, 6, 4, 5, eps=0.0), "eps must be positive"),
    (
        lambda: compat.DigitCapsules(7, 6, 4, 5)(torch.randn(2, 6, 7)),
        r"DigitCapsules: x must be \[B, num_caps_in=7, dim_caps_in=6\], got \[2, 6, 7\]",
    ),
    (
        lambda: compat.Router(6, 7, 4, 5, 3)(torch.randn(2, 7, 6)),
        r"u must be \[B, in_caps=6, in_d=4\], got \[2, 7, 6\]; .* by name, in_caps=7 and in_d=6$",
    ),
    (lambda: compat.DenseCapsule(7, 6, 4, 5)(torch.randn(7, 6)), r"x must have shape \[B, I, K\]"),
    (lambda: compat.DynamicRouting(3)(torch.randn(2, 7, 4, 5), 3), "batch_size must be B=2, got 3"),
]


@pytest.mark.parametrize(("call", "said"), TYPES + VALUES)
def test_what_does_not_fit_is_said(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError if (call, said) in TYPES else ValueError, match=f"^capsfast.compat..*{said}") as found:
        call()
    assert " _" not in str(found.value)


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda of: torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(3))]}, {"params": of}]),
    lambda of: torch.optim.SGD([nn.Parameter(torch.zeros(3)), *of], lr=0.1, momentum=0.9),
]


def trained(shape: tuple[int, ...], make: Callable[[Any], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    torch.manual_seed(1)
    optimizer = make([nn.Parameter(torch.zeros(shape))])
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.numel()).view_as(parameter)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(1, 7, 4, 5, 6), (7, 4, 5, 6)])
def test_an_optimizer_goes_on_with_the_moments_of_the_old_layer(shape: tuple[int, ...], make: Any) -> None:
    old = trained((7, 4, 5, 6) if len(shape) == 5 else (1, 7, 4, 5, 6), make)
    wanted, optimizer = trained(shape, make), make([nn.Parameter(torch.zeros(shape))])
    saved = copy.deepcopy(old.state_dict())
    optimizer.register_load_state_dict_pre_hook(compat.optimizer_state)
    optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state_dict(), wanted.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(saved, old.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(4, 7, 5, 6), (7, 4, 5, 3)])
def test_moments_of_another_layout_are_refused(shape: tuple[int, ...]) -> None:
    for make in OPTIMIZERS:
        saved, optimizer = trained(shape, make).state_dict(), make([nn.Parameter(torch.zeros(7, 4, 5, 6))])
        with pytest.raises(
            ValueError, match=r"moments of parameter 1 must be \[7, 4, 5, 6\], got \[\d, \d, 5, \d\]; take"
        ):
            compat.optimizer_state(optimizer, saved)


def test_moments_that_are_not_one_for_each_number_are_the_optimizers_business() -> None:
    optimizer = trained((7, 4), torch.optim.Adafactor)
    assert compat.optimizer_state(optimizer, optimizer.state_dict()) == optimizer.state_dict()
    parameters = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4))]
    lbfgs = torch.optim.LBFGS(parameters)

    def closure() -> Any:
        lbfgs.zero_grad()
        loss = sum(parameter.square().sum() for parameter in parameters)
        loss.backward()  # type: ignore[union-attr]
        return loss

    lbfgs.step(closure)
    assert compat.optimizer_state(lbfgs, lbfgs.state_dict()) == lbfgs.state_dict()
