"""What a layer holds beside the numbers in its tensors, to see at each call whether it is still the same layer."""

import argparse
import dataclasses
import enum
import functools
import numbers
import types
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Values that nothing changes in place.
ATOMS = (
    *(numbers.Number, str, bytes, type(None), type(Ellipsis), enum.Enum, range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(types.FunctionType, types.BuiltinFunctionType, type, torch.jit.ScriptFunction),
)
SEQUENCES = (list, tuple, deque)
MAPPINGS = (dict, OrderedDict)
SETS = (set, frozenset)
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
# Of one attribute: what is compared at each call has to be little.
MOST_VALUES = 256

# Where fused layers keep their record.
RECORD = "_capsfast_fused"
# What every module has; the switch between training and evaluation is no option of the layer. Then what torch puts into
# modules that it compiles or replicates.
EVERY = frozenset({*vars(nn.Module()), RECORD})
OWN = EVERY | {"_compiled_call_impl", "_is_replica", "_former_parameters"}


class UnclearError(TypeError):
    """A value that cannot be compared between calls. Its text says what it is."""


def frozen(value: Any) -> tuple[Any, ...]:
    """What equals that of another value only if both are the same, in type too; later changes do not reach it.

    Raises:
        UnclearError: it is, or holds, something else than plain values.
    """
    return _frozen(value, [MOST_VALUES])


def _frozen(value: Any, left: list[int]) -> tuple[Any, ...]:
    left[0] -= 1
    if left[0] < 0:
        raise UnclearError(f"more than {MOST_VALUES} values")
    kind = type(value)
    if isinstance(value, ATOMS):
        # 1 equals 1.0 and True. No kinds of functions: pickle does not know these.
        return (kind if isinstance(value, (numbers.Number, str, bytes)) else None), value
    if kind in SEQUENCES or (issubclass(kind, tuple) and not hasattr(value, "__dict__")):
        return kind, tuple([_frozen(each, left) for each in value])
    if kind in MAPPINGS:
        return kind, tuple([(_frozen(key, left), _frozen(each, left)) for key, each in value.items()])
    if kind in SETS:
        return kind, frozenset([_frozen(each, left) for each in value])
    if has_fields(value):
        return kind, _frozen(vars(value), left)
    if kind is functools.partial:
        return kind, _frozen((value.func, value.args, value.keywords, vars(value)), left)
    raise UnclearError(f"a {kind.__name__}")


def has_fields(value: object) -> bool:
    """Whether all that it holds is in its ``vars``, as in a namespace or most dataclasses."""
    return type(value) in NAMESPACES or (
        dataclasses.is_dataclass(value) and not isinstance(value, type) and "__dict__" in dir(value)
    )


def attributes(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """All that the layer and the modules in it hold beside parameters, buffers and modules: dotted names and values."""
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if name not in EVERY and not isinstance(value, nn.Module):
                yield f"{path}.{name}" if path else name, value


def hooked(module: nn.Module) -> bool:
    """Whether something runs at each call of the module beside its forward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


@dataclass(frozen=True)
class Held:
    """What one module holds.

    Attributes:
        kind: its class.
        own: names of its attributes, torch's with them.
        parameters, buffers, children: names of these.
        names: all of them, without torch's.
        plain: attributes, also of the class, that nothing changes in place: name and value.
        deep: attributes that hold plain values: name, and what :func:`frozen` makes of them.
        bound: attributes that are methods: name, function, and the place of their module among those of the layer.
        tensors: names of parameters, buffers and attributes that are tensors; their numbers are not kept.
        absent: names of parameters, buffers and children that are None.
        modules: children: name and place among the modules of the layer.
        methods: names of the functions of the class.
    """

    kind: type[nn.Module]
    own: frozenset[str]
    parameters: frozenset[str]
    buffers: frozenset[str]
    children: frozenset[str]
    names: frozenset[str]
    plain: tuple[tuple[str, Any], ...]
    deep: tuple[tuple[str, Any], ...]
    bound: tuple[tuple[str, Any, int], ...]
    tensors: tuple[str, ...]
    absent: tuple[str, ...]
    modules: tuple[tuple[str, int], ...]
    methods: tuple[str, ...]


@dataclass(frozen=True)
class Snapshot:
    """What a layer and the modules in it held when it was taken: of tensors only that they are there."""

    modules: tuple[Held, ...]

    @staticmethod
    def of(layer: nn.Module) -> "Snapshot":
        """Of the layer as it is.

        Raises:
            UnclearError: an attribute cannot be compared between calls; the text names it.
        """
        found = _all_of(layer)
        paths = {id(module): name for name, module in layer.named_modules()}
        return Snapshot(tuple(_held(module, paths[id(module)], found) for module in found))

    def holds(self, layer: nn.Module) -> bool:
        """Whether the layer is as it was, and nothing watches the modules in it."""
        compiling = torch.compiler.is_compiling()
        found = [layer]
        for place, held in enumerate(self.modules):
            module = found[place]
            if place and (type(module) is not held.kind or hooked(module)):
                return False
            if not _same(held, module, found):
                return False
            if compiling:
                # torch.compile compiles anew where one of those it saw is replaced on the object.
                for name in held.methods:
                    getattr(module, name, None)
        return True


def _all_of(layer: nn.Module) -> list[nn.Module]:
    found = [layer]
    for module in found:
        found += [each for each in dict.fromkeys(module._modules.values()) if each is not None and each not in found]
    return found


def _held(module: nn.Module, path: str, modules: list[nn.Module]) -> Held:
    places = {id(each): place for place, each in enumerate(modules)}
    parts: tuple[Mapping[str, Any], ...] = (module._parameters, module._buffers, module._modules)
    inside = {name: value for part in parts for name, value in part.items()}
    written = {name: value for name, value in vars(module).items() if name not in OWN}
    plain, deep, bound = [], [], []
    for name, value in {**_of_class(type(module)), **written}.items():
        if isinstance(value, Tensor):
            continue
        if isinstance(value, ATOMS):
            plain.append((name, value))
        elif isinstance(value, types.MethodType) and id(value.__self__) in places:
            bound.append((name, value.__func__, places[id(value.__self__)]))
        else:
            try:
                deep.append((name, frozen(value)))
            except UnclearError as error:
                dotted = f"{path}.{name}" if path else name
                raise UnclearError(f"its `{dotted}` holds {error}") from error
    return Held(
        kind=type(module),
        own=frozenset({*vars(module), *(() if path else (RECORD,))}),
        parameters=frozenset(module._parameters),
        buffers=frozenset(module._buffers),
        children=frozenset(module._modules),
        names=frozenset({*written, *inside}),
        plain=tuple(plain),
        deep=tuple(deep),
        bound=tuple(bound),
        tensors=tuple(name for name, value in {**inside, **written}.items() if isinstance(value, Tensor)),
        absent=tuple(name for name, value in inside.items() if value is None),
        modules=tuple((name, places[id(each)]) for name, each in module._modules.items() if each is not None),
        methods=tuple(
            name for kind in _classes(type(module)) for name, each in vars(kind).items() if _is_method(name, each)
        ),
    )


def _classes(kind: type) -> list[type]:
    """Its own and those that it derives from, without torch's."""
    return [each for each in kind.__mro__ if each is not object and not each.__module__.startswith("torch.")]


def _is_method(name: str, value: object) -> bool:
    return isinstance(value, types.FunctionType) and not name.startswith("__")


def _of_class(kind: type) -> dict[str, Any]:
    """Attributes of the class: no methods, properties or other descriptors."""
    return {
        name: value
        for each in reversed(_classes(kind))
        for name, value in vars(each).items()
        if not name.startswith(("__", "_abc_")) and not hasattr(type(value), "__get__")
    }


class _Missing:
    """In the place of an attribute that is not there."""


def _same(held: Held, module: nn.Module, found: list[nn.Module]) -> bool:
    """Whether the module holds the same; puts the modules in it behind those that were found."""
    own, parameters, buffers, children = vars(module), module._parameters, module._buffers, module._modules
    if not (
        own.keys() == held.own
        and parameters.keys() == held.parameters
        and buffers.keys() == held.buffers
        and children.keys() == held.children
    ):
        names = [name for part in (own, parameters, buffers, children) for name in part if name not in OWN]
        if frozenset(names) != held.names:
            return False
    for name, value in held.plain:
        now = getattr(module, name, _Missing)
        if now is not value and (type(now) is not type(value) or now != value):
            return False
    if held.deep:
        try:
            if any(frozen(getattr(module, name, _Missing)) != kept for name, kept in held.deep):
                return False
        except UnclearError:
            return False
    for name in held.tensors:
        tensor: Tensor | None = parameters.get(name)
        if tensor is None:
            tensor = buffers.get(name)
        if not isinstance(own.get(name) if tensor is None else tensor, Tensor):
            return False
    for name in held.absent:
        if any(part.get(name) is not None for part in (own, parameters, buffers, children)):
            return False
    for name, place in held.modules:
        child: Any = children.get(name)
        if place == len(found):
            found.append(child)
        elif found[place] is not child:
            return False
    for name, function, place in held.bound:
        now = getattr(module, name, _Missing)
        if type(now) is not types.MethodType or now.__func__ is not function or now.__self__ is not found[place]:
            return False
    return True
