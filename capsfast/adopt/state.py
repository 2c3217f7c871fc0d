"""The state of a layer besides the numbers in its tensors, to check at each call that the layer is unchanged."""

import argparse
import dataclasses
import enum
import functools
import numbers
import types
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import constant_while_tracing
from ..nn._layer import hooked
from .refusal import LeftAloneError

# Values that can't change in place.
ATOMS = (
    *(numbers.Number, str, bytes, type(None), type(Ellipsis), enum.Enum, range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(types.FunctionType, types.BuiltinFunctionType, type, torch.jit.ScriptFunction),
)
# Class attributes of these types count as options.
PLAIN = (numbers.Number, str, bytes, enum.Enum)
SEQUENCES = (list, tuple, deque)
MAPPINGS = (dict, OrderedDict)
SETS = (set, frozenset)
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)

# The attributes where a fused layer keeps its :class:`Fused` and its :class:`Calls`.
RECORD, COUNT = "_capsfast_fused", "_capsfast_calls"
# Attributes that are not options of a layer: every module has them, or torch and Lightning (the last one, by its own
# torch.compile) add them to modules that they compile or replicate.
OF_TOOLS = {"_compiled_call_impl", "_is_torch_compile", "_is_replica", "_former_parameters", "_compile_kwargs"}
OWN = frozenset({*vars(nn.Module()), RECORD, COUNT} | OF_TOOLS)


class UnclearError(TypeError):
    """A value can't be compared between calls. The text describes the value."""


def frozen(value: Any, owner: nn.Module | None = None) -> Any:
    """A frozen form of a plain value. Two are equal only if the values are equal, including their types.

    Later changes of the value in place don't change the frozen form. All tensors are equal, and so are all modules.

    Args:
        owner: the module that has this attribute. Methods of the owner are compared by their functions.

    Raises:
        UnclearError: the value is, or holds, something other than plain values.
    """
    if isinstance(value, (Tensor, nn.Module)):
        return Tensor if isinstance(value, Tensor) else nn.Module
    if isinstance(value, types.MethodType):
        if owner is None or value.__self__ is not owner:
            raise UnclearError("a method of another object")
        return value.__func__
    return _frozen(value)


def _frozen(value: Any) -> tuple[Any, ...]:
    kind = type(value)
    if isinstance(value, ATOMS):
        # The type tells 1 from 1.0 and True. Functions get no type, because pickle does not know their type.
        return (kind if isinstance(value, (numbers.Number, str, bytes)) else None), value
    if kind in SEQUENCES or (issubclass(kind, tuple) and not hasattr(value, "__dict__")):
        return kind, tuple([_frozen(each) for each in value])
    if kind in MAPPINGS:
        return kind, tuple([(_frozen(key), _frozen(each)) for key, each in value.items()])
    if kind in SETS:
        return kind, frozenset([_frozen(each) for each in value])
    if kind in NAMESPACES or (dataclasses.is_dataclass(kind) and hasattr(value, "__dict__")):
        return kind, _frozen(vars(value))
    if kind is functools.partial:
        return kind, _frozen((value.func, value.args, value.keywords))
    raise UnclearError(f"a {kind.__name__}")


@dataclasses.dataclass(frozen=True)
class State:
    """The attributes of a layer and its modules at one moment. Tensors count by their presence only.

    Attributes:
        modules: for each module by its path: its class (None for the layer itself), its attributes by name (the value
            if it can't change in place, and its frozen form), and the plain values of its class.
        written: dotted names of attributes that the layer's own forward writes; they are ignored.
    """

    modules: dict[str, tuple[type[nn.Module] | None, dict[str, tuple[Any, Any]], dict[str, Any]]]
    written: frozenset[str]

    @staticmethod
    def of(layer: nn.Module, written: Iterable[str] = ()) -> "State":
        """The current state of the layer.

        Raises:
            LeftAloneError: an attribute can't be compared between calls.
        """
        ignored, modules = frozenset(written), {}
        for path, module in layer.named_modules(remove_duplicate=False):
            names = _names(module, path, ignored)
            held = {name: _named(name, getattr(module, name), module) for name in names}
            values = {name: frozen(getattr(module, name)) for name in _values(type(module)) if name not in held}
            modules[path] = (type(module) if path else None, held, values)
        return State(modules, ignored)

    def changed(self, layer: nn.Module) -> str | None:
        """The name of the first attribute or module that was changed, or that got a hook; None if there is none."""
        for path, (kind, held, values) in self.modules.items():
            module: Any = layer
            for name in path.split(".") if path else ():
                module = None if module is None else module._modules.get(name)
            if kind is not None and (type(module) is not kind or hooked(module)):
                return path
            names = _names(module, path, self.written)
            for name in names:
                if name not in held:
                    return name
                now, (value, kept) = getattr(module, name), held[name]
                if now is not value and not _same(now, kept, module):
                    return name
            if len(names) != len(held):
                return next(name for name in held if name not in names)
            for name, kept in values.items():
                if not _same(getattr(module, name, None), kept, module):
                    return name
            if torch.compiler.is_compiling():
                # Reading a method makes torch.compile compile again if the method is replaced on the object.
                for name in _methods(type(module)):
                    getattr(module, name, None)
        return None


def _of_class(kind: type) -> dict[str, Any]:
    """The attributes of a class and its bases, without object and torch's classes."""
    own = [each for each in kind.__mro__ if each is not object and not each.__module__.startswith("torch.")]
    held = {name: value for each in reversed(own) for name, value in vars(each).items()}
    return {name: value for name, value in held.items() if not name.startswith(("__", "_abc_", "_capsfast"))}


@constant_while_tracing
def _methods(kind: type) -> tuple[str, ...]:
    return tuple(name for name, value in _of_class(kind).items() if isinstance(value, types.FunctionType))


def _values(kind: type) -> list[str]:
    """Names of the values of a class that can be compared."""
    return [name for name, value in _of_class(kind).items() if isinstance(value, PLAIN)]


def _names(module: nn.Module, path: str, written: frozenset[str]) -> list[str]:
    parts = (vars(module), module._parameters, module._buffers, module._modules)
    names = [name for part in parts for name in part if name not in OWN]
    return [name for name in names if (f"{path}.{name}" if path else name) not in written] if written else names


class _Changeable:
    """Stands for a value that may change in place."""


def _same(now: Any, before: Any, owner: nn.Module) -> bool:
    try:
        return bool(frozen(now, owner) == before)
    except UnclearError:
        return False


def _named(name: str, value: Any, owner: nn.Module) -> tuple[Any, Any]:
    try:
        return value if isinstance(value, ATOMS) else _Changeable, frozen(value, owner)
    except (UnclearError, RecursionError) as error:
        what = error if isinstance(error, UnclearError) else "something that holds itself"
        raise LeftAloneError(f"its `{name}` holds {what}, and a change of that later would not be seen") from error
