"""The state of a layer besides the numbers in its tensors, to check at each call that the layer is unchanged."""

import argparse
import copy
import dataclasses
import enum
import functools
import inspect
import numbers
import types
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from ..nn._layer import hooked

# Class attributes of these types count as options.
PLAIN = (numbers.Number, str, bytes, enum.Enum, type(None))
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
# The attributes where a fused layer keeps its :class:`Fused` and its :class:`Calls`.
RECORD, COUNT = "_capsfast_fused", "_capsfast_calls"
# Attributes that are not options of a layer: every module has them, or torch and Lightning (the last one, by its own
# torch.compile) add them to modules that they compile or replicate.
OF_TOOLS = {"_compiled_call_impl", "_is_torch_compile", "_is_replica", "_former_parameters", "_compile_kwargs"}
OWN = frozenset({*vars(nn.Module()), RECORD, COUNT} | OF_TOOLS)


class LeftAloneError(Exception):
    """A layer is not fused. The text is the reason in the report."""


def kept(value: Any, reason: str) -> Any:
    """A copy that equals the value until the value changes, even in place.

    Raises:
        LeftAloneError: the reason, with the kind of value instead of ``{}``: a copy does not equal the value, or
            the value holds tensors or modules.
    """
    memo: dict[int, Any] = {}
    try:
        copied_value = copy.deepcopy(value, memo)
    except Exception:  # other people's classes
        copied_value = None
    # deepcopy keeps the originals of its copies in memo[id(memo)].
    inner = [copied for copied in memo.get(id(memo), []) if isinstance(copied, (Tensor, nn.Module))]
    if inner or not same(value, copied_value):
        raise LeftAloneError(reason.format(f"a {type(inner[0] if inner else value).__name__}"))
    return copied_value


def same(now: Any, before: Any, owner: nn.Module | None = None) -> bool:
    if torch.compiler.is_compiling() and type(now) in NAMESPACES and type(before) is dict:
        # Name by name: torch.compile can't list them before torch 2.13.
        now = {name: getattr(now, name, None) for name in before}
    try:
        one, other = _compared(now, owner), _compared(before, owner)
        return type(one) is type(other) and bool(one == other)  # True == 1, but they index differently
    except Exception:  # other people's classes, arrays, a list that holds itself
        return False


def _compared(value: Any, owner: nn.Module | None) -> Any:
    """What a comparison looks at. Tensors and modules count by presence, methods of the owner by their functions."""
    if isinstance(value, (Tensor, nn.Module)):
        return Tensor if isinstance(value, Tensor) else nn.Module
    if isinstance(value, types.MethodType) and value.__self__ is owner:
        return value.__func__
    if type(value) is functools.partial:
        return value.func, value.args, value.keywords
    return dict(vars(value)) if type(value) in NAMESPACES else value


@dataclasses.dataclass(frozen=True)
class State:
    """The options of a layer and its modules at one moment. Tensors count by their presence only.

    Attributes:
        modules: for each module by its path: its class (None for the layer itself), its attributes by name, and the
            names of its methods.
        written: dotted names of attributes that the layer's own forward writes; they are ignored.
    """

    modules: dict[str, tuple[type[nn.Module] | None, dict[str, Any], tuple[str, ...]]]
    written: frozenset[str]

    @staticmethod
    def of(layer: nn.Module, written: Collection[str] = ()) -> "State":
        """The current state of the layer.

        Raises:
            LeftAloneError: an attribute can't be compared between calls.
        """
        modules = {}
        for path, module in layer.named_modules(remove_duplicate=False):
            places = (vars(module), module._parameters, module._buffers, module._modules)
            names = [name for place in places for name in place if name not in OWN]
            held = {
                name: kept(
                    _compared(getattr(module, name), module),
                    f"its `{name}` holds {{}}, and a change of that later would not be seen",
                )
                for name in (*names, *_of_class(type(module), PLAIN))
                if _dotted(path, name) not in written
            }
            methods = [name for name in ("forward", *_of_class(type(module), types.FunctionType)) if name not in held]
            modules[path] = (type(module) if path else None, held, tuple(methods))
        return State(modules, frozenset(written))

    def changed(self, layer: nn.Module) -> str | None:
        """The name of the first attribute or module that changed, or that got a hook; None if there is none."""
        for path, (kind, held, methods) in self.modules.items():
            module: Any = layer
            for name in path.split(".") if path else ():
                module = None if module is None else module._modules.get(name)
            if kind is not None and (type(module) is not kind or hooked(module)):
                return path
            for name, value in held.items():
                now = getattr(module, name, None)
                # Most options are tensors or plain, and need no look at what they hold.
                if value is Tensor and isinstance(now, Tensor):
                    continue
                plain = type(now) is type(value) and type(now) in (int, float, bool, str, type(None))
                if not (now == value if plain else same(now, value, module)):
                    return name
            for name in methods:
                # Reading a method makes torch.compile compile again if the method is replaced on the object.
                if getattr(module, name) is not None and name in vars(module):
                    return name
            # torch.compile can't list attributes before torch 2.13 (tried: 2.10).
            attributes: dict[str, Any] = {} if torch.compiler.is_compiling() else vars(module)
            for name in attributes:
                if name not in held and name not in OWN and _dotted(path, name) not in self.written:
                    return name
        return None


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _of_class(kind: type[nn.Module], wanted: Any) -> list[str]:
    """Names of the attributes of a class and its bases that are of this type, without torch's classes."""
    bases = [base for base in kind.__mro__ if base is not object and not base.__module__.startswith("torch.")]
    names = {name: None for base in bases for name in vars(base) if not name.startswith(("__", "_abc_", "_capsfast"))}
    return [name for name in names if isinstance(inspect.getattr_static(kind, name), wanted)]
