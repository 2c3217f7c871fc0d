"""Inputs of a case, and the step that is timed."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import routings
from .cases import Case
from .contenders import Forward

# More than the last-level cache of most machines: a set that comes round again is not cached.
ROTATED_BYTES = 64 * 2**20
MOST_SETS = 64

Step = Callable[[int], object]


@dataclass(frozen=True)
class InputSet:
    """tensors: the op's inputs in order. dout: the gradient of each output."""

    tensors: tuple[Tensor, ...]
    dout: tuple[Tensor, ...]


def weight_std(case: Case) -> float:
    """A deviation at which the weighted sums are of order one, so that routing does route; of a routing its own."""
    if case.routing:
        return routings.weight_std(case.routing, case.I, case.J, case.K, case.D)
    return min(0.5, case.J / math.sqrt(case.I * max(case.K, 1)))


def input_set(case: Case, device: torch.device, seed: int = 0) -> InputSet:
    """Normal inputs that depend on ``seed`` only, weight or votes scaled by :func:`weight_std`.

    Activations are uniform between 0 and 1; parameters of a routing are those that it starts with.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(shape: tuple[int, ...], std: float) -> Tensor:
        # In place, so that the widest inputs exist once.
        drawn = torch.empty(shape, device=device, dtype=case.torch_dtype)
        return drawn.normal_(0.0, std, generator=generator)

    def value(name: str, shape: tuple[int, ...]) -> Tensor:
        if name in own:
            return own[name]
        if name == "activation":
            return torch.rand(shape, device=device, dtype=case.torch_dtype, generator=generator)
        return normal(shape, weight_std(case) if name in ("weight", "votes") else 1.0)

    own: dict[str, Tensor] = {}
    if case.routing:
        made = routings.parameters(case.routing, case.I, case.J, case.K, case.D, case.r, seed)
        own = {name: each.to(device, case.torch_dtype) for name, each in made.items()}
    tensors = tuple(value(name, shape) for name, shape in case.shapes.items())
    if case.backward:
        tensors = tuple(tensor.requires_grad_() for tensor in tensors)
    return InputSet(tensors, tuple(normal(shape, 1.0) for shape in case.outputs.values()))


def rotated_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return ROTATED_BYTES
    return max(ROTATED_BYTES, 4 * torch.cuda.get_device_properties(device).L2_cache_size)


def input_sets(case: Case, device: torch.device) -> list[InputSet]:
    """As many sets as it takes to outgrow the caches, at least one."""
    count = min(MOST_SETS, math.ceil(rotated_bytes(device) / max(case.input_bytes, 1)))
    return [input_set(case, device, seed) for seed in range(count)]


def step(forward: Forward, case: Case, sets: list[InputSet]) -> Step:
    """A function of the round's number: one forward, or one forward and backward with fresh gradients."""
    if case.backward:

        def forward_backward(n: int) -> object:
            chosen = sets[n % len(sets)]
            found = forward(*chosen.tensors)
            return torch.autograd.grad(found, chosen.tensors, chosen.dout, allow_unused=True)

        return forward_backward

    def forward_only(n: int) -> object:
        with torch.no_grad():
            return forward(*sets[n % len(sets)].tensors)

    return forward_only
