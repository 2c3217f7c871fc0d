"""Every layer as a torch module: copies, checkpoints, dtypes, devices, compilation, gradients."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import capsfast
from capsfast.nn import (
    ClassCaps2d,
    ConvCaps2d,
    ConvDecoder,
    Decoder,
    DepthwisePrimaryCaps,
    Groups,
    InterestCapsules,
    LowRank,
    MatrixRouting,
    PrimaryCaps,
    PrimaryMatrixCaps,
    RoutedCaps,
    RoutingByAgreement,
    SlimConvCaps2d,
    SlimConvTransposeCaps3d,
    VectorRouting,
    Weight,
)

from .test_nn_variants import WEIGHTS

I, J, K, D = 12, 6, 3, 4


def dense(**options: Any) -> nn.Module:
    return capsfast.DynamicRouting(I, J, K, D, **options)


def interests(**options: Any) -> nn.Module:
    return InterestCapsules(J, K, D, max_length=I, **options)


def of_weight(weight: Weight) -> Callable[[], nn.Module]:
    return lambda: dense(weight=weight)


# Every layer with its inputs, without the batch.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    **{repr(weight): (of_weight(weight), ((I, K),)) for weight in WEIGHTS},
    "learned": (lambda: dense(learned_logits=True, bias=True), ((I, K),)),
    "options": (lambda: dense(softmax="in", gradient="last", leaky=True, squash="half", eps=1e-4), ((I, K),)),
    "sums": (lambda: dense(squash_last=False), ((I, K),)),
    "votes": (lambda: RoutingByAgreement(2, leaky=True), ((I, J, D),)),
    "em": (lambda: RoutedCaps(I, J, 4, 6, routing="em", pose_rows=2), ((I, 4), (I,))),
    "groups of em": (lambda: RoutedCaps(I, J, K, D, routing="em", weight=Groups(2, LowRank(2))), ((I, K), (I,))),
    "windows": (lambda: ConvCaps2d(4, J, K, D, padding=1, softmax="in"), ((4, K, 5, 6),)),
    "groups of windows": (lambda: ConvCaps2d(4, J, K, D, dilation=2, weight=Groups(2)), ((4, K, 5, 6),)),
    "children": (lambda: ConvCaps2d(4, J, K, D, routing="em", competition="child"), ((4, K, 5, 6), (4, 5, 6))),
    "classes": (lambda: ClassCaps2d(2, J, 4, 4, 3, pose_rows=2), ((2, 4, 3, 3),)),
    "slim": (lambda: SlimConvCaps2d(4, J, K, D, 2, learned_logits=True, bias=True), ((4, K, 5, 6),)),
    "everywhere": (lambda: SlimConvCaps2d(4, J, K, D, softmax="everywhere", squash="unit"), ((4, K, 5, 6),)),
    "slim em": (lambda: SlimConvCaps2d(4, J, K, D, routing="em"), ((4, K, 5, 6), (4, 5, 6))),
    "slim up": (lambda: SlimConvTransposeCaps3d(4, J, K, D, 2), ((4, K, 3, 3, 3),)),
    "primary": (lambda: PrimaryCaps(3, 4, K, 3), ((3, 9, 7),)),
    "depthwise": (lambda: DepthwisePrimaryCaps(4, K, 3), ((12, 9, 7),)),
    "matrices": (lambda: PrimaryMatrixCaps(3, 4, 4), ((3, 5, 5),)),
    "decoder": (lambda: Decoder(J, D, (1, 6, 6)), ((J, D),)),
    "conv decoder": (lambda: ConvDecoder(J, D, (1, 6, 6), class_independent=True), ((J, D),)),
    "interests": (lambda: interests(projection="linear"), ((I, K),)),
    "interests by passes": (lambda: interests(update="overwrite", squash_power=0.5), ((I, K),)),
    "interests by votes": (lambda: interests(weight="output", gradient="last", count="floor"), ((I, K),)),
    "vectors": (lambda: VectorRouting(I, J, K, D, normalize=False), ((I, K),)),
    "any vectors": (lambda: VectorRouting(None, J, K, D, normalize=False), ((I, K),)),
    "scored matrices": (lambda: MatrixRouting(I, J, 4, 6, 2), ((I, 4), (I,))),
    "any scored matrices": (lambda: MatrixRouting(None, J, 4, 6, 2, model="k-means"), ((I, 4), (I,))),
}
# Decoders mask all capsules but one, and another rounding may choose another capsule.
CHOOSES = ("decoder", "conv decoder")
# Under autocast their last step is in float32.
SUMMED_BY_TORCH = (
    "em",
    "groups of em",
    "children",
    "classes",
    "everywhere",
    "slim em",
    "primary",
    "depthwise",
    "matrices",
    "vectors",
    "any vectors",
    "scored matrices",
    "any scored matrices",
)
each_layer = pytest.mark.parametrize("name", LAYERS)


def layer_of(name: str, batch: int = 3) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    make, shapes = LAYERS[name]
    # Activations are not negative.
    return make(), [
        torch.randn(batch, *shape) if n == 0 else torch.rand(batch, *shape) for n, shape in enumerate(shapes)
    ]


def results(found: Any) -> list[Tensor]:
    return [each for each in tree_leaves(found) if each.is_floating_point()]


def saved(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


@each_layer
def test_copies_are_equal_and_apart(name: str) -> None:
    layer, given = layer_of(name)
    wanted = results(layer(*given))
    loaded = LAYERS[name][0]()
    loaded.load_state_dict(layer.state_dict())
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), saved(layer), loaded]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    for other in copies:
        assert all(map(torch.equal, results(other(*given)), wanted)) and repr(other) == repr(layer)


def test_a_subclass_shows_what_the_layer_took() -> None:
    class Own(capsfast.DynamicRouting):
        def __init__(self) -> None:
            super().__init__(7, 4, 6, 5, squash="exp")

    assert "(\n  7, 4, 6, 5, num_iterations=3, squash='exp'\n" in repr(Own())


@each_layer
def test_dtypes(name: str) -> None:
    layer, given = layer_of(name)
    wanted = results(layer(*given))
    with torch.autocast("cpu", torch.bfloat16):
        cast = results(layer(*given))
    if name not in SUMMED_BY_TORCH:
        assert cast[0].dtype == torch.bfloat16
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        low = results(copy.deepcopy(layer).to(dtype)(*(each.to(dtype) for each in given)))
        assert {each.dtype for each in low} == {dtype}
        for found, right in [*zip(low, wanted, strict=True), *zip(cast, wanted, strict=True)]:
            if name not in CHOOSES:
                assert (found.float() - right).norm() <= 0.05 * right.norm()


@each_layer
def test_meta_device(name: str) -> None:
    layer, given = layer_of(name)
    with torch.device("meta"):
        other = LAYERS[name][0]()
    assert all(parameter.is_meta for parameter in other.parameters())
    found = results(other(*(each.to("meta") for each in given)))
    assert [each.shape for each in found] == [each.shape for each in results(layer(*given))]


@each_layer
def test_every_parameter_gets_a_gradient(name: str) -> None:
    layer, given = layer_of(name)
    u = given[0].requires_grad_()
    sum(each.square().sum() for each in results(layer(*given))).backward()  # type: ignore[union-attr]
    for each, parameter in [("u", u), *layer.named_parameters()]:
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), each


@pytest.mark.rows(8)
@each_layer
def test_compiles_without_a_graph_break(name: str) -> None:
    layer, given = layer_of(name)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    torch.testing.assert_close(results(compiled(*given)), results(layer(*given)))
    _, more = layer_of(name, 4)
    torch.testing.assert_close(results(compiled(*more)), results(layer(*more)))


@each_layer
def test_no_sample(name: str) -> None:
    layer, given = layer_of(name, 0)
    assert {len(each) for each in results(layer(*given))} == {0}
