"""CapsNet, DeepCaps and CapsAutoEncoder against plain networks, and as modules."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import capsfast
from capsfast.models import CapsAutoEncoder, CapsNet, CapsNetOutput, DeepCaps
from capsfast.nn import CapsNetLoss

from .support import plain
from .support.backends import Backend, recorded_ops
from .support.layers import NETWORKS, network, parameters_of
from .support.plain import assert_alike, assert_same, on_cpu

B = 4
# image, kernel, places of the primary capsules
SIZES = [(28, 9, (6, 6)), (32, 9, (8, 8)), ((40, 19), 9, (12, 2)), (18, 7, (3, 3)), (8, 3, (2, 2)), (1, 1, (1, 1))]


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(B, 2, 12, 10, dtype=dtype)


def plain_capsnet(model: CapsNet | CapsAutoEncoder, x: Tensor, labels: Tensor | None) -> CapsNetOutput:
    """Sabour et al. 2017, figures 1 and 2, from the model's parameters."""
    p = dict(model.named_parameters())
    x = F.relu(F.conv2d(x, p["conv.weight"], p["conv.bias"]))
    x = F.conv2d(x, p["primary.conv.weight"], p["primary.conv.bias"], stride=2)
    K, H, W = p["routing.W"].shape[3], *x.shape[2:]
    places = [(t, row, column) for t in range(x.shape[1] // K) for row in range(H) for column in range(W)]
    u = torch.stack([x[:, t * K : (t + 1) * K, row, column] for t, row, column in places], 1)
    v, _ = plain.route(plain.votes(plain.squash(u), p["routing.W"]), model.routing.num_iterations)
    lengths = v.square().sum(2).sqrt()
    if not isinstance(model, CapsNet):
        return CapsNetOutput(lengths, v, plain.decoded(model.decoder, v))
    return CapsNetOutput(lengths, v, plain.decoded(model.decoder, v, lengths.argmax(1) if labels is None else labels))


def plain_caps(maps: Tensor, weight: Tensor, dim: int, stride: int = 1) -> Tensor:
    """[B, C, H, W] to [B, T, D, H', W'], squashed. Padding is half on each side; an odd place goes to the end."""
    more = [(-(-n // stride) - 1) * stride + 3 - n for n in maps.shape[2:]]
    padded = F.pad(maps, [each for n in reversed(more) for each in (n // 2, n - n // 2)])
    s = F.conv2d(padded, weight, stride=stride).unflatten(1, (-1, dim))
    return plain.squash(s.movedim(2, -1)).movedim(-1, 2)


def plain_3d_routing(poses: Tensor, weight: Tensor, bias: Tensor, num_iterations: int) -> Tensor:
    """With the squash of the authors' code, over components and places."""
    J, D = bias.shape
    votes = torch.stack([F.conv2d(each, weight, padding=1).unflatten(1, (J, D)) for each in poses.unbind(1)], 1)
    return plain.route_everywhere(votes, num_iterations, bias=bias)[0]


def plain_deepcaps(model: DeepCaps, x: Tensor) -> CapsNetOutput:
    p = dict(model.named_parameters())
    x = F.relu(F.conv2d(x, p["conv.weight"], p["conv.bias"], padding=1))
    maps = plain.normalized(x, (0, 2, 3), 1e-3) * p["norm.weight"][:, None, None] + p["norm.bias"][:, None, None]
    flat = []
    dims = NETWORKS["DeepCaps"]["dims"]
    for n, dim in enumerate(dims):
        down, first, second, skip = (p[f"cells.{n}.{name}.conv.weight"] for name in ("down", "first", "second", "skip"))
        halved = plain_caps(maps, down, dim, 2)
        deep = plain_caps(plain_caps(halved.flatten(1, 2), first, dim).flatten(1, 2), second, dim)
        if n == len(dims) - 1:
            poses = deep + plain_3d_routing(halved, skip, p[f"cells.{n}.skip.routing.bias"], 3)
        else:
            poses = deep + plain_caps(halved.flatten(1, 2), skip, dim)
        maps = poses.flatten(1, 2)
        flat.insert(0, poses.permute(0, 3, 4, 1, 2).flatten(1, 3))
    votes = plain.votes(torch.cat(flat[:2], 1), p["routing.W"])
    v, _ = plain.route(votes, 3, bias=p["routing.routing.bias"])
    return CapsNetOutput(v.square().sum(2).sqrt(), v, torch.empty(0))


@on_cpu
@pytest.mark.parametrize("labels", [torch.tensor([0, 4, 2, 2]), None], ids=["labels", "longest"])
def test_capsnet_is_the_papers_network(by: Backend, labels: Tensor | None) -> None:
    model = network("CapsNet", backend=by.name, dtype=torch.float64, num_iterations=2, init_std=0.5)
    x = images(torch.float64)
    with recorded_ops() as ops:
        found, wanted = model(x, labels), plain_capsnet(model, x, labels)
    assert ("capsfast::dynamic_routing" in ops) == by.fused
    assert isinstance(found, CapsNetOutput)
    assert_alike(found, wanted, list(model.parameters()))


@on_cpu
def test_autoencoder_decodes_all_capsules(by: Backend) -> None:
    model = network("CapsAutoEncoder", backend=by.name, dtype=torch.float64, init_std=0.5)
    x = images(torch.float64)
    found, wanted = model(x), plain_capsnet(model, x, None)
    assert_alike(found, wanted, list(model.parameters()))
    changed = found.capsules.detach().clone()
    changed[:, 3] = 0
    assert not torch.allclose(model.reconstruct(changed), model.reconstruct(found.capsules))


@on_cpu
def test_deepcaps_is_cells_with_skip_connections(by: Backend) -> None:
    model = network("DeepCaps", backend=by.name, dtype=torch.float64, reconstruction=False, eps=1e-8).train()
    with torch.no_grad():
        model.routing.W.mul_(20)  # so that couplings differ
        model.cells[2].skip.conv.weight.mul_(5)
    x = images(torch.float64)
    found, wanted = model(x), plain_deepcaps(model, x)
    assert_alike(found[:2], wanted[:2], list(model.parameters()))


def test_capsnet_has_the_papers_parameters() -> None:
    """8.2 million with the decoder, 6.8 million without (Sabour et al. 2017, section 5)."""
    model = CapsNet(device="meta")
    assert parameters_of(model.conv) == 9 * 9 * 256 + 256 == 20_992
    assert parameters_of(model.primary) == 9 * 9 * 256 * (32 * 8) + 32 * 8 == 5_308_672
    assert parameters_of(model.routing) == 32 * 6 * 6 * 10 * 16 * 8 == 1_474_560
    decoder = 160 * 512 + 512 + 512 * 1024 + 1024 + 1024 * 784 + 784
    assert parameters_of(model.decoder) == decoder == 1_411_344
    assert parameters_of(model) == 20_992 + 5_308_672 + 1_474_560 + 1_411_344 == 8_215_568
    assert parameters_of(CapsNet(device="meta", reconstruction=False)) == 6_804_224


def test_deepcaps_has_the_authors_parameters() -> None:
    """13 359 424 for 64 x 64 x 3 without the decoder: the trained parameters of the authors' code."""
    for channels, size, places, whole, drawn in (
        (3, 64, 8 * 8 + 4 * 4, 13_359_424, 67_571),
        (1, 28, 4 * 4 + 2 * 2, 8_441_920, 58_417),
    ):
        model = DeepCaps(channels, size, device="meta")
        assert parameters_of(model.conv) == 9 * 128 * channels + 128 and parameters_of(model.norm) == 2 * 128
        narrow, wide = 9 * 128 * 128, 9 * 256 * 256
        routed = 9 * 8 * 32 * 8 + 32 * 8
        cells = [4 * narrow, 9 * 128 * 256 + 3 * wide, 4 * wide, 3 * wide + routed]
        assert [parameters_of(cell) for cell in model.cells] == cells
        assert parameters_of(model.routing) == 32 * places * 10 * 32 * 8 + 10 * 32
        start, convs = 8 if size == 64 else 7, (16, 64, 32, 16, 8, 3) if size == 64 else (16, 64, 32, 16, 1)
        decoder = 33 * 16 * start**2 + 2 * 16 + sum(9 * a * b + b for a, b in pairwise(convs))
        assert parameters_of(model.decoder) == decoder == drawn
        assert parameters_of(model) == whole + drawn


def test_deepcaps_starts_as_the_authors_code() -> None:
    torch.manual_seed(0)
    model = DeepCaps(conv_channels=32, types=8)
    stds = {
        "conv.weight": (2 / (9 * 33)) ** 0.5,
        "cells.1.down.conv.weight": (9 * 8 * 4 * 8 * 8) ** -0.25,
        "cells.3.skip.conv.weight": 0.88 * (2 / 72) ** 0.5,  # cut at two deviations
        "routing.W": 0.88 * (2 / (10 * 8 * 20 * 40)) ** 0.5,
        "routing.routing.bias": (2 / 42) ** 0.5,
        "decoder.start.weight": (2 / (32 + 16 * 49)) ** 0.5,
        "decoder.convs.1.weight": (2 / (9 * 96)) ** 0.5,
    }
    for name, std in stds.items():
        assert model.get_parameter(name).std().item() == pytest.approx(std, rel=0.1), name


@pytest.mark.parametrize(("size", "kernel", "grid"), SIZES, ids=str)
def test_primary_capsules_follow_from_the_image(size: Any, kernel: int, grid: tuple[int, int]) -> None:
    model = network("CapsNet", size, 3)
    assert model.conv.kernel_size == model.primary.conv.kernel_size == (kernel, kernel)
    assert model.encode(torch.rand(2, *model.image_shape)).shape == (2, 3 * grid[0] * grid[1], 4)
    assert network("CapsNet", 28, kernel_size=5).routing.in_caps == 3 * 10 * 10


@pytest.mark.parametrize(("size", "cells"), [(28, 4), (17, 4), (16, 3), (9, 3), (8, 2), ((64, 8), 2), (1, 2)], ids=str)
def test_small_images_have_fewer_cells(size: Any, cells: int) -> None:
    model = DeepCaps(1, size, device="meta")
    assert len(model.cells) == cells
    if size != 1:
        last = [n / 2**cells for n in model.image_shape[1:]]
        assert 1 < min(last) <= 2


def test_routing_options_reach_the_layer() -> None:
    model = network("CapsNet", squash="exp", softmax="in", shared_weight=True, bias=True)
    assert model.routing.squash == "exp" and model.routing.softmax == "in"
    assert model.routing.W.shape[0] == 1
    with pytest.raises(TypeError, match="learned_logit"):
        network("CapsNet", learned_logit=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_any_batch_size(strict: bool) -> None:
    model, batch = network("CapsNet"), torch.export.Dim("B")
    x, labels = images(), torch.tensor([0, 4, 2, 1])
    shapes = {"images": {0: batch}, "labels": {0: batch}}
    program = torch.export.export(model, (x, labels), dynamic_shapes=shapes, strict=strict)
    for rows in (2, 3):
        torch.testing.assert_close(program.module()(x[:rows], labels[:rows]), model(x[:rows], labels[:rows]))


def test_gradients_of_single_samples() -> None:
    model, loss = network("CapsNet", dtype=torch.float64), CapsNetLoss(reduction="none")
    x, labels = images(torch.float64), torch.tensor([0, 4, 2, 1])

    def loss_of_one(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        image, label = image[None], label[None]
        return loss(torch.func.functional_call(model, parameters, (image, label)), image, label).total[0]

    per_sample = torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0))
    found = per_sample(dict(model.named_parameters()), x, labels)
    for b in range(B):
        wanted = torch.autograd.grad(loss(model(x, labels), x, labels).total[b], list(model.parameters()))
        assert_same([found[name][b] for name, _ in model.named_parameters()], list(wanted))


def test_diagnosis_of_a_fresh_capsnet_is_clean() -> None:
    model = CapsNet(conv_channels=32, primary_groups=8)
    assert not capsfast.diagnose(model.routing, model.encode(torch.rand(20, 1, 28, 28))).findings


@pytest.mark.parametrize(("size", "stride", "in_caps"), [(28, 1, 1152), (44, 1, 6272), (64, 2, 3200), (96, 3, 3872)])
def test_larger_images_have_a_stride_and_not_more_capsules(
    size: int, stride: int, in_caps: int, tmp_path: Path
) -> None:
    model = CapsNet(1, size, 3, conv_channels=2, decoder_hidden=(4,))
    assert model.conv.stride == (stride, stride) and model.routing.in_caps == in_caps
    assert model(torch.rand(2, 1, size, size)).reconstruction.shape == (2, 1, size, size)
    model = CapsNet(
        1, size, 3, conv_channels=2, primary_groups=2, conv_stride=1, primary_stride=3, reconstruction=False
    )
    assert (
        model.routing.in_caps == 2 * ((size - 17) // 3 + 1) ** 2 == model.encode(torch.rand(1, 1, size, size)).shape[1]
    )
    pytest.importorskip("safetensors")
    model.save_pretrained(tmp_path)
    assert torch.equal(CapsNet.from_pretrained(tmp_path).routing.W, model.routing.W)
