"""Makes the recording of a call while its ordinary code runs.

Every launch comes through launch(), and the recorder sees every operation of torch. It knows the memory of a kernel's
argument by what that is a view of: a tensor that was given, one that was allocated, the result of an operation. So
views and allocations are no steps; what else torch computes between launches (sums over partial dW and over a batch
for dbias, masks, zeros for a first V) is repeated as it is. Memory that only kernels use is one workspace, in which
tensors that no step needs at once may have the same bytes.

Not recorded: operations that look at numbers, take lists of tensors or have several results that are no views, and
outputs that are inputs. None of the four ops has any of these, except for some empty tensors.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils.weak import WeakTensorKeyDictionary
from triton.compiler import CompiledKernel

from .recording import (
    ALIGNMENT,
    Form,
    Place,
    Recording,
    Step,
    compiled_launch,
    form,
    interpreted_launch,
    is_interpreted,
    operation,
)

# Tensors in the workspace begin at multiples of it, as those of PyTorch's allocator do.
GRANULE = 512
ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
# The same as the operations, in a few microseconds less.
QUICK = {torch.ops.aten.zeros.default: torch.zeros, torch.ops.aten.sum.dim_IntList: torch.sum}
_active = threading.local()


class Memory:
    """kind: "given", "allocated", or the "result" of an operation. first, last: steps that use it.

    alone: no part of the workspace, as torch uses it or it is returned. slot, offset: where a replay has it.
    """

    def __init__(self, kind: str, tensor: Tensor) -> None:
        self.kind, self.address, self.form = kind, tensor.data_ptr(), form(tensor)
        self.bytes = -(-tensor.untyped_storage().nbytes() // GRANULE) * GRANULE
        self.alone = kind != "allocated"
        self.first, self.last, self.slot, self.offset = -1, -1, -1, 0

    def place(self, offset: int, wanted: Form | None) -> Place:
        whole = self.alone and offset == 0 and wanted == self.form
        return Place(self.slot, self.offset + offset, None if whole else wanted)


class Recorder(TorchDispatchMode):
    """why_not: why the call can't be repeated, "" if it can."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch would import it: a second at the first call

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.device = given[0].device
        self.why_not, self.launching = "", False
        self.memories: list[Memory] = []
        self.numbers: Any = WeakTensorKeyDictionary()  # of the memories of tensors
        # What makes a step of its arguments, and these, with numbers of memories for slots.
        self.steps: list[tuple[Callable[[Sequence[Any]], Step], Sequence[Any]]] = []
        for tensor in given:
            self.found("given", tensor)

    def refuse(self, why_not: str) -> None:
        self.why_not = self.why_not or why_not

    def found(self, kind: str, tensor: Tensor) -> Memory:
        if tensor.device != self.device:
            self.refuse(f"a tensor is on {tensor.device}")
        if kind != "given" and tensor.data_ptr() % ALIGNMENT:
            self.refuse("an allocator gave memory that is not aligned")
        self.numbers[tensor] = len(self.memories)
        self.memories.append(Memory(kind, tensor))
        return self.memories[-1]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = op(*args, **(kwargs or {}))
        if not self.launching and not self.why_not:
            self.called(op, args, kwargs or {}, returned)
        return returned

    def called(self, op: Any, args: Any, kwargs: Any, returned: Any) -> None:
        results = returned if isinstance(returned, (list, tuple)) else (returned,)
        operands = [value for value in args if isinstance(value, Tensor)]
        beside = [*kwargs.values(), *(each for value in args if isinstance(value, (list, tuple)) for each in value)]
        if not all(isinstance(each, Tensor) for each in results):
            self.refuse(f"{op} has a result that is no tensor")
            return
        if any(isinstance(each, Tensor) for each in beside):
            self.refuse(f"{op} has a list of tensors, or one by name")
            return
        if op in ALLOCATIONS:
            self.found("allocated", returned)
            return
        fresh = []
        for result in results:
            storage = result.untyped_storage().data_ptr()  # 0 for no bytes
            base = next((each for each in operands if each.untyped_storage().data_ptr() == storage != 0), None)
            if base is None:
                fresh.append(result)
            elif base in self.numbers:
                self.numbers[result] = self.numbers[base]
        if len(fresh) > 1:
            self.refuse(f"{op} has {len(fresh)} results")
        elif fresh or op._schema.is_mutable:
            used = self.places(args, alone=True)
            memory = self.found("result", fresh[0]) if fresh else None

            def make(final: Sequence[Any]) -> Step:
                return operation(QUICK.get(op, op), kwargs, None if memory is None else memory.slot, final)

            self.steps.append((make, used))

    def launched(self, kernel: Any, grid: tuple[int, ...], args: Any, constants: dict[str, Any], compiled: Any) -> None:
        make: Callable[[Sequence[Any]], Step]
        if is_interpreted():
            make = functools.partial(interpreted_launch, kernel, grid, constants)
        elif isinstance(compiled, CompiledKernel):
            defaults = kernel.signature.parameters
            args = (*args, *(constants.get(name, defaults[name].default) for name in kernel.arg_names[len(args) :]))
            make = functools.partial(compiled_launch, compiled, grid)
        else:
            self.refuse(f"a launch gave {type(compiled).__name__}, no compiled kernel")
            return
        self.steps.append((make, self.places(args)))

    def places(self, values: Sequence[Any], alone: bool = False) -> Sequence[Any]:
        return tuple(self.place(value, alone) if isinstance(value, Tensor) else value for value in values)

    def place(self, tensor: Tensor, alone: bool) -> Place | None:
        number = self.numbers.get(tensor)
        if number is None:
            self.refuse("a tensor is none of the call's")
            return None
        memory = self.memories[number]
        memory.alone |= alone
        memory.last = len(self.steps)
        memory.first = memory.last if memory.first < 0 else memory.first
        return Place(number, tensor.data_ptr() - memory.address if tensor.numel() else 0, form(tensor))

    def recording(self, outputs: Sequence[Tensor]) -> Recording | str:
        returned = self.places(outputs, alone=True)
        if not self.why_not and any(self.memories[each.slot].kind == "given" for each in returned):
            self.refuse("an output is an input")
        if self.why_not:
            return self.why_not
        given, allocated, results = (
            [each for each in self.memories if each.kind == kind] for kind in ("given", "allocated", "result")
        )
        alone = [each for each in allocated if each.alone]
        shared = [each for each in allocated if not each.alone and each.first >= 0]
        for slot, memory in enumerate((*given, *alone, *shared[:1], *results)):
            memory.slot = slot
        fresh = [memory.form for memory in alone]
        if shared:
            fresh.append((torch.uint8, (arrange(shared),), (1,)))
            for memory in shared:
                memory.slot = shared[0].slot

        def final(values: Sequence[Any]) -> Any:
            return tuple(self.memories[n.slot].place(*n[1:]) if isinstance(n, Place) else n for n in values)

        steps = []
        for n, (make, values) in enumerate(self.steps):
            steps.append((make(final(values)), tuple(each.slot for each in results if each.last == n)))
        return Recording(self.device, tuple(fresh), len(results), tuple(steps), final(returned))


