"""Every layer, loss and network as a torch module: copies, checkpoints, dtypes, devices, compilation, gradients."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

import capsfast
from capsfast import models
from capsfast import nn as caps
from capsfast.nn import RoutedCaps, Routing

from .support.layers import (
    EACH_KIND,
    LAYERS,
    LOSSES,
    MODULES,
    NETWORKS,
    Row,
    assert_resets,
    made,
    network,
    results,
    without_samples,
)
from .support.plain import gradients
from .support.routings import cases

# Decoders mask all capsules but one, and another rounding may choose another capsule.
CHOOSES = ("decoder", "conv decoder")
# Under autocast their last step is in float32.
SUMMED_BY_TORCH = (
    *("em", "groups of em", "windows of text", "children", "classes", "everywhere", "slim em", "primary", "depthwise"),
    *("matrices", "vectors", "any vectors", "scored matrices", "any scored matrices"),
)
# Layers that store an activation between two steps, whose gradient has 16 bits, as in all of torch.
IN_STEPS = (
    *("votes", "groups of em", "classes", "classes of videos", "slim", "everywhere", "slim em", "slim up", "primary"),
    *("depthwise", "matrices", "decoder", "conv decoder", "interests", "vectors", "any vectors", "scored matrices"),
    *("any scored matrices", "routed dynamic", "routed self"),
)
each_module = pytest.mark.parametrize("name", MODULES)
each_layer = pytest.mark.parametrize("name", LAYERS)


def test_every_network_is_here() -> None:
    kinds = {name: getattr(models, name) for name in models.__all__ if isinstance(getattr(models, name), type)}
    assert {*NETWORKS} == {name for name, kind in kinds.items() if issubclass(kind, nn.Module)}


def saved(layer: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.rows(14)
@each_module
def test_copies_are_equal_and_apart(name: str) -> None:
    layer, given = made(name)
    with torch.no_grad():
        layer.train()(*given)  # changes statistics of the batch, which are part of the state
    wanted = results(layer.eval()(*given))
    loaded = made(name)[0].eval()
    for value in loaded.state_dict().values():
        value.zero_()
    loaded.load_state_dict(layer.state_dict())
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), saved(layer), loaded]
    for value in layer.state_dict().values():
        value.zero_()
    for other in copies:
        assert all(map(torch.equal, results(other(*given)), wanted)) and repr(other) == repr(layer)


def test_a_subclass_shows_what_the_layer_took() -> None:
    class Own(capsfast.DynamicRouting):
        def __init__(self) -> None:
            super().__init__(7, 4, 6, 5, squash="exp")

    assert "(\n  7, 4, 6, 5, num_iterations=3, squash='exp'\n" in repr(Own())


@each_layer
def test_dtypes(name: str) -> None:
    layer, given = made(name)
    wanted = results(layer(*given))
    with torch.autocast("cpu", torch.bfloat16):
        cast = results(layer(*given))
    if name not in SUMMED_BY_TORCH and not name.startswith("routed"):
        assert cast[0].dtype == torch.bfloat16
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        low = results(copy.deepcopy(layer).to(dtype)(*(tensor.to(dtype) for tensor in given)))
        assert {tensor.dtype for tensor in low} == {dtype}
        for found, right in [*zip(low, wanted, strict=True), *zip(cast, wanted, strict=True)]:
            if name not in CHOOSES:
                assert (found.float() - right).norm() <= 0.05 * right.norm()


@pytest.mark.rows(12)
@pytest.mark.parametrize("name", [name for name in MODULES if name not in LOSSES])
def test_meta_device(name: str) -> None:
    layer, given = made(name)
    with torch.device("meta"):
        other, (*absent,) = made(name)
    assert all(parameter.is_meta for parameter in other.parameters())
    assert [tensor.shape for tensor in results(other(*absent))] == [tensor.shape for tensor in results(layer(*given))]


def fresh() -> dict[str, Callable[[], nn.Module]]:
    """Every module as its constructor leaves it: each routing with each set of options, each form of a network."""
    classes: dict[str, Any] = {name: getattr(models, name) for name in NETWORKS}
    forms = [*NETWORKS.items(), ("SegCaps", {"form": "r3"}), ("EfficientCapsNet", {"norm": "instance"})]
    forms += [("DeepCaps", {**NETWORKS["DeepCaps"], "routing": "em"}), ("MatrixCapsNet", {"form": "variational"})]
    makers = {name: row[0] for name, row in MODULES.items() if not name.startswith("routed") and name not in NETWORKS}
    makers |= {f"{n} {name}": partial(classes[name], 2, 24, 5, **more) for n, (name, more) in enumerate(forms)}
    makers |= {
        f"{n} routed {name}": partial(RoutedCaps, 12, 6, 3, 4, routing=name, **options)
        for n, (name, options) in enumerate([*cases(), ("dynamic", {"bias": True})])
    }
    return makers


@pytest.mark.rows(100)
@pytest.mark.parametrize("name", fresh())
def test_a_reset_makes_a_new_module(name: str) -> None:
    assert_resets(fresh()[name])


class Scaled(Routing):
    def __init__(self, *sizes: int, device: Any = None, dtype: Any = None, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.scale = nn.Parameter(torch.ones(2, device=device, dtype=dtype))


class Optional(Routing):
    def __init__(self, *sizes: int, **factory_kwargs: Any) -> None:
        super().__init__(*sizes, **factory_kwargs)
        self.register_parameter("scale", None)
        self.register_buffer("shift", None)


class Listed(Routing):
    def __init__(self, *sizes: int, device: Any = None, dtype: Any = None, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.steps = nn.ParameterList(torch.empty(2, device=device, dtype=dtype) for _ in range(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for step in self.steps:
            nn.init.normal_(step)


class Rescaled(Scaled):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.ones_(self.scale)


def test_a_part_without_a_reset_is_refused_before_any_change() -> None:
    layer = RoutedCaps(3, 2, 4, 5, routing=Scaled)
    changed = capsfast.DynamicRouting(3, 2, 4, 5)
    parametrize.register_parametrization(changed, "W", nn.Identity())
    for each, said in ((layer, "routing, a Scaled that holds scale"), (changed, r"parametrizations\.W, a Param")):
        before = copy.deepcopy(each.state_dict())
        with pytest.raises(TypeError, match=f"reset_parameters needs that of every part, got {said}"):
            each.reset_parameters()
        torch.testing.assert_close(each.state_dict(), before, rtol=0, atol=0)
    for routing in (Rescaled, Optional, Listed):
        assert_resets(partial(RoutedCaps, 3, 2, 4, 5, routing=routing))


@each_layer
def test_every_parameter_gets_a_gradient(name: str) -> None:
    layer, given = made(name)
    u = given[0].requires_grad_()
    sum(result.square().sum() for result in results(layer(*given))).backward()  # type: ignore[union-attr]
    for each, parameter in [("u", u), *layer.named_parameters()]:
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), each


@pytest.mark.rows(3)
@pytest.mark.parametrize("name", [*LOSSES, *EACH_KIND])
def test_compiles_without_a_graph_break(name: str) -> None:
    """What becomes of the graph is tested for networks (test_networks.py) and ops (test_integration.py)."""
    layer, _ = made(name)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    for batch in (3, 4):
        _, given = made(name, batch)
        leaves = [result.requires_grad_() for result in results(given)]
        leaves += layer.parameters()
        found, wanted = results(compiled(*given)), results(layer(*given))
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(gradients(found, leaves), gradients(wanted, leaves), rtol=1e-4, atol=1e-5)


# Layers without parameters.
OTHERS: dict[str, Row] = {
    "length": (caps.Length, (6, 4)),
    "mask": (caps.Mask, (6, 4)),
    "flat": (caps.FlattenCaps, (4, 3, 5, 6)),
    "flat text": (caps.FlattenCaps, (4, 3, 5)),
    "view": (lambda: caps.PrimaryCaps(3, 4, 5, 3, order="view"), (3, 9, 7)),
    "label attention": (caps.LabelAwareAttention, (6, 4), (4,)),
}


@pytest.mark.rows(30)
@pytest.mark.parametrize("name", [*MODULES, *OTHERS])
def test_no_sample(name: str) -> None:
    """A loss of no sample is NaN, as torch's are."""
    found = without_samples(lambda batch: made(name, batch, {**MODULES, **OTHERS}))
    assert name not in LAYERS or {len(each) for each in found} == {0}
    if name in NETWORKS:
        without_samples(lambda batch: (network(name).train(), made(name, batch)[1]))


@pytest.mark.parametrize("name", [layer for layer in LAYERS if "WA" not in layer and layer not in IN_STEPS])
def test_a_gradient_in_16_bits_is_rounded_after_the_sum_over_the_batch(name: str) -> None:
    """Two samples nearly cancel. What is left would be off by 1e-2 and more if each were rounded first."""
    layer, inputs = made(name, 1)
    layer = layer.to(torch.bfloat16)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        module = copy.deepcopy(layer).to(dtype)
        leaves = tree_leaves(module(*(torch.cat([value, value]).to(torch.bfloat16).to(dtype) for value in inputs)))
        outputs = [out for out in leaves if out.requires_grad]
        draw = torch.Generator().manual_seed(1)
        received = []
        for out in outputs:
            one = torch.randn(out.shape[1:], generator=draw).to(torch.bfloat16)
            received.append(torch.stack([one, -one * (1 - 1 / 16)]).to(dtype))
        gradients = torch.autograd.grad(outputs, [*module.parameters()], received, allow_unused=True)
        found.append([gradient for gradient in gradients if gradient is not None])
    for got, truth in zip(*found, strict=True):
        assert (got.double() - truth).norm() <= 8e-3 * truth.norm()
