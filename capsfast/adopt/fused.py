"""A layer whose forward is one call of capsfast, in place: the same object, parameters, names and hooks."""

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..nn._layer import Layer
from .identification import Identification
from .signature import Signature, is_simple

RECORD = "_capsfast_fused"
# What every module has; the switch between training and evaluation is no option of the layer.
OWN = frozenset({*vars(nn.Module()), RECORD})


def attributes(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """All that the layer and the modules in it hold beside parameters, buffers and modules: dotted names and values."""
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if name not in OWN and not isinstance(value, nn.Module):
                yield f"{path}.{name}" if path else name, value


def settings(layer: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Its attributes that are plain values, such as the number of iterations; lists as they are now."""
    return tuple((name, _frozen(value)) for name, value in attributes(layer) if is_simple(value))


def _frozen(value: Any) -> Any:
    return type(value)(map(_frozen, value)) if type(value) in (list, tuple) else value


def hooked(module: nn.Module) -> bool:
    """Whether something runs at each call of the module beside its forward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _at(layer: nn.Module, path: str) -> Any:
    found: Any = layer
    for part in path.split("."):
        found = getattr(found, part)
    return found


@dataclass(frozen=True)
class Fused:
    """What a fused layer computes, and for which calls.

    Attributes:
        identification: the call of capsfast.
        signatures: calls for which it was verified.
        settings: of the layer at that time.
        inner: names of the modules in the layer, whose forward does not run any more.
        contiguous: whether the layer's own output is; a ``view`` of it may follow.
    """

    identification: Identification
    signatures: tuple[Signature, ...]
    settings: tuple[tuple[str, Any], ...]
    inner: tuple[str, ...]
    contiguous: bool

    def tensors_of(
        self, layer: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[Tensor, ...] | None:
        """The tensors of the call, if it is one that was verified, of a layer as it was then; None if it is not."""
        for signature in self.signatures:
            given = signature.match(args, kwargs)
            if given is not None:
                same = all(_at(layer, name) == value for name, value in self.settings)
                return given if same and not any(hooked(_at(layer, name)) for name in self.inner) else None
        return None

    def output(self, layer: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
        v = self.identification(self.identification.tensors(layer), *given)
        return v.contiguous() if self.contiguous else v


class FusedLayer(Layer):
    """In front of the class of a layer: its forward is capsfast's for verified calls, and for others its own.

    A class, not an attribute ``forward`` of the object: a replica or shallow copy of the layer that is given other
    parameters, as several libraries make them, computes with these.
    """

    _capsfast_fused: Fused

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fused = self._capsfast_fused
        given = fused.tensors_of(self, args, kwargs)
        if given is None:
            return super().forward(*args, **kwargs)
        return fused.output(self, given)

    def __prepare_scriptable__(self) -> nn.Module:
        raise TypeError(
            f"capsfast: torch.jit.script cannot compile {type(self).__name__}; call capsfast.adopt.undo(model) first, "
            f"or use torch.jit.trace"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled is the class that this one was made of, which is made anew where it is read."""
        reduced: Any = super().__reduce_ex__(protocol)
        made = type(self)
        if not is_fused(self) or not any(each is made for each in reduced[1]):
            return reduced
        function, arguments, *state = reduced
        own = original_class(made)
        return (_restored, (own, function, *(own if each is made else each for each in arguments)), *state)


def _restored(own: type[nn.Module], function: Any, *arguments: Any) -> nn.Module:
    layer: nn.Module = function(*arguments)
    layer.__class__ = fused_class(own)
    return layer


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
    vars(layer)[RECORD] = fused
    layer.__class__ = fused_class(type(layer))


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
    layer.__class__ = original_class(type(layer))
    del vars(layer)[RECORD]
