"""What a call does not read must make no difference: other tensors of the layer, and further arguments."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from . import values
from .identification import Identification
from .inputs import Inputs
from .probe import Probe

Run = Callable[[Inputs], Tensor]


def tensor_that_matters(probe: Probe, inputs: Inputs, found: Identification) -> str | None:
    """The first tensor of the layer beside those of the call on whose numbers the output depends."""
    idle = {name: probe.tensor(name) for name in probe.settable if name not in found.names}
    before = probe(inputs.u, *inputs.others).detach().clone()
    for name, tensor in (probe.others | idle).items():
        for other in values.others(tensor.detach().clone()):
            with _replaced(tensor, other):
                if _moves(probe, inputs, before):
                    return name
    return None


def argument_that_matters(probe: Probe, inputs: Inputs, found: Identification) -> int | None:
    """The first of the tensors that count as unused on which the output depends."""
    before = probe(inputs.u, *inputs.others).detach().clone()
    for n, (role, value) in enumerate(zip(found.arguments, inputs.others, strict=True)):
        if role != "unused" or not isinstance(value, Tensor) or not value.numel():
            continue
        if any(_moves(probe, inputs.with_other(n, other), before) for other in values.others(value)):
            return n
    return None


def _moves(probe: Probe, inputs: Inputs, before: Tensor) -> bool:
    try:
        after = probe(inputs.u, *inputs.others)
    except Exception:  # with other numbers it does not even run
        return True
    return not same(before, after)


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


@contextmanager
def _replaced(tensor: Tensor, other: Tensor) -> Iterator[None]:
    """Other numbers in the memory of a tensor, which an array may share; in a new one, where an axis is expanded."""
    kept = tensor.data
    numbers = kept.clone()
    expanded = any(step == 0 and size > 1 for step, size in zip(kept.stride(), kept.shape, strict=True))
    if expanded:
        tensor.data = other
    else:
        kept.copy_(other)
    try:
        yield
    finally:
        tensor.data = kept
        if not expanded:
            kept.copy_(numbers)
