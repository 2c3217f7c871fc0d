"""Forward and backward of a routing pass, whether votes are made or given. The contract is in
ops/routing_pass.py.

The kernels are those of dynamic routing: the forward is one accumulate, with row_norm before it where the outputs do
not fit one program; the backward is one accumulate_gradient, if a gradient is a sum over the input capsules, and one
gradient with one iteration, with row_norm before them where passes.sweep() says so.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import PassParameters
from ..options import PassOptions
from ..positions import to_samples
from . import passes
from .kernels.arguments import Norms
from .launch import Call, Scores
from .passes import Given
from .routing import aligned, logits_gradient, zeros


class Through(NamedTuple):
    """What both kernels of the backward take after the call."""

    state: Tensor  # [B, J, 1, 2, D]: query and dfirst
    dcoupling: Tensor | None  # [B, I, J]
    norms: Norms
    given: Given


def call(
    x: Tensor,
    weight: Tensor | None,
    parameters: PassParameters,
    options: PassOptions,
    tf32: bool = False,
    outputs: int | None = None,
) -> Call:
    """As in launch.py, with a row of every sample in the parameters but logits. outputs: J, if there is no weight."""
    given, hidden = parameters, _hidden(parameters.out_mask)
    scores = Scores(
        query=_plain(given.query, hidden),
        precision=_plain(given.precision, hidden),
        center=_plain(given.center, hidden),
        prior=_plain(given.prior, hidden),
        activation=_plain(given.activation),
    )
    return Call(
        x, weight, given.logits, None, given.mask, given.out_mask, options, tf32, outputs=outputs, scores=scores
    )


def _hidden(out_mask: Tensor | None) -> Tensor | None:
    return None if out_mask is None else ~out_mask


def _plain(value: Tensor | None, hidden: Tensor | None = None) -> Tensor | None:
    """The value as kernels take it: contiguous float32, and 0 where it is hidden [B, J], as there it may be NaN."""
    if value is None:
        return None
    value = value.float()
    if hidden is not None:
        value = value.masked_fill(hidden if value.dim() == 2 else hidden[:, :, None], 0.0)
    return value.contiguous()


def _rows(call: Call, lse: Tensor | None) -> Tensor | None:
    """[B, I, 4] as row_norm fills it for a softmax: the given log-sum-exp stands for the maximum, 1 for the sum.

    The coupling is 0 where the log-sum-exp is -inf, and no sum of c dc is taken off its gradient.
    """
    if lse is None:
        return None
    nothing = torch.isneginf(lse)
    rows = call.zeros(*lse.shape, 4)
    rows[..., 0] = lse.masked_fill(nothing, 0.0)
    rows[..., 1] = ~nothing
    return rows


def _log_sum(maximum: Tensor, scale: Tensor) -> Tensor:
    """maximum + log(sum), -inf where there is no finite logit, for scale = 1 / sum or 0."""
    return torch.where(scale == 0.0, -torch.inf, maximum - scale.log())


def forward(
    call: Call, given_lse: Tensor | None, return_weights: bool, return_lse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns ``(mass, first, second, weights, lse, norm)``. given_lse: the one that normalize="lse" needs."""
    B, I, J, D, _ = call.sizes
    assert isinstance(call.options, PassOptions) and call.scores is not None
    inward = call.normalize == "in"
    weights = call.new_pairs(call.x.dtype) if return_weights else None
    norm = call.new(2, B, J) if inward else None
    log_sum = call.new(B, I) if return_lse and not inward else None
    if B == 0 or J == 0:
        sums = passes.Sums(call.new(B, J, D), call.new(B, J), call.new(B, J, D) if call.options.second else None)
        if log_sum is not None:
            log_sum.fill_(0.0 if call.options.leaky else -torch.inf)
        elif inward and return_lse:
            log_sum = call.new(B, J)
    else:
        uniform = call.uniform_start and not return_weights and not return_lse
        rows = _rows(call, given_lse)
        if not uniform and call.normalize == "out" and call.tiles("accumulate").groups > 1:
            rows = call.new(B, I, 4)
            passes.row_norm(call, call.scores.query, None, rows, False)
            if log_sum is not None:
                log_sum = _log_sum(rows[..., 0], rows[..., 1])
        partial, online = passes.accumulate(call, call.scores.query, rows, uniform, weights, log_sum)
        factor = passes.uniform_factor(call) if uniform else (None, 1.0)
        sums = passes.update_moments(call, partial, online, factor, norm)
        if norm is not None and weights is not None:
            passes.coupling(call, call.scores.query, Norms(None, *norm), weights)
        if norm is not None and return_lse:
            log_sum = _log_sum(norm[0], norm[1])
    assert sums.mass is not None
    return (
        sums.mass,
        sums.first,
        # Each a tensor of its own: outputs of an op may not share memory.
        call.new(0) if sums.second is None else sums.second,
        call.new(0, dtype=call.x.dtype) if weights is None else weights,
        call.new(0) if log_sum is None else log_sum,
        call.new(0) if norm is None else norm,
    )


