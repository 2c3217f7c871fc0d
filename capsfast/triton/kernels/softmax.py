"""Coupling coefficients of one input capsule i from its routing logits b; both are tuples of NT tiles [BB, JT].

MODE "out": softmax over the outputs; the tiles hold all outputs. MODE "row_norm": softmax over the outputs; the tiles
hold some outputs. MODE "in": softmax over the input capsules. MODE "sigmoid": the sigmoid of every logit. MODE "none":
the logits are the coupling.
"""

import triton
import triton.language as tl

from .tiles import per_input, where_valid
from .vectors import load_numbers


@triton.jit
def finite_or_zero(b_max):
    """The maximum to subtract from logits, or 0 if it is -inf: then exp(b - maximum) is 0 instead of NaN."""
    return tl.where(b_max == float("-inf"), 0.0, b_max)


@triton.jit
def inverse(b_total):
    return tl.where(b_total == 0.0, 0.0, 1.0 / b_total)


@triton.jit
def exponential(b_x):
    """exp(x) by the GPU's one instruction for exp2, which flushes results below 1e-38 to zero."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    return tl.exp2(b_x * LOG2_E)


@triton.jit
def over_tiles(b_tiles, T: tl.constexpr):
    """The sum of tiles [BB, JT] over their columns: [BB]. Adds the tiles first, because sums across lanes cost more."""
    b_total = b_tiles[0]
    for n in tl.static_range(1, T.NT):
        b_total += b_tiles[n]
    return tl.sum(b_total, 1)


@triton.jit
def row_maximum(b_logits, T: tl.constexpr):
    """The maximum of tiles [BB, JT] over their columns: [BB]."""
    b_most = b_logits[0]
    for n in tl.static_range(1, T.NT):
        b_most = tl.maximum(b_most, b_logits[n])
    return tl.max(b_most, 1)


@triton.jit
def over_outputs(b_logits, T: tl.constexpr):
    """c of all tiles, and maximum and 1 / sum [BB] of a row, both 0 for a row without a finite logit. Scores that
    overflow make such a row too."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    b_max = row_maximum(b_logits, T)
    if T.LEAKY:
        b_max = tl.maximum(b_max, 0.0)
    b_max = finite_or_zero(b_max)
    # All exponents of a row have the rounding error of this product, so the error cancels.
    b_shift = b_max * LOG2_E
    b_exp = ()
    for n in tl.static_range(T.NT):
        b_exp = b_exp + (tl.exp2(b_logits[n] * LOG2_E - b_shift[:, None]),)
    b_total = over_tiles(b_exp, T)
    if T.LEAKY:
        b_total += tl.exp2(-b_shift)
    b_scale = inverse(b_total)
    b_c = ()
    for n in tl.static_range(T.NT):
        b_c = b_c + (b_exp[n] * b_scale[:, None],)
    return b_c, b_max, b_scale


@triton.jit
def log_sum_exp(b_max, b_scale):
    """The log-sum-exp from maximum and 1 / sum."""
    return tl.where(b_scale == 0.0, float("-inf"), b_max - tl.log(b_scale))


@triton.jit
def load_row_norms(p_rows, rows, capsule, inputs):
    """Maximum, 1 / sum and sum_j c dc of an input capsule, [BB] each, from arguments.Norms.rows."""
    p_four = p_rows + (rows.start * inputs.I + capsule.i) * 4 + (rows.o_b * inputs.I * 4)[:, None]
    p_four += tl.arange(0, 4)[None, :]
    b_four = tl.load(p_four, mask=capsule.m_rows[:, None], other=0.0)
    b_even, b_odd = tl.split(tl.reshape(b_four, [b_four.shape[0], 2, 2]))
    b_max, b_total = tl.split(b_even)
    b_scale, _ = tl.split(b_odd)
    return b_max, b_scale, b_total


