"""capsfast.diagnose: its measurements, compared with plain routing, and its findings."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import capsfast
from capsfast import nn as caps
from capsfast.diagnostics import Diagnosis

from .support import plain
from .support.backends import Backend
from .support.plain import assert_same, on_cpu

B, I, J, D, K = 12, 30, 4, 6, 5


def layer_of(**options: Any) -> caps.DynamicRouting:
    return caps.DynamicRouting(I, J, K, D, init_std=0.3, **options)


def capsules(count: int = B) -> Tensor:
    return capsfast.squash(torch.randn(count, I, K))


def found(diagnosis: Diagnosis) -> list[str]:
    return [finding.name for finding in diagnosis.findings]


@on_cpu
def test_what_is_measured(by: Backend) -> None:
    layer = layer_of(backend=by.name, dtype=torch.float64, learned_logits=True)
    u = capsules().double()
    labels = torch.randint(J, (B,))
    diagnosis = capsfast.diagnose(layer, u, labels)

    leaf = u.clone().requires_grad_()
    votes = plain.votes(leaf, layer.W)
    v, _ = plain.route(votes, 3, layer.logits)
    lengths = v.square().sum(2).sqrt()
    target = torch.nn.functional.one_hot(labels, J)
    loss = target * (0.9 - lengths).relu() ** 2 + 0.5 * (1 - target) * (lengths - 0.1).relu() ** 2
    loss = loss.sum(1).mean()
    loss.backward()
    assert_same(diagnosis.lengths, lengths.float(), 1e-6)
    assert diagnosis.margin_loss == pytest.approx(loss.item())
    tensors = {"u": leaf, "W": layer.W, "routing.logits": layer.logits}
    assert diagnosis.gradient_norms == pytest.approx(
        {name: value.grad.norm().item() for name, value in tensors.items()}
    )

    entropies = []
    for t in (1, 2, 3):
        c = plain.route(votes, t)[1].tolist()
        rows = [-sum(x * math.log(x) for x in row) / math.log(J) for sample in c for row in sample]
        entropies.append(sum(rows) / len(rows))
    assert diagnosis.coupling_entropy == pytest.approx(entropies)
    assert diagnosis.saturation == 0
    assert diagnosis.dead_outputs == diagnosis.dead_inputs == ()


@on_cpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softmax": "in"},
        {"weight": caps.Groups(2)},
        {"weight": caps.LowRank(3)},
        {"shared_weight": True},
        {"leaky": True},
    ],
    ids=str,
)
def test_a_good_layer_has_no_findings(by: Backend, options: dict[str, Any]) -> None:
    if options.get("softmax") == "in":  # a sum of I couplings that add up to 1
        options = {**options, "squash": "exp"}
    diagnosis = capsfast.diagnose(layer_of(backend=by.name, **options), capsules())
    assert found(diagnosis) == []
    assert str(diagnosis).endswith("Nothing is wrong.")
    assert len(diagnosis.coupling_entropy) == 3


def test_randn_weights_are_called_saturated() -> None:
    layer = caps.DynamicRouting(1152, 10, 8, 16)
    u = capsfast.squash(torch.randn(20, 1152, 8))
    assert found(capsfast.diagnose(layer, u)) == []
    torch.nn.init.normal_(layer.W)
    diagnosis = capsfast.diagnose(layer, u)
    assert found(diagnosis) == ["saturated"]
    assert diagnosis.saturation == 1
    assert diagnosis.margin_loss == pytest.approx(9 * 0.405, abs=0.01)
    assert diagnosis.gradient_norms["W"] / math.sqrt(layer.W.numel()) < 1e-7
    for part in ("saturated: 100%", "stands still", "init_std", "torch.randn"):
        assert part in str(diagnosis)
    # Capsules that are normalised to length 1 do not count as saturated.
    layer.squash = "unit"
    assert found(capsfast.diagnose(layer, u)) == []


def without(shape: tuple[int, int], *absent: int) -> Tensor:
    """A mask ``[B, I]`` or ``[B, J]`` without these capsules."""
    return torch.ones(shape, dtype=torch.bool).index_fill(1, torch.tensor(absent), False)


def test_dead_capsules() -> None:
    layer, u, there = layer_of(), capsules(), without((B, I), *range(3, 13))
    diagnosis = capsfast.diagnose(layer, u * there[..., None])
    assert found(diagnosis) == ["dead inputs"] and diagnosis.dead_inputs == tuple(range(3, 13))
    assert "input capsules 3, 4, 5, 6, 7, 8, 9, 10, … (10 in all) are zero in every sample" in str(diagnosis)
    assert found(capsfast.diagnose(layer, u * there[..., None], mask=there)) == []
    with torch.no_grad():
        layer.W[:, 2] = 0
    diagnosis = capsfast.diagnose(layer, u)
    assert found(diagnosis) == ["dead outputs"] and diagnosis.dead_outputs == (2,)
    assert "output capsules 2 stay below 1%" in str(diagnosis)
    labels = torch.zeros(B, dtype=torch.int64)
    assert found(capsfast.diagnose(layer, u, labels, out_mask=without((B, J), 2))) == []
    # The bias alone makes output capsules long that are never coupled.
    logits = torch.tensor([0.0, -20.0]).expand(I, J // 2)
    diagnosis = capsfast.diagnose(layer_of(bias=True, weight=caps.Groups(2)), u, logits=logits)
    assert diagnosis.dead_outputs == (1, 3)
    assert found(diagnosis) == ["dead outputs", "collapsed"]


def test_lengths_and_coupling_at_their_ends() -> None:
    diagnosis = capsfast.diagnose(layer_of(), 0.01 * capsules())
    assert found(diagnosis) == ["faded"]
    assert "no output capsule is longer than" in str(diagnosis)
    diagnosis = capsfast.diagnose(layer_of(), capsules(), logits=torch.tensor([0.0, 12, 0, 0]).expand(I, J))
    assert "collapsed" in found(diagnosis)
    assert "of the coupling goes to output capsule 1" in str(diagnosis)
    assert max(diagnosis.coupling_entropy) < 0.01


def test_numbers_that_are_not_finite_and_gradients_that_are_zero() -> None:
    layer, u = layer_of(bias=True), capsules()
    diagnosis = capsfast.diagnose(layer, u.index_fill(1, torch.tensor(0), torch.nan))
    assert found(diagnosis) == ["not finite"] and "so are entries of the input" in str(diagnosis)
    for value, wanted, part in (
        (torch.nan, ["not finite"], "so are entries of W"),
        (0.0, ["no gradient"], "of the margin loss is 0 or not finite for u"),
    ):
        torch.nn.init.constant_(layer.W, value)
        diagnosis = capsfast.diagnose(layer, u)
        assert found(diagnosis) == wanted and part in str(diagnosis)


@on_cpu
@pytest.mark.parametrize("softmax", ["out", "in"])
@pytest.mark.parametrize(
    ("kind", "size"), [(caps.ConvCaps1d, (20,)), (caps.ConvCaps2d, (5, 4)), (caps.ConvCaps3d, (2, 5, 2))]
)
def test_convolutional_capsules_are_diagnosed_window_by_window(
    by: Backend, softmax: str, kind: type[caps.ConvCaps2d], size: tuple[int, ...]
) -> None:
    axes = len(size)
    layer = kind(3, J, K, D, padding=1, softmax=softmax, backend=by.name)
    poses = capsfast.squash(torch.randn(2, 3, K, *size), dim=2)
    diagnosis = capsfast.diagnose(layer, poses)
    assert diagnosis.lengths.shape == (2 * 5 * 4, J)
    torch.testing.assert_close(diagnosis.lengths, layer(poses).norm(dim=2).movedim(1, -1).flatten(0, axes))
    assert found(diagnosis) == []
    assert f"{kind.__name__}(3, 4, 5, 6, padding={(1,) * axes})" in str(diagnosis)
    poses[:, 1] = 0
    assert capsfast.diagnose(layer, poses).dead_inputs == tuple(range(3**axes, 2 * 3**axes))


@on_cpu
def test_votes_are_diagnosed_too(by: Backend) -> None:
    votes = 0.1 * torch.randn(B, I, J, D)
    diagnosis = capsfast.diagnose(caps.RoutingByAgreement(2, backend=by.name), votes)
    assert found(diagnosis) == []
    assert list(diagnosis.gradient_norms) == ["votes"]
    assert len(diagnosis.coupling_entropy) == 2
    votes[:, 5], votes[:, :, 1] = 0, 0
    diagnosis = capsfast.diagnose(caps.RoutingByAgreement(), votes)
    assert (diagnosis.dead_inputs, diagnosis.dead_outputs) == ((5,), (1,))
    assert "saturated" in found(capsfast.diagnose(caps.RoutingByAgreement(), 100 * torch.randn(B, I, J, D)))


def test_the_layer_stays_as_it_was() -> None:
    layer, u = layer_of(num_iterations=4), capsules()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with torch.no_grad():
        wanted = layer(u)
        diagnosis = capsfast.diagnose(layer, u)
    assert len(diagnosis.coupling_entropy) == layer.num_iterations == 4
    assert layer.W.grad is None
    assert u.grad is None and not u.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert torch.equal(layer(u), wanted)
    layer.W.requires_grad_(False)
    assert list(capsfast.diagnose(layer, u).gradient_norms) == ["u"]


def test_the_statistics_of_a_batch_normalisation_stay_as_they_were() -> None:
    layer = caps.RoutedCaps(I, J, K, D, routing="variational", batch_norm=True)
    layer(capsules())
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    capsfast.diagnose(layer, capsules())
    assert layer.training
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    graph = layer.eval()(capsules(1)).activations.sum()
    capsfast.diagnose(layer, capsules())
    graph.backward()


@pytest.mark.parametrize(("routing", "options"), [("k-means", {"softmax": "in"}), ("attention", {})], ids=str)
def test_a_softmax_over_the_input_capsules(routing: str, options: dict[str, Any]) -> None:
    layer, u = caps.RoutedCaps(I, J, K, D, routing=routing, **options), 4 * capsules()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    wanted = [caps.CouplingEntropy("in")(c).item() for c in capsfast.nn.couplings(layer, u)]
    diagnosis = capsfast.diagnose(layer, u)
    assert diagnosis.coupling_entropy == pytest.approx(wanted)
    assert min(wanted) < 0.99
    with torch.no_grad():
        layer.W[:, 1:] *= 0.05  # then the load of an output capsule is always 1, so no coupling can collapse
    assert "collapsed" not in found(capsfast.diagnose(layer, u))


def test_a_parameter_on_which_the_loss_does_not_depend() -> None:
    """The activations of self-routing do not depend on W."""
    diagnosis = capsfast.diagnose(caps.RoutedCaps(I, J, K, D, routing="self"), capsules())
    assert diagnosis.gradient_norms["W"] == 0
    assert "no gradient" in found(diagnosis)
    layer = caps.RoutedCaps(I, J, K, D, routing="inverted-attention", learned_readout=False)
    with pytest.raises(ValueError, match=r"diagnose: the activations of RoutedCaps.* must depend on u, got constants"):
        capsfast.diagnose(layer, capsules())


def test_the_default_labels_are_the_classes_in_turn() -> None:
    layer, u = layer_of(), capsules()
    loss = caps.MarginLoss()(layer(u), torch.arange(B) % J).item()
    assert capsfast.diagnose(layer, u).margin_loss == pytest.approx(loss)
