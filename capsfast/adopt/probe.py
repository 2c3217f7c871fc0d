"""A layer that can be run on any numbers, while the one it is a copy of stays as it is."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from .identification import tensor_of

NARROW = (torch.float32, torch.float16, torch.bfloat16)
CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)

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

    def leaves(self) -> list[Tensor]:
        return [each for each in self.layer.parameters() if each.requires_grad]

    def __call__(self, u: Tensor, *others: Any) -> Tensor:
        with torch.enable_grad(), InFloat64() if self.dtype == torch.float64 else nullcontext():
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


def _parametrized(layer: nn.Module) -> Iterator[str]:
    for prefix, module in layer.named_modules():
        if parametrize.is_parametrized(module):
            for name in module.parametrizations:  # type: ignore[union-attr]
                yield f"{prefix}.{name}" if prefix else str(name)
