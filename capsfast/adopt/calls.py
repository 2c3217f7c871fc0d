"""Records how a layer was called, and tells whether another call is the same."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .state import LeftAloneError, kept, same


class Like(NamedTuple):
    """Stands for a tensor argument whose first axis is the batch: its shape without the batch, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Size:
    """Stands for an int argument: the number of samples."""


@dataclass(frozen=True)
class Signature:
    """A call of a layer: capsules or votes with the batch in front, maybe further tensors with a batch, simple values.

    Attributes:
        order: names of the arguments that can be given by position.
        names: names of the arguments of the call, capsules or votes first.
        defaults: defaults of the forward.
        values: what the arguments of the call and the defaults must be, by name.
        batch: the only number of samples that the layer takes; None if it takes any number.
    """

    order: tuple[str, ...]
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    values: Mapping[str, Any]
    batch: int | None = None

    @staticmethod
    def of(
        layer: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> "tuple[Signature, tuple[Any, ...]]":
        """The signature of a call, and copies of its arguments, capsules or votes first.

        Raises:
            LeftAloneError: the call can't be fused.
        """
        parameters = inspect.signature(layer.forward).parameters.values()
        by_place = [
            parameter.name
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        # Arguments in *args have no names.
        order = (*by_place, *(f"*{n}" for n in range(len(by_place), len(args))))
        passed = dict(zip(order, args, strict=False)) | dict(kwargs)
        tensors = {name: tensor for name, tensor in passed.items() if isinstance(tensor, Tensor)}
        first, u = next(iter(tensors.items()), ("", None))
        if u is None or not u.is_floating_point() or u.dim() < 3 or not u.numel():
            raise LeftAloneError("it is called with no tensor that holds capsules in front")
        if len({id(tensor) for tensor in tensors.values()}) < len(tensors):
            raise LeftAloneError("it is called with one tensor twice")
        for other in tensors.values():
            if other.shape[:1] != u.shape[:1]:
                raise LeftAloneError(
                    f"it is called with a second tensor {list(other.shape)} without the batch in front"
                )
        defaults = {
            parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty
        }
        said = "it is called with {}, which cannot be compared between calls"
        values = {
            name: Like(tuple(value.shape[1:]), value.dtype) if name in tensors else kept(value, said)
            for name, value in (defaults | passed).items()
        }
        names = (first, *(name for name in passed if name != first))
        copies = (tensors[name].detach().clone() if name in tensors else values[name] for name in names)
        return Signature(order, names, defaults, values), tuple(copies)

    def with_size(self, batch: int) -> "Signature":
        """The signature in which every int that equals the number of samples means the number of samples."""
        ints = {name for name in self.names if type(self.values[name]) is int and self.values[name] == batch}
        return replace(self, values={**self.values, **dict.fromkeys(ints, Size)})

    def fill(self, *given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the forward by position and by name: as in this call, but with the values ``given``."""
        values = {**self.defaults, **dict(zip(self.names, given, strict=True))}
        args = tuple(values.pop(name) for name in self.order if name in values)
        return args, values

    def match(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Any, ...] | None:
        """The arguments of a call that differs from this call in the batch only; None for any other call."""
        if len(args) > len(self.order):
            return None
        passed: dict[str, Any] = dict(self.defaults)
        passed.update(zip(self.order, args, strict=False))
        passed.update(kwargs)
        if len(passed) != len(self.values):
            return None
        u, like = passed.get(self.names[0]), self.values[self.names[0]]
        if not isinstance(u, Tensor) or tuple(u.shape[1:]) != like.shape or self.batch not in (None, u.shape[0]):
            return None
        for name, wanted in self.values.items():
            if name not in passed or (name != self.names[0] and not _fits(passed[name], wanted, u)):
                return None
        return tuple([passed[name] for name in self.names])


def _fits(value: Any, wanted: Any, u: Tensor) -> bool:
    if wanted is Size:
        # torch.export passes a size that may differ between calls as a SymInt.
        return type(value) in (int, torch.SymInt) and value == u.shape[0]
    if isinstance(wanted, Like):
        if not isinstance(value, Tensor) or tuple(value.shape) != (u.shape[0], *wanted.shape):
            return False
        return value.dtype == wanted.dtype or (wanted.dtype.is_floating_point and value.dtype == u.dtype)
    return same(value, wanted)
