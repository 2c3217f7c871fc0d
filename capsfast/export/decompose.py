"""The fused ops as ops that every runtime knows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..ops import _pass, _routing, dynamic_routing, route_votes, routing_pass, votes_pass
from ..ops._register import PREFIX, Contract
from ..options import Options, PassOptions
from ..precision import wide_dtype
from ..reference.dynamic_routing import dynamic_routing as reference_dynamic_routing
from ..reference.route_votes import route_votes as reference_route_votes
from ..reference.routing_pass import routing_pass as reference_routing_pass
from ..reference.votes_pass import PassParameters
from ..reference.votes_pass import votes_pass as reference_votes_pass


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """The fused ops by their definitions as einsum, for ``ExportedProgram.run_decompositions``.

    A decomposed program holds no op of capsfast and has the votes in memory. It is for inference: what only a backward
    would read of a fused op (the sums of every iteration) is left empty, and a program with a backward is an error.

    Returns:
        For each op of ``torch.ops.capsfast`` that a program can hold a function of the same arguments. Sums are formed
        in float32 for 16-bit inputs, as by the ops. ``shared_routing`` and ``em_update`` are in no program.
    """
    forward: dict[Contract, Callable[..., Any]] = {
        dynamic_routing.CONTRACT: _dynamic_routing,
        route_votes.CONTRACT: _route_votes,
        routing_pass.CONTRACT: _routing_pass,
        votes_pass.CONTRACT: _votes_pass,
    }
    found: dict[OpOverload, Callable[..., Any]] = {}
    for contract, definition in forward.items():
        for prefix in PREFIX.values():
            found[_op(f"{prefix}{contract.name}")] = definition
            found[_op(f"{prefix}{contract.name}_backward")] = _no_backward(contract)
    return found


def _op(name: str) -> OpOverload:
    return getattr(torch.ops.capsfast, name).default  # type: ignore[no-any-return]


def _no_backward(contract: Contract) -> Callable[..., Any]:
    def raise_error(*_: Any) -> None:
        raise RuntimeError(
            f"capsfast.export.decompositions: they are for inference, got a program with capsfast::{contract.name}"
            "_backward; export the forward alone"
        )

    return raise_error


def _options(given: tuple[Any, ...]) -> Options:
    return Options.from_op(*given)._replace(gradient="full")  # a detach() is no op of other runtimes


def _dynamic_routing(u: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    found = _routing.run_reference(reference_dynamic_routing, (u, weight), rest[:4], _options(rest[4:10]), False)
    return _routed(found, u, rest[-1])


def _route_votes(votes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    J, options = rest[4], _options(rest[5:11])
    found = _routing.run_reference(reference_route_votes, (votes,), rest[:4], options, False, J)
    return _routed(found, votes, rest[-1])


def _routed(found: tuple[Tensor, Tensor], anchor: Tensor, return_coupling: bool) -> tuple[Tensor, ...]:
    v, c = found
    empty = v.new_empty(0)
    wide = empty.to(wide_dtype(anchor.dtype))
    return v, c if return_coupling else empty, wide, wide


def _routing_pass(u: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    parameters, options = PassParameters(*rest[:9]), PassOptions(*rest[9:12])
    return _with_norm(
        _pass.run_reference(reference_routing_pass, (u, weight), parameters, weight.shape[1], options, *rest[-2:])
    )


def _votes_pass(votes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    parameters, J, options = PassParameters(*rest[:9]), rest[9], PassOptions(*rest[10:13])
    return _with_norm(_pass.run_reference(reference_votes_pass, (votes,), parameters, J, options, *rest[-2:]))


def _with_norm(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return *found, found[0].new_empty(0)
