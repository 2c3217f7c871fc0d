"""Class capsules with coordinates, and the network of matrix capsules."""

import itertools
import statistics
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import capsfast
from capsfast.models import MatrixCapsNet
from capsfast.nn import ClassCaps1d, ClassCaps2d, ClassCaps3d

from .support import plain
from .support.backends import Backend, Largest
from .support.layers import parameters_of
from .support.plain import gradients
from .support.routings import convolutional_variational, randomize, variational

f64 = torch.float64
B, C, J = 2, 2, 3


def placed(layer: ClassCaps2d, poses: Tensor) -> Tensor:
    """Votes ``[B, I, J, D]`` of an image, with coordinates added to them."""
    columns = []
    for t in range(layer.in_types):
        for place in itertools.product(*map(range, layer.size)):
            pose = poses[(slice(None), t, slice(None), *place)]
            if layer.pose_rows is None:
                vote = torch.einsum("jdk,bk->bjd", layer.W[t], pose)
                at = [*range(len(place))]
            else:
                matrix = pose.unflatten(1, (layer.pose_rows, -1))
                vote = torch.einsum("bpq,jqr->bjpr", matrix, layer.W[t]).flatten(2)
                R = layer.W.shape[3]
                at = [row * R + R - 1 for row in range(len(place))]  # the last column of a row for every axis
            if layer.coordinates:
                offset, scale = (0.5, 1.0) if isinstance(layer.coordinates, bool) else layer.coordinates
                vote = vote.clone()
                for component, n, size in zip(at, place, layer.size, strict=True):
                    vote[:, :, component] += (n + offset) / size * scale
            columns.append(vote)
    return torch.stack(columns, 1)


