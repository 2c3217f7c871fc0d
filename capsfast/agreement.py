"""Routing by agreement as single passes: the sums that a pass returns, and the loop over passes."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._torch import result
from .options import Options
from .reference.squash import squash


@result
class Moments(NamedTuple):
    """The sums of a routing pass over the input capsules.

    Their dtype is float32 for 16-bit inputs, else the dtype of the inputs; ``weights`` has the dtype of the inputs.

    ``mass [B, J]`` is ``sum_i r`` and ``first [B, J, D]`` is ``sum_i r x``. On request, ``second [B, J, D]`` is
    ``sum_i r x^2``, ``weights [B, I, J]`` are r, and ``lse`` is the log-sum-exp of the logits: ``[B, I]``, or
    ``[B, J]`` for ``normalize="in"``.
    """

    mass: Tensor
    first: Tensor
    second: Tensor | None = None
    weights: Tensor | None = None
    lse: Tensor | None = None


def _of_one_iterable(kind: type[Moments], *given: Any, **named: Any) -> Moments:
    """torch rebuilds the results of a function from one iterable if an argument is a subclass of Tensor."""
    whole = len(given) == 1 and not named and not isinstance(given[0], Tensor)
    return _new(kind, *given[0]) if whole else _new(kind, *given, **named)


_new = Moments.__new__
Moments.__new__ = _of_one_iterable  # type: ignore[method-assign, assignment]


def agree(
    moments: Callable[..., Moments],
    agreement: Callable[[Tensor], Tensor],
    options: Options,
    *,
    logits: Tensor | None,
    bias: Tensor | None,
    shrink: Callable[[Tensor], Tensor] | None = None,
    accumulate: bool = True,
    return_weights: bool = False,
    **passed: Any,
) -> tuple[Tensor, Moments]:
    """Dynamic routing (Sabour, Frosst, Hinton 2017, procedure 1) as single passes: v, and the moments of the last pass.

    Args:
        moments: runs a pass; takes the keywords of :func:`capsfast.routing_pass`.
        agreement: takes a query and returns its products with the votes, ``[B, I, J]``. Called without gradients.
        shrink: a squash that replaces the one in the options.
        accumulate: False scores with the last agreement alone, without ``logits`` after the first iteration.
        passed: keywords for every pass.
    """
    o, differentiated = options, torch.is_grad_enabled()
    if shrink is None:
        shrink = partial(squash, dim=-1, eps=o.eps, kind=o.squash)
    query: Tensor | None = None
    for t in range(o.num_iterations):
        last = t + 1 == o.num_iterations
        score, prior = query, logits if accumulate or t == 0 else None
        if o.gradient == "last" and last and query is not None and differentiated:
            # As a query, the agreement would be differentiated with respect to the votes as well.
            with torch.no_grad():
                constant = agreement(query)
            score, prior = None, constant if prior is None else prior + constant
        asked = {**passed, "return_weights": True} if return_weights and last else passed
        with torch.set_grad_enabled(differentiated and (last or o.gradient == "full")):
            found = moments(query=score, logits=prior, normalize=o.softmax, leaky=o.leaky, **asked)
            v = found.first if bias is None else found.first + bias
            v = shrink(v) if o.squash_last or not last else v
            query = query + v if accumulate and query is not None else v
    return v, found
