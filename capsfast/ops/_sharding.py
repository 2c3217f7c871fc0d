"""How the ops split over a device mesh: sharding rules for DTensor, made from the contracts.

An op splits along an axis (B, J, I, or S of positions) as its tensors do that have the axis. Of a result without it,
every rank then has its part of a sum. Nothing here imports torch.distributed.tensor before a DTensor is met.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch._ops import OpOverload

from ..axes import AXES
from ..toolchain import constant_while_tracing

if TYPE_CHECKING:
    from ._register import Contract

# Of the tensors whose axes do not depend on the call.
_AXES = {
    **AXES,
    "u": "BIK",
    "weight": "IJDK",
    "votes": "BIJD",
    **dict.fromkeys(("v", "first", "second"), "BJD"),
    "mass": "BJ",
    **dict.fromkeys(("coupling", "weights"), "BIJ"),
    "s": "rBJD",
}

_pending: list[tuple["Contract", OpOverload, OpOverload]] = []


def announce(contract: "Contract", op: OpOverload, backward: OpOverload) -> None:
    """The op and its backward get rules when they are wanted."""
    _pending.append((contract, op, backward))


@constant_while_tracing
def register_if_imported() -> bool:
    """Registers the rules if there can be a DTensor."""
    if _pending and "torch.distributed.tensor" in sys.modules:
        register()
    return not _pending


def register() -> None:
    """Registers the rules of all ops that have none yet."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    propagator = DTensor._op_dispatcher.sharding_propagator
    while _pending:
        contract, *both = _pending[-1]
        for op, rule in zip(both, (_forward_rule, _backward_rule), strict=True):
            names = [argument.name for argument in op._schema.arguments]
            options = names.index(contract.first_option)
            register_sharding(op)(_rules(rule, contract, names, options))  # type: ignore[arg-type]
            # register_sharding takes the options from the first int on for what a rule depends on: without this, the
            # rules for normalize="in" would be remembered for "out".
            propagator.op_to_schema_info[op] = RuntimeSchemaInfo(options)
        _pending.pop()


class _Call(NamedTuple):
    """The arguments of an op."""

    tensors: dict[str, Any]  # those that are given, as specs with a shape
    options: dict[str, Any]

    @property
    def normalize(self) -> str:
        return self.options["normalize" if self.is_pass else "softmax"]  # type: ignore[no-any-return]

    @property
    def is_pass(self) -> bool:
        return "normalize" in self.options

    @property
    def splits(self) -> str:
        """The axes that it can be split along."""
        splits = "B"
        # J is a number among the options of ops on votes: each rank would be told the whole.
        if self.normalize != "out" and "J" not in self.options:
            splits += "J"
        # What follows a sum over the input capsules needs it whole: dynamic routing, and a softmax over them.
        if self.is_pass and self.normalize != "in":
            splits += "I"
        # The norm of a pass has one axis for B and S.
        if self.positions and not (self.is_pass and self.normalize == "in"):
            splits += "S"
        return splits

    @property
    def positions(self) -> bool:
        return "votes" in self.tensors and self.tensors["votes"].ndim == 5

    def axes(self, name: str) -> str:
        """A letter for each axis of an argument or a result."""
        if name == "norm":
            return "2BJ" if self.is_pass else "2rBJ"
        if name == "weight" and self.tensors["weight"].shape[0] == 1:
            return "1JDK"
        if name == "logits" and self.tensors["logits"].ndim == 2:
            return "IJ"
        axes = ("BJ" if self.normalize == "in" else "BI") if name == "lse_out" else _AXES[name]
        return f"{axes}S" if self.positions and axes[0] == "B" else axes


def _rules(
    rule: Callable[..., Any], contract: "Contract", names: list[str], options: int
) -> Callable[..., list[tuple[list[Any], list[Any]]]]:
    def sharding(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        named = list(zip(names, args, strict=True))
        call = _Call({n: value for n, value in named[:options] if value is not None}, dict(named[options:]))
        without = [None] * (len(named) - options)
        found = []
        for axis in ("", *call.splits):
            outputs, inputs = rule(contract, call, axis)
            found.append((outputs, [inputs.get(name) for name in names[:options]] + without))
        return found

    return sharding


def _as_input(name: str, call: _Call, axis: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    axes = call.axes(name)
    return Shard(axes.index(axis)) if axis and axis in axes else Replicate()


def _as_sum(name: str, call: _Call, axis: str) -> Any:
    """A result, or the gradient of an argument: without the axis a sum over it."""
    from torch.distributed.tensor import Partial

    return Partial() if axis and axis not in call.axes(name) else _as_input(name, call, axis)


def _forward_rule(contract: "Contract", call: _Call, axis: str) -> tuple[list[Any], dict[str, Any]]:
    from torch.distributed.tensor import Replicate

    # What was not asked for is empty.
    empty = {name for name in contract.outputs if not call.options.get(f"with_{name}", True)}
    empty |= {name for name in contract.outputs if not call.options.get(f"return_{name.removesuffix('_out')}", True)}
    if call.normalize != "in" or (call.positions and not call.is_pass):
        empty.add("norm")
    if call.positions:
        empty.add("s")
    outputs = [Replicate() if name in empty else _as_sum(name, call, axis) for name in contract.outputs]
    return outputs, {name: _as_input(name, call, axis) for name in call.tensors}


def _backward_rule(contract: "Contract", call: _Call, axis: str) -> tuple[list[Any], dict[str, Any]]:
    from torch.distributed.tensor import Replicate

    inputs = {}
    for name, value in call.tensors.items():
        if name in contract.saved:
            # As the forward left it.
            asked_for = value.ndim == len(call.axes(name))
            inputs[name] = _as_sum(name, call, axis) if asked_for else Replicate()
        else:
            inputs[name] = _as_input(name[1:] if name[1:] in contract.outputs else name, call, axis)
    gradients = [_as_sum(name, call, axis) if call.options[f"need_{name}"] else Replicate() for name in contract.needed]
    return gradients, inputs
