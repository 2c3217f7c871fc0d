"""Every argument of every layer, loss and network: what its annotation does not allow is an error that names it."""

import inspect
from types import NoneType, UnionType
from typing import Any, get_args

import pytest
import torch

import capsfast
from capsfast import models, nn
from capsfast.nn import stacked
from capsfast.nn._layer import Layer

CLASSES: dict[str, type[Layer]] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (nn, models, stacked)
    for name in module.__all__
    if inspect.isclass(getattr(module, name)) and issubclass(getattr(module, name), Layer)
}
each_class = pytest.mark.parametrize("name", CLASSES)
# The types that torch checks, or the class that other arguments belong to.
OTHERS = ("device", "dtype", "sparsity")
# Numbers may be infinite, or have any sign.
FREE = ("power", "initial_beta_a", "initial_beta_u")


def arguments_of(kind: type[Layer]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(kind).parameters.values()
    more = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        parameter.name: parameter
        for parameter in parameters
        if parameter.kind not in more and parameter.name not in OTHERS
    }


def refused(kind: type[Layer], name: str, value: object) -> type[BaseException]:
    """Calls the constructor with 2 for each argument without a default."""
    given: dict[str, Any] = {
        parameter.name: 2 for parameter in arguments_of(kind).values() if parameter.default is parameter.empty
    }
    if "image_shape" in given:
        given["image_shape"] = (1, 8, 8)
    with pytest.raises((TypeError, ValueError), match=rf"^capsfast\..*: {name} must ") as caught:
        kind(**{**given, name: value})
    assert "tensor(" not in str(caught.value) and len(str(caught.value)) < 1000, caught.value
    return caught.type


@pytest.mark.rows(60)
@each_class
def test_no_argument_takes_everything(name: str) -> None:
    for argument in arguments_of(CLASSES[name]):
        for value in (object(), torch.full((3, 4), 0.12345), torch.full((1,), -0.12345)):
            refused(CLASSES[name], argument, value)


@pytest.mark.rows(60)
@each_class
def test_numbers_have_their_range(name: str) -> None:
    kind = CLASSES[name]
    for argument, parameter in arguments_of(kind).items():
        union = isinstance(parameter.annotation, UnionType)
        types = {*get_args(parameter.annotation)} - {NoneType} if union else {parameter.annotation}
        if int in types and float not in types:
            assert refused(kind, argument, 2**31) is refused(kind, argument, 10**5000) is ValueError
        if types == {float} and argument != "power":
            assert refused(kind, argument, 10**400) is ValueError
        if types == {int}:
            assert refused(kind, argument, 0) is ValueError
            assert refused(kind, argument, 1.5) is refused(kind, argument, True) is TypeError
        elif types == {float} and argument not in FREE:
            assert refused(kind, argument, -0.5) is refused(kind, argument, float("inf")) is ValueError
            assert refused(kind, argument, True) is TypeError
        elif types == {bool}:
            assert refused(kind, argument, 1) is refused(kind, argument, None) is TypeError
        elif types == {str} and argument != "routing":
            assert refused(kind, argument, "other") is ValueError


def test_what_is_checked_is_what_a_signature_shows() -> None:
    """The options of dynamic routing stand in one place, and in the signature of every layer that has them."""
    wanted = {"softmax", "gradient", "leaky", "squash", "eps", "squash_last", "backend"}
    for kind in (capsfast.DynamicRouting, nn.AgreementRouting, nn.RoutingByAgreement):
        assert wanted <= {*arguments_of(kind)}
    with pytest.raises(ValueError, match="order must be one of 'type', 'component', 'view', got 'row'"):
        nn.PrimaryCaps(2, 2, 2, 2, order="row")