@triton.jit
def couple(b_logits, norms, inputs, rows, capsule, m_outputs, n0, T: tl.constexpr, MODE: tl.constexpr):
    """c of all tiles and, for MODE "out" only, maximum and 1 / sum [BB]."""
    b_max = tl.zeros([1], tl.float32)
    b_scale = b_max
    if MODE == "out":
        b_c, b_max, b_scale = over_outputs(b_logits, T)
    elif MODE == "row_norm":
        b_max, b_scale, _ = load_row_norms(norms.rows, rows, capsule, inputs)
        b_c = ()
        for n in tl.static_range(T.NT):
            b_c = b_c + (exponential(b_logits[n] - b_max[:, None]) * b_scale[:, None],)
    elif MODE == "in":
        b_c = ()
        for n in tl.static_range(T.NT):
            b_max_n = load_numbers(norms.maximum, rows, m_outputs[n], n0 + n, T)
            b_inverse_n = load_numbers(norms.inverse, rows, m_outputs[n], n0 + n, T)
            b_c = b_c + (exponential(b_logits[n] - b_max_n) * b_inverse_n,)
    elif MODE == "sigmoid":
        b_c = ()
        for n in tl.static_range(T.NT):
            b_c = b_c + (tl.sigmoid(b_logits[n]),)
    else:
        tl.static_assert(MODE == "none")
        b_c = b_logits
    return b_c, b_max, b_scale


@triton.jit
def scaled(b_c, b_a, T: tl.constexpr):
    """All tiles times b_a, a number per sample [BB]."""
    b_scaled = ()
    for n in tl.static_range(T.NT):
        b_scaled = b_scaled + (b_c[n] * b_a[:, None],)
    return b_scaled


@triton.jit
def agreement_gradient(
    b_c, b_dc, m_pairs, norms, p_dlse, inputs, rows, capsule, m_outputs, n0, T: tl.constexpr, MODE: tl.constexpr
):
    """db = c (dc - sum c dc + dlse). The sum is over the axis of the softmax.

    If dc is formed from x - s, sum c dc excludes s . ds too: for a large c the difference of x . ds and s . ds would
    lose digits.

    If one input capsule has all the coupling of an output in MODE "in", sum c dc equals the dc of this input capsule,
    and its db is 0. The difference of the two rounded numbers is not 0: csrc/math/softmax.h says why that matters. An
    inverse above WHOLE detects the case: rounding of b changes c, but not the sum of all exp(b - maximum), whose
    largest term is 1.

    p_dlse: [B, I], [B, J] for MODE "in", or None; for MODE "row_norm" the rows already contain dlse.
    """
    b_db = ()
    WHOLE: tl.constexpr = 1.0 - 2.0**-22
    if MODE == "in":
        for n in tl.static_range(T.NT):
            b_about = b_dc[n]
            if norms.delta is not None:
                b_about -= load_numbers(norms.delta, rows, m_outputs[n], n0 + n, T)
            b_inverse = load_numbers(norms.inverse, rows, m_outputs[n], n0 + n, T)
            # Multiplies by 0 instead of selecting 0, so that NaN stays.
            b_db_n = tl.where((b_inverse > WHOLE) & (b_c[n] > 0.5), 0.0, b_c[n]) * b_about
            if p_dlse is not None:
                b_db_n += b_c[n] * load_numbers(p_dlse, rows, m_outputs[n], n0 + n, T)
            b_db = b_db + (where_valid(m_pairs[n], b_db_n, 0.0, T.MASKED),)
    elif MODE == "sigmoid":
        for n in tl.static_range(T.NT):
            b_db = b_db + (where_valid(m_pairs[n], b_c[n] * (1.0 - b_c[n]) * b_dc[n], 0.0, T.MASKED),)
    elif MODE == "none":
        for n in tl.static_range(T.NT):
            b_db = b_db + (where_valid(m_pairs[n], b_dc[n], 0.0, T.MASKED),)
    else:
        if MODE == "out":
            b_inner = ()
            for n in tl.static_range(T.NT):
                b_inner = b_inner + (where_valid(m_pairs[n], b_c[n] * b_dc[n], 0.0, T.MASKED),)
            b_total = over_tiles(b_inner, T)
            if p_dlse is not None:
                b_total -= per_input(p_dlse, rows, capsule.m_rows, capsule.i, inputs)
        else:
            _, _, b_total = load_row_norms(norms.rows, rows, capsule, inputs)
        for n in tl.static_range(T.NT):
            b_db = b_db + (where_valid(m_pairs[n], b_c[n] * (b_dc[n] - b_total[:, None]), 0.0, T.MASKED),)
    return b_db
