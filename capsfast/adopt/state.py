"""What a layer holds beside the numbers in its tensors, to see at each call whether it is still the same layer."""

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

# Values that nothing changes in place.
ATOMS = (
    *(numbers.Number, str, bytes, type(None), type(Ellipsis), enum.Enum, range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(types.FunctionType, types.BuiltinFunctionType, type, torch.jit.ScriptFunction),
)
# Values of a class that are options.
PLAIN = (numbers.Number, str, bytes, enum.Enum)
SEQUENCES = (list, tuple, deque)
MAPPINGS = (dict, OrderedDict)
SETS = (set, frozenset)
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)

# Where a fused layer keeps what it computes, and how often it did.
RECORD, COUNT = "_capsfast_fused", "_capsfast_calls"
# What is no option of a layer: what every module has, and what torch and Lightning (the last one, by its own
# torch.compile) put into those that they compile or replicate.
OF_TOOLS = {"_compiled_call_impl", "_is_torch_compile", "_is_replica", "_former_parameters", "_compile_kwargs"}
OWN = frozenset({*vars(nn.Module()), RECORD, COUNT} | OF_TOOLS)


class UnclearError(TypeError):
    """A value that can't be compared between calls. The text says what it is."""


def frozen(value: Any, owner: nn.Module | None = None) -> Any:
    """Equal for two plain values only if these are the same, in type too. Later changes in place don't reach it.

    A tensor equals any other, and so does a module.

    Args:
        owner: the module whose attribute this is. Its own methods count by their functions.

    Raises:
        UnclearError: the value is, or holds, something else than plain values.
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
        # 1 equals 1.0 and True. Functions have no kind here: pickle doesn't know these.
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
    """What a layer and the modules in it held when this was taken: of tensors only that they are there.

    Attributes:
        modules: for each module by its path, its class (None for the layer itself), what it held under which name (the
            value where nothing changes it in place, and what :func:`frozen` makes of it), and the values of its class.
        written: attributes by their dotted names that its own forward writes, which don't count.
    """

    modules: dict[str, tuple[type[nn.Module] | None, dict[str, tuple[Any, Any]], dict[str, Any]]]
    written: frozenset[str]

    @staticmethod
    def of(layer: nn.Module, written: Iterable[str] = ()) -> "State":
        """The layer as it is.

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
        """The name of the first attribute or module that is not what it was, or that somebody watches."""
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
                # torch.compile compiles anew where one that it saw is replaced on the object.
                for name in _methods(type(module)):
                    getattr(module, name, None)
        return None


def _of_class(kind: type) -> dict[str, Any]:
    """What a class holds, and those that it derives from, without torch's."""
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
    """In the place of a value that may change in place."""


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
