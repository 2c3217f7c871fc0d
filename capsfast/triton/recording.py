"""The launches of a call in a form that can be repeated: with every tensor as an offset in a slot."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from .kernels.update import restore_kernel

# The compiler is told which arguments point to multiples of it.
ALIGNMENT = 16

Form = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
# What a step works with: tensors and their addresses by slot, and the stream.
Step = Callable[[list[Any], list[int], int], None]


def form(tensor: Tensor) -> Form:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


class Place(NamedTuple):
    """Where a tensor lies: in which slot, how many bytes behind its address. form: None if it is that of the slot."""

    slot: int
    offset: int
    form: Form | None

    def tensor(self, tensors: list[Any]) -> Tensor:
        base: Tensor = tensors[self.slot]
        if self.form is None:
            return base
        dtype, size, stride = self.form
        base = base if base.dtype == dtype else base.view(dtype)
        return base.as_strided(size, stride, base.storage_offset() + self.offset // base.itemsize)


class Recording(NamedTuple):
    """Slots are the tensors of the call, then fresh ones, then the results of steps, of which there may be less."""

    device: torch.device
    fresh: tuple[Form, ...]
    results: int
    steps: tuple[tuple[Step, tuple[int, ...]], ...]  # and the slots of results that no later step needs
    outputs: tuple[Place, ...]

    def replay(self, tensors: list[Any], addresses: list[int]) -> tuple[Tensor, ...] | None:
        """The outputs of the call, None if an allocator gave memory that is not aligned. Fills up both lists."""
        bits = 0
        for dtype, size, stride in self.fresh:
            tensor = torch.empty_strided(size, stride, dtype=dtype, device=self.device)
            address = tensor.data_ptr()
            tensors.append(tensor)
            addresses.append(address)
            bits |= address
        if bits % ALIGNMENT:
            return None
        tensors += [None] * self.results
        addresses += [0] * self.results
        stream = 0 if is_interpreted() else driver.active.get_current_stream(self.device.index)
        for step, done in self.steps:
            step(tensors, addresses, stream)
            for slot in done:
                tensors[slot] = None
        return tuple([place.tensor(tensors) for place in self.outputs])


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, which it decided when they were defined."""
    return not isinstance(restore_kernel, JITFunction)


def compiled_launch(compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any]) -> Step:
    """The end of Triton's own JITFunction.run. arguments: all of the kernel's signature."""
    places = [(n, value.slot, value.offset) for n, value in enumerate(arguments) if isinstance(value, Place)]
    template = [None if isinstance(value, Place) else value for value in arguments]
    x, y, z = (*grid, 1, 1)[:3]
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    # compiled: the function is unloaded when nothing refers to it any more.
    def step(tensors: list[Any], addresses: list[int], stream: int, compiled: Any = compiled) -> None:
        filled = template.copy()
        for n, slot, offset in places:
            filled[n] = addresses[slot] + offset
        run(x, y, z, stream, function, metadata, None, None, None, *filled)

    return step


def interpreted_launch(kernel: Any, grid: tuple[int, ...], constants: dict[str, Any], arguments: Sequence[Any]) -> Step:
    def step(tensors: list[Any], addresses: list[int], stream: int) -> None:
        kernel[grid](*(n.tensor(tensors) if isinstance(n, Place) else n for n in arguments), **constants)

    return step


def operation(op: Any, kwargs: dict[str, Any], slot: int | None, arguments: Sequence[Any]) -> Step:
    """An operation of torch. slot: of its result, None if that is one of its arguments."""

    def step(tensors: list[Any], addresses: list[int], stream: int) -> None:
        result = op(*[n.tensor(tensors) if isinstance(n, Place) else n for n in arguments], **kwargs)
        if slot is not None:
            tensors[slot], addresses[slot] = result, result.data_ptr()

    return step
