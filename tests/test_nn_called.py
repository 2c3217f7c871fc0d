"""Layers called or loaded as layers of other code: signatures, weights of other axes, and what their errors say."""

import functools
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import capsfast
import capsfast.compat
from capsfast import kinds

from .support import plain

I, J, K, D = 7, 4, 6, 5
SIZES = {"I": I, "J": J, "D": D, "K": K}


class Mine(capsfast.DynamicRouting):
    def __init__(self, size: int) -> None:
        super().__init__(I, J, K, size)


def configured(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def made(self: nn.Module, config: dict[str, int]) -> None:
        init(self, *config.values())

    return made


class Configured(capsfast.DynamicRouting):
    __init__ = configured(capsfast.DynamicRouting.__init__)


def test_signatures_are_real_and_the_constructor_of_a_subclass_is_its_own() -> None:
    for layer in (capsfast.DynamicRouting, capsfast.nn.DigitCaps):
        parameters = list(inspect.signature(layer).parameters)
        assert parameters[:5] == ["in_caps", "out_caps", "in_dim", "out_dim", "num_iterations"]
    assert list(inspect.signature(Mine).parameters) == ["size"]
    u = torch.randn(2, I, K)
    assert Mine(D)(u).shape == Configured({"in": I, "out": J, "in_dim": K, "out_dim": D})(u).shape == (2, J, D)
    for wrong in (Mine, Configured):
        with pytest.raises(TypeError, match=r"missing 1 required positional argument: '(size|config)'"):
            wrong()


@pytest.mark.parametrize(
    "layer", [capsfast.nn.RoutingByAgreement(), capsfast.compat.DynamicRouting(3)], ids=lambda layer: type(layer)
)
def test_a_tensor_in_the_place_of_the_batch_size(layer: nn.Module) -> None:
    votes = torch.randn(2, I, J, D)
    for wrong, got in ((torch.zeros(2, I, J), r"a float32 tensor \[2, 7, 4\]"), (2.0, "2.0"), (True, "True")):
        with pytest.raises(TypeError, match=f"batch_size must be an int, got {got}; logits"):
            layer(votes, wrong)
    assert torch.equal(layer(votes, 2), layer(votes)) and torch.equal(layer(votes, torch.tensor(2)), layer(votes))


def test_a_weight_with_one_more_axis_of_length_1_loads() -> None:
    W = torch.randn(1, I, J, D, K)
    for shared, rows in ((False, I), (True, 1)):
        layer = nn.Sequential(capsfast.DynamicRouting(I, J, K, D, shared_weight=shared))
        layer.load_state_dict({"0.W": W[:, :rows]})
        assert torch.equal(layer[0].W, W[0, :rows])


SHAPES = {order: kinds.shape_of(kinds.axes(order), SIZES) for order in kinds.CONVERSIONS if order != "1IJDK"}


@pytest.mark.parametrize("order", SHAPES)
def test_a_weight_of_other_axes_is_an_error_whose_remedy_loads_it(order: str) -> None:
    """Follows the remedy in the message; the votes must be the votes of the original weight."""
    layer = capsfast.DynamicRouting(I, J, K, D)
    w = torch.randn(SHAPES[order])
    with pytest.raises(
        RuntimeError, match=r"capsfast.DynamicRouting: the weight must be W .*docs/migration.md"
    ) as found:
        layer.load_state_dict({"kernel": w})
    remedy = str(found.value).partition("load {'W': ")[2].partition("}")[0]
    assert remedy == kinds.CONVERSIONS[order]
    layer.load_state_dict({"W": eval(remedy, {}, {"w": w, **SIZES})})
    letters = [each for each in order if each.isalpha()]
    axis_by_axis = w.reshape([SIZES[letter] for letter in letters])
    u = torch.randn(3, I, K)
    wanted = torch.einsum(f"{''.join(letters).lower()},bik->bijd", axis_by_axis, u)
    torch.testing.assert_close(plain.votes(u, layer.W), wanted)


# Weights that do not load as they are.
OTHERS = [
    (form, form.layout.weight, order)
    for form in kinds.FORMS
    for order in SHAPES
    if kinds.axes(order) in form.layout.loads() and order != "IJDK"
]


@pytest.mark.parametrize(("form", "name", "order"), OTHERS, ids=lambda each: getattr(each, "name", each))
def test_the_weight_of_each_form_is_recognised(form: kinds.Form, name: str, order: str) -> None:
    with pytest.raises(RuntimeError, match=rf"capsfast.compat.{form.name}\b"):
        capsfast.DynamicRouting(I, J, K, D).load_state_dict({name: torch.randn(SHAPES[order])})


def message(layer: nn.Module, state: dict[str, Tensor]) -> str:
    with pytest.raises(RuntimeError) as found:
        layer.load_state_dict(state, strict=False)
    return str(found.value)


def test_what_the_shape_does_not_say_is_said() -> None:
    square = capsfast.DynamicRouting(I, J, 6, 6)
    assert "may be [J, I, D, K] or [J, I, K, D]" in message(square, {"W": torch.randn(J, I, 6, 6)})
    assert "must be W" in message(square, {"W": torch.randn(3, 3)})
    assert "or use capsfast.compat.DenseCapsule" in message(square, {"weight": torch.randn(J, I, 6, 6)})


def test_entries_that_are_no_weight_or_beside_one_are_as_in_any_module() -> None:
    layer = capsfast.DynamicRouting(I, J, K, D)
    found = layer.load_state_dict({"weight": torch.randn(3, 3)}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["W"], ["weight"])
    W = torch.randn(I, J, D, K)
    assert layer.load_state_dict({"W": W, "weight": W}, strict=False).unexpected_keys == ["weight"]
    assert torch.equal(layer.W, W)


@pytest.mark.parametrize("shape", [(1, I, J, D, K), (I, K, J * D), (J, I, D, K), (I, J, K, D)], ids=str)
def test_the_function_names_the_table_too(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"capsfast.dynamic_routing: weight must .*; docs/migration.md turns weights"):
        capsfast.dynamic_routing(torch.randn(3, I, K), torch.randn(shape))
