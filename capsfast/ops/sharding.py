"""Sharding rules for DTensor, made from the contracts: how the ops split over a device mesh.

If an op is split along an axis (B, J, I, or S of positions), all its tensors with that axis are split along it, and
results without the axis are partial sums. torch.distributed.tensor is not imported before the first DTensor comes.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from ..calls.axes import AXES
from ..environment.private_torch import OpOverload, constant_while_tracing, register_sharding_rule
from .contract import Contract

# The axes of the tensors whose axes do not depend on the call.
_AXES = {
    **AXES,
    **dict.fromkeys(("v", "first", "second"), "BJD"),
    "mass": "BJ",
    **dict.fromkeys(("coupling", "weights"), "BIJ"),
    "s": "rBJD",
}

_pending: list[tuple[Contract, OpOverload, OpOverload]] = []


def announce(contract: Contract, op: OpOverload, backward: OpOverload) -> None:
    """Queues the op and its backward: they get their rules at the first use of DTensor."""
    _pending.append((contract, op, backward))


@constant_while_tracing
def register_if_imported() -> bool:
    """Registers the rules if torch.distributed.tensor is imported, so that a DTensor can come."""
    if _pending and "torch.distributed.tensor" in sys.modules:
        register()
    return not _pending


def register() -> None:
    """Registers the rules of all ops that have none yet."""
    while _pending:
        contract, op, backward = _pending[-1]
        for direction, rule, names in (
            (op, _forward_rule, contract.arguments),
            (backward, _backward_rule, contract.backward),
        ):
            options = names.index(contract.arguments[contract.tensors])
            register_sharding_rule(direction, _rules(rule, contract, names, options), options)
        _pending.pop()


class _Call(NamedTuple):
    """The arguments of an op."""

    tensors: dict[str, Any]  # the given tensors, as specs with a shape
    options: dict[str, Any]

    @property
    def normalize(self) -> str:
        return self.options["normalize" if self.is_pass else "softmax"]  # type: ignore[no-any-return]

    @property
    def is_pass(self) -> bool:
        return "normalize" in self.options

    @property
    def splits(self) -> str:
        """The axes along which the call can be split."""
        splits = "B"
        # With given votes, J is a number among the options: each rank would get the whole J.
        if self.normalize != "out" and "weight" in self.tensors:
            splits += "J"
        # Dynamic routing and a softmax over the input capsules need the complete sum over the input capsules.
        if self.is_pass and self.normalize != "in":
            splits += "I"
        # The norm of a pass has one axis for both B and S.
        if self.positions and not (self.is_pass and self.normalize == "in"):
            splits += "S"
        return splits

    @property
    def positions(self) -> bool:
        return self.tensors["u"].ndim == 5  # type: ignore[no-any-return]

    def axes(self, name: str) -> str:
        """A letter for each axis of an argument or a result."""
        if name == "norm":
            return "2BJ" if self.is_pass else "2rBJ"
        if name == "u":
            axes = "BIK" if "weight" in self.tensors else "BIJD"
            return f"{axes}S" if self.positions else axes
        if name == "weight":
            return "1JDK" if self.tensors["weight"].shape[0] == 1 else "IJDK"
        if name == "logits" and self.tensors["logits"].ndim == 2:
            return "IJ"
        axes = ("BJ" if self.normalize == "in" else "BI") if name == "lse_out" else _AXES[name]
        return f"{axes}S" if self.positions and axes[0] == "B" else axes


def _rules(
    rule: Callable[..., Any], contract: Contract, names: tuple[str, ...], options: int
) -> Callable[..., list[tuple[list[Any], list[Any]]]]:
    def sharding(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        named = list(zip(names, args, strict=True))
        call = _Call({n: value for n, value in named[:options] if value is not None}, dict(named[options:]))
        without = [None] * (len(named) - options)
        placements = []
        for axis in ("", *call.splits):
            outputs, inputs = rule(contract, call, axis)
            placements.append((outputs, [inputs.get(name) for name in names[:options]] + without))
        return placements

    return sharding


def _as_input(name: str, call: _Call, axis: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    axes = call.axes(name)
    return Shard(axes.index(axis)) if axis and axis in axes else Replicate()


def _as_sum(name: str, call: _Call, axis: str) -> Any:
    """The placement of a result or of the gradient of an argument: a partial sum if the tensor lacks the axis."""
    from torch.distributed.tensor import Partial

    return Partial() if axis and axis not in call.axes(name) else _as_input(name, call, axis)


def _forward_rule(contract: Contract, call: _Call, axis: str) -> tuple[list[Any], dict[str, Any]]:
    from torch.distributed.tensor import Replicate

    # Results that were not requested are empty.
    empty = {name for name in contract.outputs if not call.options.get(f"with_{name}", True)}
    empty |= {name for name in contract.outputs if not call.options.get(f"return_{name.removesuffix('_out')}", True)}
    if call.normalize != "in" or (call.positions and not call.is_pass):
        empty.add("norm")
    if call.positions:
        empty.add("s")
    outputs = [Replicate() if name in empty else _as_sum(name, call, axis) for name in contract.outputs]
    return outputs, {name: _as_input(name, call, axis) for name in call.tensors}


def _backward_rule(contract: Contract, call: _Call, axis: str) -> tuple[list[Any], dict[str, Any]]:
    from torch.distributed.tensor import Replicate

    inputs = {}
    for name, value in call.tensors.items():
        if name in contract.saved:
            # A saved result keeps the placement that the forward gave it, or it is empty.
            asked_for = value.ndim == len(call.axes(name))
            inputs[name] = _as_sum(name, call, axis) if asked_for else Replicate()
        else:
            inputs[name] = _as_input(name[1:] if name[1:] in contract.outputs else name, call, axis)
    wanted = zip(contract.needed, call.options["needed"], strict=True)
    return [
        _as_sum(name, call, axis) if need and name in call.tensors else Replicate() for name, need in wanted
    ], inputs
