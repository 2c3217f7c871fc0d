"""A layer that can be run on any numbers, while the one it is a copy of stays as it is."""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from .identification import tensor_of

NARROW = (torch.float32, torch.float16, torch.bfloat16)
CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
# What every module has.
OF_TORCH = frozenset(vars(nn.Module()))
# How deep in containers tensors are looked for, and dtypes of arrays that torch can read.
DEEPEST = 4
ARRAYS = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")

Call = Callable[..., Any]


class InFloat64(TorchFunctionMode):
    """What asks for floats of fewer bits, by name or by torch's default dtype, gets float64, in this thread only."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in CASTS:
            func = Tensor.double
        args = tuple(_wide(each) for each in args)
        found = func(*args, **{name: _wide(value) for name, value in (kwargs or {}).items()})
        if isinstance(found, Tensor) and found.dtype in NARROW and not _holds_tensor((*args, *(kwargs or {}).values())):
            return found.double()
        return found


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


def _holds_tensor(values: tuple[Any, ...]) -> bool:
    return any(
        isinstance(each, Tensor) or (isinstance(each, (tuple, list)) and _holds_tensor((*each,))) for each in values
    )


class Probe:
    """A copy of a layer with all numbers in one dtype, which it was run once before in its own.

    Attributes:
        draws: whether its forward draws random numbers.
        part: which entry of a tuple the output is, None where the layer gives a tensor.
        hooked: whether the layer has hooks, which the copy has not.
        built: names of the parameters that the first forward makes.
        names: of the floating-point tensors: parameters, buffers, plain attributes. settable: those that are no
            parametrization's.
        others: all other tensors that it holds, by name.
    """

    def __init__(
        self,
        layer: nn.Module,
        call: Call | None,
        output: Call | None,
        u: Tensor,
        others: tuple[Any, ...],
        dtype: torch.dtype,
    ) -> None:
        self._call, self._output = call or (lambda layer, *inputs: layer(*inputs)), output
        self.draws = False
        self.dtype = dtype
        self.part: int | None = None
        self.layer = private_copy(layer)
        _untie(self.layer)
        self.hooked = _take_hooks_off(self.layer)
        before = {name for name, _ in self.layer.named_parameters()}
        with torch.no_grad():
            self._run(self.layer, u, others)
        self.draws = False
        self.built = tuple(name for name, _ in self.layer.named_parameters() if name not in before)
        self._widen()
        self.names = tuple(dict.fromkeys((*_held(self.layer), *_parametrized(self.layer))))
        self.true = {name: self.tensor(name).detach().clone() for name in self.names}
        # A parametrized weight is what its own parameters make of it. It keeps its numbers.
        self.settable = tuple(_held(self.layer))
        self.others = other_tensors(self.layer)
        self.other_true = {name: value.detach().clone() for name, value in self.others.items()}

    def _widen(self) -> None:
        """All numbers to one dtype; parameters get gradients, frozen or not."""
        for parameter in self.layer.parameters():
            parameter.grad = None
        self.layer.to(self.dtype)
        for module in self.layer.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor) and value.is_floating_point():
                    vars(module)[name] = value.detach().to(self.dtype)
        for parameter in self.layer.parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_()

    def tensor(self, name: str) -> Tensor:
        return tensor_of(self.layer, name)

    def tensors(self) -> dict[str, Tensor]:
        return {name: self.tensor(name) for name in self.names}

    def set(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            if name in self.settable:
                self.tensor(name).data = value.clone()

    def leaves(self, names: tuple[str, ...]) -> list[Tensor]:
        """Parameters, and of ``names`` what a hook of torch computes of some, as torch.nn.utils.weight_norm does."""
        computed = [self.tensor(name).requires_grad_() for name in names if _is_computed(self.layer, name)]
        return [each for each in (*self.layer.parameters(), *computed) if each.requires_grad]

    def __call__(self, u: Tensor, *others: Any, gradient: bool = True) -> Tensor:
        with torch.set_grad_enabled(gradient), InFloat64() if self.dtype == torch.float64 else nullcontext():
            return self._run(self.layer, u, others)

    def _run(self, layer: nn.Module, u: Tensor, others: tuple[Any, ...]) -> Tensor:
        before = random_states(u.device)
        try:
            found = self._call(layer, u, *others)
        finally:
            if not all(torch.equal(*states) for states in zip(before, random_states(u.device), strict=True)):
                self.draws = True
                _restore(before, u.device)
        if self._output is not None:
            found = self._output(found)
        elif isinstance(found, (tuple, list)):
            tensors = [n for n, each in enumerate(found) if isinstance(each, Tensor)]
            part = next((n for n in tensors if found[n].dim() > 2), next(iter(tensors), 0))
            self.part, found = part, found[part]
        if not isinstance(found, Tensor):
            raise TypeError(f"the output is a {type(found).__name__}, not a tensor; output= says which part is meant")
        return found


def random_states(device: torch.device) -> list[Tensor]:
    """Of the generators that a forward may draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _restore(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


@contextmanager
def other_random_numbers(device: torch.device) -> Iterator[None]:
    """Torch's generators in another state, and back again."""
    before = random_states(device)
    torch.rand(1)
    torch.rand(1, device=device)
    try:
        yield
    finally:
        _restore(before, device)


@contextmanager
def modes_swapped(layer: nn.Module) -> Iterator[None]:
    """Each module in training mode where it is in evaluation mode, and the other way round."""
    modes = [(module, module.training) for module in layer.modules()]
    for module, training in modes:
        module.training = not training
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def private_copy(layer: nn.Module) -> nn.Module:
    """A copy that shares no tensor; what a forward has left on the layer with a gradient loses that."""
    memo: dict[int, Any] = {}
    for module in layer.modules():
        for value in vars(module).values():
            for each in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(each, Tensor) and not each.is_leaf:
                    memo[id(each)] = each.detach().clone()
    with torch.no_grad():
        return copy.deepcopy(layer, memo)


def _take_hooks_off(layer: nn.Module) -> bool:
    """Other people's hooks, which may write somewhere; those of torch are part of what a layer computes."""
    found = False
    for module in layer.modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            hooks = getattr(module, kind)
            for key, hook in list(hooks.items()):
                if not str(getattr(hook, "__module__", "")).startswith("torch."):
                    del hooks[key]
                    found = True
    return found


def _held(layer: nn.Module) -> Iterator[str]:
    """Names of all floating-point tensors that a layer holds: parameters, buffers and plain attributes."""
    for prefix, module in layer.named_modules():
        if isinstance(module, parametrize.ParametrizationList) or "parametrizations" in prefix.split("."):
            continue
        held = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in held.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                yield f"{prefix}.{name}" if prefix else name


def _is_computed(layer: nn.Module, name: str) -> bool:
    path, _, attribute = name.rpartition(".")
    hooks = layer.get_submodule(path)._forward_pre_hooks.values()
    return any(getattr(hook, "name", None) == attribute for hook in hooks)


def _untie(layer: nn.Module) -> None:
    """A tensor under several names becomes several, so that the name that the forward reads is found."""
    seen: set[int] = set()

    def once(held: dict[str, Any]) -> None:
        for name, value in held.items():
            if isinstance(value, Tensor) and id(value) in seen:
                copied = value.detach().clone()
                if isinstance(value, nn.Parameter):
                    copied = nn.Parameter(copied, requires_grad=value.requires_grad)
                held[name] = copied
            if isinstance(value, Tensor):
                seen.add(id(held[name]))

    for module in layer.modules():
        once(module._parameters)
        once(module._buffers)
        once(vars(module))


def other_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Those that are not floating-point, and those in lists, mappings, data classes and arrays of the layer.

    A tensor of an array shares its memory.
    """
    floats = {id(tensor_of(layer, name)) for name in _held(layer)}
    found: dict[str, Tensor] = {}

    def look(name: str, value: Any, depth: int) -> None:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.name in ARRAYS:
            value = torch.from_numpy(value)
        if isinstance(value, Tensor):
            if id(value) not in floats and value.numel():
                found[name] = value
        elif depth == DEEPEST:
            return
        elif isinstance(value, (tuple, list)):
            for n, each in enumerate(value):
                look(f"{name}[{n}]", each, depth + 1)
        elif isinstance(value, Mapping):
            for key, each in value.items():
                look(f"{name}[{key!r}]", each, depth + 1)
        elif isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type)):
            for key, each in vars(value).items():
                look(f"{name}.{key}", each, depth + 1)

    for prefix, module in layer.named_modules():
        plain = {name: value for name, value in vars(module).items() if name not in OF_TORCH}
        for name, value in {**module._buffers, **plain}.items():
            look(f"{prefix}.{name}" if prefix else name, value, 0)
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_floating_point():
                look(f"{prefix}.{name}" if prefix else name, parameter, 0)
    return found


def _parametrized(layer: nn.Module) -> Iterator[str]:
    for prefix, module in layer.named_modules():
        if parametrize.is_parametrized(module):
            for name in module.parametrizations:  # type: ignore[union-attr]
                yield f"{prefix}.{name}" if prefix else str(name)