@plain.on_cpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"coordinates": False},
        {"coordinates": [1, 0.1]},
        {"pose_rows": 2},
        {"pose_rows": 2, "coordinates": (1, 0.1)},
        {"pose_rows": 2, "routing": "dynamic"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("kind", "size"), [(ClassCaps1d, (5,)), (ClassCaps2d, (3, 2)), (ClassCaps3d, (2, 3, 2))], ids=["1d", "2d", "3d"]
)
def test_places_are_added_to_the_votes(
    by: Backend, options: dict[str, Any], kind: type[ClassCaps2d], size: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    if "pose_rows" in options:
        options = {**options, "pose_rows": max(2, len(size))}
    layer = kind(C, J, 6, 6, size, **{"routing": "em", **options}, init_std=0.7, backend=by.name, dtype=f64)
    randomize(layer.routing)
    poses = torch.randn(B, C, 6, *size, dtype=f64, requires_grad=True)
    activation = torch.rand(B, C, *size, dtype=f64, requires_grad=True)
    found, wanted = layer(poses, activation), layer.routing(placed(layer, poses), activation.flatten(1))
    plain.assert_alike(found, wanted, [poses, activation, *layer.parameters()])
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
    assert "coordinates=(1, 0.1)" in repr(ClassCaps2d(C, J, 2, 2, 4, coordinates=[1, 0.1]))


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
    assert parameters_of(small) == count(64, 8, 16, 16) == 68_754
    assert parameters_of(large) == count(32, 32, 32, 32) == 317_194


def test_variational_form_has_the_authors_parameters() -> None:
    """Ribeiro, Leontidis, Kollias 2020, the authors' code."""

    def count(A: int, B: int, C: int, D: int, classes: int, channels: int) -> int:
        first = 5 * 5 * channels * A + 2 * A
        primary = A * B * (16 + 1) + 2 * B + 2 * B
        return first + primary + 9 * 16 * (B * C + C * D) + 16 * D * classes + 2 * (C + D + classes)

    of: dict[str, Any] = {"form": "variational", "device": "meta"}
    norb, mnist = MatrixCapsNet(**of), MatrixCapsNet(1, 32, 10, primary_types=16, **of)
    assert parameters_of(norb) == count(64, 8, 16, 16, 5, 2) == 68_714
    assert parameters_of(mnist) == count(64, 16, 16, 16, 10, 1) == 95_572


def test_variational_form_is_its_definition() -> None:
    torch.manual_seed(0)
    model = MatrixCapsNet(2, 28, 3, conv_channels=5, primary_types=2, conv_types=(3, 4), form="variational", dtype=f64)
    assert model.conv.bias is model.primary.pose.bias is model.primary.activation.bias is None
    randomize(model)
    images = torch.randn(2, 2, 28, 28, dtype=f64)
    found, norm = model(images), torch.nn.functional.batch_norm

    def normal(maps: Tensor, by: Any) -> Tensor:
        return norm(maps, None, None, by.weight, by.bias, training=True)

    conv, primary = torch.nn.functional.conv2d, model.primary
    features = normal(conv(images, model.conv.weight, stride=2), model.norm).relu()
    poses = normal(conv(features, primary.pose.weight).unflatten(1, (2, 16)), primary.pose_norm)
    activation = normal(conv(features, primary.activation.weight), primary.activation_norm).sigmoid()
    for layer in model.conv_caps:
        grid = layer.grid(poses.shape[3:])
        of_windows, active = convolutional_variational(layer, poses, activation)
        poses = of_windows.unflatten(1, grid).permute(0, 3, 4, 1, 2)
        activation = active.unflatten(1, grid).movedim(3, 1)
    assert model.routing.coordinates == (1.0, 0.1)
    wanted = variational(placed(model.routing, poses), activation.flatten(1), model.routing.routing, poses)
    plain.assert_alike((found.capsules, found.lengths), wanted, [*model.parameters()])
    single = MatrixCapsNet(1, 8, 3, **SMALL, form="variational", competition="window", routing="em", coordinates=False)
    assert single.conv_caps[0].start == "child" and not single.routing.coordinates and single.routing.identity
    assert model.eval()(images).lengths.shape == (2, 3)


def test_activations_start_as_in_the_authors_code() -> None:
    torch.manual_seed(0)
    activation = MatrixCapsNet(activation_std=3.0).primary.activation
    assert activation.bias.eq(-1).all() and 5.5 < activation.weight.abs().max() <= 6  # cut at two deviations


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


# The initial values of EM routing alone.
PLAIN: dict[str, Any] = {"identity": False, "init_std": None, "floor": 1.0, "final": 10.0}
PLAIN |= {"initial_beta_a": 0.0, "initial_beta_u": None}


class Start(NamedTuple):
    """What a new network does. Each number is the median of several draws, because one draw may be an exception."""

    chooses: float  # share of activations that are not near 0 or 1, in the layer with the fewest
    spread: float  # deviation of the activations of the class capsules
    fades: float  # deviation of the poses of the second layer, as a share of the deviation in the first
    least: float  # the root mean square of the gradient of W, in the layer where it is smallest
    most: float


def start(num_iterations: int, **options: Any) -> Start:
    draws = []
    for seed in range(7):
        torch.manual_seed(seed)
        sizes: dict[str, Any] = {"conv_channels": 16, "primary_types": 4, "conv_types": (6, 6)}
        model = MatrixCapsNet(1, 8, 10, num_iterations=num_iterations, **sizes, **options)
        found: list[Any] = []
        for part in (*model.conv_caps, model.routing):
            part.register_forward_hook(lambda _, given, made: found.append(made))  # noqa: B023
        capsfast.nn.MarginLoss()(model(torch.rand(16, 1, 8, 8)).lengths, torch.arange(16) % 10).backward()
        chosen = [((each.activations - 0.5).abs() < 0.45).float().mean().item() for each in found]
        poses = [each.poses.std().item() for each in found]
        weights = [value.grad for name, value in model.named_parameters() if name.endswith("W")]
        gradient = [0.0 if weight is None else weight.square().mean().sqrt().item() for weight in weights]
        spread = found[-1].activations.std().item()
        draws.append(Start(min(chosen), spread, poses[1] / poses[0], min(gradient), max(gradient)))
    return Start(*map(statistics.median, zip(*draws, strict=True)))


@pytest.mark.parametrize("num_iterations", [2, 3])
def test_network_starts_where_all_its_layers_learn(num_iterations: int) -> None:
    ours, plain = start(num_iterations), start(num_iterations, **PLAIN)
    assert ours.chooses > 0.7 and ours.spread > 0.05 and ours.fades > 0.5
    assert ours.least > 5e-4 and ours.most < 20 * ours.least
    # With PLAIN poses fade, activations hardly depend on the image, and weights hardly change the loss.
    assert plain.fades < 0.5 * ours.fades and plain.spread < 0.05 * ours.spread and plain.most < 0.1 * ours.least


def test_starting_options_give_way() -> None:
    model = MatrixCapsNet(1, 8, 4, **SMALL, floor=0.5, init_std=0.7)
    assert model.routing.routing.floor == 0.5 and model.routing.init_std == 0.7 and model.routing.identity
    betas = model.routing.routing.beta_a, model.routing.routing.beta_u
    assert (betas[0] == -10).all() and (betas[1] == -10 / 4).all()  # besides -0.5 log(2 floor)
    model = MatrixCapsNet(1, 8, 4, **SMALL, floor=0.5, cost_scale="inputs")
    betas = model.routing.routing.beta_a, model.routing.routing.beta_u
    assert (betas[0] == 0).all() and (betas[1] == 0).all()
    model = MatrixCapsNet(1, 8, 4, **SMALL, cost="mass")
    assert (model.routing.routing.beta_u == -1).all()
    model = MatrixCapsNet(1, 8, 4, **SMALL, routing="self")
    assert not model.routing.identity
    layer = capsfast.nn.RoutedCaps(50, 3, 4, 4, routing="em", identity=True, init_std=1e-3)
    torch.testing.assert_close(layer.W, torch.eye(4).expand(50, 3, 4, 4), rtol=0, atol=0.002 + 1e-6)


@pytest.mark.parametrize(("coordinates", "length"), [(True, 0.99), (False, 0.03)])
def test_coordinates_lengthen_class_capsules_of_dynamic_routing(coordinates: bool, length: float) -> None:
    """docs/convolutional-capsules.md says so, with these lengths."""
    torch.manual_seed(0)
    layer = ClassCaps2d(8, 8, 8, 16, size=(4, 4), coordinates=coordinates)
    found = layer(torch.randn(4, 8, 8, 4, 4) * 0.2)
    poses = found if isinstance(found, torch.Tensor) else found.poses
    assert float(poses.norm(dim=2).mean()) == pytest.approx(length, abs=0.02)
