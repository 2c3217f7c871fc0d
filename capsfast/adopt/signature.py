"""How a layer was called, so that another call can be told from it."""

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

# What may stand beside the tensors of a call and inside a layer's attributes: compared at every call.
SIMPLE = (
    *(bool, int, float, str, type(None), torch.dtype, torch.device),
    *(types.FunctionType, types.BuiltinFunctionType, type),
)


def is_simple(value: object) -> bool:
    """A value that can be compared, and that nothing changes in place without this being seen."""
    if isinstance(value, (tuple, list)):
        return all(map(is_simple, value))
    return isinstance(value, SIMPLE)


class Slot(NamedTuple):
    """An argument.

    kind: ``"u"`` the capsules or votes, ``"other"`` another tensor, ``"batch"`` the number of samples, ``"value"`` any
    other. value: of another tensor the shape without the batch, and the dtype.
    """

    kind: Literal["u", "other", "batch", "value"]
    value: Any = None

    def holds(self, given: object, batch: int) -> bool:
        if self.kind == "batch":
            # torch.export gives a number that may differ between calls as one of its own.
            return type(given) in (int, torch.SymInt) and given == batch
        if self.kind == "other":
            shape, dtype = self.value
            return isinstance(given, Tensor) and tuple(given.shape) == (batch, *shape) and given.dtype == dtype
        return type(given) is type(self.value) and given == self.value


class UnclearCallError(ValueError):
    """A call whose arguments cannot be compared with those of another. Its text reads on after "is called with"."""


@dataclass(frozen=True)
class Signature:
    """A call of a layer: capsules or votes with the batch in front, maybe further tensors with a batch, simple values.

    Attributes:
        args, kwargs: a slot for each argument, in order.
        shape: of the capsules or votes, without the batch.
        batch: the only number of samples that the layer takes; None if it takes others.
    """

    args: tuple[Slot, ...]
    kwargs: tuple[tuple[str, Slot], ...]
    shape: tuple[int, ...]
    batch: int | None = None

    @staticmethod
    def of(args: Sequence[object], kwargs: Mapping[str, object]) -> "tuple[Signature, tuple[Tensor, ...]]":
        """Of a call that was made, and its tensors, the capsules or votes first.

        Raises:
            UnclearCallError: the reason.
        """
        given = [*args, *kwargs.values()]
        tensors = tuple(each for each in given if isinstance(each, Tensor))
        if not tensors or not tensors[0].is_floating_point() or tensors[0].dim() < 3 or not tensors[0].numel():
            raise UnclearCallError("no tensor that holds capsules in front")
        u, *others = tensors
        for other in others:
            if other.shape[:1] != u.shape[:1]:
                raise UnclearCallError(f"a second tensor {list(other.shape)} without the batch in front")
        for each in given:
            if not isinstance(each, Tensor) and not is_simple(each):
                raise UnclearCallError(f"a {type(each).__name__}, which cannot be compared between calls")

        def slot(each: Any) -> Slot:
            if not isinstance(each, Tensor):
                return Slot("value", each)
            return Slot("u") if each is u else Slot("other", (tuple(each.shape[1:]), each.dtype))

        slots = tuple(map(slot, given))
        if sum(each.kind == "u" for each in slots) > 1:
            raise UnclearCallError("one tensor twice")
        named = tuple(zip(kwargs, slots[len(args) :], strict=True))
        return Signature(slots[: len(args)], named, tuple(u.shape[1:])), tensors

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*self.args, *(slot for _, slot in self.kwargs))

    def readings(self, batch: int) -> "tuple[Signature, ...]":
        """What the call may have meant: an int that is the number of samples may be given as such, or by chance."""

        def read(slot: Slot) -> Slot:
            return Slot("batch") if type(slot.value) is int and slot.value == batch else slot

        as_batch = replace(
            self,
            args=tuple(map(read, self.args)),
            kwargs=tuple((name, read(slot)) for name, slot in self.kwargs),
        )
        return (self,) if as_batch == self else (as_batch, self)

    def fill(self, u: Tensor, *others: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of this call for other tensors."""
        rest = iter(others)

        def argument(slot: Slot) -> Any:
            if slot.kind == "other":
                return next(rest)
            return {"u": u, "batch": u.shape[0], "value": slot.value}[slot.kind]

        return tuple(map(argument, self.args)), {name: argument(slot) for name, slot in self.kwargs}

    def match(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Tensor, ...] | None:
        """The tensors of a call that differs from this one in nothing but the batch; None for any other call."""
        if len(args) != len(self.args) or len(kwargs) != len(self.kwargs):
            return None
        given = list(args)
        for name, _ in self.kwargs:
            if name not in kwargs:
                return None
            given.append(kwargs[name])
        slots = self.slots
        u: Any = next(each for slot, each in zip(slots, given, strict=True) if slot.kind == "u")
        if not isinstance(u, Tensor) or u.dim() != 1 + len(self.shape) or tuple(u.shape[1:]) != self.shape:
            return None
        if self.batch is not None and u.shape[0] != self.batch:
            return None
        others: list[Any] = []
        for slot, each in zip(slots, given, strict=True):
            if slot.kind != "u" and not slot.holds(each, u.shape[0]):
                return None
            if slot.kind == "other":
                others.append(each)
        return (u, *others)
