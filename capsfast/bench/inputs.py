"""The inputs of a case, and the step to time."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case
from .contenders import Forward

# More than the last-level cache of most machines, so that no set is still cached when it is used again.
ROTATED_BYTES = 64 * 2**20
MOST_SETS = 64

Step = Callable[[], object]


@dataclass(frozen=True)
class InputSet:
    """tensors: the op's inputs in order. dout: the gradient of each output."""

    tensors: tuple[Tensor, ...]
    dout: tuple[Tensor, ...]


def weight_std(case: Case) -> float:
    """A deviation that makes weighted sums of order one, so that coupling changes; for a routing, its own deviation."""
    if case.routing:
        return float(case.on_meta.weight_std(case.K, columns=case.D))
    return min(0.5, case.J / math.sqrt(case.I * max(case.K, 1)))


def input_set(case: Case, device: torch.device, seed: int = 0) -> InputSet:
    """Normal inputs that depend on ``seed`` only, weight or votes scaled by :func:`weight_std`.

    Activations are uniform between 0 and 1. Parameters of a routing or a layer have their initial values.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        if name in of_module:
            return of_module[name].to(device, case.torch_dtype)
        # In place, so that the largest inputs are in memory once.
        empty = torch.empty(shape, device=device, dtype=case.torch_dtype)
        if name == "activation":
            return empty.uniform_(generator=generator)
        return empty.normal_(0.0, weight_std(case) if name in ("weight", "votes") else 1.0, generator=generator)

    of_module: dict[str, Tensor] = {}
    if case.module_name:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = case.module()
        of_module = {f"{case.op}.{name}": value.detach() for name, value in module.named_parameters()}
    tensors = tuple(drawn(name, shape).requires_grad_(case.backward) for name, shape in case.shapes.items())
    return InputSet(tensors, tuple(drawn("gradient", shape) for shape in case.outputs.values()))


def input_sets(case: Case, device: torch.device) -> list[InputSet]:
    """Enough sets to exceed the caches, at least one; on a GPU one, because the timing clears its cache."""
    count = min(MOST_SETS, math.ceil(ROTATED_BYTES / max(case.input_bytes, 1))) if device.type == "cpu" else 1
    return [input_set(case, device, seed) for seed in range(count)]


def step(forward: Forward, case: Case, sets: list[InputSet]) -> Step:
    """A step that runs forward, or forward and backward with fresh gradients, on the next set."""
    rotation = itertools.cycle(sets)

    def both() -> object:
        chosen = next(rotation)
        return torch.autograd.grad(forward(*chosen.tensors), chosen.tensors, chosen.dout, allow_unused=True)

    def forward_only() -> object:
        with torch.no_grad():
            return forward(*next(rotation).tensors)

    return both if case.backward else forward_only
