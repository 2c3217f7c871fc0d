"""What is particular to EM routing and its networks: schedules, far votes, competition across windows, coordinates."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import capsfast
from capsfast.models import MatrixCapsNet
from capsfast.nn import ROUTINGS, ClassCaps2d, ConvCaps2d, EMRouting, PrimaryMatrixCaps, RoutedCaps, SpreadLoss, Votes
from capsfast.nn.routing.votes import GivenVotes
from capsfast.nn.routing.windows import WindowVotes
from capsfast.passes import Moments

from .support import plain
from .support.backends import Backend
from .support.routings import randomize
from .test_routings import Largest, gradients

f64 = torch.float64


def em(**options: Any) -> EMRouting:
    return EMRouting(9, 3, 4, 5, **options)


def test_schedule_of_inverse_temperatures() -> None:
    default = em(final=0.01).inverse_temperatures
    assert default == pytest.approx((0.01 * 0.05, 0.01 * 0.0975, 0.01 * 0.142625))
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
    """Of input capsules of length 1, whatever the sizes."""
    for in_caps, K in ((72, 16), (400, 8)):
        torch.manual_seed(0)
        layer = RoutedCaps(in_caps, 10, K, 16, routing="em")
        found = layer(F.normalize(torch.randn(64, in_caps, K), dim=2), torch.rand(64, in_caps))
        assert found.activations.min() > 0.2 and found.activations.max() < 0.6


@plain.on_cpu
def test_far_votes_do_not_cancel(by: Backend) -> None:
    """Votes around 300 with a deviation of 0.1: their variance is lost in moments about 0."""
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
    assert all(each.isfinite().all() for each in everything) and not everything[0][0].any()
    with torch.no_grad():  # the other two are so far away that nothing is coupled to them
        layer.W[:, 1:] += 1e4 * torch.randn(9, 2, 5, 4, dtype=f64)
    assert all(each.isfinite().all() for each in gradients(tuple(layer(u, activation)), [u, *layer.parameters()]))


def test_activations_weigh_as_copies_do() -> None:
    """An activation of 2 is a capsule that is there twice."""
    torch.manual_seed(0)
    u, weight = torch.randn(2, 9, 4, dtype=f64), torch.randn(9, 3, 5, 4, dtype=f64)
    twice = torch.cat([u, u[:, 3:4]], 1), torch.cat([weight, weight[3:4]])
    activation = torch.ones(2, 9, dtype=f64)
    activation[:, 3] = 2
    one, other = em(dtype=f64), EMRouting(10, 3, 4, 5, dtype=f64)
    plain.assert_same(tuple(one((u, weight), activation)), tuple(other(twice)))


def test_scale_of_the_cost() -> None:
    """By the mean mass the activations don't depend on the activations' scale, by the sum they do."""
    torch.manual_seed(0)
    u, weight, activation = torch.randn(2, 9, 4, dtype=f64), torch.randn(9, 3, 5, 4, dtype=f64), torch.rand(2, 9)
    for scale, same in (("mean", True), ("sum", False), ("inputs", False)):
        routing = em(cost_scale=scale, dtype=f64)
        one, half = routing((u, weight), activation.double()), routing((u, weight), activation.double() / 2)
        assert torch.allclose(one.activations, half.activations) == same
    by_inputs, by_number = em(cost_scale="inputs", dtype=f64), em(cost_scale=3 / 9, dtype=f64)
    plain.assert_same(tuple(by_inputs((u, weight))), tuple(by_number((u, weight))))


# Competition across windows

B, C, J, K, D, SIZE = 2, 2, 3, 4, 6, (5, 6)
WINDOWS: dict[str, dict[str, Any]] = {
    "3x3": {},
    "stride": {"stride": 2},
    "padding": {"padding": (1, 2)},
    "all": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 1), "dilation": (2, 3)},
}


class PlainWindowVotes(Votes):
    """Windows whose votes and coupling coefficients are all in memory, with a softmax for each input capsule."""

    def __init__(self, votes: Tensor, child: Tensor) -> None:
        """votes ``[B, windows, I, J, D]``; child ``[windows, I]``, which input capsule that is, -1 for padding."""
        self.votes, self.child = votes, child
        self.places = votes.shape[:2]
        self.I, self.J, self.D = votes.shape[2:]
        self.B, self.dtype, self.device = votes.shape[0] * votes.shape[1], votes.dtype, votes.device

    def moments(  # type: ignore[override]
        self,
        *,
        center: Tensor | None = None,
        query: Tensor | None = None,
        precision: Tensor | None = None,
        prior: Tensor | None = None,
        logits: Tensor | None = None,
        activation: Tensor | None = None,
        second: bool = False,
        leaky: bool = False,
    ) -> Moments:
        x, b = self.votes, torch.zeros_like(self.votes[..., 0])  # [B, windows, I, J]
        if center is not None:
            x = x - center.unflatten(0, self.places)[:, :, None]
        if query is not None:
            b = b + (x * query.unflatten(0, self.places)[:, :, None]).sum(-1)
        if precision is not None:
            b = b - 0.5 * (x.square() * precision.unflatten(0, self.places)[:, :, None]).sum(-1)
        if prior is not None:
            b = b + prior.unflatten(0, self.places)[:, :, None]
        if logits is not None:
            b = b + logits
        r = torch.zeros_like(b)
        for number in range(int(self.child.max()) + 1):
            window, place = (self.child == number).nonzero(as_tuple=True)
            if len(window):
                of_child = b[:, window, place].flatten(1)  # all output capsules of all windows that it is in
                leak = torch.zeros_like(of_child[:, : int(leaky)])
                share = torch.cat([of_child, leak], 1).softmax(1)[:, : of_child.shape[1]]
                r[:, window, place] = share.unflatten(1, (-1, self.J))
        if activation is not None:
            r = r * activation.unflatten(0, self.places)[..., None]
        r, x = r.flatten(0, 1), x.flatten(0, 1)
        return Moments(r.sum(1), (r[..., None] * x).sum(1), (r[..., None] * x.square()).sum(1) if second else None, r)


def children(layer: ConvCaps2d) -> Tensor:
    """Which input capsule the entries of every window are, ``[windows, I]``; -1 for padding."""
    rows = []
    for y, x in torch.cartesian_prod(*(torch.arange(n) for n in layer.grid(SIZE))).tolist():
        row = []
        for t in range(C):
            for dy in range(layer.kernel_size[0]):
                for dx in range(layer.kernel_size[1]):
                    at = [
                        place * step + offset * gap - pad
                        for place, step, offset, gap, pad in zip(
                            (y, x), layer.stride, (dy, dx), layer.dilation, layer.padding, strict=True
                        )
                    ]
                    inside = 0 <= at[0] < SIZE[0] and 0 <= at[1] < SIZE[1]
                    row.append((t * SIZE[0] + at[0]) * SIZE[1] + at[1] if inside else -1)
        rows.append(row)
    return torch.tensor(rows)


def images(dtype: torch.dtype = f64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    poses = torch.randn(B, C, K, *SIZE, dtype=dtype).requires_grad_()
    return poses, (0.2 + 0.8 * torch.rand(B, C, *SIZE, dtype=dtype)).requires_grad_()


ROUTED: list[tuple[str, dict[str, Any]]] = [
    ("em", {}),
    ("em", {"leaky": True, "momentum": 0.1, "cost_scale": "sum"}),
    ("dynamic", {}),
    ("dynamic", {"learned_logits": True, "gradient": "last"}),
]


@plain.on_cpu
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize(("name", "options"), ROUTED, ids=str)
def test_children_choose_among_all_their_parents(by: Backend, windows: str, name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = ConvCaps2d(
        C,
        J,
        K,
        D,
        **WINDOWS[windows],
        routing=name,
        competition="child",
        init_std=0.7,
        backend=by.name,
        dtype=f64,
        **options,
    )
    randomize(layer.routing.routing)
    poses, activation = images()
    leaves = [poses, *layer.parameters()] + ([activation] if name == "em" else [])
    given = (poses, activation) if name == "em" else (poses,)
    found = layer(*given)
    u = layer.unfold(poses).unflatten(0, (B, -1))
    votes = torch.einsum("ijdk,bwik->bwijd", layer.routing.W, u)
    a = layer.unfold_activation(poses, activation) if name == "em" else None
    wanted = layer.routing.routing(PlainWindowVotes(votes, children(layer)), a)
    grid = layer.grid(SIZE)
    of_image = wanted.poses.unflatten(0, (B, *grid)).permute(0, 3, 4, 1, 2)
    if name == "em":
        pair = (of_image, wanted.activations.unflatten(0, (B, *grid)).movedim(3, 1))
        plain.assert_same(tuple(found), pair)
        plain.assert_same(gradients(tuple(found), leaves), gradients(pair, leaves))
    else:
        plain.assert_same(found, of_image)
        plain.assert_same(gradients((found,), leaves), gradients((of_image,), leaves))


def test_shares_of_a_child_sum_to_1() -> None:
    """Also where scores differ by thousands, and where no output capsule is left."""
    layer = ConvCaps2d(C, J, K, D, padding=1, routing="em", competition="child")
    votes = layer.votes(images(torch.float32)[0])
    query = 1e3 * torch.randn(votes.B, J, D)
    for found in (votes.moments(return_weights=True), votes.moments(query=query, return_weights=True)):
        assert found.weights is not None and found.weights.isfinite().all()
        of_windows = found.weights.sum(2).unflatten(0, (B, -1)).transpose(1, 2)
        torch.testing.assert_close(F.fold(of_windows, SIZE, 3, padding=1), torch.ones(B, C, *SIZE), rtol=1e-4, atol=0)


def test_output_capsules_of_windows_can_be_masked() -> None:
    torch.manual_seed(0)
    layer = ConvCaps2d(C, J, K, D, routing="em", competition="child", dtype=f64)
    inner = layer.votes(images()[0])
    assert isinstance(inner, WindowVotes)
    given = torch.einsum("ijdk,bik->bijd", layer.routing.W, layer.unfold(images()[0])).detach().requires_grad_()
    out_mask = torch.ones(inner.B, J, dtype=torch.bool)
    out_mask[:, 1] = False
    out_mask[: inner.B // B] = False  # no output capsule in the first sample
    votes = WindowVotes(GivenVotes("test", given, out_mask=out_mask), inner.windows)
    for query in (None, torch.randn(inner.B, J, D, dtype=f64, requires_grad=True)):
        found = votes.moments(query=query, return_weights=True, leaky=query is None)
        assert found.weights is not None
        shares = found.weights.unflatten(0, (B, -1))
        assert not shares[0].any() and not shares[..., 1].any() and shares[1, ..., 0].all()
        assert all(each.isfinite().all() for each in gradients((found.first,), [given]))
    found = layer.routing.routing(votes)
    assert not found.poses[: inner.B // B].any() and found.poses.isfinite().all()


def test_no_tensor_of_all_windows_and_all_places() -> None:
    """Beside the unfolded poses, the largest is as large as windows times kernel area."""
    torch.manual_seed(0)
    layer = ConvCaps2d(1, 6, 1, 12, routing="em", competition="child")
    poses = torch.randn(1, 1, 1, 14, 14).requires_grad_()
    with Largest() as largest:
        layer(poses).poses.sum().backward()
    windows = 12 * 12
    assert windows * 9 <= largest.numel < 1.5 * windows * 6 * 12 < windows * 14 * 14


def test_competition_in_other_forms() -> None:
    """Pose matrices, in 16 bits, and diagnosed."""
    torch.manual_seed(0)
    layer = ConvCaps2d(C, J, K, K, routing="em", competition="child", pose_rows=2, stride=2, padding=1)
    poses, activation = images(torch.float32)
    assert layer.routing.W.shape == (C * 9, J, 2, 2) and "competition='child'" in repr(layer)
    found = layer(poses, activation)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = layer(poses, activation)
    assert (low.poses - found.poses).norm() < 0.1 * found.poses.norm()
    diagnosis = capsfast.diagnose(layer, poses.detach(), activation=activation.detach())
    assert diagnosis.lengths.shape == (B * 3 * 3, J)
    torch.testing.assert_close(diagnosis.lengths.view(B, 3, 3, J).movedim(3, 1), found.activations.detach())
    vectors = ConvCaps2d(C, J, K, D, routing="dynamic", competition="child", padding=1)
    same = ConvCaps2d(C, J, K, D, routing="dynamic", padding=1)
    assert vectors(poses).shape == same(poses).shape
    assert 0.3 < vectors(poses).norm() / same(poses).norm() < 3


# Class capsules


def placed(layer: ClassCaps2d, poses: Tensor) -> Tensor:
    """Votes ``[B, I, J, D]`` of an image, with coordinates added to them."""
    H, W = layer.size
    columns = []
    for t in range(layer.in_types):
        for y in range(H):
            for x in range(W):
                pose = poses[:, t, :, y, x]
                if layer.pose_rows is None:
                    vote = torch.einsum("jdk,bk->bjd", layer.W[t], pose)
                    at = (0, 1)
                else:
                    matrix = pose.unflatten(1, (layer.pose_rows, -1))
                    vote = torch.einsum("bpq,jqr->bjpr", matrix, layer.W[t]).flatten(2)
                    R = layer.W.shape[3]
                    at = (R - 1, 2 * R - 1)  # the last column of the first two rows
                if layer.coordinates:
                    vote = vote.clone()
                    vote[:, :, at[0]] += (y + 0.5) / H
                    vote[:, :, at[1]] += (x + 0.5) / W
                columns.append(vote)
    return torch.stack(columns, 1)


@plain.on_cpu
@pytest.mark.parametrize(
    "options", [{}, {"coordinates": False}, {"pose_rows": 2}, {"pose_rows": 2, "routing": "dynamic"}], ids=str
)
def test_places_are_added_to_the_votes(by: Backend, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = ClassCaps2d(C, J, K, D, (3, 2), **{"routing": "em", **options}, init_std=0.7, backend=by.name, dtype=f64)
    randomize(layer.routing)
    poses = torch.randn(B, C, K, 3, 2, dtype=f64, requires_grad=True)
    activation = torch.rand(B, C, 3, 2, dtype=f64, requires_grad=True)
    found, wanted = layer(poses, activation), layer.routing(placed(layer, poses), activation.flatten(1))
    leaves = [poses, activation, *layer.parameters()]
    plain.assert_same(tuple(found), tuple(wanted))
    plain.assert_same(gradients(found, leaves), gradients(wanted, leaves))
    plain.assert_same(tuple(layer(layer.flatten(poses), activation.flatten(1))), tuple(found))


def test_class_capsules_in_other_forms() -> None:
    torch.manual_seed(0)
    layer = ClassCaps2d(C, J, 16, 16, 4, routing="em", pose_rows=4)
    assert layer.W.shape == (C, J, 4, 4) and "pose_rows=4" in repr(layer)
    u, activation = torch.randn(20, C, 16, 4, 4, requires_grad=True), torch.rand(20, C, 4, 4)
    mask = torch.ones(20, C * 16, dtype=torch.bool)
    mask[:, 3] = False
    found = layer(u, activation, mask=mask)
    changed = u.detach().clone()
    changed[:, 0, :, 0, 3] = 9
    torch.testing.assert_close(tuple(layer(changed, activation, mask=mask)), tuple(found))
    with Largest() as largest:
        gradients(tuple(layer(u, activation)), [u, *layer.parameters()])
    assert largest.numel < 20 * C * 16 * J * 16
    assert capsfast.diagnose(layer, layer.flatten(u.detach())).lengths.shape == (20, J)
    assert "coordinates=False" in repr(ClassCaps2d(C, J, 1, 1, 4, coordinates=False))


# The network


def test_network_has_the_papers_parameters() -> None:
    """68 thousand for A = 64, B = 8, C = D = 16, and about 310 thousand for 32 of each (section 4)."""

    def count(A: int, B: int, C: int, D: int, classes: int = 5, channels: int = 2) -> int:
        conv = 5 * 5 * channels * A + A
        primary = A * B * (16 + 1) + B * (16 + 1)
        one = 3 * 3 * B * C * 4 * 4 + 2 * C
        two = 3 * 3 * C * D * 4 * 4 + 2 * D
        return conv + primary + one + two + D * classes * 4 * 4 + 2 * classes

    small = MatrixCapsNet(device="meta")
    large = MatrixCapsNet(conv_channels=32, primary_types=32, conv_types=(32, 32), device="meta")
    assert sum(value.numel() for value in small.parameters()) == count(64, 8, 16, 16) == 68_754
    assert sum(value.numel() for value in large.parameters()) == count(32, 32, 32, 32) == 317_194


def test_network_has_the_papers_grids() -> None:
    """14, 6 and 4 places (figure 1), from images of 32 pixels."""
    model = MatrixCapsNet(conv_channels=4, primary_types=2, conv_types=(2, 3))
    features = model.conv(torch.rand(1, 2, 32, 32))
    assert features.shape[2:] == (14, 14) and model.primary.grid((14, 14)) == (14, 14)
    assert model.conv_caps[0].grid((14, 14)) == (6, 6) and model.conv_caps[1].grid((6, 6)) == (4, 4)
    assert model.routing.in_caps == 3 * 4 * 4 and model.conv_caps[0].competition == "child"
    u, activation = model.encode(torch.rand(1, 2, 32, 32))
    assert u.shape == (1, 48, 16) and activation.shape == (1, 48) and 0 < activation.min() < activation.max() < 1


SMALL: dict[str, Any] = {"conv_channels": 6, "primary_types": 2, "conv_types": (3, 3), "pose_rows": 2}


@pytest.mark.parametrize("size", [28, 17, (16, 9), 7, (3, 1)])
def test_network_takes_any_image_size(size: Any) -> None:
    model = MatrixCapsNet(3, size, 4, **SMALL)
    output = model(torch.rand(2, *model.image_shape), torch.tensor([0, 1]))
    assert output.lengths.shape == (2, 4) and output.capsules.shape == (2, 4, 4) and output.reconstruction is None
    with pytest.raises(RuntimeError, match="there is no decoder"):
        model.reconstruct(output.capsules)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("competition", ["window", "child"])
def test_network_takes_every_routing(name: str, competition: str) -> None:
    torch.manual_seed(0)
    model = MatrixCapsNet(1, 8, 5, routing=name, competition=competition, **SMALL)
    images, labels = torch.rand(7, 1, 8, 8), torch.arange(7) % 5
    SpreadLoss(steps=10)(model(images).lengths, labels, step=3).backward()
    values = model.named_parameters()
    missing = {each for each, value in values if value.grad is None or not value.grad.isfinite().all()}
    # Where poses alone are routed, nobody looks at activations, nor at what makes them.
    assert not {each for each in missing if name == "em" or each.endswith(".W") or each.startswith("conv.")}


def test_network_is_inspected_with_its_activations() -> None:
    """Statistics see what classify makes; options are those of the layers by passes, for dynamic routing too."""
    from capsfast import train

    images = train.ImageData("digits", batch_size=8)
    images.setup()
    for options in ({}, {"routing": "dynamic", "squash": "exp"}):
        learner = train.Learner("matrixcapsnet", *images.sets[2:], options={**SMALL, **options})
        found = train.routing_statistics(learner, images.sets.test, limit=8, batch_size=8)
        batch = next(iter(images.val_dataloader()))
        lengths = learner.model(batch.images).lengths[batch.labels == 3].mean(0)
        torch.testing.assert_close(found.lengths[3], lengths.detach(), rtol=1e-4, atol=1e-5)
    assert {"component_beta", "init_std"} <= set(train.networks.options_of("matrixcapsnet"))
    assert "top_k" not in train.networks.options_of("matrixcapsnet", "dynamic")


def test_network_learns_with_the_spread_loss() -> None:
    torch.manual_seed(0)
    model = MatrixCapsNet(1, 8, 4, num_iterations=2, **SMALL)
    images, labels = torch.rand(4, 1, 8, 8), torch.arange(4)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.03), []
    for step in range(60):
        optimizer.zero_grad()
        loss = SpreadLoss(start=0.5, steps=1000)(model(images).lengths, labels, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0] and torch.equal(model(images).lengths.argmax(1), labels)


def test_network_as_a_module() -> None:
    torch.manual_seed(0)
    model = MatrixCapsNet(1, 7, 5, num_iterations=2, **SMALL)
    images = torch.rand(3, 1, 7, 7)
    wanted = model(images)[:2]
    loaded = MatrixCapsNet(1, 7, 5, num_iterations=2, **SMALL)
    loaded.load_state_dict(model.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(copy.deepcopy(loaded)(images)[:2], wanted, strict=True))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images)[:2], wanted, rtol=1e-3, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(images)
    assert low.lengths.isfinite().all()
    exact = copy.deepcopy(model).double()(images.double())
    torch.testing.assert_close(wanted[0].double(), exact.lengths, rtol=0, atol=1e-3)
    labels = torch.arange(3)
    single = torch.func.grad(lambda p: SpreadLoss()(torch.func.functional_call(model, p, images).lengths, labels, 0))
    found = single({name: value.detach() for name, value in model.named_parameters()})
    assert all(value.isfinite().all() for value in found.values())


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "schedule": (lambda: em(inverse_temperature=[1, 2]), ValueError, "must hold num_iterations=3 numbers, got 2"),
    "schedule's kind": (lambda: em(inverse_temperature="hot"), TypeError, "None, a number or a sequence"),
    "negative": (lambda: em(inverse_temperature=[1, 2, -1]), ValueError, "inverse_temperature must be positive"),
    "floor": (lambda: em(floor=0), ValueError, "floor must be positive and finite, got 0"),
    "momentum": (lambda: em(momentum=1), ValueError, "momentum must be below 1, got 1"),
    "cost": (lambda: em(cost="entropy"), ValueError, "cost must be one of"),
    "scale": (lambda: em(cost_scale="max"), ValueError, "cost_scale must be one of"),
    "scale's number": (lambda: em(cost_scale=-1.0), ValueError, "cost_scale must be positive"),
    "beta": (lambda: em(initial_beta_u=math.nan), ValueError, "initial_beta_u must be finite, got nan"),
    "nonlinearity": (lambda: em(nonlinearity="relu"), ValueError, "nonlinearity must be one of"),
    "competition": (lambda: ConvCaps2d(2, 2, 4, 4, competition="all"), ValueError, "competition must be one of"),
    "groups": (lambda: ConvCaps2d(2, 2, 4, 4, competition="child", groups=2), ValueError, "groups need routing='dyn"),
    "coupling": (
        lambda: ConvCaps2d(2, 2, 4, 4, competition="child")(torch.zeros(1, 2, 4, 5, 5), return_coupling=True),
        ValueError,
        "return_coupling needs routing='dynamic' in windows",
    ),
    "places": (lambda: ClassCaps2d(2, 3, 4, 1, 2), ValueError, "out_dim must be at least 2 for two coordinates, got 1"),
    "positions": (lambda: ClassCaps2d(2, 3, 4, 4, 2, positions=2), TypeError, "ClassCaps2d: positions is no option"),
    "activation of a list": (
        lambda: ClassCaps2d(2, 3, 4, 4, 2)(torch.zeros(1, 2, 4, 2, 2), [1.0]),
        TypeError,
        r"ClassCaps2d: activation must be a torch\.Tensor \[B, I\], got list",
    ),
    "shared": (lambda: ClassCaps2d(2, 3, 4, 4, 2, shared_weight=True), TypeError, "shared_weight is no option"),
    "image": (lambda: ClassCaps2d(2, 3, 4, 4, 2)(torch.zeros(1, 2, 4, 2, 3)), ValueError, "u must be .*in_types=2"),
    "activation": (
        lambda: ClassCaps2d(2, 3, 4, 4, 2)(torch.zeros(1, 2, 4, 2, 2), torch.zeros(1, 2, 2, 3)),
        ValueError,
        r"activation must be \[B, in_types, H, W\]",
    ),
    "features": (lambda: PrimaryMatrixCaps(3, 2, 4)(torch.zeros(1, 2, 5, 5)), ValueError, "in_channels=3"),
    "a window for windows": (
        lambda: MatrixCapsNet(windows=3),
        TypeError,
        r"windows must be three pairs \(kernel size, stride\), got 3",
    ),
    "ints for windows": (
        lambda: MatrixCapsNet(windows=(5, 3, 3)),
        TypeError,
        "windows must be a sequence of ints, got 5",
    ),
    "windows": (lambda: MatrixCapsNet(windows=[(3, 1)]), ValueError, "windows must be three pairs"),
    "window": (lambda: MatrixCapsNet(1, 4, windows=[(3, 1)] * 3), ValueError, "a window of 3 x 3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        call()
