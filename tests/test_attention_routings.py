"""Properties of single routings, beyond the tests that all routings share."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import capsfast
from capsfast.nn import ROUTINGS, CosineRouting, RoutedCaps, VariationalRouting, couplings
from capsfast.nn.couplings import recorded

from .support import plain
from .support.backends import Backend, recorded_ops
from .support.layers import without_samples
from .support.routings import ROUTINGS as ROWS
from .support.routings import randomize
from .test_docs import ROOT, table_rows

B, I, J, D, K = 5, 11, 4, 6, 6


def given_votes(*spatial: int, shared: bool = False) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, I, 1 if shared else J, D, *spatial, dtype=torch.float64).requires_grad_()


@plain.on_cpu
@pytest.mark.parametrize("options", [{}, {"num_iterations": 2, "bias": False}], ids=["bias", "no bias"])
def test_exact_cosine_of_given_votes(by: Backend, options: dict[str, Any]) -> None:
    routing = CosineRouting(I, J, K, D, exact=True, dtype=torch.float64, backend=by.name, **options)
    randomize(routing)
    votes = given_votes()
    found = routing(votes)
    wanted = ROWS["cosine"].definition(votes, votes[..., 0, 0], routing, votes)
    plain.assert_alike(found, wanted, [votes, *routing.parameters()], 1e-8)


def by_passes(routing: Any, *given: Tensor, **masks: Tensor) -> tuple[Tensor, Tensor]:
    """k-means or cosine routing as single passes over a pair (u, weight) or votes."""
    moments = partial(capsfast.routing_pass if len(given) > 1 else capsfast.votes_pass, *given, **masks)
    unit = partial(capsfast.squash, kind="unit", eps=routing.eps)
    if isinstance(routing, CosineRouting):
        query: Tensor | None = None
        for _ in range(routing.num_iterations):
            s = moments(query=query).first
            s = s if routing.bias is None else s + routing.bias
            query = unit(s) if query is None else query + unit(s)
    else:
        s = moments(normalize=routing.softmax).first
        for _ in range(routing.num_iterations):
            s = moments(query=routing.sharpness * unit(s), normalize=routing.softmax).first
    v = capsfast.squash(s, kind=routing.squash, eps=routing.eps).masked_fill(~masks["out_mask"][..., None], 0.0)
    return v, torch.linalg.vector_norm(v, dim=2)


# The sizes of u and weight, or of votes.
GIVEN = {
    "a weight": ((B, I, K), (I, J, D, K)),
    "a shared weight": ((B, I, K), (1, J, D, K)),
    "a weight of all outputs": ((B, I, K), (I, 1, D, K)),
    "pose matrices": ((B, I, 2, 3), (I, J, 3, 3)),
    "votes": ((B, I, J, D),),
    "shared votes": ((B, I, 1, D),),
    "a large batch": ((37, I, K), (I, J, D, K)),
}


@plain.on_cpu
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("k-means", {"sharpness": 3.0, "squash": "half"}),
        ("k-means", {"softmax": "in", "num_iterations": 1, "eps": 1e-3}),
        ("cosine", {"squash": "exp", "eps": 1e-3}),
        ("cosine", {"num_iterations": 1, "bias": False}),
    ],
    ids=str,
)
def test_one_op_is_the_loop_of_passes(by: Backend, name: str, options: dict[str, Any], given: str) -> None:
    routing = ROUTINGS[name](I, J, K, D, dtype=torch.float64, backend=by.name, **options)
    randomize(routing)
    tensors = [torch.randn(size, dtype=torch.float64).requires_grad_() for size in GIVEN[given]]
    batch = len(tensors[0])
    masks = {"mask": torch.rand(batch, I) < 0.8, "out_mask": torch.rand(batch, J) < 0.8}
    votes, leaves = tensors[0] if len(tensors) == 1 else tuple(tensors), [*tensors, *routing.parameters()]
    with recorded_ops() as ops:
        plain.gradients(routing(votes, **masks), leaves)
    assert len([op for op in ops if op.startswith("capsfast::")]) == 2 * by.fused
    plain.assert_alike(routing(votes, **masks), by_passes(routing, *tensors, **masks), leaves)


@pytest.mark.parametrize(("name", "passes"), [("k-means", 4), ("cosine", 3)])
def test_every_pass_has_its_coupling(name: str, passes: int) -> None:
    layer, u = RoutedCaps(I, J, K, D, routing=name), torch.randn(B, I, K)
    found = couplings(layer, u)
    assert [*map(Tensor.size, found)] == [torch.Size([B, I, J])] * passes
    with recorded(layer) as last:
        layer(u)
    torch.testing.assert_close(last[-1], found[-1])


def test_exact_cosine_with_masks() -> None:
    routing = CosineRouting(I, J, K, D, exact=True, dtype=torch.float64)
    randomize(routing)
    votes, mask, out_mask = (
        given_votes().detach(),
        torch.rand(2, I) < 0.7,
        torch.tensor([[True, True, False, True]] * 2),
    )
    wild = votes.masked_fill(~mask[:, :, None, None], torch.nan).masked_fill(~out_mask[:, None, :, None], 7)
    wild.requires_grad_()
    found = routing(wild, mask=mask, out_mask=out_mask)
    (gradient,) = torch.autograd.grad(found.poses.square().sum(), wild)
    assert gradient.isfinite().all() and not gradient[:, :, 2].any()
    for b in range(2):
        there = votes[b : b + 1, mask[b]]
        alone = CosineRouting(there.shape[1], J, K, D, exact=True, dtype=torch.float64)
        alone.load_state_dict(routing.state_dict())
        plain.assert_same(found.poses[b : b + 1], alone(there, out_mask=out_mask[:1]).poses)


def test_exact_cosine_of_votes_that_output_capsules_share() -> None:
    routing = CosineRouting(I, J, K, D, exact=True, dtype=torch.float64)
    randomize(routing)
    votes = given_votes(shared=True)
    plain.assert_same(tuple(routing(votes)), tuple(routing(votes.expand(-1, -1, J, -1))))


def test_self_routing_shares_sum_to_one() -> None:
    torch.manual_seed(0)
    layer = RoutedCaps(I, J, K, D, routing="self")
    u, activation = torch.randn(B, I, K), torch.rand(B, I)
    torch.testing.assert_close(layer(u, activation).activations, torch.full((B, J), 1 / J))  # the route's weight is 0
    randomize(layer.routing)
    found = layer(u, activation)
    torch.testing.assert_close(found.activations.sum(1), torch.ones(B))
    torch.testing.assert_close(layer(u, 3 * activation).poses, found.poses)
    assert not layer(u, torch.zeros(B, I)).activations.any()


def test_self_attention_makes_three_passes_and_records_one() -> None:
    torch.manual_seed(0)
    layer = RoutedCaps(I, J, K, D, routing="self-attention")
    u = torch.randn(B, I, K)
    (c,) = couplings(layer, u)
    votes = plain.votes(u, layer.W)
    torch.testing.assert_close(c, plain.couple((votes * votes.sum(1, keepdim=True)).sum(-1) / D**0.5))


def test_attention_starts_with_the_mean() -> None:
    torch.manual_seed(0)
    layer = RoutedCaps(I, J, K, D, routing="attention")
    u = torch.randn(B, I, K)
    mean = plain.votes(u, layer.W).mean(1)
    torch.testing.assert_close(layer(u).poses, (layer.routing.A @ mean[..., None])[..., 0])


def test_inverted_attention_without_a_readout() -> None:
    torch.manual_seed(0)
    layer = RoutedCaps(I, J, K, D, routing="inverted-attention", learned_readout=False)
    found = layer(torch.randn(B, I, K), out_mask=torch.tensor([True, True, False, True]).expand(B, -1))
    assert torch.equal(found.activations, torch.tensor([1.0, 1.0, 0.0, 1.0]).expand(B, -1))
    assert {name for name, _ in layer.routing.named_parameters()} == {"gain", "shift"}


def test_variational_output_capsules_that_are_not_there() -> None:
    """A masked output capsule takes nothing from the others."""
    torch.manual_seed(0)
    votes = torch.randn(B, I, J, D, dtype=torch.float64)
    routing, fewer = (VariationalRouting(I, n, K, D, batch_norm=False, dtype=torch.float64) for n in (J, J - 1))
    there = torch.tensor([True] * (J - 1) + [False]).expand(B, -1)
    found, wanted = routing(votes, out_mask=there), fewer(votes[:, :, :-1])
    plain.assert_same((found.poses[:, :-1], found.activations[:, :-1]), tuple(wanted))
    routing = VariationalRouting(I, J, K, D, batch_norm="both")
    without_samples(lambda n: (partial(routing, out_mask=there[:n]), [torch.randn(n, I, J, D)]))


@pytest.mark.parametrize("batch_norm", [True, "both"])
def test_variational_normalized_over_the_batch(batch_norm: bool | str) -> None:
    """Training uses batch statistics over all positions; evaluation uses running statistics. Both as in torch."""
    torch.manual_seed(0)
    routing = VariationalRouting(I, J, K, D, batch_norm=batch_norm, dtype=torch.float64)
    bare = VariationalRouting(I, J, K, D, batch_norm=False, dtype=torch.float64)
    bare.load_state_dict(routing.state_dict(), strict=False)
    votes, normalized = given_votes(3, 2), {}
    norms = {"norm": torch.nn.BatchNorm2d(J).double(), "pose_norm": torch.nn.BatchNorm3d(J).double()}
    sent = (torch.randn(2, J, D, 3, 2, dtype=torch.float64), torch.randn(2, J, 3, 2, dtype=torch.float64))
    for training in (True, True, False):
        routing.train(training)
        found, (poses, activations) = routing(votes), bare(votes)
        for name, value in {"norm": activations.logit(), "pose_norm": poses}.items():
            normalized[name] = norms[name].train(training)(value)
        pair = (normalized["pose_norm"] if batch_norm == "both" else poses, normalized["norm"].sigmoid())
        plain.assert_same(tuple(found), pair)
        plain.assert_same(*(torch.autograd.grad(each, votes, sent) for each in (tuple(found), pair)), tolerance=1e-8)
    names = [name for name, _ in routing.named_buffers()]
    assert len(names) == (6 if batch_norm == "both" else 3)
    for name in names:
        plain.assert_same(routing.get_buffer(name), norms[name.split(".")[0]].get_buffer(name.split(".")[1]))
    plain.assert_same(routing(votes[:1]).activations, routing(votes).activations[:1])
    low = routing.bfloat16().train()(votes.bfloat16())
    assert low.activations.dtype == torch.bfloat16 and all(tensor.isfinite().all() for tensor in low)


@pytest.mark.parametrize("name", ROWS)
def test_given_votes_for_one_output_capsule(name: str) -> None:
    """To a pass an axis J of size 1 is shared; to these routings J is 1."""
    torch.manual_seed(0)
    layer = RoutedCaps(I, 1, K, D, routing=name, dtype=torch.float64)
    u = torch.randn(B, I, K, dtype=torch.float64)
    if ROWS[name].of_votes:
        plain.assert_same(tuple(layer.routing(plain.votes(u, layer.W))), tuple(layer(u)))
    else:
        assert layer(u).poses.shape == (B, 1, D)


def test_the_table_of_routings_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row[0].strip("`"): row for row in table_rows(ROOT / "docs" / "layers.md", "| name | class | source")}
    assert set(rows) == set(ROUTINGS)
    count = 0

    def counted(*arguments: Any, **named: Any) -> capsfast.Moments:
        nonlocal count
        count += 1
        return capsfast.routing_pass(*arguments, **named)

    monkeypatch.setattr("capsfast.nn.routing.votes.routing_pass", counted)
    for name, (_, kind, _, passes, _) in rows.items():
        assert kind.strip("`") == ROUTINGS[name].__name__
        layer = RoutedCaps(I, J, K, D, routing=name)
        count = 0
        layer(torch.randn(B, I, K))
        wanted = "0" if passes.startswith("one fused op") else passes.split("`")[1]
        assert count == eval(wanted, {"num_iterations": getattr(layer.routing, "num_iterations", None)})


@pytest.mark.parametrize("name", ["em", "self", "variational"])
def test_activations_must_not_be_negative(name: str) -> None:
    """Activations are factors of a mass."""
    layer, u, activation = RoutedCaps(I, J, K, D, routing=name), torch.randn(B, I, K), torch.rand(B, I)
    activation[0, 1] = 0
    layer(u, activation)
    activation[1, 2] = -0.25
    for other in (0.5, float("nan")):  # the minimum of numbers with a NaN is NaN
        activation[0, 0] = other
        with pytest.raises(ValueError, match=r"Routing: activation must not be negative, got -0\.25; clamp it with"):
            layer(u, activation)


def test_batch_statistics_of_output_capsules_that_are_there() -> None:
    """The statistics of a capsule skip the samples in which it is masked."""
    layer = RoutedCaps(I, J, K, D, routing="variational", dtype=torch.float64)
    u, out_mask = torch.randn(5, I, K, dtype=torch.float64), torch.ones(5, J, dtype=torch.bool)
    everyone = copy.deepcopy(layer)
    plain.assert_same(tuple(everyone(u)), tuple(copy.deepcopy(layer)(u, out_mask=out_mask)))
    out_mask[3:, 0] = False
    masked, few = copy.deepcopy(layer), copy.deepcopy(layer)
    u.requires_grad_()
    found, wanted = [each[:3, 0] for each in masked(u, out_mask=out_mask)], [each[:, 0] for each in few(u[:3])]
    plain.assert_same(found, wanted)
    sent = [torch.randn_like(tensor) for tensor in found]
    plain.assert_same(*(torch.autograd.grad(each, u, sent) for each in (found, wanted)), tolerance=1e-8)
    for name, there in masked.routing.named_buffers():
        those_of = few.routing.get_buffer(name)
        if name.endswith("num_batches_tracked"):
            assert there == 1
        else:
            plain.assert_same(there[0], those_of[0])
            assert not torch.equal(there[1:], those_of[1:])
    out_mask[:, 0] = False
    absent = masked(u, out_mask=out_mask)
    assert all(tensor.isfinite().all() and not tensor[:, 0].any() for tensor in absent)
    message = r"VariationalRouting: batch_norm needs more than one sample .* in training, got 1"
    with pytest.raises(ValueError, match=message):
        layer(u[:1])
    assert layer.eval()(u[:1]).activations.isfinite().all()
