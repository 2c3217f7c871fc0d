"""A copy of a layer that runs on any numbers, so that the layer itself is left unchanged."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .identification import tensor_of
from .inputs import Inputs, binary
from .snapshot import Snapshot, random_state_kept
from .trace import Trace, trace

NARROW = (torch.float32, torch.float16, torch.bfloat16)
CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
# Attributes that every module has.
OF_TORCH = frozenset(vars(nn.Module()))

Run = Callable[..., Any]


class InFloat64(TorchFunctionMode):
    """Replaces narrower float dtypes by float64, whether named or torch's default, in this thread only."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in CASTS:
            func = Tensor.double
        args = tuple(_wide(value) for value in args)
        result = func(*args, **{name: _wide(value) for name, value in (kwargs or {}).items()})
        if (
            isinstance(result, Tensor)
            and result.dtype in NARROW
            and not _holds_tensor((*args, *(kwargs or {}).values()))
        ):
            return result.double()
        return result


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


def _holds_tensor(values: tuple[Any, ...]) -> bool:
    return any(
        isinstance(tensor, Tensor) or (isinstance(tensor, (tuple, list)) and _holds_tensor((*tensor,)))
        for tensor in values
    )


class Probe:
    """A copy of a layer in float64 that has run once in each mode.

    Attributes:
        part: index of the output in the layer's tuple, None if the layer returns a tensor.
        hooked: whether modules in the layer have hooks; the copy has none.
        built: names of the parameters that the first forward makes.
        written: names of buffers and attributes that a forward writes.
        places: for each tensor that the layer holds by name, the mapping and the key that hold it.
        names: names of the floating-point tensors. true: the layer's own values of these tensors.
    """

    def __init__(self, layer: nn.Module, run: Run | None, output: Run | None, inputs: Inputs) -> None:
        self._run, self._output = run or (lambda layer, *given: layer.forward(*given)), output
        self.part: int | None = None
        self.layer = private_copy(layer)
        self.hooked = take_hooks_off(self.layer)
        self._widen()
        before = {name for name, _ in self.layer.named_parameters()}
        inputs = inputs.double()
        with torch.no_grad(), InFloat64():
            if run is None and any(map(nn.parameter.is_lazy, self.layer.parameters())):
                self.layer(inputs.u, *inputs.others)  # torch makes lazy parameters in a hook
            own = {name: place[key] for name, (place, key) in held(self.layer).items()}
            values = {name: value.clone() for name, value in own.items() if not nn.parameter.is_lazy(value)}
            self._part_of(self._run(self.layer, inputs.u, *inputs.others))
            with modes_swapped(self.layer):
                self._run(self.layer, inputs.u, *inputs.others)
        self.built = tuple(name for name, _ in self.layer.named_parameters() if name not in before)
        self._widen()
        self.places = held(self.layer)
        self.written = tuple(
            name
            for name, (place, key) in self.places.items()
            if name not in self.built and not (name in values and same(place[key], values[name]))
        )
        self.names = tuple(name for name in self.places if self.tensor(name).is_floating_point())
        self.true = {name: self.tensor(name).detach().clone() for name in self.names}

    def _widen(self) -> None:
        """Casts all numbers to float64; all parameters require gradients, even frozen ones."""
        for parameter in self.layer.parameters():
            parameter.grad = None
        self.layer.double()
        for module in self.layer.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor) and value.is_floating_point():
                    vars(module)[name] = value.detach().double()
        for parameter in self.layer.parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_()

    def tensor(self, name: str) -> Tensor:
        return tensor_of(self.layer, name)

    def tensors(self) -> dict[str, Tensor]:
        return {name: self.tensor(name) for name in self.names}

    def set(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.tensor(name).data = value.clone()

    def __call__(self, inputs: Inputs, gradient: bool = True) -> Tensor:
        with torch.set_grad_enabled(gradient), InFloat64():
            return self._part_of(self._run(self.layer, inputs.u, *inputs.others))

    def outputs(self, inputs: Inputs) -> Any:
        """All results of the layer."""
        with torch.enable_grad(), InFloat64():
            return self._run(self.layer, inputs.u, *inputs.others)

    def results(self, inputs: Inputs, entries: Sequence[str]) -> tuple[Tensor, ...]:
        """The output, or the entries of the layer's tuple whose meaning is known."""
        if not entries:
            return (self(inputs),)
        results = zip(self.outputs(inputs), entries, strict=True)
        return tuple(value for value, entry in results if entry not in ("None", "other"))

    def _part_of(self, result: Any) -> Tensor:
        if self._output is not None:
            result = self._output(result)
        elif isinstance(result, (tuple, list)):
            tensors = [n for n, tensor in enumerate(result) if isinstance(tensor, Tensor)]
            part = next((n for n in tensors if result[n].dim() > 2), next(iter(tensors), 0))
            self.part, result = part, result[part]
        if not isinstance(result, Tensor):
            raise TypeError(f"the output is a {type(result).__name__}, not a tensor; output= says which part is meant")
        return result

    def trace(self, inputs: Inputs, *parts: int, symbolic: bool = False) -> Trace:
        """Traces the layer in its current mode. Further arguments are named ``argument 2`` and so on.

        parts: indices in the layer's tuple that count as results besides the output.
        """
        tensors_in = {"u": inputs.u.detach().requires_grad_()}
        tensors_in |= {
            f"argument {n}": tensor for n, tensor in enumerate(inputs.others, 2) if isinstance(tensor, Tensor)
        }
        kept = {name: place[key] for name, (place, key) in self.places.items()}
        # An argument of 0 and 1 may be a mask. The layer computes with all other tensors.
        numbers = ["u", *kept, *(name for name, value in tensors_in.items() if not binary(value))]

        def run(tensors: dict[str, Tensor]) -> list[Tensor]:
            for name, (place, key) in self.places.items():
                place[key] = tensors[name]
            u = tensors["u"]
            others = [tensors.get(f"argument {n}", size) for n, size in enumerate(inputs.sizes(u.shape[0]), 2)]
            result = self._run(self.layer, u, *others)
            return [self._part_of(result), *(result[part] for part in parts)]

        before = Snapshot(self.layer)
        try:
            with random_state_kept(self.layer), InFloat64():
                return trace(run, tensors_in | kept, numbers, "u", symbolic)
        finally:
            before.restore()


@contextmanager
def modes_swapped(layer: nn.Module) -> Iterator[None]:
    """Swaps training and evaluation mode of every module."""
    modes = [(module, module.training) for module in layer.modules()]
    for module, training in modes:
        module.training = not training
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def private_copy(layer: nn.Module) -> nn.Module:
    """A copy that shares no tensor; tensors with a gradient graph that a forward left on the layer are detached."""
    memo: dict[int, Any] = {}
    for module in layer.modules():
        for value in vars(module).values():
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(tensor, Tensor) and not tensor.is_leaf:
                    memo[id(tensor)] = tensor.detach().clone()
    with torch.no_grad():
        return copy.deepcopy(layer, memo)


def held(layer: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """The place of each tensor that the layer holds by name: parameters, buffers and plain attributes."""
    places = {}
    for prefix, module in layer.named_modules():
        attributes = {name: value for name, value in vars(module).items() if name not in OF_TORCH}
        for place in (module._parameters, module._buffers, attributes):
            for name, value in place.items():
                if isinstance(value, Tensor):
                    where = vars(module) if place is attributes else place
                    places[f"{prefix}.{name}" if prefix else name] = (where, name)
    return places


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def take_hooks_off(layer: nn.Module) -> bool:
    """Removes other people's hooks, which may write somewhere. Torch's own hooks belong to the layer's computation."""
    found = False
    for module in layer.modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            hooks = getattr(module, kind)
            for key, hook in list(hooks.items()):
                if not str(getattr(hook, "__module__", "")).startswith("torch."):
                    del hooks[key]
                    found = True
    return found
