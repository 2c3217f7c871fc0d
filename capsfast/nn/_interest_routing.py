"""The routing of interest capsules: dynamic routing with options that the fused ops lack."""

from functools import partial
from typing import Any

from torch import Tensor

from .. import checks
from ..arguments import RoutingParameters, unchecked
from ..functional import squash as _squash
from ..ops import factored_routing
from ..options import Options
from ..precision import as_under_autocast, wide_dtype
from .routing.votes import PassVotes, Votes

OP = "capsfast.nn.InterestCapsules"
# c of the squash kinds whose length is n / (c + n), n = |s|^2.
RATIO = {"paper": 1.0, "half": 0.5, "eps_outside": 1.0}


def squash(s: Tensor, power: float, kind: str, eps: float) -> Tensor:
    # eps inside the power, because a power below 1 has an infinite gradient at 0.
    n = s.square().sum(-1, keepdim=True) + eps
    return (n / (RATIO[kind] + n)) ** power * n.rsqrt() * s


def route(
    u: Tensor,
    weight: Tensor,
    J: int,
    logits: Tensor | None,
    mask: Tensor | None,
    out_mask: Tensor | None,
    o: Any,
) -> Tensor:
    """``u [B, I, K]`` and ``weight [1 or I, 1 or J, D, K]`` to interests ``[B, J, D]`` in the dtype of u.

    Under autocast the result has autocast's dtype, as with the ops; computations between passes are not cast.

    Args:
        o: the layer, which holds the options.
    """
    if logits is not None and checks.autocast_dtype(u.device) is not None:
        logits = logits.to(wide_dtype(u.dtype))
    (u, weight), no_autocast = as_under_autocast(u, weight)
    shared = weight.shape[0] == 1 and weight.shape[1] == 1
    accumulate = o.update == "accumulate"
    # In a softmax over the interests each behaviour has its own softmax, so masking before and after is the same.
    masks_after = o.mask_after and o.softmax == "in"
    plain = o.squash_power == 1 and not masks_after
    fused = Options(o.num_iterations, o.softmax, o.gradient, False, o.squash, o.eps)
    given: dict[str, Any] = {"J": J, "mask": None if masks_after else mask, "out_mask": out_mask, "backend": o.backend}
    with no_autocast:
        if shared and plain:
            scaled = logits if logits is None or o.temperature == 1 else logits / o.temperature
            call = unchecked(u, weight, RoutingParameters(scaled, None, mask, out_mask), fused, J, OP)
            if factored_routing.serves(call, o.backend):
                return factored_routing.run(call, False, accumulate, 1 / o.temperature)[0]
        if plain and accumulate and o.temperature == 1:
            return PassVotes(OP, u, weight, **given).agree(**fused._asdict(), logits=logits)  # type: ignore[no-any-return]
        votes = PassVotes(OP, u, weight, **given)
        v: Tensor = Votes.agree(
            votes,
            o.num_iterations,
            logits=logits,
            softmax=o.softmax,
            gradient=o.gradient,
            squash=partial(_squash, kind=o.squash, eps=o.eps)
            if o.squash_power == 1
            else partial(squash, power=o.squash_power, kind=o.squash, eps=o.eps),
            temperature=o.temperature,
            accumulate=accumulate,
            activation=mask.to(u.dtype) if masks_after and mask is not None else None,
        )
        return v.to(u.dtype)
