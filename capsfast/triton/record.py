"""Makes the launch plan of a call (replay.py) while the ordinary code of that call runs.

Every launch comes through launch(), every operation of torch through the recorder. A kernel's argument is known by the
tensor it is a view of: one that the call was given, one it allocated, or the result of an operation. Views and
allocations become addresses; what else torch computed between launches (a sum over partial dW, zeros) is repeated as
it was. What was allocated and is not returned shares one workspace, and there what is never needed at once the bytes.

No plan has a call whose operations look at numbers or have several results that are no views, or whose outputs are its
inputs: none of the four ops does that with one output capsule or more.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from triton.compiler import CompiledKernel

from .replay import ALIGNMENT, Place, Plan, Step, compiled_launch, interpreted_launch, is_interpreted

_active = threading.local()
# Tensors in a workspace begin at multiples of it, as PyTorch's allocator has them.
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


class Memory:
    """Memory of a call: "given", "allocated", or the "result" of an operation; or "shared", a part of the workspace.

    first, last: launches that use it. slot, offset: where it is at a replay.
    """

    def __init__(self, kind: str, tensor: Tensor) -> None:
        self.kind, self.address, self.form = kind, tensor.data_ptr(), form(tensor)
        self.bytes = -(-tensor.untyped_storage().nbytes() // GRANULE) * GRANULE
        self.first, self.last, self.slot, self.offset = -1, -1, -1, 0
        self.alone = False  # torch works with it, or it is returned


def form(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


class Recorder(TorchDispatchMode):
    """Notes the steps of a call. why_not: why they can't be repeated, "" if they can."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.device = given[0].device
        self.why_not, self.launching = "", False
        self.memories: list[Memory] = []
        self.of: Any = WeakTensorKeyDictionary()  # the memory of a tensor, by number
        self.steps: list[Callable[[Callable[[Any], Any]], Step]] = []
        for tensor in given:
            self.found("given", tensor)

    def found(self, kind: str, tensor: Tensor) -> int:
        if tensor.device != self.device:
            self.why_not = f"a tensor is on {tensor.device}"
        if kind != "given" and tensor.data_ptr() % ALIGNMENT:
            self.why_not = "an allocator gave memory that is not aligned"
        self.of[tensor] = len(self.memories)
        self.memories.append(Memory(kind, tensor))
        return len(self.memories) - 1

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        returned = op(*args, **kwargs)
        if not self.launching and not self.why_not:
            self.operation(op, args, kwargs, returned)
        return returned

    def operation(self, op: Any, args: Any, kwargs: Any, returned: Any) -> None:
        operands = [value for value in args if isinstance(value, Tensor)]
        if len(operands) != sum(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            self.why_not = f"{op} has a list of tensors, or one by name"
        fresh = []
        for result in tree_leaves(returned):
            if not isinstance(result, Tensor):
                self.why_not = f"{op} has a result that is no tensor"
                return
            storage = result.untyped_storage().data_ptr()
            base = next((each for each in operands if each.untyped_storage().data_ptr() == storage), None)
            if base is None:
                fresh.append(result)
            elif base in self.of:
                self.of[result] = self.of[base]
        if op in ALLOCATIONS:
            self.found("allocated", returned)
        elif len(fresh) > 1:
            self.why_not = f"{op} has {len(fresh)} results"
        elif fresh or op._schema.is_mutable:
            used = self.places(args, alone=True)
            number = self.found("result", fresh[0]) if fresh else -1
            self.steps.append(lambda final: operation(QUICK.get(op, op), final(used), kwargs, self.memories, number))

    def launched(self, kernel: Any, grid: tuple[int, ...], args: Any, constants: dict[str, Any], compiled: Any) -> None:
        if self.why_not:
            return
        used = self.places(args)
        if is_interpreted():
            self.steps.append(lambda final: interpreted_launch(kernel, grid, final(used), constants))
        elif isinstance(compiled, CompiledKernel):
            defaults = kernel.signature.parameters
            rest = [constants.get(name, defaults[name].default) for name in kernel.arg_names[len(args) :]]
            self.steps.append(lambda final: compiled_launch(compiled, grid, [*final(used), *rest]))
        else:
            self.why_not = f"a launch gave {type(compiled).__name__}, no compiled kernel"

    def places(self, values: Any, alone: bool = False) -> Any:
        """The values with the places of tensors, whose slots are the numbers of their memories."""

        def at(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            number = self.of.get(value)
            if number is None:
                self.why_not = "a tensor is none of the call's"
                return value
            memory = self.memories[number]
            memory.alone |= alone
            memory.last = len(self.steps)
            memory.first = memory.last if memory.first < 0 else memory.first
            return Place(number, value.data_ptr() - memory.address if value.numel() else 0, form(value))

        return tuple(map(at, values))

    def plan(self, outputs: tuple[Tensor, ...]) -> Plan | str:
        returned = self.places(outputs, alone=True)
        if not self.why_not and any(self.memories[each.slot].kind == "given" for each in returned):
            self.why_not = "an output is an input"
        if self.why_not:
            return self.why_not
        allocated = [each for each in self.memories if each.kind == "allocated" and each.first >= 0]
        shared = [each for each in allocated if not each.alone]
        alone = [each for each in allocated if each.alone]
        fresh = [(*memory.form[1:], memory.form[0]) for memory in alone]
        if shared:
            fresh.append(((arrange(shared),), (1,), torch.uint8))
        given, results = ([each for each in self.memories if each.kind == kind] for kind in ("given", "result"))
        for slot, memory in enumerate((*given, *alone, *shared[:1], *results)):
            memory.slot = slot
        for memory in shared:
            memory.slot, memory.kind = shared[0].slot, "shared"

        def final(values: Any) -> Any:
            return tuple(map(at, values))

        def at(value: Any) -> Any:
            if not isinstance(value, Place):
                return value
            memory = self.memories[value.slot]
            whole = value.form == memory.form and value.offset == 0 and memory.kind != "shared"
            return Place(memory.slot, memory.offset + value.offset, None if whole else value.form)

        steps = tuple(step(final) for step in self.steps)
        return Plan(self.device, tuple(fresh), len(results), steps, final(returned))


def operation(op: Any, args: Any, kwargs: Any, memories: list[Memory], number: int) -> Step:
    """An operation of torch. number: of the memory that is its result, or -1."""
    slot = memories[number].slot if number >= 0 else -1

    def step(tensors: list[Any], addresses: list[int], stream: int) -> None:
        result = op(*[value.tensor(tensors) if isinstance(value, Place) else value for value in args], **kwargs)
        if slot >= 0:
            tensors[slot], addresses[slot] = result, result.data_ptr()

    return step


def arrange(memories: list[Memory]) -> int:
    """Gives each its offset, so that no two overlap that are in use at the same step. Returns the bytes in all."""
    placed: list[Memory] = []
    for memory in sorted(memories, key=lambda each: -each.bytes):
        memory.offset = 0
        for other in sorted(placed, key=lambda each: each.offset):
            apart = other.last < memory.first or memory.last < other.first
            if not apart and other.offset < memory.offset + memory.bytes:
                memory.offset = max(memory.offset, other.offset + other.bytes)
        placed.append(memory)
    return max(memory.offset + memory.bytes for memory in placed)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launches a kernel, for the call that is recorded as well."""
    recorder: Recorder | None = getattr(_active, "recorder", None)
    if recorder is None:
        kernel[grid](*args, **constants)
        return
    recorder.launching = True
    try:
        compiled = kernel[grid](*args, **constants)
    finally:
        recorder.launching = False
    recorder.launched(kernel, grid, args, constants, compiled)


def record(
    function: Callable[..., tuple[Tensor, ...]], args: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], Plan | str]:
    """Runs the function. Returns its outputs and the plan that repeats it, or why there is none."""
    # A tensor that is given twice is two here: at the replay they may differ.
    args = tuple(value.detach() if isinstance(value, Tensor) else value for value in args)
    recorder = Recorder([value for value in args if isinstance(value, Tensor)])
    _active.recorder = recorder
    try:
        with recorder:
            outputs = function(*args)
    finally:
        _active.recorder = None
    return outputs, recorder.plan(outputs)
