"""Layers of windows that route block by block, against the same layers that route all windows at once."""

import copy
import random
import re
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import capsfast
from capsfast import nn as caps
from capsfast.environment import native
from capsfast.nn import _blocks

from .support.backends import recorded_ops
from .support.layers import results
from .support.plain import assert_same, gradients

f64 = torch.float64
AXES = {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 1), "dilation": (2, 3)}
CASES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "conv": (caps.ConvCaps2d, {}),
    "conv axes": (caps.ConvCaps2d, AXES),
    "conv wide padding": (caps.ConvCaps2d, {"padding": 6}),
    "conv in": (caps.ConvCaps2d, {"softmax": "in", "padding": 1}),
    "conv matrices": (caps.ConvCaps2d, {"pose_rows": 2, "padding": 1}),
    "conv groups": (caps.ConvCaps2d, {"weight": caps.Groups(2), "padding": 1}),
    "conv low rank": (caps.ConvCaps2d, {"weight": caps.LowRank(2)}),
    "conv logits": (caps.ConvCaps2d, {"learned_logits": True, "bias": True, "gradient": "last"}),
    **{
        f"conv {name}": (caps.ConvCaps2d, {"routing": name, "padding": 1})
        for name in ("attention", "cosine", "em", "inverted-attention", "k-means", "self", "self-attention")
    },
    "conv variational": (caps.ConvCaps2d, {"routing": "variational", "batch_norm": False, "padding": 1}),
    "conv 1-D": (caps.ConvCaps1d, {"routing": "em", "stride": 2, "padding": (2,), "dilation": 2}),
    "conv 3-D": (caps.ConvCaps3d, {"padding": 1}),
    "conv 3-D axes": (
        caps.ConvCaps3d,
        {"routing": "em", "kernel_size": (2, 1, 3), "padding": (0, 0, 2), "dilation": 2},
    ),
    "slim": (caps.SlimConvCaps2d, {"padding": 1}),
    "slim axes": (caps.SlimConvCaps2d, {**AXES, "conv_bias": True}),
    "slim em": (caps.SlimConvCaps2d, {"routing": "em", "padding": 1, "stride": 2}),
    "slim own kernels": (caps.SlimConvCaps2d, {"shared": False}),
    "slim 3-D": (caps.SlimConvCaps3d, {"padding": 1, "routing": "em"}),
    "up": (caps.SlimConvTransposeCaps2d, {"conv_bias": True}),
    "transposed gaps": (caps.SlimConvTransposeCaps2d, {"kernel_size": 2, "stride": 3, "padding": 0}),
    "up, em": (caps.SlimConvTransposeCaps2d, {"routing": "em", "kernel_size": 3, "dilation": 2, "padding": 2}),
    "up, 3-D": (caps.SlimConvTransposeCaps3d, {}),
}


def blocks(monkeypatch: pytest.MonkeyPatch, nbytes: int, growth: float = 100.0) -> None:
    """``growth``: results of ops may take so many times the bytes of the poses; with 0 the backward has none."""
    monkeypatch.setattr(_blocks, "limits", lambda poses: _blocks.Limits(nbytes, int(growth * poses.nbytes)))
    monkeypatch.setattr(_blocks, "AT_ONCE", 0 if growth else 2**40)


def layer_and_images(name: str, dtype: torch.dtype = f64) -> tuple[Any, list[Tensor]]:
    kind, options = CASES[name]
    torch.manual_seed(0)
    layer: Any = kind(2, 4, 4, 6, **{"kernel_size": 3, **options}, dtype=dtype)
    size = {"1d": (11,), "2d": (7, 8), "3d": (4, 3, 5)}[kind.__name__[-2:]]
    images = [torch.randn(2, 2, 4, *size, dtype=dtype)]
    if options.get("routing") == "em":
        images.append(torch.rand(2, 2, *size, dtype=dtype))
    return layer, [image.requires_grad_() for image in images]


def everything(layer: nn.Module, images: list[Tensor]) -> list[Tensor]:
    """Output capsules and all gradients."""
    found = results(layer(*images))
    return [*found, *gradients(found, [*images, *layer.parameters()])]


