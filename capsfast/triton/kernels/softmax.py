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
def finite_or_zero(m):
    """The maximum m to subtract from logits, or 0 if it is -inf: then exp(b - m) is 0 instead of NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def inverse(total):
    return tl.where(total == 0.0, 0.0, 1.0 / total)


@triton.jit
def exponential(x):
    """exp(x) by the GPU's one instruction for exp2, which flushes results below 1e-38 to zero."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    return tl.exp2(x * LOG2_E)


@triton.jit
def over_tiles(tiles, T: tl.constexpr):
    """The sum of tiles [BB, JT] over their columns: [BB]. Adds the tiles first, because sums across lanes cost more."""
    total = tiles[0]
    for n in tl.static_range(1, T.NT):
        total += tiles[n]
    return tl.sum(total, 1)


@triton.jit
def row_maximum(b, T: tl.constexpr):
    """The maximum of tiles [BB, JT] over their columns: [BB]."""
    most = b[0]
    for n in tl.static_range(1, T.NT):
        most = tl.maximum(most, b[n])
    return tl.max(most, 1)


@triton.jit
def over_outputs(b, T: tl.constexpr):
    """c of all tiles, and maximum and 1 / sum [BB] of a row, both 0 for a row without a finite logit. Scores that
    overflow make such a row too."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    m = row_maximum(b, T)
    if T.LEAKY:
        m = tl.maximum(m, 0.0)
    m = finite_or_zero(m)
    # All exponents of a row have the rounding error of this product, so the error cancels.
    shift = m * LOG2_E
    exponentials = ()
    for n in tl.static_range(T.NT):
        exponentials = exponentials + (tl.exp2(b[n] * LOG2_E - shift[:, None]),)
    total = over_tiles(exponentials, T)
    if T.LEAKY:
        total += tl.exp2(-shift)
    scale = inverse(total)
    c = ()
    for n in tl.static_range(T.NT):
        c = c + (exponentials[n] * scale[:, None],)
    return c, m, scale


@triton.jit
def log_sum_exp(m, scale):
    """The log-sum-exp from maximum and 1 / sum."""
    return tl.where(scale == 0.0, float("-inf"), m - tl.log(scale))


@triton.jit
def load_row_norms(ptr, rows, here, inputs):
    """Maximum, 1 / sum and sum_j c dc of an input capsule, [BB] each, from arguments.Norms.rows."""
    at = ptr + (rows.first * inputs.I + here.i) * 4 + (rows.local * inputs.I * 4)[:, None] + tl.arange(0, 4)[None, :]
    four = tl.load(at, mask=here.ok[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(four, [four.shape[0], 2, 2]))
    m, total = tl.split(even)
    scale, _ = tl.split(odd)
    return m, scale, total


@triton.jit
def couple(b, norms, inputs, rows, here, known, first, T: tl.constexpr, MODE: tl.constexpr):
    """c of all tiles and, for MODE "out" only, maximum and 1 / sum [BB]. known: which outputs exist."""
    m = tl.zeros([1], tl.float32)
    scale = m
    if MODE == "out":
        c, m, scale = over_outputs(b, T)
    elif MODE == "row_norm":
        m, scale, _ = load_row_norms(norms.rows, rows, here, inputs)
        c = ()
        for n in tl.static_range(T.NT):
            c = c + (exponential(b[n] - m[:, None]) * scale[:, None],)
    elif MODE == "in":
        c = ()
        for n in tl.static_range(T.NT):
            maximum = load_numbers(norms.maximum, rows, known[n], first + n, T)
            each = load_numbers(norms.inverse, rows, known[n], first + n, T)
            c = c + (exponential(b[n] - maximum) * each,)
    elif MODE == "sigmoid":
        c = ()
        for n in tl.static_range(T.NT):
            c = c + (tl.sigmoid(b[n]),)
    else:
        tl.static_assert(MODE == "none")
        c = b
    return c, m, scale


@triton.jit
def scaled(c, a, T: tl.constexpr):
    """All tiles times a number per sample, a [BB]."""
    product = ()
    for n in tl.static_range(T.NT):
        product = product + (c[n] * a[:, None],)
    return product


@triton.jit
def agreement_gradient(
    c, dc, valid, norms, dlse_ptr, inputs, rows, here, known, first, T: tl.constexpr, MODE: tl.constexpr
):
    """db = c (dc - sum c dc + dlse). The sum is over the axis of the softmax.

    If dc comes from x - s, the sum has no s . ds either: for a large c the difference of x . ds and s . ds would lose
    digits.

    Where one input capsule has all of the coupling of MODE "in", the sum equals its dc, and its db is 0. The difference
    of two rounded numbers is not 0: csrc/math/softmax.h says why that matters. A large inverse detects the case,
    because rounding of b changes c, but not the sum of all exp(b - maximum), whose largest term is 1.

    dlse_ptr: [B, I], [B, J] for MODE "in", or None; for MODE "row_norm" the rows already contain dlse.
    """
    db = ()
    WHOLE: tl.constexpr = 1.0 - 2.0**-22
    if MODE == "in":
        for n in tl.static_range(T.NT):
            about = dc[n]
            if norms.delta is not None:
                about -= load_numbers(norms.delta, rows, known[n], first + n, T)
            each = load_numbers(norms.inverse, rows, known[n], first + n, T)
            # Multiplies by 0 instead of selecting 0, so that NaN stays.
            found = tl.where((each > WHOLE) & (c[n] > 0.5), 0.0, c[n]) * about
            if dlse_ptr is not None:
                found += c[n] * load_numbers(dlse_ptr, rows, known[n], first + n, T)
            db = db + (where_valid(valid[n], found, 0.0, T.MASKED),)
    elif MODE == "sigmoid":
        for n in tl.static_range(T.NT):
            db = db + (where_valid(valid[n], c[n] * (1.0 - c[n]) * dc[n], 0.0, T.MASKED),)
    elif MODE == "none":
        for n in tl.static_range(T.NT):
            db = db + (where_valid(valid[n], dc[n], 0.0, T.MASKED),)
    else:
        if MODE == "out":
            inner = ()
            for n in tl.static_range(T.NT):
                inner = inner + (where_valid(valid[n], c[n] * dc[n], 0.0, T.MASKED),)
            total = over_tiles(inner, T)
            if dlse_ptr is not None:
                total -= per_input(dlse_ptr, rows, here.ok, here.i, inputs)
        else:
            _, _, total = load_row_norms(norms.rows, rows, here, inputs)
        for n in tl.static_range(T.NT):
            db = db + (where_valid(valid[n], c[n] * (dc[n] - total[:, None]), 0.0, T.MASKED),)
    return db
