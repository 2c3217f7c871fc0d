"""The fused ops as ops that every runtime knows."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._torch import OpOverload
from ..arguments import PassParameters, RoutingParameters, unchecked
from ..ops import dynamic_routing, routing_pass
from ..ops.define import PREFIX, Op, overload
from ..options import Options, PassOptions
from ..precision import wide_dtype


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """The fused ops by their definitions as einsum, for ``ExportedProgram.run_decompositions``.

    A decomposed program holds no op of capsfast and has the votes in memory. It is for inference: what only a backward
    would read of a fused op (the sums of every iteration) is left empty, and a program with a backward is an error.

    Returns:
        For each op of ``torch.ops.capsfast`` that a program can hold a function of the same arguments. Sums are formed
        in float32 for 16-bit inputs, as by the ops. ``factored_routing`` and ``em_update`` are in no program.
    """
    found: dict[OpOverload, Callable[..., Any]] = {}
    for op, parameters, options in (
        (dynamic_routing.OP, RoutingParameters, Options),
        (routing_pass.OP, PassParameters, PassOptions),
    ):
        for prefix in PREFIX.values():
            found[overload(prefix + op.contract.name)] = _by_definition(op, parameters, options)
            found[overload(f"{prefix}{op.contract.name}_backward")] = _no_backward(op.contract.name)
    return found


def _by_definition(op: Op, parameters: Any, options: Any) -> Callable[..., tuple[Tensor, ...]]:
    first, last = len(parameters._fields), -1 - op.contract.requests

    def run(u: Tensor, weight: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        given, J = options(*rest[first + 1 : last]), rest[first]
        if options is Options:
            given = given._replace(gradient="full")  # a detach() is no op of other runtimes
        call = unchecked(u, weight, parameters(*rest[:first]), given, J)
        results = op.run_definition(call, rest[last + 1 :])
        # What the backward alone reads.
        empty = u.new_empty(0, dtype=wide_dtype(u.dtype))
        return (*results, *[empty] * (len(op.contract.outputs) - len(results)))

    return run


def _no_backward(name: str) -> Callable[..., Any]:
    def raise_error(*_: Any) -> None:
        raise RuntimeError(
            f"capsfast.export.decompositions: they are for inference, got a program with capsfast::{name}"
            "_backward; export the forward alone"
        )

    return raise_error
