"""A plan lists what a call allocates, launches and asks of torch, in order. The first call of a signature makes the
plan, and every call of the signature runs it.

A planner is a function that gets a slot in place of every tensor. The planner makes memory with new(), appends kernels
with launch(), and appends functions of torch with compute(). A signature is everything that a plan depends on: the
planner, the options, and the shape, strides, dtype, device and alignment of every tensor.

The plan uses two parts of Triton whose only documentation is examples; both are the same from 3.6 to 3.9 (torch 2.15):
  * ``kernel[grid](...)`` returns the compiled kernel (None in the interpreter);
  * ``compiled[grid]`` launches the compiled kernel again, without Triton's checks. The call takes all arguments of the
    signature, tensors as addresses, and ``stream``, and calls the hooks of profilers.
Where either is missing, every launch takes the ordinary path, and a warning says so once.

If the extension is there, C++ runs a plan from its second run on (csrc/plans): unless the plan computes with torch,
returns parts of tensors, or has a kernel with scratch memory, clusters or arguments other than addresses, integers and
float32. CAPSFAST_PLANS=python in the environment keeps every run in Python.
"""

import contextlib
import functools
import inspect
import os
import re
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..environment import native
from ..environment.private_torch import raw_stream

# Triton tells its compiler which pointers are multiples of this many bytes.
ALIGNMENT = 16
# Tensors in the workspace begin at multiples of this many bytes, as tensors from PyTorch's allocator do.
GRANULE = 512
# The most plans that are kept. The oldest plan goes first.
MOST = 256
# The bytes of a type of PTX or of Triton.
BYTES = {"u64": 8, "b64": 8, "s64": 8, "u32": 4, "b32": 4, "s32": 4, "f32": 4, "i64": 8, "i32": 4, "fp32": 4}
LARGEST = torch.finfo(torch.float32).max
# The dtypes of tensors that C++ makes.
NEW_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
# Options of every launch. Triton 3.10 and newer fuse products and sums into multiply-adds only on request.
ALWAYS = {"enable_fp_fusion": True}

Form = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]


def form_of(tensor: Tensor) -> Form:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


