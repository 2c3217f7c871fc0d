"""A routing pass: score votes, normalise, add up their moments."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calls.arguments import Call, PassParameters
from ..environment.private_torch import result
from .coupling import coupling_coefficients, log_sum_exp, valid_pairs
from .votes import votes


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


def routing_pass(call: Call) -> tuple[Tensor, ...]:
    """mass ``[B, J]``, first and second ``[B, J, D]``, weights ``[B, I, J]`` and lse, without positions.

    lse is the log-sum-exp of the softmax, ``[B, I]`` for "out" and ``[B, J]`` for "in". It is an empty vector without
    a softmax, and so is second if it is not requested.
    """
    o, J = call.options, call.J
    mask, out_mask = call.parameters.mask, call.parameters.out_mask
    query, precision, center, prior, logits, activation, lse, *_ = _without_masked(call.parameters)
    x = votes(call)
    B, I, _, D = x.shape
    if center is not None:
        x = x - center[:, None]
    score = x.new_zeros(B, I, J)
    if query is not None:
        score = score + torch.einsum("bijd,bjd->bij", x, query)
    if precision is not None:
        score = score - 0.5 * torch.einsum("bijd,bjd->bij", x * x, precision)
    if prior is not None:
        score = score + prior[:, None]
    if logits is not None:
        score = score + logits
    valid = valid_pairs(mask, out_mask)
    r = coupling_coefficients(score, valid, o.normalize, o.leaky, lse)
    if activation is not None:
        r = r * activation[:, :, None]
    x = x.expand(B, I, J, D)
    first = torch.einsum("bij,bijd->bjd", r, x)
    second = torch.einsum("bij,bijd->bjd", r, x * x) if o.second else first.new_empty(0)
    softmax = o.normalize in ("out", "in")
    return r.sum(1), first, second, r, log_sum_exp(score, valid, o.normalize, o.leaky) if softmax else x.new_empty(0)


def _without_masked(parameters: PassParameters) -> PassParameters:
    """Zeros for masked capsules: their values must not reach a gradient either."""

    def cleared(value: Tensor | None, mask: Tensor | None) -> Tensor | None:
        if value is None or mask is None:
            return value
        return value.masked_fill(~mask.reshape(*mask.shape, *(1,) * (value.dim() - 2)), 0.0)

    of_outputs = {
        name: cleared(getattr(parameters, name), parameters.out_mask)
        for name in ("query", "precision", "center", "prior")
    }
    of_inputs = {name: cleared(getattr(parameters, name), parameters.mask) for name in ("activation", "lse")}
    return parameters._replace(**of_outputs, **of_inputs)
