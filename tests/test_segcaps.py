"""SegCaps against a plain network, and as a module."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from capsfast.models import SegCaps, SegCapsOutput

from .support import plain
from .support.plain import assert_same, on_cpu

B, J = 2, 3
SMALL: dict[str, Any] = {"conv_channels": 3, "types": 2, "dims": (2, 3, 4), "digit_dim": 4, "kernel_size": 3}
SMALL["hidden"] = (5,)


def images(height: int = 7, width: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(B, 2, height, width, dtype=dtype)


def route_at_positions(maps: Tensor, types: int, D: int, num_iterations: int, **options: Any) -> Tensor:
    """Routes the output of a convolution, ``[B I, J D, H, W]``, to ``[B, J, D, H, W]``."""
    votes = maps.view(B, types, -1, D, *maps.shape[2:])
    v, _ = plain.route(plain.at_samples(votes, 2), num_iterations, **{"kind": "exp", **options})
    return plain.to_image(v, B, maps.shape[2:])


def doubled(poses: Tensor, weight: Tensor, like: Tensor) -> Tensor:
    """A transposed convolution: zeros between the places of the input, and a convolution with the flipped kernel."""
    spread = poses.new_zeros(poses.shape[0] * poses.shape[1], poses.shape[2], *(2 * n - 1 for n in poses.shape[3:]))
    spread[:, :, ::2, ::2] = poses.flatten(0, 1)
    more = [like.shape[3 + axis] - spread.shape[2 + axis] for axis in (0, 1)]
    reach = weight.shape[2] // 2
    around = (reach, weight.shape[2] - 1 - reach + more[1], reach, weight.shape[2] - 1 - reach + more[0])
    return F.conv2d(F.pad(spread, around), weight.transpose(0, 1).flip(2, 3))


def plain_segcaps(model: SegCaps, x: Tensor, classes: Tensor | None) -> SegCapsOutput:
    """A network with two levels of halved size, from the model's parameters."""
    p = dict(model.named_parameters())

    def slim(name: str, poses: Tensor, r: int = 3, step: int = 1) -> Tensor:
        weight = p[f"{name}.conv.weight"]
        maps = F.conv2d(poses.flatten(0, 1), weight, stride=step, padding=weight.shape[2] // 2)
        D = SMALL["digit_dim"] if name == "classes" else weight.shape[0] // 2
        return route_at_positions(maps, poses.shape[1], D, r)

    def larger(name: str, poses: Tensor, like: Tensor) -> Tensor:
        weight = p[f"{name}.conv.weight"]
        return route_at_positions(doubled(poses, weight, like), poses.shape[1], weight.shape[1] // 2, 1)

    features = F.relu(F.conv2d(x, p["conv.weight"], p["conv.bias"], padding=1))
    full = slim("start", features[:, None], 1)
    half = slim("route_down.0", slim("down.0", full, 1, 2))
    quarter = slim("route_down.1", slim("down.1", half, 1, 2))
    again = slim("route_up.0", torch.cat([larger("up.0", quarter, half), half], 1))
    again = slim("route_up.1", torch.cat([larger("up.1", again, full), full], 1))
    capsules = slim("classes", again)
    lengths = capsules.square().sum(2).sqrt()
    kept = capsules * (lengths > 0.5 if classes is None else classes)[:, :, None]
    hidden = F.relu(F.conv2d(kept.flatten(1, 2), p["decoder.0.weight"], p["decoder.0.bias"]))
    return SegCapsOutput(lengths, capsules, F.conv2d(hidden, p["decoder.2.weight"], p["decoder.2.bias"]).sigmoid())


@on_cpu
@pytest.mark.parametrize("size", [(7, 6), (5, 9), (8, 8), (1, 3)], ids=str)
def test_is_a_plain_network(by: Any, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = SegCaps(2, size, J, **SMALL, backend=by.name, dtype=torch.float64)
    with torch.no_grad():
        model.classes.conv.weight *= 4  # lengths on both sides of 0.5
    x, classes = images(*size).requires_grad_(), torch.rand(B, J, *size) > 0.5
    leaves = [x, *model.parameters()]
    for given in (classes, None):
        results = []
        for output in (model(x, given), plain_segcaps(model, x, given)):
            assert output.lengths.shape == (B, J, *size)
            total = output.lengths.sum() + output.reconstruction.square().sum()
            results.append((*output, *torch.autograd.grad(total, leaves)))
        assert_same(*results)
    assert 0 < (output.lengths > 0.5).double().mean() < 1 or size == (1, 3)


# The layers of the authors' SegCaps-R3: capsule types and sizes.
R3 = {
    "down.0": (2, 16),
    "route_down.0": (4, 16),
    "down.1": (4, 32),
    "route_down.1": (8, 32),
    "down.2": (8, 64),
    "route_down.2": (8, 32),
    "up.0": (8, 32),
    "route_up.0": (4, 32),
    "up.1": (4, 16),
    "route_up.1": (4, 16),
    "up.2": (2, 16),
    "classes": (1, 16),
}


def plain_r3(model: SegCaps, x: Tensor) -> Tensor:
    p = dict(model.named_parameters())

    def layer(name: str, poses: Tensor, like: Tensor | None = None) -> Tensor:
        weight, bias = p[f"{name}.conv.weight"], p[f"{name}.routing.bias"]
        assert tuple(bias.shape) == R3[name]
        if like is not None:
            maps = doubled(poses, weight, like)
        else:
            # When the number of places is halved, odd padding has its extra place at the end.
            first, step = (1, 2) if name.startswith("down") else (weight.shape[2] // 2, 1)
            maps = F.conv2d(F.pad(poses.flatten(0, 1), (first, weight.shape[2] // 2) * 2), weight, stride=step)
        rounds = 1 if name == "down.0" else 3
        return route_at_positions(maps, poses.shape[1], bias.shape[1], rounds, kind="paper", bias=bias)

    full = F.relu(F.conv2d(x, p["conv.weight"], p["conv.bias"], padding=2))[:, None]
    half = layer("route_down.0", layer("down.0", full))
    quarter = layer("route_down.1", layer("down.1", half))
    eighth = layer("route_down.2", layer("down.2", quarter))
    again = layer("route_up.0", torch.cat([layer("up.0", eighth, quarter), quarter], 1))
    again = layer("route_up.1", torch.cat([layer("up.1", again, half), half], 1))
    return layer("classes", torch.cat([layer("up.2", again, full), full], 1))


@on_cpu
def test_the_authors_network(by: Any) -> None:
    """LaLonde, Bagci 2018: 1.4 million parameters; 1 416 112 in their code, and 9 537 of the decoder."""
    torch.manual_seed(0)
    model = SegCaps(1, (16, 8), 1, form="r3", backend=by.name, dtype=torch.float64)
    count = sum(parameter.numel() for parameter in model.parameters())
    sizes = {"down.0": 16, "classes": 16} | {"down.1": 16, "down.2": 32, "route_down.2": 64}
    before = {name: sizes.get(name, R3[name][1]) for name in R3} | {"up.1": 32, "up.2": 16}
    kernels = {name: 4 if "up." in name and "route" not in name else 1 if name == "classes" else 5 for name in R3}
    layers = sum(J * D * (kernels[name] ** 2 * before[name] + 1) for name, (J, D) in R3.items())
    decoder = 17 * 64 + 65 * 128 + 129
    assert layers + 26 * 16 == 1_416_112 and count == 1_416_112 + decoder == 1_425_649
    x = torch.rand(B, 1, 16, 8, dtype=torch.float64).requires_grad_()
    leaves = [x, *(value for name, value in model.named_parameters() if not name.startswith("decoder"))]
    output = model(x)
    results = [
        (each, *torch.autograd.grad(each.square().sum(), leaves)) for each in (output.capsules, plain_r3(model, x))
    ]
    assert_same(*results)
    assert model.up[0].conv.weight.std().item() == pytest.approx(0.88 * (2 / (16 * 8 * 32)) ** 0.5, rel=0.02)
    assert model.route_down[1].conv.weight.std().item() == pytest.approx(0.88 * (2 / (25 * 32)) ** 0.5, rel=0.02)


def test_types_of_every_level() -> None:
    model = SegCaps(1, 9, J, **{**SMALL, "dims": (2, 3, 4), "types": [2, 3, 5]})
    assert [each.out_types for each in (model.start, *model.down, *model.up)] == [2, 3, 5, 3, 2]
    assert [each.in_types for each in (*model.route_down, *model.route_up)] == [3, 5, 6, 4]
    x = torch.rand(B, 1, 9, 9)
    assert model(x).lengths.shape == (B, J, 9, 9)
    torch.manual_seed(0)
    one = SegCaps(1, 9, J, **SMALL)
    torch.manual_seed(0)
    assert torch.equal(SegCaps(1, 9, J, **{**SMALL, "types": (2, 2, 2)})(x).capsules, one(x).capsules)


def test_the_decoder_sees_the_classes_of_a_pixel_alone() -> None:
    model = SegCaps(2, (7, 6), J, **SMALL)
    capsules = torch.randn(B, J, 4, 7, 6)
    classes = torch.zeros(B, J, 7, 6, dtype=torch.bool)
    classes[:, 1, 2] = True
    wild = torch.where(classes[:, :, None], capsules, torch.nan)
    found = model.reconstruct(wild, classes)
    assert torch.equal(found, model.reconstruct(capsules, classes))
    with torch.no_grad():
        capsules[:, 1, :, 2, 3] += 1
    changed = (model.reconstruct(capsules, classes) != found).any(1)
    assert changed[:, 2, 3].all() and not changed[:, 2, :3].any() and not changed[:, 3:].any()


def test_levels_and_options() -> None:
    for dims in ((4,), (4, 4), (2, 3, 4, 5)):
        model = SegCaps(1, 9, J, **{**SMALL, "dims": dims, "learned_logits": True, "bias": True})
        assert len(model.down) == len(model.up) == len(dims) - 1
        assert model.classes.routing.bias is not None and model.start.routing.bias is None
        assert model(torch.rand(B, 1, 9, 9)).reconstruction.shape == (B, 1, 9, 9)
