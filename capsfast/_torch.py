"""The private parts of torch that the core uses, each with the reason. No other module of the core names one."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload as OpOverload  # the type of torch.ops.capsfast.dynamic_routing.default
from torch.autograd import forward_ad
from torch.jit._trace import TracerWarning as TracerWarning  # what torch.jit.trace warns with of comparisons

# The autograd that torch.library gives an op takes most of the host time of a small call. Below it the kernel runs
# alone.
below_autograd = torch._C._AutoDispatchBelowAutograd
# torch.is_autocast_enabled asks about one device. This is the question for all of them, and nearly always "no".
any_autocast = torch._C._is_any_autocast_enabled
# Whether torch.func (vmap, grad, jvp) runs the call. torch has no public function for it.
transformed = torch._C._are_functorch_transforms_active
# Whether a gradient is one of a batch of them (is_grads_batched=True). Nothing public says so.
gradients_in_batches = torch._C._functorch.is_legacy_batchedtensor
# torch.jit.is_tracing() is two Python calls more. None if nothing is traced.
tracing_state = torch._C._get_tracing_state

F = TypeVar("F", bound=Callable[..., object])


def forward_mode() -> bool:
    """Whether the call is differentiated in forward mode. torch.autograd.forward_ad does not say so publicly."""
    return forward_ad._current_level >= 0


def constant_while_tracing(function: F) -> F:
    """torch.compile calls the function instead of tracing it, and keeps what it returns.

    So does torch.compiler.assume_constant_result, which imports the compiler: a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def surely(known: bool) -> bool:
    """``known``, a comparison of sizes; False where torch.compile cannot tell before the program runs."""
    if not torch.compiler.is_compiling():
        return known
    # The public torch.sym_* functions have no such question. Its import takes a second, but not while compiling.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return True if guard_or_false(known) else False  # noqa: SIM210 - a symbol is no bool


def register_sharding_rule(op: OpOverload, rule: Callable[..., Any], first_option: int) -> None:
    """A rule for DTensors, as ``torch.distributed.tensor.experimental.register_sharding`` takes it.

    That function takes the arguments from the first int on for what a rule depends on: the rules for normalize="in"
    would be remembered for "out". Nothing public says where the options begin.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(op)(rule)
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = RuntimeSchemaInfo(first_option)
