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

Results = Sequence[Tensor]

ALIGNMENT = 64


class Memory:
    """Memory for the results of several computations."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.bytes = torch.empty(max(0, nbytes), dtype=torch.uint8, device=device)
        self.used = 0


class _Stored(NamedTuple):
    """Where a result is kept."""

    at: int
    size: torch.Size
    dtype: torch.dtype


class Recording:
    """The results of the ops of a computation, in their order."""

    def __init__(self) -> None:
        self._calls: list[Results] = []
        self._kept: list[list[_Stored]] = []
        self._memory: Memory | None = None

    @property
    def nbytes(self) -> int:
        """The memory that :meth:`keep` takes."""
        return sum(_room(result) for results in self._calls for result in results)

    def keep(self, memory: Memory) -> bool:
        """Moves the results to this memory; False, and keeps nothing, if there is too little room."""
        calls, self._calls = self._calls, []
        if memory.used + sum(_room(result) for results in calls for result in results) > memory.bytes.numel():
            return False
        self._memory = memory
        for results in calls:
            stored = []
            for result in results:
                stored.append(_Stored(memory.used, result.shape, result.dtype))
                memory.used += _room(result)
            self._kept.append(stored)
            for place, result in zip(stored, results, strict=True):
                self._at(place).copy_(result)
        return True

    def _at(self, place: _Stored) -> Tensor:
        # Not a view, which an autograd function would treat in another way than a new tensor.
        assert self._memory is not None
        memory = self._memory.bytes
        stride = torch.empty(place.size, device="meta").stride()
        start = place.at // place.dtype.itemsize
        return memory.new_empty(0, dtype=place.dtype).set_(memory.untyped_storage(), start, place.size, stride)  # type: ignore[call-overload,no-any-return]

    def _next(self) -> Results:
        return tuple(self._at(place) for place in self._kept.pop(0))


def _room(result: Tensor) -> int:
    return -(-result.numel() * result.itemsize // ALIGNMENT) * ALIGNMENT


class _State(threading.local):
    recording: Recording | None = None  # results go there
    replayed: Recording | None = None  # results come from there


state = _State()


@contextmanager
def recorded(recording: Recording) -> Iterator[None]:
    """The results of ops go to the recording."""
    before, state.recording = state.recording, recording
    try:
        yield
    finally:
        state.recording = before


@contextmanager
def replayed(recording: Recording | None) -> Iterator[None]:
    """Ops take their results from a kept recording of the same computation; with None they run."""
    before, state.replayed = state.replayed, recording
    try:
        yield
    finally:
        state.replayed = before


def active() -> bool:
    """Whether ops must call :func:`result`."""
    return state.recording is not None or state.replayed is not None


def result(op: Callable[..., Results], inputs: Sequence[Any]) -> Results:
    """The results of the op for the inputs, recorded or replayed."""
    if state.replayed is not None:
        return state.replayed._next()
    results = op(*inputs)
    if state.recording is not None:
        state.recording._calls.append(results)
    return results
