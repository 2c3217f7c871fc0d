"""A routing pass: score votes, normalise, add up their moments."""

import torch
from torch import Tensor

from ..arguments import Call, PassParameters
from ..positions import from_samples
from .coupling import coupling_coefficients, log_sum_exp, valid_pairs
from .votes import votes


def routing_pass(call: Call) -> tuple[Tensor, ...]:
    """mass ``[B, J]``, first and second ``[B, J, D]``, weights ``[B, I, J]`` and lse.

    lse is the log-sum-exp of the softmax, ``[B, I]`` for "out" and ``[B, J]`` for "in". It is an empty vector without
    a softmax, and so is second if it is not requested.
    """
    if call.weight is None and call.u.dim() == 5:
        B, S = call.u.shape[0], call.u.shape[4]
        found = routing_pass(call.as_samples())
        return tuple(value if value.dim() == 1 else from_samples(value, B, S) for value in found)
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


def _without_masked(given: PassParameters) -> PassParameters:
    """Zeros for masked capsules: their values must not reach a gradient either."""

    def cleared(value: Tensor | None, mask: Tensor | None) -> Tensor | None:
        if value is None or mask is None:
            return value
        return value.masked_fill(~mask.reshape(*mask.shape, *(1,) * (value.dim() - 2)), 0.0)

    of_outputs = {
        name: cleared(getattr(given, name), given.out_mask) for name in ("query", "precision", "center", "prior")
    }
    of_inputs = {name: cleared(getattr(given, name), given.mask) for name in ("activation", "lse")}
    return given._replace(**of_outputs, **of_inputs)