class Memory:
    """The memory of slots. kind: "given" with the call, "new", or the "result" of a function of torch.

    alone: whether the memory is a tensor of its own; other new memory lies in the workspace. first_step, last_step:
    the steps that begin and end its use. index: the position among the tensors of a run. offset: bytes in the
    workspace.
    """

    def __init__(self, kind: str, form: Form, alignment: int = 0) -> None:
        self.kind, self.form, self.alignment = kind, form, alignment
        self.alone = kind != "new"
        self.first_step, self.last_step, self.index, self.offset = -1, -1, -1, 0

    @property
    def bytes(self) -> int:
        """The size of the memory if it is new, and so contiguous."""
        return -(-torch.Size(self.form[1]).numel() * self.form[0].itemsize // GRANULE) * GRANULE


class Slot:
    """What a planner knows of a tensor: everything but its numbers. ghost: a meta tensor of the same form."""

    def __init__(self, plan: "Plan", memory: Memory, ghost: Tensor) -> None:
        self.plan, self.memory, self.ghost = plan, memory, ghost
        self.shape, self.dtype, self.device = ghost.shape, ghost.dtype, plan.device
        self.stride, self.dim, self.numel, self.element_size = ghost.stride, ghost.dim, ghost.numel, ghost.element_size

    def __getitem__(self, key: Any) -> "Slot":
        return Slot(self.plan, self.memory, self.ghost[key])

    def __iter__(self) -> Iterator["Slot"]:
        return (self[n] for n in range(self.shape[0]))

    @property
    def offset(self) -> int:
        """Bytes from the start of the memory to the slot."""
        return int(self.ghost.storage_offset()) * self.element_size()

    def contiguous(self) -> "Slot":
        slot: Slot = self.plan.compute(Tensor.contiguous, self)
        return slot

    def aligned(self) -> "Slot":
        """The slot, contiguous and at a multiple of ALIGNMENT: a part of another tensor may begin elsewhere."""
        slot = self.contiguous()
        # A function of torch may return a view.
        if slot.memory.kind == "result" or (slot.memory.alignment + slot.offset) % ALIGNMENT:
            slot = self.plan.compute(_aligned, slot)
        return slot


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_meta or tensor.data_ptr() % ALIGNMENT else tensor


class Place(NamedTuple):
    """Where a run finds a slot: in which tensor of the run, and how many bytes from the start of the tensor.

    form: None if the slot is the whole tensor.
    """

    tensor_index: int
    offset: int
    form: Form | None

    def tensor(self, tensors: Sequence[Any]) -> Tensor:
        base: Tensor = tensors[self.tensor_index]
        if self.form is None:
            return base
        dtype, size, stride = self.form
        base = base if base.dtype == dtype else base.view(dtype)
        return base.as_strided(size, stride, base.storage_offset() + self.offset // base.itemsize)


def filled(values: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    return [value.tensor(tensors) if isinstance(value, Place) else value for value in values]


class Launch:
    """A kernel with its grid and arguments. constants: constants by name, and options of the launch."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: dict[str, Any]) -> None:
        self.kernel, self.grid, self.arguments = kernel, (*grid, 1, 1)[:3], arguments
        self.constants = constants | ALWAYS
        self.compiled: Any = None
        self.runner: Any = None
        self.relaunched = False

    def finish(self, place: Callable[[Any], Any]) -> None:
        self.arguments = [place(value) for value in self.arguments]
        self.addresses = [(n, *at[:2]) for n, at in enumerate(self.arguments) if isinstance(at, Place)]
        by_name = [*inspect.signature(self.kernel.fn).parameters.values()][len(self.arguments) :]
        self.signature = [
            *self.arguments,
            *(self.constants.get(parameter.name, parameter.default) for parameter in by_name),
        ]

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int | None) -> None:
        """stream: the CUDA stream, or None to launch by Triton's ordinary path."""
        if self.runner is not None and stream is not None:
            signature = self.signature.copy()
            for n, index, offset in self.addresses:
                signature[n] = addresses[index] + offset
            try:
                self.runner(*signature, stream=stream)
                self.relaunched = True
                return
            except TypeError as error:  # this release takes other arguments, and has launched nothing
                if self.relaunched:  # a hook of the user's raised it
                    raise
                _warn_of_ordinary_launches(repr(error))
        compiled = self.kernel[self.grid](*filled(self.arguments, tensors), **self.constants)
        if stream is not None and compiled is not None:  # a hook of the user's can keep Triton from compiling
            self.compiled, self.runner = compiled, again(compiled, self.grid)

    def described(self) -> dict[str, Any] | None:
        """The launch as C++ takes it, None if it takes more than the CUDA driver's plain launch.

        The driver takes the arguments that are no constants, then addresses of scratch memory, which is none here.
        """
        compiled = self.compiled
        try:
            types, metadata = [*compiled.src.signature.values()], compiled.metadata
            entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", compiled.asm["ptx"], re.S)
            scratch = metadata.global_scratch_size + metadata.profile_scratch_size
            function, early = int(compiled.function), bool(metadata.launch_pdl)
            cooperative, single = bool(metadata.launch_cooperative_grid), metadata.num_ctas == 1
            if len(types) != len(self.signature) or not all(isinstance(kind, str) for kind in types):
                return None
        except (AttributeError, KeyError, TypeError):  # a release of Triton whose kernels are other
            return None
        arguments: list[int] = []
        addresses: list[tuple[int, int, int]] = []
        sizes: list[int] = []
        for kind, value in zip(types, self.signature, strict=True):
            if kind == "constexpr":
                continue
            kind = "u64" if kind.startswith("*") else kind
            if isinstance(value, Place):
                addresses.append((len(arguments), value.tensor_index, value.offset))
                value = 0
            elif kind == "fp32" and abs(value) <= LARGEST:
                (value,) = struct.unpack("<I", struct.pack("<f", value))
            if kind not in BYTES or not isinstance(value, int):
                return None
            arguments.append(value % 2**64)
            sizes.append(BYTES[kind])
        wanted = [
            BYTES.get(kind) for kind in re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", entry[1] if entry else "")
        ]
        more = wanted[len(sizes) :]
        if wanted[: len(sizes)] != sizes or more != [8] * len(more) or scratch or not single:
            return None
        return {
            "function": function,
            "grid": self.grid,
            "threads": metadata.num_warps * metadata.warp_size,
            "shared_bytes": metadata.shared,
            "cooperative": cooperative,
            "early": early,
            "arguments": arguments + [0] * len(more),
            "addresses": addresses,
        }


@functools.cache
def _warn_of_ordinary_launches(why: str) -> None:
    warnings.warn(
        f"capsfast: Triton {triton.__version__} does not launch a compiled kernel again ({why}); every launch takes "
        "Triton's ordinary path, which costs the host several times as much",
        RuntimeWarning,
        stacklevel=2,
    )


def again(compiled: Any, grid: tuple[int, ...]) -> Any:
    """A function that launches the compiled kernel again, or None if this Triton has no such function."""
    try:
        return compiled[grid]
    except (TypeError, AttributeError) as error:
        _warn_of_ordinary_launches(repr(error))
        return None


class Zeros:
    """Fills new memory with zeros."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def finish(self, place: Callable[[Any], Any]) -> None:
        self.place: Place = place(self.slot)
        self.bytes = self.slot.numel() * self.slot.element_size()

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int | None) -> None:
        self.place.tensor(tensors).zero_()

    def described(self) -> dict[str, Any]:
        return {"addresses": [(0, *self.place[:2])], "zero_bytes": self.bytes}


class Compute:
    """A call of a function of torch. result: where a run keeps the returned tensor."""

    def __init__(self, function: Callable[..., Tensor], arguments: Sequence[Any], result: Memory) -> None:
        self.function, self.arguments, self.result = function, arguments, result

    def finish(self, place: Callable[[Any], Any]) -> None:
        self.arguments = [place(value) for value in self.arguments]

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int | None) -> None:
        result = self.function(*filled(self.arguments, tensors))
        tensors[self.result.index], addresses[self.result.index] = result, result.data_ptr()


class Plan:
    """A run has the tensors of the call first, then new tensors, with the workspace last, then results."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memories: list[Memory] = []
        self.steps: list[Launch | Zeros | Compute] = []
        self.new_forms: list[Form] = []
        self.given_count = self.results = 0
        self.done: list[list[int]] = []  # for each step the results that no later step needs
        self.outputs: list[Place] = []

    def _slot(self, kind: str, form: Form, alignment: int = 0) -> Slot:
        self.memories.append(Memory(kind, form, alignment))
        dtype, size, stride = form
        return Slot(self, self.memories[-1], torch.empty_strided(size, stride, dtype=dtype, device="meta"))

    def given(self, tensor: Tensor) -> Slot:
        return self._slot("given", form_of(tensor), tensor.data_ptr() % ALIGNMENT)

    def new(self, *size: int, dtype: torch.dtype = torch.float32) -> Slot:
        return self._slot("new", form_of(torch.empty(size, dtype=dtype, device="meta")))

    def zeros(self, *size: int, dtype: torch.dtype = torch.float32) -> Slot:
        slot = self.new(*size, dtype=dtype)
        if slot.numel():
            self._use([slot])
            self.steps.append(Zeros(slot))
        return slot

    def compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The slot of what a function of torch returns. The function must not change its arguments.

        If the function returns None or an argument itself, as contiguous() may, no step is appended.
        """
        result = function(*(argument.ghost if isinstance(argument, Slot) else argument for argument in arguments))
        same = [argument for argument in arguments if isinstance(argument, Slot) and argument.ghost is result]
        if result is None or same:
            return same[0] if same else None
        self._use(arguments)
        slots, storage = [argument for argument in arguments if isinstance(argument, Slot)], result.untyped_storage()
        # If the result is a view of memory, that memory must not serve other steps.
        self._use([slot for slot in slots if slot.ghost.untyped_storage() is storage], alone=True)
        slot = self._slot("result", form_of(result))
        self.steps.append(Compute(function, arguments, slot.memory))
        self._use([slot], alone=True, step=len(self.steps) - 1)
        return slot

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        self._use(arguments)
        self.steps.append(Launch(kernel, grid, arguments, constants))

    def _use(self, values: Sequence[Any], alone: bool = False, step: int | None = None) -> None:
        step = len(self.steps) if step is None else step
        for memory in (value.memory for value in values if isinstance(value, Slot)):
            memory.alone |= alone
            memory.first_step = step if memory.first_step < 0 else memory.first_step
            memory.last_step = step

    def finish(self, outputs: Sequence[Slot]) -> None:
        """Gives every slot its place."""
        self._use(outputs, alone=True)
        passed, new, results = (
            [memory for memory in self.memories if memory.kind == kind] for kind in ("given", "new", "result")
        )
        alone = [request for request in new if request.alone]
        workspace = [request for request in new if not request.alone and request.first_step >= 0]
        for index, memory in enumerate((*passed, *alone, *workspace[:1], *results)):
            memory.index = index
        self.new_forms = [memory.form for memory in alone]
        if workspace:
            self.new_forms.append((torch.uint8, (arrange(workspace),), (1,)))
        for memory in workspace:
            memory.index = workspace[0].index

        def place(value: Any) -> Any:
            if not isinstance(value, Slot):
                return value
            memory, form = value.memory, form_of(value.ghost)
            whole = memory.alone and not value.offset and form == memory.form
            return Place(memory.index, memory.offset + value.offset, None if whole else form)

        if has_pdl(self.device):
            # A kernel starts early only behind a launched kernel of this plan: other kernels may break the rule of
            # kernels/begin.py, and a grid without programs is not launched.
            for before, step in zip((None, *self.steps), self.steps, strict=False):
                if isinstance(step, Launch):
                    early = isinstance(before, Launch) and 0 not in before.grid
                    step.constants |= {"PDL": True, "launch_pdl": early}
        for step in self.steps:
            step.finish(place)
        self.given_count, self.results = len(passed), len(results)
        self.done = [[result.index for result in results if result.last_step == n] for n in range(len(self.steps))]
        self.outputs = [place(slot) for slot in outputs]
        self.memories = []

    def run(self, tensors: list[Any], addresses: list[int]) -> tuple[Tensor, ...]:
        """Returns the outputs. tensors, addresses: lists with the tensors of the call; the run appends to both."""
        bits = 0
        for dtype, size, stride in self.new_forms:
            tensor = torch.empty_strided(size, stride, dtype=dtype, device=self.device)
            address = tensor.data_ptr()
            tensors.append(tensor)
            addresses.append(address)
            bits |= address
        tensors += [None] * self.results
        addresses += [0] * self.results
        # A user's allocator may return memory that is not aligned. Triton's ordinary path handles that.
        stream = None if bits % ALIGNMENT else stream_of(self.device)
        for step, done in zip(self.steps, self.done, strict=True):
            step(tensors, addresses, stream)
            for index in done:
                tensors[index] = None
        return tuple([place.tensor(tensors) for place in self.outputs])

    @functools.cached_property
    def described(self) -> tuple[Any, ...] | None:
        """The arguments of keep_plan() in csrc/plans/serve.cpp, None if C++ can't run the plan. Call it after a run."""
        steps = [None if isinstance(step, Compute) else step.described() for step in self.steps]
        if None in steps:
            return None
        forms, outputs = [*self.new_forms], []
        for place in self.outputs:
            index = place.tensor_index - self.given_count
            if place.offset or not 0 <= index < len(forms):
                return None
            dtype, size, _ = form = place.form or forms[index]
            # To kernels memory is an address, so the tensor may be made in the form in which it is returned.
            if dtype != forms[index][0] or torch.Size(size).numel() != torch.Size(forms[index][1]).numel():
                return None
            forms[index] = form
            outputs.append(index)
        if len({*outputs}) < len(outputs) or not {dtype for dtype, *_ in forms} <= {*NEW_DTYPES}:
            return None
        return (
            self.device.type == "cuda",
            [(str(dtype), size, stride) for dtype, size, stride in forms],
            steps,
            outputs,
            [step.compiled for step in self.steps if isinstance(step, Launch)],
        )

    def hand_over(self) -> None:
        """Has C++ run the plan from now on, if it can. Call it after a run."""
        launched = all(step.runner is not None for step in self.steps if isinstance(step, Launch))
        if native.extension is not None and launched and not hooked() and self.described is not None:
            native.extension.keep_plan(*self.described)


def hooked() -> bool:
    """Whether a profiler's hooks want to see every launch of Triton."""
    runtime = triton.knobs.runtime  # every call of an op asks
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def arrange(memories: list[Memory]) -> int:
    """Sets the offsets of memories so that no two overlap that are in use at the same step. Returns the total bytes."""
    placed: list[Memory] = []
    for memory in sorted(memories, key=lambda memory: -memory.bytes):
        for other in sorted(placed, key=lambda memory: memory.offset):
            at_once = other.first_step <= memory.last_step and memory.first_step <= other.last_step
            if at_once and other.offset < memory.offset + memory.bytes:
                memory.offset = max(memory.offset, other.offset + other.bytes)
        placed.append(memory)
    return max(memory.offset + memory.bytes for memory in placed)


def stream_of(device: torch.device) -> int | None:
    """The current stream, or None where launches take the ordinary path: in the interpreter, and on AMD GPUs, where no
    plan ever ran."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    stream = torch.cuda.current_stream(device).cuda_stream if raw_stream is None else raw_stream(device.index)
    return int(stream)


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Whether kernels start before the kernel in front has ended (programmatic dependent launch)."""
    if device.type != "cuda" or torch.version.hip is not None or triton.knobs.runtime.interpret:
        return False
    return os.environ.get("CAPSFAST_PDL") != "0" and torch.cuda.get_device_capability(device) >= (9, 0)


by_cpp = native.extension is not None and os.environ.get("CAPSFAST_PLANS") != "python"
if native.extension is not None:
    native.extension.ask_before_launches(hooked)

_plans: dict[tuple[Any, ...], Plan] = {}  # by signature
_lock = threading.Lock()
_as_it_is = contextlib.nullcontext()


def forget() -> None:
    """Drops all plans, for tests that change tile sizes."""
    with _lock:
        _plans.clear()
    if native.extension is not None:
        native.extension.forget_plans()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes ``device`` the current device, because Triton launches on the current device."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _as_it_is
    return torch.cuda.device(device)


def planned(planner: Callable[..., Sequence[Slot]]) -> Callable[..., tuple[Tensor, ...]]:
    """Makes the kernels of an op. planner: takes the plan and the arguments, slots for tensors; returns the outputs."""

    @functools.wraps(planner)
    def call(*args: Any) -> tuple[Tensor, ...]:
        key: list[Any] = [planner]
        tensors, addresses = [], []
        for value in args:
            if isinstance(value, Tensor):
                tensors.append(value)
                addresses.append(address := value.data_ptr())
                key.append((value.shape, value.stride(), value.dtype, value.get_device(), address % ALIGNMENT))
            else:
                key.append(tuple(value) if isinstance(value, list) else value)
        signature = tuple(key)
        with on_device(tensors[0].device):
            plan = _plans.get(signature)
            if plan is None:
                plan = Plan(tensors[0].device)
                outputs = planner(
                    plan, *(plan.given(tensor) if isinstance(tensor, Tensor) else tensor for tensor in args)
                )
                plan.finish(outputs)
                with _lock:
                    if len(_plans) >= MOST:
                        del _plans[next(iter(_plans))]
                    _plans[signature] = plan
            results = plan.run(tensors, addresses)
            if by_cpp:
                plan.hand_over()
            return results

    return call
