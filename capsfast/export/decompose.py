"""Decomposes the fused ops, and digamma of variational routing, into ops that every runtime knows."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..calls.arguments import PassParameters, RoutingParameters, unchecked
from ..calls.options import PassOptions, RoutingOptions
from ..calls.precision import wide_dtype
from ..environment.private_torch import OpOverload
from ..ops import dynamic_routing, routing_pass
from ..ops.define import PREFIX, Op, overload


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """The definitions of the fused ops as einsum, for ``ExportedProgram.run_decompositions``.

    A decomposed program holds no op of capsfast and stores the votes. It is for inference: results that only a backward
    reads (the sums of every iteration) stay empty, and a program with a backward is an error.

    Returns:
        For each op of ``torch.ops.capsfast`` in exported programs, a function with the same arguments. Like the ops, it
        forms sums in float32 for 16-bit inputs. Programs never hold ``factored_routing``, ``em_update`` and
        ``em_routing``. Also for ``torch.digamma``, which variational routing needs and ONNX lacks.
    """
    table: dict[OpOverload, Callable[..., Any]] = {torch.ops.aten.digamma.default: digamma}
    for op, parameters, options in (
        (dynamic_routing.OP, RoutingParameters, RoutingOptions),
        (routing_pass.OP, PassParameters, PassOptions),
    ):
        for prefix in {*PREFIX.values()}:
            table[overload(prefix + op.contract.name)] = _by_definition(op, parameters, options)
            table[overload(f"{prefix}{op.contract.name}_backward")] = _no_backward(op.contract.name)
    return table


def _by_definition(op: Op, parameters: Any, options: Any) -> Callable[..., tuple[Tensor, ...]]:
    first, last = len(parameters._fields), -1 - op.contract.requests

    def run(u: Tensor, weight: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        chosen, J = options(*rest[first + 1 : last]), rest[first]
        if options is RoutingOptions:
            chosen = chosen._replace(gradient="full")  # other runtimes have no detach()
        call = unchecked(u, weight, parameters(*rest[:first]), chosen, J)
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


# B_2n / 2n, with the Bernoulli numbers B.
_SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)


def digamma(x: Tensor) -> Tensor:
    """``torch.digamma`` by its recurrence, asymptotic series and reflection (Abramowitz and Stegun, 6.3.5 to 6.3.18).

    The error is a few units in the last place of the largest of 1, ``log |x|`` and ``1 / |x|``.
    """
    wide = x.to(wide_dtype(x.dtype))
    positive = torch.where(wide > 0, wide, 1 - wide)
    steps = torch.arange(8, dtype=wide.dtype, device=wide.device)
    far = positive + 8
    inverse = (1 / far).square()
    series = torch.zeros_like(wide)
    for term in reversed(_SERIES):
        series = (series + term) * inverse
    value = far.log() - 0.5 / far - series - (1 / (positive[..., None] + steps)).sum(-1)
    # The tangent of x itself would have few digits near a pole.
    part = wide - wide.round()
    value = torch.where(wide > 0, value, value - math.pi / torch.tan(math.pi * part))
    return value.masked_fill((wide < 0) & (part == 0), torch.nan).to(x.dtype)
