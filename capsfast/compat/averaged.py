"""Dynamic routing with logits averaged over the batch, an error in older models."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from .. import _keywords, arguments, checks
from ..arguments import Call, RoutingParameters
from ..functional import squash as _squash
from ..options import Options
from ..precision import in_wide_dtype
from ..reference.coupling import coupling_coefficients

Linear = Callable[[Tensor], Tensor]


@_keywords.closed
def averaged_routing(
    u: Tensor,
    weight: Tensor | None,
    num_iterations: int = 3,
    *,
    logits: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    softmax: str = "out",
    gradient: str = "full",
    leaky: bool = False,
    squash: str = "paper",
    eps: float = 1e-8,
    squash_last: bool = True,
    return_coupling: bool = False,
    **unknown: Unpack[_keywords.NoMore],
) -> Any:
    """:func:`capsfast.dynamic_routing` that averages the logits over the batch before every softmax.

    Several older implementations do so. The result of a sample then depends on the other samples, and accuracy falls
    at small batches: use this function to reproduce such models, not to train new ones. Under DistributedDataParallel
    each rank averages over its own batch.

    All samples have the same coupling ``c [I, J]``. So the weighted sums are ``sum_ik u_bik (c_ij W_ijdk)``, and the
    mean of the agreement ``W_ij u_bi . v_bj`` is ``<W_ij, mean_b v_bj u_bi^T>``: products of matrices without votes.
    torch computes them, on any device, differentiable any number of times.

    Args:
        u: input capsules ``[B, I, K]``; with ``weight=None`` votes ``[B, I, J, D]``.
        weight: ``[I, J, D, K]``, ``[1, J, D, K]``, or None.
        all others: as in :func:`capsfast.dynamic_routing`.

    Returns:
        ``v [B, J, D]``; with ``return_coupling`` the pair of ``v`` and ``c [B, I, J]``.

    Raises:
        ValueError, TypeError: as :func:`capsfast.dynamic_routing`; a mask with ``softmax="in"``, because each sample
            would then have its own softmax.
    """
    op = "capsfast.compat.averaged_routing"
    if unknown:
        _keywords.refuse(averaged_routing, unknown, op)
    checks.boolean(op, "return_coupling", return_coupling)
    options = Options(num_iterations, softmax, gradient, leaky, squash, eps, squash_last)
    options.check(op)
    votes_or_weight = arguments.GIVEN if weight is None else weight
    call, spatial = arguments.check(op, u, votes_or_weight, RoutingParameters(logits, bias, mask, None), options)
    if spatial or (weight is not None and u.dim() == 4):
        raise ValueError(
            f"{op}: u must be [B, I, K] or votes [B, I, J, D], got {checks.shape_of(u)} with more axes; "
            f"capsfast.dynamic_routing takes these, without the mean"
        )
    if mask is not None and softmax == "in":
        raise ValueError(f"{op}: mask needs softmax='out', got softmax='in', with which samples differ; drop the mask")
    v, c = in_wide_dtype(_route, call, (0, 1))
    return (v, c) if return_coupling else v


def _route(call: Call) -> tuple[Tensor, Tensor]:
    o, (logits, bias, mask, _) = call.options, call.parameters
    u, weight = call.u, call.weight
    B, I = u.shape[:2]
    if mask is not None:
        # Values of a masked capsule, such as NaN, must not reach dW, and its weight must not reach the sums.
        u = u.masked_fill(~mask.reshape(B, I, *(1,) * (u.dim() - 2)), 0.0)
        if weight is not None and weight.shape[0] == I:
            weight = weight.masked_fill(~mask.any(0)[:, None, None, None], 0.0)
    weighted_sums, agreement_with = _sums(u, weight, call.J)
    prior = u.new_zeros(I, call.J) if logits is None else logits
    if prior.dim() == 3:
        prior = _mean(prior.sum(0), B)

    agreement: Tensor | float = 0.0
    for t in range(o.num_iterations):
        last = t + 1 == o.num_iterations
        with torch.no_grad() if o.gradient == "last" and not last else nullcontext():
            c = coupling_coefficients((prior + agreement)[None], None, o.softmax, o.leaky)[0]
            s = weighted_sums(c)
            if bias is not None:
                s = s + bias
            v = _squash(s, kind=o.squash, eps=o.eps) if o.squash_last or not last else s
            if not last:
                agreement = agreement + _mean(agreement_with(v), B)
                if o.gradient == "last":
                    agreement = agreement.detach()
    coupling = c.expand(B, I, call.J)
    return v, coupling if mask is None else coupling.masked_fill(~mask[:, :, None], 0.0)


def _mean(total: Tensor, B: int) -> Tensor:
    return total / max(B, 1)  # 0 for an empty batch


def _sums(u: Tensor, weight: Tensor | None, J: int) -> tuple[Linear, Linear]:
    """Two functions: from a coupling to weighted sums, and from outputs to the agreement summed over the batch."""
    if weight is None:
        votes = u.expand(-1, -1, J, -1)
        return lambda c: torch.einsum("ij,bijd->bjd", c, votes), lambda v: torch.einsum("bijd,bjd->ij", votes, v)
    B, I, K = u.shape
    u = u.flatten(1)
    weight = weight.expand(I, J, -1, -1).permute(0, 3, 1, 2).contiguous()  # [I, K, J, D]
    # Neither function forms votes.
    return (
        lambda c: (u @ (c[:, None, :, None] * weight).flatten(0, 1).flatten(1)).view(B, J, -1),
        lambda v: torch.einsum("ikjd,ikjd->ij", (u.T @ v.flatten(1)).view(weight.shape), weight),
    )
