"""The op behind :func:`capsfast.votes_pass`.

``capsfast::votes_pass`` and ``capsfast::votes_pass_backward`` have the contract of ``capsfast::routing_pass``, with
votes instead of u and weight, and ``dvotes`` instead of ``du, dweight``. There are J output capsules; the votes
``[B, I, J or 1, D]`` may have one entry for all of them, and so has dvotes. Votes ``[B, I, J, D, S]`` have S positions.
Then all that has an axis B ends in an axis S, but for the norm that the backward alone reads: there B is B S.
"""

from typing import Any

import torch
from torch import Tensor

from ..backend import select
from ..options import PassOptions
from ..reference.votes_pass import PassParameters
from ..reference.votes_pass import votes_pass as reference
from ._glue import fake_gradients
from ._pass import OPTIONS, SHARED, fake_outputs, received, run_reference, why_not_fused
from ._register import Contract, define


def call(
    votes: Tensor,
    parameters: PassParameters,
    J: int,
    options: PassOptions,
    return_weights: bool,
    return_lse: bool,
    backend: str | None,
    op: str = "capsfast.votes_pass",
) -> tuple[Tensor, ...]:
    """``(mass, first, second, weights, lse)`` from the chosen backend, with empty tensors for what is not wanted.

    The arguments were checked by the caller, whose name is ``op``.
    """
    cannot = why_not_fused(
        votes.dtype,
        votes.shape[3],
        parameters,
        options,
        shared_outputs=votes.shape[2] != J,
        positions=votes.dim() == 5,
    )
    chosen = select(op, votes.device, backend, cannot)
    if chosen == "reference":
        return run_reference(reference, (votes,), parameters, J, options, return_weights, return_lse)
    *found, _ = _ops[chosen](votes, *parameters, J, *options, return_weights, return_lse)
    return tuple(found)


def _fake(votes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    torch._check(votes.dim() in (4, 5), lambda: "votes must be [B, I, J or 1, D] or [B, I, J, D, S]")
    parameters, J = rest[:9], rest[9]
    B, I, given, D = votes.shape[:4]
    if given != 1 or votes.dim() == 5:
        torch._check(given == J, lambda: "votes must have 1 or J output capsules")
    return fake_outputs(votes, (B, I, J, D), (*parameters, *rest[10:]), votes.shape[4:])


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    # Five gradients of outputs, then the tensors.
    return fake_gradients(args[5:13], args[-8:])


CONTRACT = Contract(
    name="votes_pass",
    inputs=("votes",),
    options=f"SymInt J, {OPTIONS}",
    fake=_fake,
    fake_backward=_fake_backward,
    received=received,
    **SHARED,
)
_ops = define(CONTRACT)
