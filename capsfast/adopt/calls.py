"""Records how a layer was called, and tells whether another call is the same."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .state import LeftAloneError, kept, same


class Slot(NamedTuple):
    """An argument.

    kind: ``"u"`` the capsules or votes, ``"other"`` another tensor, ``"batch"`` the number of samples, ``"value"`` any
    other value. value: for ``"other"`` the shape without the batch, and the dtype; for ``"value"`` a copy.
    """

    kind: Literal["u", "other", "batch", "value"]
    value: Any = None

    def holds(self, given: object, u: Tensor) -> bool:
        if self.kind == "batch":
            # torch.export passes a size that may differ between calls as a SymInt.
            return type(given) in (int, torch.SymInt) and given == u.shape[0]
        if self.kind == "other":
            shape, dtype = self.value
            if not isinstance(given, Tensor) or tuple(given.shape) != (u.shape[0], *shape):
                return False
            return given.dtype == dtype or (dtype.is_floating_point and given.dtype == u.dtype)
        return same(given, self.value)


@dataclass(frozen=True)
class Signature:
    """A call of a layer: capsules or votes with the batch in front, maybe further tensors with a batch, simple values.

    Attributes:
        order: names of the arguments that can be given by position.
        slots: all arguments by name, with defaults for arguments that were not given.
        defaults: defaults of the forward.
        shape: shape of the capsules or votes, without the batch.
        batch: the only number of samples that the layer takes; None if it takes any number.
    """

    order: tuple[str, ...]
    slots: tuple[tuple[str, Slot], ...]
    defaults: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    batch: int | None = None

    @staticmethod
    def of(
        layer: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> "tuple[Signature, tuple[Tensor, ...]]":
        """The signature of a call, and its tensors, capsules or votes first.

        Raises:
            LeftAloneError: the call can't be fused.
        """
        parameters = inspect.signature(layer.forward).parameters.values()
        by_place = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        # Arguments in *args have no names.
        order = (*by_place, *(f"*{n}" for n in range(len(by_place), len(args))))
        given = dict(zip(order, args, strict=False)) | dict(kwargs)
        tensors = tuple(each for each in given.values() if isinstance(each, Tensor))
        if not tensors or not tensors[0].is_floating_point() or tensors[0].dim() < 3 or not tensors[0].numel():
            raise LeftAloneError("it is called with no tensor that holds capsules in front")
        if len({id(each) for each in tensors}) < len(tensors):
            raise LeftAloneError("it is called with one tensor twice")
        u, *others = tensors
        for other in others:
            if other.shape[:1] != u.shape[:1]:
                raise LeftAloneError(
                    f"it is called with a second tensor {list(other.shape)} without the batch in front"
                )
        defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        slots: dict[str, Slot] = {}
        for name, value in (defaults | given).items():
            if isinstance(value, Tensor):
                if not any(value is each for each in tensors):
                    raise LeftAloneError("its forward has a tensor as a default")
                slots[name] = Slot("u") if value is u else Slot("other", (tuple(value.shape[1:]), value.dtype))
                continue
            slots[name] = Slot("value", kept(value, "it is called with {}, which cannot be compared between calls"))
        # In the order of the call, as the tensors are.
        ordered = tuple((name, slots[name]) for name in (*given, *(name for name in defaults if name not in given)))
        return Signature(order, ordered, tuple(defaults.items()), tuple(u.shape[1:])), tensors

    def readings(self, batch: int, given: int) -> "tuple[Signature, ...]":
        """Possible meanings of the call: an int equal to the number of samples may mean it, or be equal by chance.

        given: number of arguments that were passed.
        """

        def read(n: int, slot: Slot) -> Slot:
            sized = slot.kind == "value" and type(slot.value) is int and slot.value == batch
            return Slot("batch") if n < given and sized else slot

        as_batch = replace(self, slots=tuple((name, read(n, slot)) for n, (name, slot) in enumerate(self.slots)))
        return (self,) if as_batch == self else (as_batch, self)

    def fill(self, u: Tensor, *others: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of this call for other tensors."""
        rest = iter(others)
        values = {}
        for name, slot in self.slots:
            if slot.kind == "value":
                values[name] = slot.value
            else:
                values[name] = next(rest) if slot.kind == "other" else u if slot.kind == "u" else u.shape[0]
        args = tuple(values.pop(name) for name in self.order if name in values)
        return args, values

    def match(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Tensor, ...] | None:
        """The tensors of a call that differs from this call in the batch only; None for any other call."""
        if len(args) > len(self.order):
            return None
        given: dict[str, Any] = dict(self.defaults)
        given.update(zip(self.order, args, strict=False))
        given.update(kwargs)
        if len(given) != len(self.slots) or any(name not in given for name, _ in self.slots):
            return None
        # The capsules or votes are the first tensor of the call.
        u = next(given[name] for name, slot in self.slots if slot.kind == "u")
        if not isinstance(u, Tensor) or tuple(u.shape[1:]) != self.shape or self.batch not in (None, u.shape[0]):
            return None
        if any(slot.kind != "u" and not slot.holds(given[name], u) for name, slot in self.slots):
            return None
        return (u, *(given[name] for name, slot in self.slots if slot.kind == "other"))
