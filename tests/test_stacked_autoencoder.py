"""The stacked capsule autoencoder, part by part, against plain code."""

import math

import pytest
import torch
from torch import Tensor

from capsfast.data import Batch
from capsfast.models import Sparsity, StackedCapsuleAutoencoder
from capsfast.nn.stacked import ObjectCaps, Objects, Parts, SetTransformer, TemplateMixture, explain
from capsfast.nn.stacked.affine import affine, compose, inverse

from .support.layers import parameters_of
from .support.plain import assert_same

B, M, K, FEATURES = 3, 4, 5, 6
IMAGE = (2, 9, 7)


def double(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def homogeneous(maps: Tensor) -> Tensor:
    last = torch.tensor([0.0, 0.0, 1.0], dtype=maps.dtype).expand(*maps.shape[:-2], 1, 3)
    return torch.cat([maps, last], -2)


def density(x: Tensor, mean: Tensor, std: Tensor | float) -> Tensor:
    return (-((x - mean) ** 2) / (2 * std**2)).exp() / (std * math.sqrt(2 * math.pi))


def parts_of() -> Parts:
    return Parts(affine(double(B, M, 6)), torch.rand(B, M, dtype=torch.float64), double(B, M, FEATURES).relu())


def small(**options: object) -> StackedCapsuleAutoencoder:
    torch.manual_seed(0)
    sizes = {"num_parts": M, "num_objects": K, "conv_channels": 8, "part_features": FEATURES, "template_size": 5}
    return StackedCapsuleAutoencoder(1, 12, 3, **{**sizes, "dim": 4, "hidden": 8, **options})  # type: ignore[arg-type]


def test_maps_of_the_plane() -> None:
    torch.manual_seed(0)
    one, other = affine(3 * double(20, 6)), affine(3 * double(20, 6))
    assert_same(homogeneous(compose(one, other)), homogeneous(one) @ homogeneous(other))
    assert_same(homogeneous(inverse(one)), homogeneous(one).inverse(), 1e-6)
    assert ((one[:, :, 2]).abs() < 1).all()
    # No shear and no rotation: two scales, each of 0.51 at 0.
    assert_same(affine(double(6) * 0), torch.tensor([[0.51, 0, 0], [0, 0.51, 0]], dtype=torch.float64))
    turned = affine(torch.tensor([0.0, 0, math.atanh(0.5), 0, 0, 0], dtype=torch.float64))  # a quarter
    assert_same(turned, torch.tensor([[0, -0.51, 0], [0.51, 0, 0]], dtype=torch.float64))


def test_a_template_lies_where_its_pose_says() -> None:
    mixture = TemplateMixture(1, FEATURES, (1, 32, 32), 8, dtype=torch.float64)
    with torch.no_grad():
        mixture.templates.fill_(50.0)
        mixture.alpha.fill_(50.0)
    pose = torch.tensor([[[[0.25, 0, 0.5], [0, 0.5, -0.25]]]], dtype=torch.float64)
    values, share = mixture.drawn(Parts(pose, torch.ones(1, 1, dtype=torch.float64), double(1, 1, FEATURES)))
    assert values.shape == (1, 2, 1, 32, 32) and torch.allclose(share.sum(1), torch.ones(()).double())
    rows, columns = (share[0, 0, 0] > 0.5).nonzero().T
    assert columns.min() in (19, 20) and columns.max() in (27, 28)  # x from 0.25 to 0.75 of [-1, 1]
    assert rows.min() in (3, 4) and rows.max() in (19, 20)  # y from -0.75 to 0.25


def test_pixels_are_mixtures() -> None:
    torch.manual_seed(0)
    mixture = TemplateMixture(M, FEATURES, IMAGE, 5, pixel_std=0.3, dtype=torch.float64)
    parts, images = parts_of(), torch.rand(B, *IMAGE, dtype=torch.float64)
    values, share = mixture.drawn(parts)
    assert values.shape == (B, M + 1, *IMAGE)
    assert_same(values[:, -1], mixture.background.sigmoid()[None, :, None, None].expand(B, *IMAGE))
    wanted = (share.squeeze(2) * density(images[:, None], values, 0.3).prod(2)).sum(1).log().sum((1, 2))
    drawn = mixture(parts, images)
    assert_same(drawn.log_likelihood, wanted)
    assert_same(drawn.image, (share * values).sum(1))
    absent = parts._replace(presences=torch.zeros(B, M, dtype=torch.float64))
    assert_same(mixture(absent, images).image, values[:, -1])


def test_parts_are_explained_by_a_mixture_of_votes() -> None:
    torch.manual_seed(0)
    objects = Objects(double(B, K, M, 6), *torch.rand(2, B, K, M, dtype=torch.float64).add(0.1), torch.zeros(()))
    parts = parts_of()
    found = explain(objects, parts.poses, parts.presences, nobody=1e-3)
    total = torch.full((B, M), 1e-3, dtype=torch.float64)
    joint = []
    for k in range(K):
        of_votes = density(parts.poses.flatten(2), objects.votes[:, k], objects.scales[:, k, :, None])
        joint.append(objects.vote_presences[:, k] * of_votes.prod(2))
        total = total + joint[-1]
    assert_same(found.log_likelihood, (parts.presences * total.log()).sum(1))
    assert_same(found.posterior, torch.stack(joint, 2) / total[..., None])


def test_votes_of_objects() -> None:
    torch.manual_seed(0)
    caps = ObjectCaps(7, K, M, dim=4, hidden=8, dtype=torch.float64).eval()
    encodings = double(B, K, 7)
    found = caps(encodings)
    raw = caps.predict(caps.describe(encodings))
    relation, pose = raw[..., : 6 * M].unflatten(2, (M, 6)), raw[..., 6 * M : 6 * M + 6]
    whole = homogeneous(affine(pose + caps.pose))[:, :, None] @ homogeneous(affine(relation + caps.relations))
    assert_same(found.votes, whole[..., :2, :].flatten(3))
    assert found.vote_presences.shape == (B, K, M) and (found.scales > 0.01).all()
    assert_same(found.presences, found.vote_presences.max(2).values)
    assert_same(found.deformation, relation.square().sum() / 2 / B)
    # One object does not see the encoding of another.
    changed = encodings.clone()
    changed[:, 0] += 1
    assert_same(caps(changed).votes[:, 1:], found.votes[:, 1:])
    assert not torch.equal(caps(changed).votes[:, 0], found.votes[:, 0])


def test_a_set_has_no_order_and_absent_members_no_say() -> None:
    torch.manual_seed(0)
    transformer = SetTransformer(6, 8, K, dim=8, num_heads=2, dtype=torch.float64)
    members, presence = double(B, M, 6), torch.rand(B, M, dtype=torch.float64)
    found, order = transformer(members, presence), torch.tensor([2, 0, 3, 1])
    assert found.shape == (B, K, 8)
    assert_same(transformer(members[:, order], presence[:, order]), found)
    presence[:, 1] = 0
    wild = members.clone()
    wild[:, 1] = 7
    assert_same(transformer(wild, presence), transformer(members, presence))
    assert_same(transformer(members[:, [0, 2, 3]], presence[:, [0, 2, 3]]), transformer(members, presence))


def test_the_loss_in_words() -> None:
    torch.manual_seed(0)
    model = small(sparsity=Sparsity(2.0, 3.0, 0.5, 0.25, 4.0)).double().eval()
    output = model(torch.rand(B, 1, 12, 12, dtype=torch.float64))
    loss = model.loss(output)
    presences, posterior = output.objects.presences, output.explained.posterior.sum(1)
    assert_same(loss["image"], -output.drawn.log_likelihood.mean())
    assert_same(loss["parts"], -output.explained.log_likelihood.mean())
    assert_same(loss["prior_within"], 2.0 * sum((row.sum() - K / 3) ** 2 for row in presences) / B)
    assert_same(loss["prior_between"], 3.0 * sum((row.sum() - B / 3) ** 2 for row in presences.T) / K)
    shares = [row / row.sum() for row in posterior]
    assert_same(loss["posterior_within"], 0.5 * sum(-(p * p.log()).sum() for p in shares) / B)
    total = posterior.sum(0) / posterior.sum()
    assert_same(loss["posterior_between"], 0.25 * (total * total.log()).sum())
    assert_same(loss["deformation"], 4.0 * output.objects.deformation)


def test_objects_do_not_move_parts() -> None:
    model = small()
    loss = model.loss(model(torch.rand(B, 1, 12, 12)))
    of_parts = [*model.conv.parameters(), *model.part_caps.parameters(), *model.templates.parameters()]
    of_objects = [*model.encoder.parameters(), *model.object_caps.parameters()]
    image = torch.autograd.grad(loss.pop("image"), [*of_parts, *of_objects], retain_graph=True, allow_unused=True)
    assert all(each is not None for each in image[: len(of_parts)])
    assert all(each is None for each in image[len(of_parts) :])
    rest = torch.autograd.grad(sum(loss.values()), [*of_parts, *of_objects], allow_unused=True)  # type: ignore[arg-type]
    assert all(each is None for each in rest[: len(of_parts)])
    assert all(tensor is not None and tensor.isfinite().all() for tensor in rest[len(of_parts) :])


def test_noise_in_training_alone() -> None:
    model, images = small(), torch.rand(B, 1, 12, 12)
    assert not torch.equal(model(images).parts.presences, model(images).parts.presences)
    model.eval()
    assert_same(tuple(model(images).parts), tuple(model(images).parts))
    quiet = small(noise=0.0)
    assert_same(quiet(images).reconstruction, quiet.eval()(images).reconstruction)


def test_what_is_drawn_is_the_image_whatever_the_network_sees() -> None:
    sizes = {"num_parts": M, "num_objects": K, "conv_channels": 8, "template_size": 5, "dim": 4, "hidden": 8}
    from capsfast import train

    learner = train.Learner("stacked", 1, 12, 3, options=sizes, normalize="image").eval()
    images = torch.rand(B, 1, 12, 12)
    found, output = learner.measured(Batch(images, torch.zeros(B).long()))
    wanted = learner.model.templates(learner.model.find_parts(learner.normalized(images)), images)
    assert_same(found["image"], -wanted.log_likelihood.mean())
    assert_same(found["reconstruction"], (output.reconstruction - images).square().flatten(1).sum(1).mean())


def test_numbers_of_parameters() -> None:
    model = small()
    convolutions = 8 * 9 + 8 + 3 * (8 * 8 * 9 + 8)
    part_caps = (8 + 1) * M * (6 + 1 + FEATURES + 1)
    templates = M * 2 * 25 + (FEATURES + 1) * 32 + 32 + 1 + 2
    each = (256 + 1) * 8 + (8 + 1) * 4 + (4 + 1) * 8 + 8 * (8 * M + 7) + 6 * M + 6 + 1 + M + M
    assert parameters_of(model) == convolutions + part_caps + templates + K * each + parameters_of(model.encoder)


@pytest.mark.slow
def test_learns() -> None:
    """Bars in one of two directions: after some steps the model explains images better than the background does."""
    torch.manual_seed(0)
    model = small(num_parts=2, conv_channels=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    history = []
    for _ in range(60):
        images = torch.zeros(16, 1, 12, 12)
        places = torch.randint(2, 9, (16,))
        for n, place in enumerate(places):
            images[n, 0, :, place : place + 2] = 1
        loss = model.loss(model(images))
        optimizer.zero_grad()
        torch.stack(list(loss.values())).sum().backward()
        optimizer.step()
        history.append((loss["image"].item(), loss["parts"].item()))
    assert history[-1][0] < history[0][0] - 50 and history[-1][1] < history[0][1]


def test_clusters_are_named_once() -> None:
    from capsfast.train import cluster_accuracy

    torch.manual_seed(0)
    labels = torch.arange(60) % 3
    points = torch.eye(3)[labels] + 0.05 * torch.randn(60, 3)
    assert cluster_accuracy(points, points, labels, 3) == 1
    merged = torch.where(labels == 2, 1, labels)
    assert cluster_accuracy(points, points, merged, 3) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="train must have at least num_classes=3 rows, got 2"):
        cluster_accuracy(points[:2], points, labels, 3)


@pytest.mark.parametrize("shape", [(28, 28), (1, 28, 28, 2), 28])
def test_the_shape_of_images_is_three_sizes(shape: object) -> None:
    with pytest.raises(ValueError, match=r"image_shape must be \(channels, height, width\), got"):
        TemplateMixture(4, 3, shape)  # type: ignore[arg-type]
