"""The private parts of torch that the core uses, each with the reason. No other core module uses private torch."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload as OpOverload  # the type of torch.ops.capsfast.dynamic_routing.default
from torch.autograd import forward_ad
from torch.jit._trace import TracerWarning as TracerWarning  # torch.jit.trace warns of comparisons with it
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import _register_namedtuple
from torch.utils._pytree import tree_flatten as tree_flatten  # the tensors in a result, and back
from torch.utils._pytree import tree_unflatten as tree_unflatten

# The autograd that torch.library adds to an op takes most of the host time of a small call. This context skips it
# and runs the kernel alone.
below_autograd = torch._C._AutoDispatchBelowAutograd
# torch.is_autocast_enabled asks about one device. This asks about all devices at once; the answer is nearly always no.
any_autocast = torch._C._is_any_autocast_enabled
# The current stream as a number, without an object of Python for it. None where this torch has no such function.
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# Whether torch has the functions that turn its tensors into handles of its C interface, and back.
turns_tensors_into_handles = hasattr(torch._C, "_aoti") and all(
    hasattr(torch._C._aoti, name)
    for name in ("unsafe_alloc_void_ptr_from_tensor", "alloc_tensors_by_stealing_from_void_ptrs")
)
# Hooks of all modules, which torch's counters and trackers register. torch has no public function that sees them.
any_global_hook = _has_any_global_hook
# Whether torch.func (vmap, grad, jvp) runs the call. torch has no public function for it.
transformed = torch._C._are_functorch_transforms_active
# Whether a gradient belongs to a batch of gradients (is_grads_batched=True). torch has no public function for it.
gradients_in_batches = torch._C._functorch.is_legacy_batchedtensor
# None if nothing is traced. torch.jit.is_tracing() would add two Python calls.
tracing_state = torch._C._get_tracing_state
# The level of forward-mode differentiation, -1 outside of it. torch.autograd.forward_ad has no public function for it.
forward_level = partial(getattr, forward_ad, "_current_level")

# "tf32" if float32 products on CUDA devices may be rounded to TF32: torch.backends.cuda.matmul.fp32_precision, whose
# look-up takes five times as long.
matmul_precision = partial(torch._C._get_fp32_precision_getter, "cuda", "matmul")

F = TypeVar("F", bound=Callable[..., object])
C = TypeVar("C", bound=type)


def result(kind: C) -> C:
    """Decorates a NamedTuple that a layer or network returns, so that torch.export.save writes programs with it.

    torch has no public function for this; torch.export.register_dataclass takes no tuples.
    """
    _register_namedtuple(kind, serialized_type_name=f"{kind.__module__}.{kind.__name__}")
    return kind


def constant_while_tracing(function: F) -> F:
    """torch.compile calls the function once instead of tracing it, and keeps the result as a constant.

    torch.compiler.assume_constant_result does the same but imports the compiler, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def surely(known: bool) -> bool:
    """``known``, a comparison of sizes; False if torch.compile can't decide it before the program runs."""
    if not torch.compiler.is_compiling():
        return known
    # No public torch.sym_* function does this. The import takes a second, except while compiling.
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

    # A guard would limit an exported program to the sizes that give the same answer as the example.
    decided = statically_known_true(known) if torch.compiler.is_exporting() else guard_or_false(known)
    return True if decided else False  # noqa: SIM210 - a symbol is not a bool


def statically(*comparisons: bool) -> bool:
    """Whether all comparisons of sizes hold for every size that a graph serves. Adds no guard, unlike surely()."""
    if not torch.compiler.is_compiling():
        return all(comparisons)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # as in surely()

    return all(statically_known_true(comparison) for comparison in comparisons)


def register_sharding_rule(op: OpOverload, rule: Callable[..., Any], first_option: int) -> None:
    """A rule for DTensors, as ``torch.distributed.tensor.experimental.register_sharding`` takes it.

    That function caches rules by the arguments from the first int on, so the rules for normalize="in" would be reused
    for "out". torch has no public way to say where the options begin.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(op)(rule)
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = RuntimeSchemaInfo(first_option)
