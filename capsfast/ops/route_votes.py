"""The op behind :func:`capsfast.route_votes`.

``capsfast::route_votes`` and ``capsfast::route_votes_backward`` have the contract of ``capsfast::dynamic_routing``,
with votes instead of u and weight, and ``dvotes`` instead of ``du, dweight``. There are J output capsules; the votes
``[B, I, J or 1, D]`` may have one entry for all of them, and so has dvotes. Votes ``[B, I, J, D, S]`` have S positions.
Then all that has an axis B ends in an axis S, and s and norm are empty: they would be r / I of votes that have few
input capsules. The backward computes them again, a part of the positions at a time.
"""

from typing import Any

import torch
from torch import Tensor

from ..backend import select
from ..options import Options
from ..reference.route_votes import route_votes as reference
from ._glue import fake_gradients
from ._register import Contract, define
from ._routing import OPTIONS, SHARED, fake_outputs, received, run_reference, why_not_fused


def call(
    votes: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    out_mask: Tensor | None,
    J: int,
    options: Options,
    return_coupling: bool,
    share_batch_logits: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """``(v, c)`` from the chosen backend. The arguments were checked by the caller."""
    cannot = why_not_fused(
        votes.dtype, votes.shape[3], share_batch_logits, votes.shape[2] != J, positions=votes.dim() == 5
    )
    chosen = select("capsfast.route_votes", votes.device, backend, cannot)
    if chosen == "reference":
        return run_reference(reference, (votes,), (logits, bias, mask, out_mask), options, share_batch_logits, J)
    v, c, _, _ = _ops[chosen](votes, logits, bias, mask, out_mask, J, *options.of_op(), return_coupling)
    return v, c


def _fake(votes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    torch._check(votes.dim() in (4, 5), lambda: "votes must be [B, I, J or 1, D] or [B, I, J, D, S]")
    *parameters, J = rest[:5]
    B, I, given, D = votes.shape[:4]
    if given != 1 or votes.dim() == 5:
        torch._check(given == J, lambda: "votes must have 1 or J output capsules")
    return fake_outputs(votes, (B, I, J, D), (*parameters, *rest[5:]), votes.shape[4:])


def _fake_backward(
    dv: Tensor,
    dcoupling: Tensor | None,
    votes: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    out_mask: Tensor | None,
    coupling: Tensor,
    s: Tensor,
    norm: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    return fake_gradients((votes, logits, bias), rest[-3:])


CONTRACT = Contract(
    name="route_votes",
    inputs=("votes",),
    options=f"SymInt J, {OPTIONS}",
    fake=_fake,
    fake_backward=_fake_backward,
    received=received,
    **SHARED,
)
_ops = define(CONTRACT)
