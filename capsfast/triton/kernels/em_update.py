"""The step between passes of EM routing: makes a Gaussian for every output capsule from moments, and the gradients.

csrc/ops/cpu/em_update.h has the formulas, and the same names. A program has one sample: a tile [JP, DP] of its J
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
def load(p_numbers, o_tile, m_tile):
    """Loads float32 numbers; 0 in the padding, or if the pointer is None."""
    b_tile = tl.zeros(o_tile.shape, tl.float32)
    if p_numbers is not None:
        b_tile += tl.load(p_numbers + o_tile, mask=m_tile, other=0.0)
    return b_tile


@triton.jit
def mean(b_tile, m_tile, D: tl.constexpr):
    """The mean over the components of a row, repeated for every component."""
    return tl.zeros_like(b_tile) + (tl.sum(tl.where(m_tile, b_tile, 0.0), 1) / D)[:, None]


@triton.jit
def activate(logit, m_j, m_valid, SOFTMAX: tl.constexpr):
    """a, 1 - a (for a sigmoid only) and log a."""
    if SOFTMAX:
        # Masked capsules get the lowest float, because -inf would make a sample without output capsules NaN.
        logit = tl.where(m_j, tl.where(m_valid, logit, -3.4028234663852886e38), float("-inf"))
        shifted = logit - tl.max(logit, 0)
        exponential = tl.exp(shifted)
        total = tl.sum(exponential, 0)
        return exponential / total, exponential, shifted - tl.log(total)
    else:
        exponential = tl.exp(-tl.abs(logit))
        smaller, larger = exponential / (1.0 + exponential), 1.0 / (1.0 + exponential)
        m_negative = logit < 0.0
        log_activation = tl.where(m_negative, logit, 0.0) - tl.log(1.0 + exponential)
        return tl.where(m_negative, smaller, larger), tl.where(m_negative, larger, smaller), log_activation


@triton.jit
def em_update_kernel(
    p_mass,  # [B, J] float32, as all tensors but the mask
    p_first, p_second, p_center,  # [B, J, D]
    p_last,  # [B, J, D], or None for 0
    p_beta_a, p_beta_u,  # [J]
    p_out_mask,  # [B, J] bytes or None
    p_poses, p_precision, p_score,  # the results; in the backward their gradients, or None for 0
    p_next_precision, p_next_db_x,  # in the backward of a routing: see below
    p_dmass, p_dfirst, p_dsecond, p_dcenter, p_dlast,  # results of the backward; None in the forward
    p_dbeta_a, p_dbeta_u,  # [B, J]: shares of the samples
    floor, momentum, cost_scale, rate,
    J: tl.constexpr, D: tl.constexpr, JP: tl.constexpr, DP: tl.constexpr,
    ISOTROPIC: tl.constexpr, VARIANCE: tl.constexpr, SOFTMAX: tl.constexpr, FINAL: tl.constexpr,
    MOMENTUM: tl.constexpr, ROUTING: tl.constexpr, PDL: tl.constexpr = False,
):
    """ROUTING: this step is part of a routing, so center is the previous poses; from iteration 1 on, last is too.

    A routing has 0 for masked outputs in the precision, in the prior and in gradients, because their votes may be NaN.
    In its backward p_precision and p_next_db_x hold sum_i db x^2 and sum_i db x of the next pass, which has
    p_next_precision. p_dcenter, None in the first iteration, gets the gradient of the previous poses. They count as
    last, and as the new poses of a capsule without mass. As center they have no effect: moments about another center
    make the same Gaussian. (With single passes, dcenter of this step and dcenter of the pass before it cancel.)
    """
    begin(PDL)
    o_j, o_d = tl.arange(0, JP), tl.arange(0, DP)
    m_j = o_j < J
    m_tile = m_j[:, None] & (o_d < D)[None, :]
    o_row = tl.cast(tl.program_id(0), tl.int64) * J + o_j
    o_tile = o_row[:, None] * D + o_d[None, :]
    m_valid = m_j
    if p_out_mask is not None:
        m_valid = m_j & (tl.load(p_out_mask + o_row, mask=m_j, other=0) != 0)

    mass, center = load(p_mass, o_row, m_j), load(p_center, o_tile, m_tile)
    first, second = load(p_first, o_tile, m_tile), load(p_second, o_tile, m_tile)
    n = inverse(mass)
    shift = first * n[:, None]
    held = tl.zeros_like(shift)
    if MOMENTUM:
        held = momentum * (load(p_last, o_tile, m_tile) - (center + shift))
    raw = second * n[:, None] - shift * shift + held * held
    # Only rounding makes raw negative, so the backward ignores the cut at 0. tl.maximum would hide NaN.
    variance = tl.where(raw < 0.0, 0.0, raw) + floor
    if ISOTROPIC:
        variance = mean(variance, m_tile, D)
    precision = 1.0 / variance
    log_sigma = 0.5 * tl.sum(tl.where(m_tile, tl.log(variance), 0.0), 1)

    cost = D * load(p_beta_u, o_j, m_j)
    if VARIANCE:
        cost += log_sigma
    of_total = inverse(tl.sum(mass, 0))
    of_mean = tl.sum(tl.where(m_valid, 1.0, 0.0), 0) * of_total
    scale = tl.where(cost_scale > 0.0, cost_scale, of_mean)
    logit = rate * (load(p_beta_a, o_j, m_j) - mass * scale * cost)
    activation, complement, log_activation = activate(logit, m_j, m_valid, SOFTMAX)
    m_kept = m_valid if ROUTING else m_j
    if p_dmass is None:
        tl.store(p_poses + o_tile, center + shift + held, mask=m_tile)
        score = activation
        if not FINAL:
            tl.store(p_precision + o_tile, tl.where(m_kept[:, None], precision, 0.0), mask=m_tile)
            HALF_LOG_TWO_PI: tl.constexpr = 0.9189385332046727
            score = tl.where(m_kept, log_activation - (log_sigma + D * HALF_LOG_TWO_PI), 0.0)
        tl.store(p_score + o_row, score, mask=m_j)
    else:
        dlog_activation = load(p_score, o_row, m_j)
        dlog_sigma = -dlog_activation
        if FINAL:
            dlog_activation *= activation
            dlog_sigma = tl.zeros_like(dlog_sigma)
        if SOFTMAX:
            dlogit = tl.where(m_valid, dlog_activation - activation * tl.sum(dlog_activation, 0), 0.0)
        else:
            dlogit = dlog_activation * complement
        dcost = -rate * dlogit  # the gradient of mass scale cost
        of_cost = dcost * mass * scale
        if VARIANCE:
            dlog_sigma += of_cost
        tl.store(p_dbeta_a + o_row, -dcost, mask=m_j)
        tl.store(p_dbeta_u + o_row, D * of_cost, mask=m_j)
        dscale = tl.sum(dcost * mass * cost, 0)
        dmass = dcost * scale * cost - tl.where(cost_scale > 0.0, 0.0, dscale * of_mean * of_total)

        dprecision = load(p_precision, o_tile, m_tile)
        dpose = load(p_poses, o_tile, m_tile)
        if ROUTING:
            dprecision *= -0.5
            dpose += load(p_next_precision, o_tile, m_tile) * load(p_next_db_x, o_tile, m_tile)
        dvariance = precision * (0.5 * dlog_sigma[:, None] - dprecision * precision)
        if ISOTROPIC:
            dvariance = mean(dvariance, m_tile, D)
        dcenter = dpose
        dlast = tl.zeros_like(dpose)
        if MOMENTUM:
            dlast = momentum * (2.0 * held * dvariance + dpose)
            dcenter -= dlast
        dshift = dcenter - 2.0 * shift * dvariance
        dn = tl.sum(tl.where(m_tile, dvariance * second + dshift * first, 0.0), 1)
        # Without mass the gradient is 0, even where dn is NaN.
        dmass -= tl.where(n == 0.0, 0.0, n * n * dn)
        m_kept_tile = m_tile & m_kept[:, None]
        tl.store(p_dmass + o_row, tl.where(m_kept, dmass, 0.0), mask=m_j)
        tl.store(p_dfirst + o_tile, tl.where(m_kept_tile, dshift * n[:, None], 0.0), mask=m_tile)
        tl.store(p_dsecond + o_tile, tl.where(m_kept_tile, dvariance * n[:, None], 0.0), mask=m_tile)
        if ROUTING:
            dcenter = tl.where(m_kept_tile, dlast + tl.where((n == 0.0)[:, None], dcenter, 0.0), 0.0)
        if p_dcenter is not None:
            tl.store(p_dcenter + o_tile, dcenter, mask=m_tile)
        if p_dlast is not None:
            tl.store(p_dlast + o_tile, dlast, mask=m_tile)
