"""A layer whose forward is one call of capsfast, in place: the same object, parameters, names and hooks."""

import functools
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import tracing_state
from ..nn._layer import Layer
from .calls import Signature
from .identification import Identification
from .state import COUNT, RECORD, State

# What a call computes in: dtype of the capsules, of what is read (None for nothing), of autocast (None if off).
Dtypes = tuple[torch.dtype, torch.dtype | None, torch.dtype | None]


def autocast_of(u: Tensor) -> torch.dtype | None:
    """The dtype of autocast for the device of the tensor, None where it is off."""
    kind = u.device.type
    # Torch does not say whether autocast is on for a device that has none, such as meta.
    on = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
    return torch.get_autocast_dtype(kind) if on and torch.is_autocast_enabled(kind) else None


@dataclass
class Calls:
    """How often a fused layer ran fused, and how often its own forward, and why it did the last time.

    Calls inside of a compiled graph are not counted.
    """

    fused: int = 0
    own: int = 0
    why: str = ""


@dataclass(frozen=True)
class Fused:
    """What a fused layer computes, and for which calls.

    Attributes:
        identification: the call of capsfast.
        calls: that were compared.
        results: for each set of dtypes in which the two were compared, the dtypes of what the layer gives.
        state: of the layer at that time.
        shapes: of the tensors that the call reads.
        contiguous: whether the layer's own output is; a ``view`` of it may follow.
        single: whether a call with one sample may be fused. A layer that squeezes gives another shape there.
        entries: how many the layer's tuple has; 0 where it gives a tensor.
    """

    identification: Identification
    calls: tuple[Signature, ...]
    results: Mapping[Dtypes, tuple[torch.dtype, ...]]
    state: State
    shapes: tuple[tuple[int, ...], ...]
    contiguous: bool
    single: bool
    entries: int

    def output(self, layer: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """What the layer gives, or the text that says why its own forward has to."""
        given = None
        for call in self.calls:
            given = call.match(args, kwargs)
            if given is not None:
                break
        if given is None:
            return "it was called with other arguments or sizes than those of the example"
        u = given[0]
        if u.shape[0] == 1 and not self.single:
            return "it was called with one sample, for which it gives another shape"
        changed = self.state.changed(layer)
        if changed is not None:
            return f"its `{changed}` is not what it was"
        tensors = self.identification.tensors(layer)
        found = list(tensors.values())
        for shape, tensor in zip(self.shapes, found, strict=True):
            if tensor.shape != shape or tensor.dtype != found[0].dtype:
                return "a parameter has another shape or dtype than it had"
        dtypes = self.results.get((u.dtype, found[0].dtype if found else None, autocast_of(u)))
        if dtypes is None:
            return f"its own forward does not run on {u.dtype}, or capsfast differs from it there".replace("torch.", "")
        return self.compute(tensors, given, dtypes)

    def compute(self, tensors: Mapping[str, Tensor], given: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> Any:
        """The call of capsfast, its results in these dtypes."""
        if self.identification.coupling is None:
            found: tuple[Tensor, ...] = (self.identification(tensors, *given),)
        else:
            found = self.identification.with_coupling(tensors, *given)
        cast = [each if each.dtype == dtype else each.to(dtype) for each, dtype in zip(found, dtypes, strict=True)]
        v = cast[0].contiguous() if self.contiguous else cast[0]
        if not self.entries:
            return v
        places = {self.identification.part: v, self.identification.coupling: cast[-1]}
        return tuple(places.get(n) for n in range(self.entries))


class FusedLayer(Layer):
    """In front of the class of a layer: its forward is capsfast's for verified calls, and for others its own.

    A class, not an attribute ``forward`` of the object: a replica or shallow copy of the layer that is given other
    parameters, as several libraries make them, computes with these.
    """

    # None: an object that was made of the class, as a layer that clones itself makes it.
    _capsfast_fused: Fused | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fused = self._capsfast_fused
        compiling = torch.compiler.is_compiling()
        followed = compiling or tracing_state() is not None
        if fused is None or (followed and torch.onnx.is_in_onnx_export()):  # ONNX knows torch's operations alone
            return super().forward(*args, **kwargs)
        found = fused.output(self, args, kwargs)
        if not compiling:
            _count(self, found)
        return super().forward(*args, **kwargs) if isinstance(found, str) else found

    def as_capsfast(self, u: Tensor) -> tuple[nn.Module, Tensor]:
        """For :func:`capsfast.diagnose`: see :meth:`capsfast.adopt.Identification.layer`."""
        fused = self._capsfast_fused
        assert fused is not None
        return fused.identification.layer(self, u)

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


def _count(layer: nn.Module, found: Any) -> None:
    count: Calls = vars(layer).setdefault(COUNT, Calls())
    if not isinstance(found, str):
        count.fused += 1
        return
    if not count.own:
        warnings.warn(
            f"capsfast.accelerate: {original_class(type(layer)).__name__} runs its own forward, because {found}; "
            f"report.calls() counts such calls, and this warning comes once for the layer",
            stacklevel=5,
        )
    count.own, count.why = count.own + 1, found


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

        @functools.wraps(own.forward)  # with the signature that export and others look at
        def forward(self: FusedLayer, *args: Any, **kwargs: Any) -> Any:
            return FusedLayer.forward(self, *args, **kwargs)

        body = {"__module__": own.__module__, "__doc__": own.__doc__, "forward": forward}
        _classes[own] = types.new_class(f"Fused{own.__name__}", (FusedLayer, own), {}, lambda new: new.update(body))
    return _classes[own]


def is_fused(layer: object) -> bool:
    """Whether this very object was fused, and nothing was put in front of its class since."""
    return type(layer).__bases__[:1] == (FusedLayer,)


def original_class(made: type) -> type[nn.Module]:
    """The class that the layer had, or has."""
    return next((each.__bases__[1] for each in made.__mro__ if each.__bases__[:1] == (FusedLayer,)), made)


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
    for name in (RECORD, COUNT):
        vars(layer).pop(name, None)
