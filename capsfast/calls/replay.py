"""Keeps the results of the ops of a computation, so that the same computation can run again without kernels.

A layer of windows routes a block in its forward, and again in its backward. It keeps no autograd graph between, only
the results of the ops, in one piece of memory: between the large tensors of the blocks, which are freed, many small
objects that stay would cut the memory of the process into pieces.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

Op = Callable[..., Sequence[Tensor]]

ALIGNMENT = 64


class DifferentError(Exception):
    """The computation that is to be replayed calls other ops than the recorded one."""


class _Call(NamedTuple):
    """An op, its arguments that are no tensors, and its results; later where these lie."""

    op: Op
    arguments: tuple[Any, ...]
    results: Sequence[Any]


class _Place(NamedTuple):
    start: int
    size: torch.Size
    dtype: torch.dtype


class Recording:
    """The results of the ops of a computation, in their order."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def result(self, op: Op, inputs: Sequence[Any]) -> Sequence[Tensor]:
        """The results of the op, which runs."""
        results = op(*inputs)
        self._calls.append(_Call(op, _plain(inputs), results))
        return results

    @property
    def nbytes(self) -> int:
        """The bytes that :meth:`keep` takes."""
        return sum(_room(result) for call in self._calls for result in call.results)

    def keep(self, memory: Tensor, start: int) -> int:
        """Copies the results to ``memory``, uint8, from a byte on, and returns where they end.

        The memory must have room for ``nbytes``.
        """
        for n, call in enumerate(self._calls):
            places = []
            for result in call.results:
                places.append(_Place(start, result.shape, result.dtype))
                _at(memory, places[-1]).copy_(result)
                start += _room(result)
            self._calls[n] = call._replace(results=places)
        return start


class Replay:
    """Gives the results of a recording that was kept in ``memory``."""

    def __init__(self, recording: Recording, memory: Tensor) -> None:
        self._calls, self._memory = iter(recording._calls), memory

    def result(self, op: Op, inputs: Sequence[Any]) -> Sequence[Tensor]:
        """
        Raises:
            DifferentError: the recording has another call here.
        """
        call = next(self._calls, None)
        if call is None or (call.op, call.arguments) != (op, _plain(inputs)):
            raise DifferentError
        return tuple(_at(self._memory, place) for place in call.results)


def _plain(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments, with the shapes of tensors instead of tensors."""
    return tuple(value.shape if isinstance(value, Tensor) else value for value in inputs)


def _room(result: Tensor) -> int:
    return -(-result.numel() * result.itemsize // ALIGNMENT) * ALIGNMENT


def _at(memory: Tensor, place: _Place) -> Tensor:
    # Not a view, which an autograd function would treat in another way than a new tensor.
    tensor, stride = memory.new_empty(0, dtype=place.dtype), torch.empty(place.size, device="meta").stride()
    start = memory.storage_offset() + place.start
    return tensor.set_(memory.untyped_storage(), start // place.dtype.itemsize, place.size, stride)  # type: ignore[call-overload,no-any-return]


class _State(threading.local):
    of_ops: Recording | Replay | None = None


state = _State()


@contextmanager
def of_ops(source: Recording | Replay | None) -> Iterator[None]:
    """Ops ask ``source`` for their results; None: they run, also inside another computation that is recorded."""
    before, state.of_ops = state.of_ops, source
    try:
        yield
    finally:
        state.of_ops = before
