"""Forward and backward of a routing pass, for computed and for given votes. The contract is in
ops/routing_pass.py.

A pass runs the kernels of dynamic routing. The forward is one accumulate, with row_norm before it if the outputs do not
fit one program. The backward is one accumulate_gradient, unless all couplings are equal, and one gradient with one
iteration.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..options import PassOptions
from ..positions import to_samples
from . import passes
from .config import padded
from .kernels.arguments import Norms
from .launch import Call, Scores
from .passes import Given
from .plan import Slot
from .routing import logits_gradient, over_inputs, zeros


class Through(NamedTuple):
    """What accumulate_gradient takes after the call."""

    state: Slot  # [B, J, 1, 2, padded D]: query and dfirst
    dcoupling: Slot | None  # [B, I, J]
    norms: Norms
    given: Given


def call(
    x: Slot,
    weight: Slot | None,
    parameters: Any,
    options: PassOptions,
    tf32: bool = False,
    outputs: int | None = None,
) -> Call:
    """The Call of a pass. parameters: PassParameters of slots; all but logits have a row for every sample.

    outputs: J, if there is no weight.
    """
    given, plain = parameters, functools.partial(x.plan.compute, _plain)
    shown = (given.query, given.precision, given.center, given.prior)
    query, precision, center, prior = (plain(value, given.out_mask) for value in shown)
    scores = Scores(query, precision, center, prior, plain(given.activation))
    return Call(
        x, weight, given.logits, None, given.mask, given.out_mask, options, tf32, outputs=outputs, scores=scores
    )


def _plain(value: Tensor | None, out_mask: Tensor | None = None) -> Tensor | None:
    """The value as contiguous float32, with 0 where out_mask [B, J] hides outputs, whose values may be NaN."""
    if value is None:
        return None
    value = value.float()
    if out_mask is not None:
        value = value.masked_fill(~(out_mask if value.dim() == 2 else out_mask[:, :, None]), 0.0)
    return value.contiguous()


def _rows(lse: Tensor | None) -> Tensor | None:
    """[B, I, 4] as row_norm fills it for a softmax: the given log-sum-exp takes the place of the maximum, 1 of the sum.

    The coupling is 0 where the log-sum-exp is -inf. The sum of c dc is 0, so it does not change the gradient.
    """
    if lse is None:
        return None
    nothing = torch.isneginf(lse)
    nought = torch.zeros_like(lse, dtype=torch.float32)
    return torch.stack([lse.masked_fill(nothing, 0.0), (~nothing).float(), nought, nought], -1)


def _log_sum(maximum: Tensor, scale: Tensor) -> Tensor:
    """maximum + log(sum), -inf where no logit is finite. scale: 1 / sum, or 0."""
    return torch.where(scale == 0.0, -torch.inf, maximum - scale.log())


def forward(
    call: Call, given_lse: Slot | None, return_weights: bool, return_lse: bool
) -> tuple[Slot, Slot, Slot, Slot, Slot, Slot]:
    """Returns ``(mass, first, second, weights, lse, norm)``. given_lse: the log-sum-exp for normalize="lse"."""
    B, I, J, D, _ = call.sizes
    assert isinstance(call.options, PassOptions)
    inward = call.normalize == "in"
    dtype = torch.float32 if inward else call.x.dtype
    weights = call.new_pairs(dtype) if return_weights else None
    norm = call.new(2, B, J) if inward else None
    log_sum = call.new(B, I) if return_lse and not inward else None
    if B == 0 or J == 0:
        sums = passes.Sums(call.new(B, J, D), call.new(B, J), call.new(B, J, D) if call.options.second else None)
        if log_sum is not None:
            log_sum = call.compute(_empty_log_sum, B, I, call.options.leaky, call.x.device)
        elif inward and return_lse:
            log_sum = call.new(B, J)
    else:
        uniform = call.uniform_start and not return_weights and not return_lse
        rows = call.compute(_rows, given_lse)
        if not uniform and call.normalize == "out" and call.tiles("accumulate").groups > 1:
            rows = call.new(B, I, 4)
            passes.row_norm(call, call.scores.query, None, rows, False)
            if log_sum is not None:
                log_sum = call.compute(_log_sum, rows[..., 0], rows[..., 1])
        partial, online = passes.accumulate(call, call.scores.query, rows, uniform, weights, log_sum)
        factor = passes.uniform_factor(call) if uniform else (None, 1.0)
        sums = passes.update(call, partial, online, factor, (None, None) if norm is None else (norm[0], norm[1]))
        if norm is not None and weights is not None:
            passes.coupling(call, call.scores.query, Norms(None, *norm), weights)
        if norm is not None and return_lse:
            log_sum = call.compute(_log_sum, norm[0], norm[1])
    assert sums.mass is not None
    return (
        sums.mass,
        sums.first,
        # Every output is a tensor of its own: outputs of an op may not share memory.
        call.new(0) if sums.second is None else sums.second,
        call.new(0, dtype=dtype) if weights is None else weights,
        call.new(0) if log_sum is None else log_sum,
        call.new(0) if norm is None else norm,
    )


def backward(
    call: Call,
    parameters: Any,
    given: tuple[Slot | None, ...],
    saved: tuple[Slot, ...],
    needed: tuple[bool, ...],
) -> tuple[Slot, ...]:
    """Returns ``(dx, dweight, dquery, dprecision, dcenter, dprior, dlogits, dactivation, dlse)``; a gradient that is
    not needed is empty. dx: du, or dvotes.

    given: gradients of mass, first, second, weights and lse, each of which may be None. saved: what forward() returned.
    """
    B, I, J, D, K = call.sizes
    inputs = (call.x, call.weight, *parameters[:7])
    if B == 0 or J == 0:
        return tuple(zeros(call, tensor, wanted) for tensor, wanted in zip(inputs, needed, strict=True))
    dmass, dfirst, dsecond = (call.compute(_plain, value, parameters.out_mask) for value in given[:3])
    dcoupling, dlse = None if given[3] is None else given[3].contiguous(), call.compute(_plain, given[4])
    query_and_dfirst = (call.zeros(B, J, D) if each is None else each for each in (call.scores.query, dfirst))
    state = call.compute(_state, *query_and_dfirst)  # without a query no kernel reads the zeros in its place
    norms = Norms()
    beside = Given(dmass, dsecond, dlse)
    if call.normalize == "in":
        # As in coupling_gradient(); an activation multiplies dc, but not s.
        s = saved[1].aligned() if call.scores.activation is None else None
        first = None if dfirst is None or s is not None else saved[1]
        delta = call.compute(_inward_total, *beside[:2], dfirst, dcoupling, saved[0], first, *saved[2:4], s)
        norms = Norms(None, saved[5][0], saved[5][1], delta, s)
    need_x, need_weight, *need_scores, need_logits, need_activation, need_lse = needed
    uniform = call.uniform_start and not need_activation
    through = Through(state, dcoupling, norms._replace(rows=call.compute(_rows, parameters.lse)), beside)
    launched = I > 0 and (need_x or need_weight or need_logits or need_activation or need_lse)
    pairs = passes.new_coefficients(call, 1) if launched and not uniform else None
    terms = call.new_pairs(torch.float32) if launched and need_activation else None
    of_scores = _score_gradients(call, through, dfirst, saved, need_scores, pairs, terms)
    dx = dweight = dlogits = dactivation = drow = None
    if launched:
        if need_x or need_weight:
            dx, parts = passes.gradient(call, state, pairs, uniform, (need_x, need_weight), dsecond)
            dweight = None if parts is None else passes.add_up(call, parts)
        if need_logits:
            dlogits = logits_gradient(call, pairs)
        if need_activation:
            dactivation = call.compute(_over_outputs, terms)
        if need_lse:
            drow = call.compute(_of_log_sum, pairs)
    found = (dx, dweight, dlogits, dactivation, drow)
    gradients = (*found[:2], *of_scores, *found[2:])
    return tuple(
        zeros(call, tensor, wanted)
        if gradient is None
        else call.compute(Tensor.to, gradient, (call.x if tensor is None else tensor).dtype)
        for gradient, tensor, wanted in zip(gradients, inputs, needed, strict=True)
    )


def _state(query: Tensor, dfirst: Tensor) -> Tensor:
    """State [B, J, 1, 2, padded D], in the form of dynamic routing."""
    D = query.shape[2]
    return torch.nn.functional.pad(torch.stack([query, dfirst], 2)[:, :, None], (0, padded(D) - D))


def _empty_log_sum(B: int, I: int, leaky: bool, device: torch.device) -> Tensor:
    return torch.full((B, I), 0.0 if leaky else -torch.inf, dtype=torch.float32, device=device)


def _inward_total(
    dmass: Tensor | None,
    dsecond: Tensor | None,
    dfirst: Tensor | None,
    dcoupling: Tensor | None,
    mass: Tensor,
    first: Tensor | None,
    second: Tensor,
    weights: Tensor,
    s: Tensor | None,
) -> Tensor:
    """sum_i c dc [B, J] for a softmax over the input capsules, from the moments, because dc is linear in x and x^2.

    s: the first moment, if the sum leaves out s . dfirst + s^2 . dsecond, which kernels/votes.py subtracts from dc.
    """
    total = torch.zeros_like(mass)
    if dmass is not None:
        total = total + dmass * mass
    if dfirst is not None and first is not None:
        total = total + (dfirst * first).sum(2)
    if dsecond is not None:
        total = total + (dsecond * (second if s is None else second - s * s)).sum(2)
    if dcoupling is not None:
        total = total + over_inputs(dcoupling.float() * weights)
    # With the positions of one sample the mass is a view whose positions are behind.
    return total.contiguous()


def _over_outputs(pairs: Tensor) -> Tensor:
    """Sums [B, I, J] or [B, I, J, S] over j. The result has a row for each sample."""
    found = pairs.sum(2)
    return found if pairs.dim() == 3 else to_samples(found)


def _of_log_sum(pairs: Tensor) -> Tensor:
    """The gradient of a given log-sum-exp, from pairs [1, B, I, J, 2]."""
    return -_over_outputs(pairs[0, ..., 1])


def _summed(call: Call, needed: list[bool]) -> bool:
    """Whether a gradient of the scores is a sum over the input capsules."""
    need_query, need_precision, need_center, need_prior = needed
    scored = call.scores.query is not None or call.scores.precision is not None
    return need_query or need_precision or need_prior or (need_center and scored)


def _score_gradients(
    call: Call,
    through: Through,
    dfirst: Slot | None,
    saved: tuple[Slot, ...],
    needed: list[bool],
    pairs: Slot | None,
    terms: Slot | None,
) -> tuple[Slot | None, ...]:
    """dquery, dprecision, dcenter and dprior in float32; a gradient that is not needed is None. Fills pairs and terms,
    as passes.accumulate_gradient() does."""
    query, precision, *_ = call.scores
    need_query, need_precision, need_center, need_prior = needed
    mass, first, *_ = saved
    partial = sums = None
    if _summed(call, needed):
        wanted = (need_prior or (need_center and query is not None), need_precision)
        partial = passes.partial_sums(call, "accumulate_gradient", *wanted)
    if partial is not None or pairs is not None:
        state, dcoupling, norms, given = through
        kept = None if pairs is None else pairs[0]
        passes.accumulate_gradient(call, state, dcoupling, norms, kept, partial, given, terms)
    if partial is not None:
        sums = passes.update(call, partial)
    dprecision = dcenter = None
    if need_precision and sums is not None:
        dprecision = call.compute(_dprecision, sums.second)
    if need_center:
        through_score = (None, None, None) if sums is None else (sums.first, sums.mass, precision)
        dcenter = call.compute(_dcenter, mass, first, dfirst, through.given.second, query, *through_score)
    return (
        sums.first if need_query and sums is not None else None,
        dprecision,
        dcenter,
        sums.mass if need_prior and sums is not None else None,
    )


def _dprecision(second: Tensor) -> Tensor:
    return -0.5 * second


def _dcenter(
    mass: Tensor,
    first: Tensor,
    dfirst: Tensor | None,
    dsecond: Tensor | None,
    query: Tensor | None,
    dscores_x: Tensor | None,
    dscores: Tensor | None,
    precision: Tensor | None,
) -> Tensor:
    """Minus the sum over i of dx, because x = votes - center. dscores, dscores_x: the sums over i of db and db x."""
    found = torch.zeros_like(first)
    if dfirst is not None:
        found = found - mass[:, :, None] * dfirst
    if dsecond is not None:
        found = found - 2 * dsecond * first
    if query is not None and dscores is not None:
        found = found - query * dscores[:, :, None]
    if precision is not None and dscores_x is not None:
        found = found + precision * dscores_x
    return found
