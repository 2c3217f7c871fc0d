"""Between the passes of EM routing: moments of the votes to the Gaussian of every output capsule, and its gradients.

The formulas are those of csrc/ops/cpu/em_update.h. A program has one sample: a tile [JP, DP] of its J output capsules
and their D components, both padded to powers of two.
"""

import triton
import triton.language as tl

from .softmax import inverse as exact_inverse


@triton.jit
def inverse_mass(mass):
    """As in capsfast/reference/em_update.py."""
    return exact_inverse(tl.where(mass > 1e-12, mass, 0.0))


@triton.jit
def load_rows(pointer, at, within):
    """A tile of [B, J, D], or 0 where there is none."""
    rows = tl.zeros([at.shape[0], at.shape[1]], tl.float32)
    if pointer is not None:
        rows += tl.load(pointer + at, mask=within, other=0.0)
    return rows


@triton.jit
def gaussians(
    mass, first, second, center, last_ptr, at, within, floor, momentum,
    D: tl.constexpr, HELD: tl.constexpr, ISOTROPIC: tl.constexpr,
):
    """1 / mass [JP], shift, by how much momentum moves the pose, the variance before it is cut at 0, and after."""
    n = inverse_mass(mass)
    shift = first * n[:, None]
    held = tl.zeros_like(shift)
    if HELD:
        held = momentum * (load_rows(last_ptr, at, within) - (center + shift))
    raw = second * n[:, None] - shift * shift + held * held
    # tl.maximum would hide what is not a number.
    variance = tl.where(raw < 0.0, 0.0, raw) + floor
    if ISOTROPIC:
        variance = tl.zeros_like(variance) + (tl.sum(tl.where(within, variance, 0.0), 1) / D)[:, None]
    return n, shift, held, raw, tl.where(within, variance, 1.0)


@triton.jit
def sums_of_beta(beta_u_ptr, j, d, there, D: tl.constexpr, COMPONENT: tl.constexpr):
    if COMPONENT:
        within = there[:, None] & (d < D)[None, :]
        total = tl.sum(tl.load(beta_u_ptr + (j * D)[:, None] + d[None, :], mask=within, other=0.0), 1)
    else:
        total = tl.load(beta_u_ptr + j, mask=there, other=0.0) * D
    return total


@triton.jit
def logits(
    mass, log_sigma, beta_a_ptr, beta_u_ptr, alive, j, d, there, cost_scale, rate,
    D: tl.constexpr, VARIANCE: tl.constexpr, MEAN: tl.constexpr, COMPONENT: tl.constexpr, SOFTMAX: tl.constexpr,
):
    """The logits, their costs of a mass of 1, the factor of the mass, and what that is made of."""
    cost = sums_of_beta(beta_u_ptr, j, d, there, D, COMPONENT)
    if VARIANCE:
        cost += log_sigma
    of_total = inverse_mass(tl.sum(mass, 0))
    count = tl.sum(tl.where(alive, 1.0, 0.0), 0)
    scale = cost_scale
    if MEAN:
        scale = count * of_total
    logit = rate * (tl.load(beta_a_ptr + j, mask=there, other=0.0) - mass * scale * cost)
    if SOFTMAX:
        # Not -inf for masked capsules, of which a sample with no capsule left would become nan.
        logit = tl.where(there, tl.where(alive, logit, -3.4028234663852886e38), float("-inf"))
    return logit, cost, scale, count, of_total


@triton.jit
def activate(logit, SOFTMAX: tl.constexpr):
    """Activations and their logarithms."""
    if SOFTMAX:
        shifted = logit - tl.max(logit, 0)
        e = tl.exp(shifted)
        total = tl.sum(e, 0)
        activation = e / total
        log_activation = shifted - tl.log(total)
    else:
        e = tl.exp(-tl.abs(logit))
        activation = tl.where(logit < 0.0, e, 1.0) / (1.0 + e)
        log_activation = tl.where(logit < 0.0, logit, 0.0) - tl.log(1.0 + e)
    return activation, log_activation