@pytest.mark.rows(8)
@pytest.mark.parametrize(("name", "growth"), [("conv", 100.0), ("conv", 3.0), *zip(CASES, cycle((0.0, 3.0, 100.0)))])
def test_blocks_are_the_whole_image(name: str, growth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, images = layer_and_images(name)
    wanted = everything(layer, images)
    for nbytes in (1, 2**14):  # a window, some rows
        blocks(monkeypatch, nbytes, growth)
        assert_same(everything(layer, images), wanted)


@pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["conv", "conv em", "conv cosine", "slim"])
def test_ops_whose_results_are_kept_run_once(name: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    some_fit = {"conv em": 20.0, "slim": 1.0}.get(name, 3.0)
    for growth in (1000.0, 0.0, some_fit):
        blocks(monkeypatch, 2**12, growth)
        layer, images = layer_and_images(name, torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), recorded_ops() as forward:
            out = results(layer(*images))
        with recorded_ops() as backward:
            gradients(out, [*images, *layer.parameters()])
        of_both = (list(filter(re.compile(r"capsfast::\w+_(routing|pass)$").match, ops)) for ops in (forward, backward))
        counts.append(tuple(map(len, of_both)))
    (once, again), (none_kept, all_again), (some, others_again) = counts
    assert again == 0 and once == none_kept == all_again == some > 1
    assert 0 < others_again < once


def test_second_derivatives_are_those_of_the_whole_image(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks(monkeypatch, 600)
    layer = caps.ConvCaps2d(1, 2, 2, 2, 2, routing="em", num_iterations=2, backend="reference", dtype=f64)
    poses = torch.randn(1, 1, 2, 3, 3, dtype=f64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x).poses, poses)


@pytest.mark.parametrize("name", ["conv em", "slim"])
def test_gradients_in_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks(monkeypatch, 2**12)
    layer, images = layer_and_images(name)
    found = results(layer(*images))[0]
    upstream = torch.randn(2, *found.shape, dtype=f64)
    (batched,) = torch.autograd.grad(found, images[0], upstream, is_grads_batched=True, retain_graph=True)
    for each, wanted in zip(upstream, batched, strict=True):
        torch.testing.assert_close(torch.autograd.grad(found, images[0], each, retain_graph=True)[0], wanted)


def test_other_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.func.functional_call lends parameters, which are gone when the backward routes the block again."""
    blocks(monkeypatch, 2**12, 0.0)
    layer, images = layer_and_images("conv")
    other = copy.deepcopy(layer)
    nn.init.normal_(other.routing.W)
    W = other.routing.W.detach().clone().requires_grad_()
    found = torch.func.functional_call(layer, {"routing.W": W}, tuple(images))
    assert_same(gradients(found, [images[0], W]), gradients(other(*images), [images[0], other.routing.W]))


def test_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("conv", "slim", "conv em"):
        layer, images = layer_and_images(name, torch.float32)
        found = []
        for nbytes in (2**23, 2**12):
            blocks(monkeypatch, nbytes, 1.0)
            with torch.autocast("cpu", torch.bfloat16):
                found.append(everything(layer, images))
        for a, b in zip(*found, strict=True):
            assert a.dtype == b.dtype and (a - b).norm() <= 0.05 * max(1.0, float(b.detach().norm()))


def test_transforms_see_the_whole_image(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks(monkeypatch, 2**12)
    layer, (poses,) = layer_and_images("conv")
    each = torch.func.vmap(lambda image: layer(image.unsqueeze(0)).squeeze(0))(poses)
    torch.testing.assert_close(each, layer(poses))
    exported = torch.export.export(layer, (poses.detach(),)).module()
    torch.testing.assert_close(exported(poses.detach()), layer(poses))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # votes are no tensor
@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
@pytest.mark.parametrize(("name", "part"), [("conv", "routing"), ("conv", "routing.routing"), ("slim", "conv")])
def test_hooks_of_parts_are_called_once(name: str, part: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks(monkeypatch, 2**12)
    layer, images = layer_and_images(name)
    calls: list[int] = []
    getattr(layer.get_submodule(part), f"register_{kind}_hook")(lambda *given: calls.append(1))
    everything(layer, images)
    assert len(calls) == 1


@pytest.mark.parametrize(("name", "part"), [("conv", "routing.W"), ("slim own kernels", "conv.weight")])
def test_a_random_parametrization_is_drawn_once(name: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks(monkeypatch, 2**12)
    layer, (poses,) = layer_and_images(name)
    owner, _, tensor = part.rpartition(".")
    nn.utils.parametrize.register_parametrization(layer.get_submodule(owner), tensor, nn.Dropout())
    at_places = layer(torch.ones_like(poses)).flatten(3)
    torch.testing.assert_close(at_places, at_places[..., :1].expand_as(at_places))


def test_poses_that_are_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaf that is a view of a tensor without a gradient."""
    layer, (poses,) = layer_and_images("conv")
    viewed = poses.detach().movedim(2, -1).contiguous().movedim(-1, 2).requires_grad_()
    wanted = everything(layer, [poses])
    blocks(monkeypatch, 2**12)
    assert_same(everything(layer, [viewed]), wanted)


class OfTheBatch(caps.Routing):
    """A user's routing that does not say that samples are independent."""

    def route(self, votes: Any, activation: Tensor | None) -> tuple[Tensor, Tensor]:
        poses = votes.moments().first
        return poses - poses.mean(0), poses.norm(dim=2)


@pytest.mark.parametrize("routing", [OfTheBatch, "variational"])
def test_a_routing_that_mixes_samples_sees_all(routing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = caps.ConvCaps2d(2, 3, 4, 5, routing=routing, dtype=f64)
    poses = torch.randn(2, 2, 4, 6, 6, dtype=f64)
    wanted: caps.Capsules = layer(poses)
    blocks(monkeypatch, 2**12)
    torch.testing.assert_close(layer(poses).poses, wanted.poses)


def test_hooks_of_tensors_see_whole_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that a block called would change its share, and the sum once more."""
    layer, (poses,) = layer_and_images("conv")
    wanted = everything(layer, [poses])
    blocks(monkeypatch, 2**12)
    hooks = [tensor.register_hook(lambda gradient: 2.0 * gradient) for tensor in (poses, layer.routing.W)]
    found = everything(layer, [poses])
    assert_same(found, [wanted[0], 2.0 * wanted[1], 2.0 * wanted[2]])
    out = layer(poses)
    (of_poses,) = torch.autograd.grad(out, poses, torch.ones_like(out), create_graph=False, retain_graph=True)
    batch = torch.ones(2, *out.shape, dtype=f64)
    (batched,) = torch.autograd.grad(out, poses, batch, is_grads_batched=True)
    assert_same([*batched], [of_poses, of_poses])
    for hook in hooks:
        hook.remove()


@pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")
@pytest.mark.parametrize("name", ["conv", "conv em", "conv cosine", "conv self-attention", "slim"])
def test_a_backward_under_other_conditions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward routes a block again if other ops gave the results of the forward."""
    layer, images = layer_and_images(name)
    wanted = everything(layer, images)
    blocks(monkeypatch, 2**12)
    tensors = [*images, *layer.parameters()]
    for forward, backward in (("reference", None), ("cpp", "reference")):
        with capsfast.use_backend(forward):  # type: ignore[arg-type]
            found = results(layer(*images))
        with capsfast.use_backend(backward):  # type: ignore[arg-type]
            assert_same([*found, *gradients(found, tensors)], wanted)
    with torch.device("cpu"):
        found = results(layer(*images))
    assert_same(gradients(found, tensors), wanted[len(found) :])
    found = results(layer(*images))
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    assert_same(gradients(found, images), wanted[len(found) :][: len(images)])


def test_results_that_are_kept_are_saved_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that checkpoints drop them, and torch.autograd.graph.save_on_cpu moves them."""
    layer, images = layer_and_images("conv")
    wanted = everything(layer, images)
    blocks(monkeypatch, 2**12)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone() if tensor.dtype == torch.uint8 else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = results(layer(*images))
    memory = [tensor for tensor in packed if tensor.dtype == torch.uint8]
    assert len(memory) == 1 and memory[0].numel() > found[0].nbytes
    memory[0].fill_(255)
    assert_same([*found, *gradients(found, [*images, *layer.parameters()])], wanted)
    checkpointed = torch.utils.checkpoint.checkpoint(layer, *images, use_reentrant=False)
    assert_same(gradients([checkpointed], [*images, *layer.parameters()]), wanted[1:])


class Nested(caps.Routing):
    """A user's routing that calls a layer of windows."""

    independent = True

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.inner = caps.ConvCaps1d(1, 1, 6, 6, 1, dtype=f64)

    def route(self, votes: Any, activation: Tensor | None) -> tuple[Tensor, Tensor]:
        first = votes.moments().first
        again = self.inner(first.movedim(1, 2).unsqueeze(1))[:, 0].movedim(1, 2)
        poses = votes.moments(query=again).first
        return poses, poses.norm(dim=2)


def test_layers_of_windows_inside_a_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = caps.ConvCaps2d(2, 4, 4, 6, routing=Nested, dtype=f64)
    poses = torch.randn(2, 2, 4, 7, 8, dtype=f64, requires_grad=True)
    wanted = everything(layer, [poses])
    blocks(monkeypatch, 2**11)
    assert_same(everything(layer, [poses]), wanted)


KINDS = (
    caps.ConvCaps1d,
    caps.ConvCaps2d,
    caps.ConvCaps3d,
    caps.SlimConvCaps2d,
    caps.SlimConvCaps3d,
    caps.SlimConvTransposeCaps2d,
    caps.SlimConvTransposeCaps3d,
)


def drawn_layer(draw: random.Random) -> tuple[Any, list[Tensor]]:
    """A random layer with random options, and images that fit it: poses, and perhaps activations."""
    kind, routing, groups = draw.choice(KINDS), draw.choice([*caps.ROUTINGS]), draw.choice([1, 1, 2])
    axes, slim = int(kind.__name__[-2]), kind.__name__.startswith("Slim")

    def numbers(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw.randint(least, most) for _ in range(axes))

    window = {
        "kernel_size": numbers(1, 3),
        "stride": numbers(1, 3),
        "padding": numbers(0, 2),
        "dilation": numbers(1, 2),
    }
    options: dict[str, Any] = {"backend": draw.choice([None, "reference"]), **window}
    in_types, out_types = (groups * draw.randint(1, 3) for _ in range(2))
    dim = draw.choice([2, 3, 4])
    if routing == "dynamic":
        options |= {name: draw.random() < 0.4 for name in ("learned_logits", "bias", "leaky")}
        options |= {"gradient": draw.choice(["full", "last"]), "num_iterations": draw.randint(1, 3)}
        options["softmax"] = draw.choice(["out", "in"])
    elif routing == "variational":
        options["batch_norm"] = False
    if slim:
        options |= {"shared": draw.random() < 0.5, "conv_bias": draw.random() < 0.5}
        routing = "cosine" if routing == "self" else routing  # self-routing needs the input capsules
    elif groups == 2:
        options["weight"] = caps.Groups(2)
    elif draw.random() < 0.5:
        options["weight"] = draw.choice([caps.LowRank(2), caps.SharedWeight()])
    elif draw.random() < 0.5:
        dim, options["pose_rows"] = 4, 2
    layer = kind(in_types, out_types, dim, dim, routing=routing, dtype=f64, **options)
    size = (6, 5, 5)[:axes] if axes < 3 else (3, 5, 4)
    size = tuple(max(n, 2 * (k - 1) + 1) for n, k in zip(size, window["kernel_size"], strict=True))
    images = [torch.randn(draw.randint(1, 3), in_types, dim, *size, dtype=f64)]
    if routing != "dynamic" and draw.random() < 0.7:
        images.append(torch.rand(images[0].shape[0], in_types, *size, dtype=f64))
    if draw.random() < 0.5:  # types after the places
        images = [image.movedim(1, -1).contiguous().movedim(-1, 1) for image in images]
    for tensor in (*images, *layer.parameters()):
        tensor.requires_grad_(draw.random() < 0.8)
    images[0].requires_grad_()
    return layer, images


@pytest.mark.rows(12)
@pytest.mark.parametrize("seed", range(60))
def test_random_layers_in_blocks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    layer, images = drawn_layer(draw)
    leaves = [tensor for tensor in (*images, *layer.parameters()) if tensor.requires_grad]

    def everything_now() -> list[Tensor]:
        found = results(layer(*images))
        return [*found, *gradients(found, leaves)]

    wanted = everything_now()
    for nbytes in (2**11, 2**13):
        blocks(monkeypatch, nbytes, draw.choice([0.0, 2.0, 1000.0]))
        assert_same(everything_now(), wanted)
