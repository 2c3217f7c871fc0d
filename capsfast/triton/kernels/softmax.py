"""Coupling coefficients of one input capsule i from its routing logits b; both are tuples of NT tiles [BB, JT].

MODE "out": softmax over the outputs; the tiles hold all of them. MODE "row_norm": softmax over the outputs; the tiles
hold some of them. MODE "in": softmax over the input capsules. MODE "sigmoid": of every logit. MODE "none": the logits
are the coupling.
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
    """exp(x) as the one instruction that there is for it, which flushes what is below 1e-38 to zero."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    return tl.exp2(x * LOG2_E)


@triton.jit
def over_tiles(tiles, T: tl.constexpr):
    """The sum of tiles [BB, JT] over their columns: [BB]. Tiles are added up first, as lanes take more to add."""
    total = tiles[0]
    for n in tl.static_range(1, T.NT):
        total += tiles[n]
    return tl.sum(total, 1)


@triton.jit
def over_outputs(b, T: tl.constexpr):
    """c of all tiles and the log-sum-exp [BB], -inf where there is no finite logit."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    most = b[0]
    for n in tl.static_range(1, T.NT):
        most = tl.maximum(most, b[n])
    m = tl.max(most, 1)
    if T.LEAKY:
        m = tl.maximum(m, 0.0)
    m = finite_or_zero(m)
    # All exponents of a row have the rounding error of this product, so it cancels.
    shift = m * LOG2_E
    exponentials = ()
    for n in tl.static_range(T.NT):
        exponentials = exponentials + (tl.exp2(b[n] * LOG2_E - shift[:, None]),)
    total = over_tiles(exponentials, T)
    if T.LEAKY:
        total += tl.exp2(-shift)
    scale = inverse(total)[:, None]
    c = ()
    for n in tl.static_range(T.NT):
        c = c + (exponentials[n] * scale,)
    return c, tl.where(total == 0.0, float("-inf"), m + tl.log(total))


@triton.jit
def couple(b, norms, inputs, rows, here, known, first, T: tl.constexpr, MODE: tl.constexpr):
    """c of all tiles and, for MODE "out" alone, the log-sum-exp. known: which outputs there are."""
    log_sum = tl.zeros([1], tl.float32)
    if MODE == "out":
        c, log_sum = over_outputs(b, T)
    elif MODE == "row_norm":
        at = norms.rows + (rows.first * inputs.I + here.i) + rows.local * inputs.I
        m = tl.load(at, mask=here.ok, other=0.0)
        scale = tl.load(at + tl.cast(inputs.B, tl.int64) * inputs.I, mask=here.ok, other=0.0)
        c = ()
        for n in tl.static_range(T.NT):
            c = c + (exponential(b[n] - m[:, None]) * scale[:, None],)
    elif MODE == "in":
        c = ()
        for n in tl.static_range(T.NT):
            maximum = load_numbers(norms.maximum, rows, known[n], first + n, T)
            scale = load_numbers(norms.inverse, rows, known[n], first + n, T)
            c = c + (exponential(b[n] - maximum) * scale,)
    elif MODE == "sigmoid":
        c = ()
        for n in tl.static_range(T.NT):
            c = c + (tl.sigmoid(b[n]),)
    else:
        tl.static_assert(MODE == "none")
        c = b
    return c, log_sum


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
    """db = c (dc - sum c dc + dlse), summed over what the softmax runs over.

    If dc is of x - s, the sum has no s . ds either: for a large c the difference of x . ds and s . ds would lose its
    digits.

    dlse_ptr: [B, I] or None, for MODE "out"; in other modes it is part of delta or of the rows.
    """
    db = ()
    if MODE == "in":
        for n in tl.static_range(T.NT):
            about = dc[n]
            if norms.delta is not None:
                about -= load_numbers(norms.delta, rows, known[n], first + n, T)
            db = db + (where_valid(valid[n], c[n] * about, 0.0, T.MASKED),)
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
            at = norms.rows + ((2 * tl.cast(inputs.B, tl.int64) + rows.first) * inputs.I + here.i)
            total = tl.load(at + rows.local * inputs.I, mask=here.ok, other=0.0)
        for n in tl.static_range(T.NT):
            db = db + (where_valid(valid[n], c[n] * (dc[n] - total[:, None]), 0.0, T.MASKED),)
    return db