@triton.jit
def is_alive(out_mask_ptr, at, there):
    if out_mask_ptr is not None:
        there = there & (tl.load(out_mask_ptr + at, mask=there, other=0) != 0)
    return there


@triton.jit
def em_update_kernel(
    mass_ptr,  # [B, J] float32
    first_ptr, second_ptr, center_ptr,  # [B, J, D] float32
    last_ptr,  # [B, J, D] float32, or None for poses 0 before
    beta_a_ptr, beta_u_ptr,  # [J]; [J], or if COMPONENT [J, D]; float32
    out_mask_ptr,  # [B, J] bytes or None
    poses_ptr,  # [B, J, D] float32, out
    precision_ptr,  # [B, J, D] float32, out; None in the final iteration
    score_ptr,  # [B, J] float32, out
    floor, momentum, cost_scale, rate,
    J: tl.constexpr, D: tl.constexpr, JP: tl.constexpr, DP: tl.constexpr, HELD: tl.constexpr,
    ISOTROPIC: tl.constexpr, VARIANCE: tl.constexpr, MEAN: tl.constexpr, COMPONENT: tl.constexpr,
    SOFTMAX: tl.constexpr,
):
    b = tl.cast(tl.program_id(0), tl.int64)
    j, d = tl.arange(0, JP), tl.arange(0, DP)
    there = j < J
    within = there[:, None] & (d < D)[None, :]
    at = (b * J + j)[:, None] * D + d[None, :]
    alive = is_alive(out_mask_ptr, b * J + j, there)
    mass = tl.load(mass_ptr + b * J + j, mask=there, other=0.0)
    center = load_rows(center_ptr, at, within)
    n, shift, held, raw, variance = gaussians(
        mass, load_rows(first_ptr, at, within), load_rows(second_ptr, at, within), center, last_ptr, at, within,
        floor, momentum, D, HELD, ISOTROPIC,
    )
    log_sigma = 0.5 * tl.sum(tl.log(variance), 1)
    logit, cost, scale, count, of_total = logits(
        mass, log_sigma, beta_a_ptr, beta_u_ptr, alive, j, d, there, cost_scale, rate,
        D, VARIANCE, MEAN, COMPONENT, SOFTMAX,
    )
    activation, log_activation = activate(logit, SOFTMAX)
    tl.store(poses_ptr + at, center + shift + held, mask=within)
    if precision_ptr is None:
        tl.store(score_ptr + b * J + j, activation, mask=there)
    else:
        HALF_LOG_TWO_PI: tl.constexpr = 0.9189385332046727
        tl.store(precision_ptr + at, 1.0 / variance, mask=within)
        tl.store(score_ptr + b * J + j, log_activation - (log_sigma + D * HALF_LOG_TWO_PI), mask=there)