def arrange(memories: list[Memory]) -> int:
    """Gives each an offset, so that none overlaps another that is in use at the same step. Returns the bytes in all."""
    placed: list[Memory] = []
    for memory in sorted(memories, key=lambda each: -each.bytes):
        for other in sorted(placed, key=lambda each: each.offset):
            at_once = other.first <= memory.last and memory.first <= other.last
            if at_once and other.offset < memory.offset + memory.bytes:
                memory.offset = max(memory.offset, other.offset + other.bytes)
        placed.append(memory)
    return max(memory.offset + memory.bytes for memory in placed)


# Options of every launch. Sums of products are multiply-adds, which from Triton 3.10 on is not what it does by itself.
ALWAYS = {"enable_fp_fusion": True}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launches a kernel, and notes that if the call is recorded."""
    constants |= ALWAYS
    recorder: Recorder | None = getattr(_active, "recorder", None)
    if recorder is None:
        kernel[grid](*args, **constants)
        return
    recorder.launching = True  # what Triton's interpreter does with torch is no step
    try:
        compiled = kernel[grid](*args, **constants)
    finally:
        recorder.launching = False
    recorder.launched(kernel, grid, args, constants, compiled)


def record(
    function: Callable[..., tuple[Tensor, ...]], args: Sequence[Any]
) -> tuple[tuple[Tensor, ...], Recording | str]:
    """Runs the function. Returns its outputs, and the recording or why there is none."""
    # One tensor as two arguments becomes two: at a replay they may differ.
    args = [value.detach() if isinstance(value, Tensor) else value for value in args]
    _active.recorder = recorder = Recorder([value for value in args if isinstance(value, Tensor)])
    # A with statement would also set flags of the process, at which torch.compile looks in every thread.
    _push_mode(recorder)
    try:
        outputs = function(*args)
    finally:
        _pop_mode()
        _active.recorder = None
    return outputs, recorder.recording(outputs)
