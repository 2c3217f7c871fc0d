"""The step between passes of EM routing: makes a Gaussian for every output capsule from moments, and the gradients.

csrc/ops/cpu/em_update.cpp has the formulas, and the same names. A program has one sample: a tile [JP, DP] of its J
output capsules and their D components, both padded to powers of two.
"""

import triton
import triton.language as tl

from .begin import begin
from .softmax import inverse as exact_inverse


@triton.jit
def inverse(mass):
    """1 / mass, or 0 where mass is not above 1e-12, as in capsfast/reference/em_update.py."""
    return exact_inverse(tl.where(mass > 1e-12, mass, 0.0))


@triton.jit
def load(pointer, at, there):
    """Loads float32 numbers; 0 in the padding, or if the pointer is None."""
    found = tl.zeros(at.shape, tl.float32)
    if pointer is not None:
        found += tl.load(pointer + at, mask=there, other=0.0)
    return found


@triton.jit
def mean(tile, within, D: tl.constexpr):
    """The mean over the components of a row, repeated for every component."""
    return tl.zeros_like(tile) + (tl.sum(tl.where(within, tile, 0.0), 1) / D)[:, None]


@triton.jit
def activate(logit, there, alive, SOFTMAX: tl.constexpr):
    """a, 1 - a (for a sigmoid only) and log a."""
    if SOFTMAX:
        # Not -inf for masked capsules, which would make a sample without output capsules nan.
        logit = tl.where(there, tl.where(alive, logit, -3.4028234663852886e38), float("-inf"))
        shifted = logit - tl.max(logit, 0)
        e = tl.exp(shifted)
        total = tl.sum(e, 0)
        return e / total, e, shifted - tl.log(total)
    else:
        e = tl.exp(-tl.abs(logit))
        less, more = e / (1.0 + e), 1.0 / (1.0 + e)
        negative = logit < 0.0
        log_activation = tl.where(negative, logit, 0.0) - tl.log(1.0 + e)
        return tl.where(negative, less, more), tl.where(negative, more, less), log_activation


@triton.jit
def em_update_kernel(
    mass_ptr,  # [B, J] float32, as all tensors but the mask
    first_ptr, second_ptr, center_ptr,  # [B, J, D]
    last_ptr,  # [B, J, D], or None without momentum
    beta_a_ptr, beta_u_ptr,  # [J]
    out_mask_ptr,  # [B, J] bytes or None
    poses_ptr, precision_ptr, score_ptr,  # the results; in the backward their gradients, or None for 0
    dmass_ptr, dfirst_ptr, dsecond_ptr, dcenter_ptr, dlast_ptr,  # results of the backward; None in the forward
    dbeta_a_ptr, dbeta_u_ptr,  # [B, J]: shares of the samples
    floor, momentum, cost_scale, rate,
    J: tl.constexpr, D: tl.constexpr, JP: tl.constexpr, DP: tl.constexpr,
    ISOTROPIC: tl.constexpr, VARIANCE: tl.constexpr, SOFTMAX: tl.constexpr, FINAL: tl.constexpr,
    PDL: tl.constexpr = False,
):
    begin(PDL)
    j, d = tl.arange(0, JP), tl.arange(0, DP)
    there = j < J
    within = there[:, None] & (d < D)[None, :]
    row = tl.cast(tl.program_id(0), tl.int64) * J + j
    at = row[:, None] * D + d[None, :]
    alive = there
    if out_mask_ptr is not None:
        alive = there & (tl.load(out_mask_ptr + row, mask=there, other=0) != 0)

    mass, center = load(mass_ptr, row, there), load(center_ptr, at, within)
    first, second = load(first_ptr, at, within), load(second_ptr, at, within)
    n = inverse(mass)
    shift = first * n[:, None]
    held = tl.zeros_like(shift)
    if last_ptr is not None:
        held = momentum * (load(last_ptr, at, within) - (center + shift))
    raw = second * n[:, None] - shift * shift + held * held
    # Rounding alone makes it negative, so the backward ignores the cut. tl.maximum would hide NaN.
    variance = tl.where(raw < 0.0, 0.0, raw) + floor
    if ISOTROPIC:
        variance = mean(variance, within, D)
    precision = 1.0 / variance
    log_sigma = 0.5 * tl.sum(tl.where(within, tl.log(variance), 0.0), 1)

    cost = load(beta_u_ptr, j, there)
    if VARIANCE:
        cost += log_sigma
    of_total = inverse(tl.sum(mass, 0))
    of_mean = tl.sum(tl.where(alive, 1.0, 0.0), 0) * of_total
    scale = tl.where(cost_scale > 0.0, cost_scale, of_mean)
    logit = rate * (load(beta_a_ptr, j, there) - mass * scale * cost)
    activation, complement, log_activation = activate(logit, there, alive, SOFTMAX)
    if dmass_ptr is None:
        tl.store(poses_ptr + at, center + shift + held, mask=within)
        score = activation
        if not FINAL:
            tl.store(precision_ptr + at, precision, mask=within)
            HALF_LOG_TWO_PI: tl.constexpr = 0.9189385332046727
            score = log_activation - (log_sigma + D * HALF_LOG_TWO_PI)
        tl.store(score_ptr + row, score, mask=there)
    else:
        dlog_activation = load(score_ptr, row, there)
        dlog_sigma = -dlog_activation
        if FINAL:
            dlog_activation *= activation
            dlog_sigma = tl.zeros_like(dlog_sigma)
        if SOFTMAX:
            dlogit = tl.where(alive, dlog_activation - activation * tl.sum(dlog_activation, 0), 0.0)
        else:
            dlogit = dlog_activation * complement
        dcost = -rate * dlogit  # the gradient of mass scale cost
        of_cost = dcost * mass * scale
        if VARIANCE:
            dlog_sigma += of_cost
        tl.store(dbeta_a_ptr + row, -dcost, mask=there)
        tl.store(dbeta_u_ptr + row, of_cost, mask=there)
        dscale = tl.sum(dcost * mass * cost, 0)
        dmass = dcost * scale * cost - tl.where(cost_scale > 0.0, 0.0, dscale * of_mean * of_total)

        dvariance = precision * (0.5 * dlog_sigma[:, None] - load(precision_ptr, at, within) * precision)
        if ISOTROPIC:
            dvariance = mean(dvariance, within, D)
        dpose = load(poses_ptr, at, within)
        dcenter = dpose
        if last_ptr is not None:
            dlast = momentum * (2.0 * held * dvariance + dpose)
            dcenter -= dlast
            tl.store(dlast_ptr + at, dlast, mask=within)
        dshift = dcenter - 2.0 * shift * dvariance
        dn = tl.sum(tl.where(within, dvariance * second + dshift * first, 0.0), 1)
        # Without mass the gradient is 0, even where dn is NaN.
        tl.store(dmass_ptr + row, dmass - tl.where(n == 0.0, 0.0, n * n * dn), mask=there)
        tl.store(dfirst_ptr + at, dshift * n[:, None], mask=within)
        tl.store(dsecond_ptr + at, dvariance * n[:, None], mask=within)
        tl.store(dcenter_ptr + at, dcenter, mask=within)
