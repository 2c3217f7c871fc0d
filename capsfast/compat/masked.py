"""Dynamic routing that multiplies the coupling by a mask after the softmax, as ComiRec's code does."""

from typing import Any

import torch
from torch import Tensor

from .. import arguments, checks
from ..agreement import agree
from ..arguments import RoutingParameters
from ..options import Options
from ..passes import routing_pass, votes_pass


def masked_after_routing(
    u: Tensor,
    weight: Tensor | None,
    num_iterations: int = 3,
    *,
    mask: Tensor,
    logits: Tensor | None = None,
    bias: Tensor | None = None,
    softmax: str = "out",
    gradient: str = "full",
    leaky: bool = False,
    squash: str = "paper",
    eps: float = 1e-8,
    squash_last: bool = True,
    return_coupling: bool = False,
    backend: str | None = None,
) -> Any:
    """:func:`capsfast.dynamic_routing` that multiplies the coupling by a mask, or any factor, after the softmax.

    With ``softmax="in"`` masked input capsules take part in the softmax, so that the coupling of an output capsule adds
    up to less than one. Published code for interest capsules (ComiRec, Cen et al. 2020) does so. With ``softmax="out"``
    and a mask of 0 and 1, ``capsfast.dynamic_routing(mask=...)`` is faster: this function routes by single passes.

    Args:
        u: input capsules ``[B, I, K]``; with ``weight=None`` votes ``[B, I, J, D]``.
        weight: ``[I, J, D, K]``, with size 1 along an axis that shares it, or None.
        mask: ``[B, I]``, bool or factors of any value.
        all others: as in :func:`capsfast.dynamic_routing`.

    Returns:
        ``v [B, J, D]`` in the dtype of u; with ``return_coupling`` the pair of ``v`` and ``c [B, I, J]``, masked.

    Raises:
        ValueError, TypeError: as :func:`capsfast.dynamic_routing`.
    """
    op = "capsfast.compat.masked_after_routing"
    checks.boolean(op, "return_coupling", return_coupling)
    options = Options(num_iterations, softmax, gradient, leaky, squash, eps, squash_last)
    options.check(op)
    if not isinstance(mask, Tensor):
        raise TypeError(f"{op}: mask must be a torch.Tensor [B, I], got {checks.shown(mask)}")
    votes_or_weight = arguments.GIVEN if weight is None else weight
    call, spatial = arguments.check(op, u, votes_or_weight, RoutingParameters(logits, bias, mask != 0, None), options)
    if spatial:
        raise ValueError(f"{op}: u must be [B, I, K] or votes [B, I, J, D], got {checks.shape_of(u)} with more axes")
    # If output capsules share the weight, an out_mask tells the pass their number.
    more: dict[str, Any] = {"activation": mask.to(u.dtype), "backend": backend}
    if weight is not None and weight.shape[1] == 1 and call.J != 1:
        more["out_mask"] = torch.ones(u.shape[0], call.J, dtype=torch.bool, device=u.device)

    def moments(**given: Any) -> Any:
        return votes_pass(u, **given) if weight is None else routing_pass(u, weight, **given)

    def agreement(query: Tensor) -> Tensor:
        found: Tensor = moments(query=query, normalize="none", return_weights=True, backend=backend).weights
        return found

    v, last = agree(moments, agreement, options, logits=logits, bias=bias, return_weights=return_coupling, **more)
    cast = checks.autocast_dtype(u.device)  # the result gets the dtype of the fused op's result
    v = v.to(u.dtype if cast is None or u.dtype.itemsize == 8 else cast)
    return (v, last.weights) if return_coupling else v
