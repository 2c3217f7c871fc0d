"""Decomposes the fused ops into ops that every runtime knows."""

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
    """The definitions of the fused ops as einsum, for ``ExportedProgram.run_decompositions``.

    A decomposed program holds no op of capsfast and stores the votes. It is for inference: results that only a backward
    reads (the sums of every iteration) stay empty, and a program with a backward is an error.

    Returns:
        For each op of ``torch.ops.capsfast`` in exported programs, a function with the same arguments. Like the ops, it
        forms sums in float32 for 16-bit inputs. Programs never hold ``factored_routing`` and ``em_update``.
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
            given = given._replace(gradient="full")  # other runtimes have no detach()
        call = unchecked(u, weight, parameters(*rest[:first]), given, J)
        results = op.run_definition(call, rest[last + 1 :])
        # The results that only the backward reads.
        empty = u.new_empty(0, dtype=wide_dtype(u.dtype))
        return (*results, *[empty] * (len(op.contract.outputs) - len(results)))

    return run


def _no_backward(name: str) -> Callable[..., Any]:
    def raise_error(*_: Any) -> None:
        raise RuntimeError(
            f"capsfast.export.decompositions: a program must be for inference, got one with capsfast::{name}"
            "_backward; export the forward alone"
        )

    return raise_error