@triton.jit
def em_update_gradient_kernel(
    mass_ptr, first_ptr, second_ptr, center_ptr, last_ptr, beta_a_ptr, beta_u_ptr, out_mask_ptr,  # as above
    dposes_ptr, dprecision_ptr,  # [B, J, D] float32, or None for 0
    dscore_ptr,  # [B, J] float32, or None for 0
    dmass_ptr,  # [B, J] float32, out, as all that follow
    dfirst_ptr, dsecond_ptr, dcenter_ptr,  # [B, J, D]
    dlast_ptr,  # [B, J, D] or None
    dbeta_a_ptr, dbeta_u_ptr,  # [B, J]: the share of a sample in the gradient of beta_a, and of a number of beta_u
    floor, momentum, cost_scale, rate,
    J: tl.constexpr, D: tl.constexpr, JP: tl.constexpr, DP: tl.constexpr, HELD: tl.constexpr,
    ISOTROPIC: tl.constexpr, VARIANCE: tl.constexpr, MEAN: tl.constexpr, COMPONENT: tl.constexpr,
    SOFTMAX: tl.constexpr, FINAL: tl.constexpr,
):
    b = tl.cast(tl.program_id(0), tl.int64)
    j, d = tl.arange(0, JP), tl.arange(0, DP)
    there = j < J
    within = there[:, None] & (d < D)[None, :]
    row = b * J + j
    at = row[:, None] * D + d[None, :]
    alive = is_alive(out_mask_ptr, b * J + j, there)
    mass = tl.load(mass_ptr + row, mask=there, other=0.0)
    first, second = load_rows(first_ptr, at, within), load_rows(second_ptr, at, within)
    n, shift, held, raw, variance = gaussians(
        mass, first, second, load_rows(center_ptr, at, within), last_ptr, at, within, floor, momentum,
        D, HELD, ISOTROPIC,
    )
    log_sigma = 0.5 * tl.sum(tl.log(variance), 1)
    logit, cost, scale, count, of_total = logits(
        mass, log_sigma, beta_a_ptr, beta_u_ptr, alive, j, d, there, cost_scale, rate,
        D, VARIANCE, MEAN, COMPONENT, SOFTMAX,
    )
    activation, log_activation = activate(logit, SOFTMAX)
    # Of the logits and of log sigma.
    dlogit = tl.zeros([JP], tl.float32)
    dlog_sigma = tl.zeros([JP], tl.float32)
    if dscore_ptr is not None:
        given = tl.load(dscore_ptr + row, mask=there, other=0.0)
        if FINAL:
            if SOFTMAX:
                dlogit = activation * (given - tl.sum(given * activation, 0))
            else:
                dlogit = given * activation * (1.0 - activation)
        else:
            dlog_sigma = -given
            if SOFTMAX:
                dlogit = given - activation * tl.sum(given, 0)
            else:
                dlogit = given * (1.0 - activation)
        if SOFTMAX:
            dlogit = tl.where(alive, dlogit, 0.0)
    tl.store(dbeta_a_ptr + row, rate * dlogit, mask=there)
    # Of mass scale cost.
    dcost = -rate * dlogit
    of_cost = dcost * mass * scale
    dmass = dcost * scale * cost
    if MEAN:
        dmass -= tl.sum(dcost * mass * cost, 0) * count * of_total * of_total
    if VARIANCE:
        dlog_sigma += of_cost
    tl.store(dbeta_u_ptr + row, of_cost if COMPONENT else of_cost * D, mask=there)
    # Of the moments.
    precision = 1.0 / variance
    dvariance = 0.5 * dlog_sigma[:, None] * precision
    if dprecision_ptr is not None:
        dvariance -= load_rows(dprecision_ptr, at, within) * precision * precision
    if ISOTROPIC:
        dvariance = tl.zeros_like(dvariance) + (tl.sum(tl.where(within, dvariance, 0.0), 1) / D)[:, None]
    dvariance = tl.where(raw >= 0.0, dvariance, 0.0)
    dpose = load_rows(dposes_ptr, at, within)
    dheld = 2.0 * held * dvariance + dpose
    dcenter = dpose
    if HELD:
        dcenter -= momentum * dheld
    dshift = dcenter - 2.0 * shift * dvariance
    dn = tl.sum(tl.where(within, dvariance * second + dshift * first, 0.0), 1)
    # Without mass there is no gradient, also where the sum is none.
    tl.store(dmass_ptr + row, dmass - tl.where(n == 0.0, 0.0, n * n * dn), mask=there)
    tl.store(dfirst_ptr + at, dshift * n[:, None], mask=within)
    tl.store(dsecond_ptr + at, dvariance * n[:, None], mask=within)
    tl.store(dcenter_ptr + at, dcenter, mask=within)
    if dlast_ptr is not None:
        tl.store(dlast_ptr + at, momentum * dheld, mask=within)
