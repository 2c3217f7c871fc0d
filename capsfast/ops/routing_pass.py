"""The op behind :func:`capsfast.routing_pass` and :func:`capsfast.votes_pass`.

``capsfast::routing_pass`` returns ``(mass [B, J], first [B, J, D], second [B, J, D], weights [B, I, J], lse, norm)``.
second, weights and lse (``[B, I]`` for normalize "out", ``[B, J]`` for "in") are empty if they are not requested.
weights has the dtype of u, except for normalize "in": then weights, like the other results, has the dtype that sums are
formed in (dynamic_routing.py says why). norm is for the backward, empty unless normalize is "in": the normaliser over
the input capsules ``[2, B, J]``, a number m, which the largest logit exceeds by at most 8, and
``1 / sum_i exp(logit - m)``.

u, weight, votes and tf32 are as in dynamic_routing.py. With positions, norm is ``[2, B S, J]``, without a last axis S;
only the backward reads norm.

``capsfast::routing_pass_backward`` returns the gradients that are needed, and empty tensors for the others. It
recomputes votes, logits and coupling.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..calls.arguments import Call, PassParameters
from ..calls.precision import as_under_autocast, wide_dtype
from ..reference.routing_pass import routing_pass as definition
from . import flops
from .define import Op, check_fake, fake_sizes
from .shared_weights import saves_votes, with_votes, without_votes

WEIGHTS = (3,)  # run() returns weights in the dtype of u


def run(call: Call, return_weights: bool, return_lse: bool, backend: str | None) -> tuple[Tensor, ...]:
    """``(mass, first, second, weights, lse)`` from the chosen backend, with empty tensors for what is not wanted."""
    if saves_votes(call, backend):
        return without_votes(run, WEIGHTS, call, return_weights, return_lse, backend)
    if call.weight is not None and call.weight.shape[1] != call.J:
        return with_votes(run, WEIGHTS, call, return_weights, return_lse, backend)
    mass, first, second, weights, lse = OP.run(call, (return_weights, return_lse), backend)[:5]
    if return_weights:
        (u,), _ = as_under_autocast(call.u)
        weights = weights.to(u.dtype)
    return mass, first, second, weights, lse


def _fake(a: Any) -> tuple[Tensor, ...]:
    sizes, S = fake_sizes(a.u, a.weight, a.J)
    check_fake({name: getattr(a, name) for name in PassParameters._fields}, sizes, S)
    (B, I, J, D), wide, inward = sizes, wide_dtype(a.u.dtype), a.normalize == "in"

    def new(*size: int, wanted: bool = True, dtype: torch.dtype = wide) -> Tensor:
        empty: Tensor = a.u.new_empty(size if wanted else (0,), dtype=dtype)
        return empty

    return (
        new(B, J, *S),
        new(B, J, D, *S),
        new(B, J, D, *S, wanted=a.with_second),
        new(B, I, J, *S, wanted=a.return_weights, dtype=wide if inward else a.u.dtype),
        new(B, J if inward else I, *S, wanted=a.return_lse),
        new(2, B * math.prod(S), J, wanted=inward),
    )


def _flops(a: Any) -> Any:
    votes, once = flops.of_votes(a, *fake_sizes(a.u, a.weight, a.J))
    return votes + once * ((a.query is not None) + (a.precision is not None) + 1 + a.with_second)


def _flops_backward(a: Any) -> Any:
    votes, once = flops.of_votes(a, *fake_sizes(a.u, a.weight, a.J))
    u, weight, query, precision, center, prior, logits, activation, lse = a.needed
    of_votes = u or weight or center
    scores = (a.query is not None) * (query + of_votes) + (a.precision is not None) * (precision + of_votes)
    of_coupling = scores > 0 or prior or logits or activation or lse
    sums = (a.dfirst is not None) + (a.dsecond is not None)
    given = any(value is not None for value in (a.dmass, a.dfirst, a.dsecond, a.dweights, a.dlse_out))
    return votes * (u + weight) + once * (sums * (of_votes + of_coupling) + given * scores)


OP = Op(
    "routing_pass",
    ("capsfast.routing_pass", "capsfast.votes_pass"),
    _fake,
    definition=definition,
    flops=(_flops, _flops_backward),
    narrow=lambda options: () if options.normalize == "in" else WEIGHTS,
)
