"""Routing by agreement (Sabour, Frosst, Hinton 2017, procedure 1) as a loop over passes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..calls.arguments import Call
from ..calls.options import RoutingOptions
from ..environment.private_torch import forward_level
from .coupling import coupling_coefficients, valid_pairs
from .routing_pass import Moments
from .squash import squash
from .votes import votes


def agree(
    moments: Callable[..., Moments],
    options: RoutingOptions,
    *,
    logits: Tensor | None,
    bias: Tensor | None,
    out_mask: Tensor | None = None,
    agreement: Callable[[Tensor], Tensor | None] | None = None,
    shrink: Callable[[Tensor, str], Tensor] | None = None,
    return_weights: bool = False,
    **passed: Any,
) -> tuple[Tensor, Moments]:
    """The loop, whatever computes the passes: v, and the moments of the last pass.

    Args:
        moments: runs a pass; takes the keywords of :func:`capsfast.routing_pass`.
        out_mask: takes output capsules out of the result; ``moments`` takes them out of the coupling.
        agreement: takes a query and returns its products with the votes, ``[B, I, J]``; default: the weights of a pass
            with this query alone.
        shrink: takes a sum and the kind of its squash, and replaces :func:`squash`.
        passed: more keywords for the passes.
    """
    o, constant = options, options.gradient == "last"
    if shrink is None:

        def shrink(s: Tensor, kind: str) -> Tensor:
            return squash(s, eps=o.eps, kind=kind)

    if agreement is None:

        def agreement(query: Tensor) -> Tensor | None:
            return moments(query=query, normalize="none", return_weights=True).weights

    query: Tensor | None = None
    for t in range(o.num_iterations):
        last = t + 1 == o.num_iterations
        score, prior = query, logits if o.accumulate or t == 0 else None
        if constant and last and query is not None and (torch.is_grad_enabled() or forward_level() >= 0):
            # As a query, the agreement would be differentiated with respect to the votes as well.
            agreed = agreement(query)
            assert agreed is not None
            score, prior = None, agreed.detach() if prior is None else prior + agreed.detach()
        asked = {**passed, "return_weights": True} if return_weights and last else passed
        moments_of_pass = moments(query=score, logits=prior, normalize=o.softmax, leaky=o.leaky, **asked)
        v = moments_of_pass.first if bias is None else moments_of_pass.first + bias
        v = shrink(v, o.last_squash if last else o.squash)
        v = v if out_mask is None else v.masked_fill(~out_mask[:, :, None], 0.0)
        v = v.detach() if constant and not last else v
        v = v if last or o.sharpness == 1 else o.sharpness * v
        query = query + v if o.accumulate and query is not None else v
    return v, moments_of_pass


def dynamic_routing(call: Call) -> tuple[Tensor, Tensor]:
    """Output capsules ``v [B, J, D]`` and the last coupling ``[B, I, J]``, without positions."""
    logits, bias, mask, out_mask = call.parameters
    x, valid = votes(call), valid_pairs(mask, out_mask)
    none = x.new_zeros(*x.shape[:2], call.J)

    def agreement(query: Tensor) -> Tensor:
        return torch.einsum("bijd,bjd->bij", x, query)

    def moments(query: Tensor | None, logits: Tensor | None, normalize: str, leaky: bool) -> Moments:
        b = none if logits is None else logits.expand(none.shape)
        c = coupling_coefficients(b if query is None else b + agreement(query), valid, normalize, leaky)
        return Moments(c.sum(1), torch.einsum("bij,bijd->bjd", c, x), weights=c)

    v, last = agree(moments, call.options, logits=logits, bias=bias, out_mask=out_mask, agreement=agreement)
    assert last.weights is not None
    return v, last.weights
