"""Forward and backward of a routing pass, for computed and for given votes. The contract is in
ops/routing_pass.py.

A pass runs the kernels of dynamic routing. The forward is one accumulate, with row_norm before it if the outputs do not
fit one program. The backward is one accumulate_gradient, unless all couplings are equal, and one gradient with one
iteration.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from . import passes
from .kernels.arguments import Norms, OutputGradients
from .launch import KernelCall, plain
from .plan import Slot
from .routing import coupled, total


def forward(call: KernelCall, return_weights: bool, return_lse: bool) -> tuple[Slot, Slot, Slot, Slot, Slot, Slot]:
    """Returns ``(mass, first, second, weights, lse, norm)``."""
    B, I, J, D, _ = call.sizes
    inward = call.normalize == "in"
    dtype = torch.float32 if inward else call.x.dtype
    weights = call.new_pairs(dtype) if return_weights else None
    norm = call.new(2, B, J) if inward else None
    lse: Slot | None = None
    if B and J:
        query, *_ = passes.arrange(call)
        sums, lse = passes.weighted_sums(call, query, True, weights, return_lse, norm)
    else:
        sums = passes.Sums(call.new(B, J, D), call.new(B, J), call.new(B, J, D) if call.second else None)
        if return_lse:
            of_nothing = 0.0 if call.options.leaky else -math.inf
            shape = (B, J if inward else I)
            lse = call.compute(
                functools.partial(torch.full, shape, of_nothing, dtype=torch.float32, device=call.x.device)
            )
    assert sums.mass is not None
    # Every output is a tensor of its own: outputs of an op may not share memory.
    second, lse, norm = (value or call.new(0) for value in (sums.second, lse, norm))
    return sums.mass, sums.first, second, weights or call.new(0, dtype=dtype), lse, norm


def backward(
    call: KernelCall, parameters: Any, given: tuple[Slot | None, ...], saved: tuple[Slot, ...], needed: tuple[bool, ...]
) -> tuple[Slot, ...]:
    """Returns ``(dx, dweight, dquery, dprecision, dcenter, dprior, dlogits, dactivation, dlse)``; a gradient that is
    not needed is empty. dx: du, or dvotes.

    parameters: as given, with a row for every sample. given: gradients of mass, first, second, weights and lse, each of
    which may be None. saved: what forward() returned.
    """
    B, I, J, D, _ = call.sizes
    inputs = (call.x, call.weight, *parameters[:7])
    if B == 0 or J == 0:
        return passes.returned(call, inputs, needed, (None,) * 9)
    need_x, need_weight, _, _, need_center, _, need_logits, need_a, need_lse = needed
    mass, first, second, weights, _, norm = saved
    moments = passes.Sums(first, mass, second)
    dmass, dfirst, dsecond = (call.compute(plain, value, parameters.out_mask) for value in given[:3])
    dcoupling, dlse = None if given[3] is None else given[3].contiguous(), call.compute(plain, given[4])
    # As in coupling_gradient(); an activation multiplies dc, but not s.
    s = first.contiguous() if call.normalize == "in" and call.parameters.activation is None else None
    state, of_dsecond, of_s = passes.arrange(call, (dfirst, dsecond, s))
    assert state is not None
    delta = None
    if call.normalize == "in":
        delta = _delta(call, moments, dfirst, OutputGradients(dcoupling, dmass, dsecond), weights, s)
    norms = Norms(None, norm[0], norm[1], delta, of_s) if delta else Norms()
    douts = OutputGradients(dcoupling, dmass, of_dsecond, dlse)
    launched = I > 0 and (need_x or need_weight or need_logits or need_a or need_lse)
    uniform = call.uniform_start and not need_a
    pairs = passes.new_coefficients(call, 1) if launched and not uniform else None
    terms = call.new_pairs(torch.float32) if launched and need_a else None
    dquery, dprior, dscores_xx = dscores = _accumulate(call, state, norms, douts, pairs, terms, needed)
    of_inputs = (need_x, need_weight, need_logits)
    dx, dweight, dlogits = passes.gradients(call, state, pairs, uniform, of_inputs, dsecond=of_dsecond)
    dprecision = dscores_xx and call.compute(torch.mul, dscores_xx, -0.5)
    dcenter = _dcenter(call, moments, dfirst, dsecond, dscores) if need_center else None
    dactivation = call.compute(total, terms, 2) if terms else None
    drow = call.compute(torch.neg, call.compute(total, pairs[0, ..., 1], 2)) if pairs and need_lse else None
    gradients = (dx, dweight, dquery, dprecision, dcenter, dprior, dlogits, dactivation, drow)
    return passes.returned(call, inputs, needed, gradients)


def _delta(
    call: KernelCall, moments: passes.Sums, dfirst: Slot | None, douts: OutputGradients, weights: Slot, s: Slot | None
) -> Slot:
    """The sum of c dc over the input capsules for softmax "in", computed from the moments. s: None, or dc is formed
    from x - s, see coupling_gradient()."""
    first, mass, second = moments
    of_first = dfirst if s is None else None
    about = second if s is None or douts.dsecond is None else call.compute(_about, second, s)
    delta = call.compute(_products, mass, 1.0, douts.dmass, mass, 1.0, of_first, first, 1.0, douts.dsecond, about)
    if douts.dcoupling is not None:
        delta = call.compute(torch.add, delta, call.compute(coupled, weights, douts.dcoupling))
    # For one sample with positions, the mass is a view whose last axis in memory is the positions.
    contiguous: Slot = delta.contiguous()
    return contiguous


def _accumulate(
    call: KernelCall,
    state: Slot,
    norms: Norms,
    douts: OutputGradients,
    pairs: Any,
    terms: Any,
    needed: tuple[bool, ...],
) -> tuple[Slot | None, Slot | None, Slot | None]:
    """Fills pairs and terms; returns the sums of db x, db and db x^2 over the input capsules, for the gradients of
    query, prior, center and precision, None where no gradient needs them."""
    need_query, need_precision, need_center, need_prior = needed[2:6]
    partial = None
    if need_query or need_precision or need_prior or (need_center and call.agreement):
        mass = need_prior or (need_center and call.query)
        partial = passes.partial_sums(call, "accumulate_gradient", mass, need_precision)
    if partial is not None or pairs is not None:
        passes.accumulate_gradient(call, state, norms, douts, pairs and pairs[0], partial, terms)
    return (None,) * 3 if partial is None else passes.update(call, partial)


def _dcenter(
    call: KernelCall, moments: passes.Sums, dfirst: Any, dsecond: Any, dscores: tuple[Slot | None, ...]
) -> Any:
    """Minus the sum of dvotes over the input capsules, because x = votes - center."""
    of_moments = (-1.0, moments.mass, dfirst, -2.0, moments.first, dsecond)
    of_scores = (-1.0, dscores[1], call.parameters.query, 1.0, dscores[0], call.parameters.precision)
    return call.compute(_products, moments.first, *of_moments, *of_scores)


def _about(second: Tensor, s: Tensor) -> Tensor:
    return second - s * s


def _products(like: Tensor, *terms: Any) -> Tensor:
    """The sum of terms in the shape of ``like``, [B, J] or [B, J, D]. A term is three arguments: a number and two
    factors [B, J] or [B, J, D]. A factor None makes the term 0. If ``like`` has no axis d, products are summed over d.
    """
    total = torch.zeros_like(like)
    for scale, a, b in zip(terms[::3], terms[1::3], terms[2::3], strict=True):
        if a is not None and b is not None:
            product = scale * (a[..., None] if a.dim() < b.dim() else a) * b
            total = total + (product.sum(2) if product.dim() > total.dim() else product)
    return total
