"""Numbers of NumPy as sizes and options: a layer holds Python's numbers."""

import inspect
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import capsfast
from capsfast import compat, models, nn
from capsfast.nn._layer import Layer

from .support.layers import CLASSES, NETWORKS

I, J, K, D = 12, 6, 4, 4
# Arguments without a default, and values for options whose default is None.
FULLY: dict[str, Any] = {"in_caps": I, "out_caps": J, "in_dim": K, "out_dim": D}
WINDOWS: dict[str, Any] = {"in_types": 2, "out_types": 3, "in_dim": K, "out_dim": D}
LAYERS: dict[str, dict[str, Any]] = {
    **{
        f"nn.{name}": FULLY
        for name in nn.__all__
        if name.endswith("Routing") and name not in ("RoutingByAgreement", "MatrixRouting", "VectorRouting")
    },
    "nn.DynamicRouting": FULLY,
    "nn.RoutedCaps": {**FULLY, "init_std": 0.5, "pose_rows": 2},
    "nn.EMRouting": {**FULLY, "inverse_temperature": [0.5, 1.0, 2.0], "initial_beta_u": -0.5, "cost_scale": 2.0},
    "nn.VariationalRouting": {**FULLY, "nu": 8.0},
    "nn.MatrixRouting": {**FULLY, "pose_rows": 2},
    "nn.VectorRouting": FULLY,
    "nn.RoutingByAgreement": {},
    "nn.ConvCaps2d": {**WINDOWS, "init_std": 0.5, "num_iterations": 2, "kernel_size": (3, 2)},
    "nn.ConvCaps1d": WINDOWS,
    "nn.ConvCaps3d": {**WINDOWS, "padding": (0, 1, 2)},
    "nn.ClassCaps1d": {"in_types": 2, "out_caps": 3, "in_dim": K, "out_dim": D, "size": 3},
    "nn.ClassCaps3d": {"in_types": 2, "out_caps": 3, "in_dim": K, "out_dim": D, "size": (3, 2, 1)},
    "nn.ClassCaps2d": {"in_types": 2, "out_caps": 3, "in_dim": K, "out_dim": D, "size": (3, 2), "pose_rows": 2}
    | {"coordinates": (0.5, 2.0)},
    "nn.SlimConvCaps2d": {**WINDOWS, "init_std": 0.5, "num_iterations": 2},
    "nn.SlimConvTransposeCaps3d": WINDOWS,
    "nn.PrimaryCaps": {"in_channels": 3, "types": 4, "dim": 2, "kernel_size": 3},
    "nn.DepthwisePrimaryCaps": {"types": 4, "dim": 2, "kernel_size": 3},
    "nn.PrimaryMatrixCaps": {"in_channels": 3, "types": 4, "dim": 4, "activation_std": 0.5},
    "nn.Decoder": {"num_caps": J, "dim": D, "image_shape": (1, 6, 5), "hidden": (7, 5)},
    "nn.ConvDecoder": {"num_caps": J, "dim": D, "image_shape": (1, 8, 8), "channels": (4, 3)},
    "nn.InterestCapsules": {"num_interests": J, "in_dim": K, "out_dim": D, "max_length": I, "init_std": 0.5},
    "nn.LabelAwareAttention": {"power": 2.0},
    **{f"nn.{name}": {} for name in ("CapsNetLoss", "MarginLoss", "SpreadLoss")},
    "nn.FullWeight": {"positions": 4},
    "nn.LowRank": {"rank": 2, "positions": 4},
    "nn.Groups": {"groups": 2},
    "models.Sparsity": {},
    **{
        f"models.{name}": {"in_channels": 2, "image_size": (12, 10), **more}
        | ({} if name == "CapsAutoEncoder" else {"num_classes": CLASSES})
        for name, more in NETWORKS.items()
    },
    "models.CapsNet": {"in_channels": 2, "image_size": 28, "num_classes": CLASSES, "num_iterations": 2},
    "compat.CapsuleLayer": {"num_capsules": J, "num_route_nodes": I, "in_channels": K, "out_channels": D},
    "compat.DigitCaps": {"num_lower": I, "num_higher": J, "lower_dim": K, "higher_dim": D},
}


