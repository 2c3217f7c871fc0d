"""A layer whose forward becomes a call of capsfast, in place: the same object, parameters, names and hooks."""

import functools
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..environment.private_torch import tracing_state
from ..nn._layer import Node
from .calls import Signature
from .identification import Identification
from .state import COUNT, RECORD, State

# The dtypes of a call: of the capsules, of the parameters that it reads (None without), of autocast (None if off).
Dtypes = tuple[torch.dtype, torch.dtype | None, torch.dtype | None]


def autocast_of(u: Tensor) -> torch.dtype | None:
    """The dtype of autocast for the device of the tensor, None if autocast is off."""
    kind = u.device.type
    # torch raises an error when asked about a device without autocast, such as meta.
    on = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
    return torch.get_autocast_dtype(kind) if on and torch.is_autocast_enabled(kind) else None


@dataclass(frozen=True)
class Calls:
    """How often a layer ran fused, how often its own forward, and why it ran its own forward the last time.

    Calls inside a compiled graph are not counted.
    """

    fused: int = 0
    own: int = 0
    why: str = ""


@dataclass(frozen=True)
class Fused:
    """The call of capsfast in a fused layer, and the call of the layer that it serves.

    Attributes:
        identification: the call of capsfast.
        signature: the call of the layer that was compared.
        results: for each compared set of dtypes, the dtypes of the layer's results.
        state: state of the layer when it was compared.
        shapes: shapes of the tensors that the call reads.
        contiguous: whether the layer's own output is contiguous; the model may call ``view`` on it.
        single: whether a call with one sample may be fused. A layer that squeezes returns another shape then.
    """

    identification: Identification
    signature: Signature
    results: Mapping[Dtypes, tuple[torch.dtype, ...]]
    state: State
    shapes: tuple[tuple[int, ...], ...]
    contiguous: bool
    single: bool

    def output(self, layer: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """The result of the fused call, or a text that says why the layer's own forward must run."""
        arguments = self.signature.match(args, kwargs)
        if arguments is None:
            return "it was called with arguments or sizes that differ from the example"
        u = arguments[0]
        if u.shape[0] == 1 and not self.single:
            return "it was called with one sample, where its output has another shape"
        changed = self.state.changed(layer)
        if changed is not None:
            return f"its `{changed}` is not what it was"
        tensors = self.identification.tensors(layer)
        held = [tensor.dtype for tensor in tensors.values()]
        for shape, tensor in zip(self.shapes, tensors.values(), strict=True):
            if tensor.shape != shape or tensor.dtype != held[0]:
                return "a parameter has another shape or dtype than it had"
        dtypes = self.results.get((u.dtype, held[0] if held else None, autocast_of(u)))
        if dtypes is None:
            return f"its own forward does not run on {u.dtype}, or capsfast differs from it there".replace("torch.", "")
        results = self.identification.results(tensors, *arguments)
        cast = [
            tensor if tensor.dtype == dtype else tensor.to(dtype) for tensor, dtype in zip(results, dtypes, strict=True)
        ]
        entries = self.identification.entries
        output = entries.index("output") - entries[: entries.index("output")].count("None") if entries else 0
        if self.contiguous:
            cast[output] = cast[output].contiguous()
        rest = iter(cast)
        return tuple(None if entry == "None" else next(rest) for entry in entries) if entries else cast[0]


class FusedLayer(Node):
    """First base class of a fused layer: its forward runs capsfast for verified calls, else the layer's own forward.

    A class, not an attribute ``forward`` of the object: several libraries make replicas or shallow copies of a layer
    with other parameters, and these compute with their own parameters.
    """

    # None in an object that was made from the class, for example by a layer that clones itself.
    _capsfast_fused: Fused | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fused = self._capsfast_fused
        compiling = torch.compiler.is_compiling()
        followed = compiling or tracing_state() is not None
        if fused is None or (followed and torch.onnx.is_in_onnx_export()):  # ONNX knows only torch's operations
            return super().forward(*args, **kwargs)
        result = fused.output(self, args, kwargs)
        if not compiling:
            _count(self, result)
        return super().forward(*args, **kwargs) if isinstance(result, str) else result

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
        """Pickles the original class; unpickling makes the fused class again."""
        reduced: Any = super().__reduce_ex__(protocol)
        fused_kind = type(self)
        if not is_fused(self) or not isinstance(reduced, tuple):
            return reduced
        function, arguments, *state = reduced
        if all(argument is not fused_kind for argument in (function, *arguments)):
            return reduced
        original = original_class(fused_kind)
        return (
            _restored,
            (original, *(original if argument is fused_kind else argument for argument in (function, *arguments))),
            *state,
        )


def _count(layer: nn.Module, result: Any) -> None:
    count: Calls = vars(layer).get(COUNT, Calls())
    if not isinstance(result, str):
        vars(layer)[COUNT] = Calls(count.fused + 1, count.own, count.why)
        return
    if not count.own:
        warnings.warn(
            f"capsfast.accelerate: {original_class(type(layer)).__name__} runs its own forward, because {result}; "
            f"report.calls() counts such calls; each layer warns once",
            stacklevel=5,
        )
    vars(layer)[COUNT] = replace(count, own=count.own + 1, why=result)


def _restored(original: type[nn.Module], function: Any, *arguments: Any) -> nn.Module:
    layer: nn.Module = function(*arguments)
    _set_class(layer, fused_class(original))
    return layer


def _set_class(layer: nn.Module, kind: type[nn.Module]) -> None:
    # Not by assignment, because the layer may have its own __setattr__.
    object.__setattr__(layer, "__class__", kind)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def fused_class(original: type[nn.Module]) -> type[nn.Module]:
    """The class of all fused layers whose own class is ``original``."""
    if original not in _classes:

        @functools.wraps(original.forward)  # with the signature that export and others look at
        def forward(self: FusedLayer, *args: Any, **kwargs: Any) -> Any:
            return FusedLayer.forward(self, *args, **kwargs)

        body = {"__module__": original.__module__, "__doc__": original.__doc__, "forward": forward}
        _classes[original] = types.new_class(
            f"Fused{original.__name__}", (FusedLayer, original), {}, lambda new: new.update(body)
        )
    return _classes[original]


def is_fused(layer: object) -> bool:
    """Whether this object was fused and its class was not replaced since."""
    return type(layer).__bases__[:1] == (FusedLayer,)


def original_class(fused_kind: type) -> type[nn.Module]:
    """The class before the layer was fused; ``fused_kind`` itself if it is not a fused class."""
    return next((kind.__bases__[1] for kind in fused_kind.__mro__ if kind.__bases__[:1] == (FusedLayer,)), fused_kind)


def fuse(layer: nn.Module, fused: Fused) -> None:
    _set_class(layer, fused_class(type(layer)))
    vars(layer)[RECORD] = fused


def can_be_fused(layer: nn.Module) -> None:
    """Replaces the class of the layer and restores it; raises the error if that is impossible."""
    original = type(layer)
    _set_class(layer, fused_class(original))
    _set_class(layer, original)


def restore(layer: nn.Module) -> None:
    """Undoes :func:`fuse`.

    Raises:
        RuntimeError: the class was replaced since then.
    """
    if not is_fused(layer):
        raise RuntimeError(
            f"capsfast.adopt.undo: the layer must have the class that accelerate gave it, got {type(layer).__name__}, "
            f"derived from that class later; undo that change first, such as a parametrization"
        )
    _set_class(layer, original_class(type(layer)))
    for name in (RECORD, COUNT):
        vars(layer).pop(name, None)
