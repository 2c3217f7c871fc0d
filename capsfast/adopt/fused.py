"""A layer whose forward is one call of capsfast, in place: the same object, parameters, names and hooks."""

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..nn._layer import Layer
from .identification import Identification
from .signature import Signature
from .snapshot import RECORD, Snapshot


@dataclass(frozen=True)
class Verified:
    """A kind of call for which layer and capsfast were compared.

    Attributes:
        signature: its arguments.
        autocast: the dtype of autocast around it, None where it was off.
        given: the dtype of the capsules or votes.
        result: the dtype of what the layer's own forward gives.
    """

    signature: Signature
    autocast: torch.dtype | None
    given: torch.dtype
    result: torch.dtype

    def match(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Tensor, ...] | None:
        """The tensors of a call of this kind, the capsules or votes first; None for any other call."""
        found = self.signature.match(args, kwargs)
        if found is None or found[0].dtype != self.given or autocast_of(found[0]) != self.autocast:
            return None
        return found


def autocast_of(u: Tensor) -> torch.dtype | None:
    """The dtype of autocast for the device of the tensor, None where it is off."""
    kind = u.device.type
    # Of a device that has none, such as meta, torch does not say whether it is on.
    on = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
    return torch.get_autocast_dtype(kind) if on and torch.is_autocast_enabled(kind) else None


@dataclass(frozen=True)
class Fused:
    """What a fused layer computes, and for which calls.

    Attributes:
        identification: the call of capsfast.
        calls: for which it was verified.
        snapshot: of the layer at that time.
        tensors: shape and dtype of each tensor that the call reads.
        contiguous: whether the layer's own output is; a ``view`` of it may follow.
    """

    identification: Identification
    calls: tuple[Verified, ...]
    snapshot: Snapshot
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    contiguous: bool

    def output(self, layer: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor | None:
        """Of a call that was verified, of a layer as it was then; None of any other."""
        for call in self.calls:
            given = call.match(args, kwargs)
            if given is not None:
                break
        else:
            return None
        if not self.snapshot.holds(layer):
            return None
        tensors = self.identification.tensors(layer)
        for (shape, dtype), tensor in zip(self.tensors, tensors.values(), strict=True):
            if tensor.shape != shape or tensor.dtype != dtype:
                return None
        v = self.identification(tensors, *given)
        if v.dtype != call.result:
            v = v.to(call.result)
        return v.contiguous() if self.contiguous else v


class FusedLayer(Layer):
    """In front of the class of a layer: its forward is capsfast's for verified calls, and for others its own.

    A class, not an attribute ``forward`` of the object: a replica or shallow copy of the layer that is given other
    parameters, as several libraries make them, computes with these.
    """

    # None: an object that was made of the class, as a layer that clones itself makes it.
    _capsfast_fused: Fused | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fused = self._capsfast_fused
        v = None if fused is None else fused.output(self, args, kwargs)
        return super().forward(*args, **kwargs) if v is None else v

    def __prepare_scriptable__(self) -> nn.Module:
        raise TypeError(
            f"capsfast: torch.jit.script cannot compile {type(self).__name__}; call capsfast.adopt.undo(model) first, "
            f"or use torch.jit.trace"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled is the class that this one was made of, which is made anew where it is read."""
        reduced: Any = super().__reduce_ex__(protocol)
        made = type(self)
        if not is_fused(self) or not isinstance(reduced, tuple):
            return reduced
        function, arguments, *state = reduced
        if all(each is not made for each in (function, *arguments)):
            return reduced
        own = original_class(made)
        return (_restored, (own, *(own if each is made else each for each in (function, *arguments))), *state)


def _restored(own: type[nn.Module], function: Any, *arguments: Any) -> nn.Module:
    layer: nn.Module = function(*arguments)
    _set_class(layer, fused_class(own))
    return layer


def _set_class(layer: nn.Module, kind: type[nn.Module]) -> None:
    # Not by assignment: a __setattr__ of the layer may do something else.
    object.__setattr__(layer, "__class__", kind)


def takes_class(layer: nn.Module, kind: type[nn.Module]) -> None:
    """Tries whether the class of the layer can be replaced, and puts it back; raises what that raises."""
    own = type(layer)
    _set_class(layer, kind)
    _set_class(layer, own)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def fused_class(own: type[nn.Module]) -> type[nn.Module]:
    """The class of fused layers of the class ``own``, one for all of them."""
    if own not in _classes:
        body = {"__module__": own.__module__, "__doc__": own.__doc__}
        _classes[own] = types.new_class(f"Fused{own.__name__}", (FusedLayer, own), {}, lambda new: new.update(body))
    return _classes[own]


def is_fused(layer: object) -> bool:
    """Whether this very object was fused, and nothing was put in front of its class since."""
    return type(layer).__bases__[:1] == (FusedLayer,)


def original_class(made: type) -> type[nn.Module]:
    own: type[nn.Module] = made.__bases__[1]
    return own


def fuse(layer: nn.Module, fused: Fused) -> None:
    _set_class(layer, fused_class(type(layer)))
    vars(layer)[RECORD] = fused


def restore(layer: nn.Module) -> None:
    """What :func:`fuse` found.

    Raises:
        RuntimeError: something was put in front of the class since then.
    """
    if not is_fused(layer):
        raise RuntimeError(
            f"capsfast.adopt.undo: the class of the layer must be the one that accelerate gave it, got "
            f"{type(layer).__name__}, made of it since; take that off first, such as a parametrization"
        )
    _set_class(layer, original_class(type(layer)))
    vars(layer).pop(RECORD, None)