def backward(
    call: Call,
    parameters: PassParameters,
    given: tuple[Tensor | None, ...],
    saved: tuple[Tensor, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    """Returns ``(dx, dweight, dquery, dprecision, dcenter, dprior, dlogits, dactivation, dlse)``; those that are not
    needed are empty. dx: du, or dvotes.

    given: gradients of mass, first, second, weights and lse, each of which may be None. saved: what forward() returned.
    """
    B, I, J, D, K = call.sizes
    inputs = (call.x, call.weight, *parameters[:7])
    if B == 0 or J == 0:
        return tuple(zeros(call, tensor, wanted) for tensor, wanted in zip(inputs, needed, strict=True))
    assert call.scores is not None
    hidden = _hidden(parameters.out_mask)
    dmass, dfirst, dsecond = (_plain(value, hidden) for value in given[:3])
    dcoupling, dlse = None if given[3] is None else given[3].contiguous(), _plain(given[4])
    # The layout of dynamic routing. Without a query nothing reads its place.
    state = call.new(B, J, 1, 2, D)
    if dfirst is None:
        state[:, :, 0, 1].zero_()
    else:
        state[:, :, 0, 1] = dfirst
    if call.scores.query is not None:
        state[:, :, 0, 0] = call.scores.query
    norms = Norms()
    beside = Given(dmass, dsecond, dlse)
    if call.normalize == "in":
        # As in coupling_gradient(); an activation multiplies dc, but not s.
        s = aligned(saved[1]) if call.scores.activation is None else None
        delta = _inward_total(call, beside, dfirst, dcoupling, saved, s)
        norms = Norms(None, saved[5][0], saved[5][1], delta, s)
    need_x, need_weight, *need_scores, need_logits, need_activation, need_lse = needed
    uniform = call.uniform_start and not need_activation
    through = Through(state, dcoupling, norms._replace(rows=_rows(call, parameters.lse)), beside)
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
            assert pairs is not None
            dlogits = logits_gradient(call, pairs)
        if terms is not None:
            dactivation = _over_outputs(call, terms)
        if need_lse:
            assert pairs is not None
            drow = -_over_outputs(call, pairs[0, ..., 1])
    found = (dx, dweight, dlogits, dactivation, drow)
    gradients = (*found[:2], *of_scores, *found[2:])
    return tuple(
        zeros(call, tensor, wanted) if gradient is None else gradient.to((call.x if tensor is None else tensor).dtype)
        for gradient, tensor, wanted in zip(gradients, inputs, needed, strict=True)
    )


def _inward_total(
    call: Call,
    given: Given,
    dfirst: Tensor | None,
    dcoupling: Tensor | None,
    saved: tuple[Tensor, ...],
    s: Tensor | None,
) -> Tensor:
    """sum_i c dc [B, J] for a softmax over the input capsules: from the moments, as dc is linear in these.

    s: the first moment if s . dfirst + s^2 . dsecond is left out, as kernels/votes.py takes it off dc.
    """
    B, _, J, *_ = call.sizes
    mass, first, second, weights, *_ = saved
    total = call.zeros(B, J)
    if given.mass is not None:
        total += given.mass * mass
    if dfirst is not None and s is None:
        total += (dfirst * first).sum(2)
    if given.second is not None:
        total += (given.second * (second if s is None else second - s * s)).sum(2)
    if dcoupling is not None:
        total += call.over_inputs(dcoupling.float() * weights)
    return total


def _over_outputs(call: Call, pairs: Tensor) -> Tensor:
    """The sums over j of [B, I, J] or [B, I, J, S]: a row for each sample."""
    found = pairs.sum(2)
    return found if call.positions is None else to_samples(found)


def _summed(call: Call, needed: list[bool]) -> bool:
    """Whether a gradient of the scores is a sum over the input capsules."""
    assert call.scores is not None
    need_query, need_precision, need_center, need_prior = needed
    scored = call.scores.query is not None or call.scores.precision is not None
    return need_query or need_precision or need_prior or (need_center and scored)


def _score_gradients(
    call: Call,
    through: Through,
    dfirst: Tensor | None,
    saved: tuple[Tensor, ...],
    needed: list[bool],
    pairs: Tensor | None,
    terms: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """dquery, dprecision, dcenter and dprior in float32, None for those that are not needed. Fills pairs and terms, as
    accumulate_gradient does."""
    assert call.scores is not None
    query, precision, *_ = call.scores
    need_query, need_precision, need_center, need_prior = needed
    mass, first, *_ = saved
    dquery = dprecision = dcenter = dprior = None
    if need_center:
        # As x = votes - center, minus the sum of the gradients of x over i. What goes through the score is below.
        dcenter = call.zeros(*first.shape)
        if dfirst is not None:
            dcenter -= mass[:, :, None] * dfirst
        if through.given.second is not None:
            dcenter -= 2 * through.given.second * first
    partial = None
    if _summed(call, needed):
        wanted = (need_prior or (need_center and query is not None), need_precision)
        partial = passes.partial_sums(call, "accumulate_gradient", *wanted)
    if partial is not None or pairs is not None:
        state, dcoupling, norms, given = through
        kept = None if pairs is None else pairs[0]
        passes.accumulate_gradient(call, state, dcoupling, norms, kept, partial, given, terms)
    if partial is not None:
        sums = passes.update_moments(call, partial)
        dquery, dprior = sums.first, sums.mass
        if sums.second is not None:
            dprecision = -0.5 * sums.second
        if dcenter is not None and query is not None and sums.mass is not None:
            dcenter -= query * sums.mass[:, :, None]
        if dcenter is not None and precision is not None:
            dcenter += precision * sums.first
    found = (dquery, dprecision, dcenter, dprior)
    return tuple(gradient if wanted else None for gradient, wanted in zip(found, needed, strict=True))