def numpy_of(value: Any) -> Any:
    """The same with NumPy's numbers. float32 where it holds the number."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(numpy_of, value))
    if isinstance(value, Mapping):
        return {name: numpy_of(each) for name, each in value.items()}
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return np.int64(value)
    if isinstance(value, float):
        return np.float32(value) if float(np.float32(value)) == value else np.float64(value)
    return value


def constructor(name: str) -> Any:
    folder, _, own = name.partition(".")
    return getattr({"nn": nn, "models": models, "compat": compat}[folder], own)


def arguments(name: str) -> dict[str, Any]:
    """Every argument of the constructor that is a number, or holds some."""
    signature = inspect.signature(constructor(name)).parameters
    defaults = (
        {parameter.name: parameter.default for parameter in signature.values()}
        if name.partition(".")[0] != "compat"
        else {}
    )
    numbers = {key: value for key, value in defaults.items() if value != numpy_of(value) or _number(value)}
    return {**numbers, **LAYERS[name]}


def _number(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_number, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def held(value: Any, seen: set[int]) -> None:
    """Asserts that a module, or what it holds, has no number of NumPy."""
    assert type(value).__module__ != "numpy", value
    if id(value) in seen:
        return
    seen.add(id(value))
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, torch.nn.Module) or type(value).__module__.startswith("capsfast"):
        parts = getattr(value, "__dict__", {}).values()
    for part in parts:
        held(part, seen)


@pytest.mark.parametrize("name", LAYERS)
def test_constructors(name: str) -> None:
    make, given = constructor(name), arguments(name)
    torch.manual_seed(0)
    wanted = make(**given)
    torch.manual_seed(0)
    got = make(**numpy_of(given))
    assert repr(got) == repr(wanted)
    held(got, set())
    if isinstance(got, torch.nn.Module):
        for (key, one), (other, two) in zip(got.state_dict().items(), wanted.state_dict().items(), strict=True):
            assert key == other and torch.equal(one, two)
    if isinstance(got, models._network.Network):
        assert json.dumps(got._options("")) == json.dumps(wanted._options(""))


@pytest.mark.parametrize("name", LAYERS)
def test_numbers_that_make_no_sense(name: str) -> None:
    make, given = constructor(name), arguments(name)
    for key, value in given.items():
        if isinstance(value, float):
            for wrong in (math.nan, np.float32("nan"), -math.inf, np.float64("inf")):
                if key != "power" or wrong != math.inf:
                    with pytest.raises(ValueError, match=key):
                        make(**{**given, key: wrong})
        if isinstance(value, int) and not isinstance(value, bool):
            for wrong in (True, 1.5, np.float64(2), np.bool_(True), "2"):
                with pytest.raises(TypeError, match=key):
                    make(**{**given, key: wrong})


u, weight, votes = torch.rand(3, I, K), torch.rand(I, J, D, K), torch.rand(3, I, J, D)
CALLS: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "squash": lambda n: capsfast.squash(u, n(1), n(0.5)),
    "dynamic_routing": lambda n: capsfast.dynamic_routing(u, weight, n(2), eps=n(0.5)),
    "route_votes": lambda n: capsfast.route_votes(votes, n(2), eps=n(0.5)),
    "averaged_routing": lambda n: compat.averaged_routing(u, weight, n(2), eps=n(0.5)),
    "masked_after_routing": lambda n: compat.masked_after_routing(
        u, weight, n(2), eps=n(0.5), mask=torch.ones(3, I, dtype=torch.bool)
    ),
    "batch size": lambda n: nn.RoutingByAgreement()(votes, n(3)),
    "spread loss": lambda n: nn.SpreadLoss()(torch.eye(4), torch.arange(4), n(5)),
}


@pytest.mark.parametrize("name", CALLS)
def test_functions(name: str) -> None:
    call = CALLS[name]
    wanted = call(lambda value: value)
    for kind in (numpy_of, np.array):
        assert torch.equal(call(kind), wanted)
    if name != "spread loss":  # which takes any step
        for wrong in (True, 1.5, None) if name != "batch size" else (True, 1.5):
            with pytest.raises(TypeError, match=r"an int|a number"):
                call(lambda value: wrong if isinstance(value, int) else value)  # noqa: B023
    for wrong in (math.nan, np.float32("nan"), math.inf):
        if name not in ("batch size", "spread loss"):
            with pytest.raises(ValueError, match="eps must be positive and finite"):
                call(lambda value: wrong if isinstance(value, float) else value)  # noqa: B023


def test_every_public_layer_is_here() -> None:
    public = {
        f"{folder}.{name}"
        for folder, module in (("nn", nn), ("models", models))
        for name in module.__all__
        if inspect.isclass(getattr(module, name)) and issubclass(getattr(module, name), Layer)
    }
    numbered = {name for name in public if arguments_of(name)}
    twins = {"nn.ClassCaps", "nn.DigitCaps", "nn.SlimConvCaps3d", "nn.SlimConvTransposeCaps2d", "nn.Routing"}
    assert numbered - LAYERS.keys() - twins == set()


def arguments_of(name: str) -> list[str]:
    parameters = inspect.signature(constructor(name)).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if "int" in str(parameter.annotation) or "float" in str(parameter.annotation)
    ]


def test_training(tmp_path: Path) -> None:
    """Checkpoints hold the options. A seed of NumPy gives the same draws."""
    pytest.importorskip("lightning")
    from capsfast import train
    from capsfast.data import BatchOrder

    images = torch.rand(2, 1, 3, 3)

    def found(n: Callable[[Any], Any]) -> list[Any]:
        sizes = n({"in_channels": 1, "image_size": 8, "num_classes": 10, "lr": 0.5, "clip": 0.25, "seed": 3})
        learner = train.Learner("cnn", **sizes, options=n({"channels": [4, 4], "hidden": [3], "kernel_size": 3}))
        options = n({"batch_size": 4, "shift": 1, "brightness": 0.5, "hold_out": 0.25, "seed": 3})
        data = train.ImageData("digits", flip=np.True_ if n is numpy_of else True, **options)
        held([*learner.hparams.items(), *data.hparams.items(), *data.options.items()], set())
        rows = [draw.rows for draw in BatchOrder(n(9), n(2), shuffle=True, seed=n(3))]
        trainer = train.make_trainer(tmp_path, epochs=n(2), checkpoint_every=n(5), max_steps=n(7), accelerator="cpu")
        held([trainer.max_epochs, trainer.max_steps, [vars(callback) for callback in trainer.callbacks]], set())
        counted = train.evaluate(learner, data.sets.test, limit=n(6), batch_size=n(4)) if n is numpy_of else None
        assert counted is None or counted.images == 6
        moved = train.fgsm(lambda x: x.sum(), images, n(0.5)), train.pgd(torch.sum, images, n(0.5), steps=n(2))
        return [*learner.model.parameters(), *rows, *moved]

    assert all(map(torch.equal, found(numpy_of), found(lambda value: value)))
    for wrong in (math.nan, np.float32("nan"), np.float64("inf")):
        for call in (train.fgsm, train.pgd):
            with pytest.raises(ValueError, match="eps must be 0 or positive and finite"):
                call(torch.sum, images, wrong)
        for name in ("lr", "weight_decay", "decay_rate", "clip", "reconstruction_weight"):
            with pytest.raises(ValueError, match=name):
                train.Learner("cnn", **{name: wrong})
