"""Coupling coefficients of one input capsule i from its routing logits b; both are tuples of NT tiles [BB, JT].

MODE "out": softmax over the outputs; the tiles hold all of them. MODE "row_norm": softmax over the outputs; the tiles
hold some of them. row_norm has computed each row's maximum, 1 / sum and sum_j c dc, rows_ptr [3, B, I]; or the rows
hold a log-sum-exp that is given, 1 and 0. MODE "in": softmax over the input capsules, whose maximum and 1 / sum,
[B, J] each, are known from the forward. MODE "sigmoid": of every logit. MODE "none": the logits are the coupling.
"""

import triton
import triton.language as tl

from .tiles import per_input, where_valid


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
def over_tiles(tiles, NT: tl.constexpr):
    """The sum of tiles [BB, JT] over their columns: [BB]. Tiles are added up first, as lanes take more to add."""
    total = tiles[0]
    for n in tl.static_range(1, NT):
        total += tiles[n]
    return tl.sum(total, 1)


@triton.jit
def over_outputs(b, NT: tl.constexpr, LEAKY: tl.constexpr):
    """c of all tiles and the log-sum-exp [BB], -inf where there is no finite logit."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    most = b[0]
    for n in tl.static_range(1, NT):
        most = tl.maximum(most, b[n])
    m = tl.max(most, 1)
    if LEAKY:
        m = tl.maximum(m, 0.0)
    m = finite_or_zero(m)
    # All exponents of a row have the rounding error of this product, so it cancels.
    shift = m * LOG2_E
    exponentials = ()
    for n in tl.static_range(NT):
        exponentials = exponentials + (tl.exp2(b[n] * LOG2_E - shift[:, None]),)
    total = over_tiles(exponentials, NT)
    if LEAKY:
        total += tl.exp2(-shift)
    scale = inverse(total)[:, None]
    c = ()
    for n in tl.static_range(NT):
        c = c + (exponentials[n] * scale,)
    return c, tl.where(total == 0.0, float("-inf"), m + tl.log(total))


@triton.jit
def couple(
    b, rows_ptr, norm, rows, ok, i, B, I, NT: tl.constexpr, LEAKY: tl.constexpr, MODE: tl.constexpr
):
    """c of all tiles and, for MODE "out" alone, the log-sum-exp. norm: for MODE "in" a pair (maximum, 1 / sum) of
    tuples of NT tiles [BB, JT]."""
    log_sum = tl.zeros([1], tl.float32)
    if MODE == "out":
        c, log_sum = over_outputs(b, NT, LEAKY)
    elif MODE == "row_norm":
        at = rows_ptr + (rows[0] * I + i) + rows[1] * I
        m = tl.load(at, mask=ok, other=0.0)
        scale = tl.load(at + tl.cast(B, tl.int64) * I, mask=ok, other=0.0)
        c = ()
        for n in tl.static_range(NT):
            c = c + (exponential(b[n] - m[:, None]) * scale[:, None],)
    elif MODE == "in":
        c = ()
        for n in tl.static_range(NT):
            c = c + (exponential(b[n] - norm[0][n]) * norm[1][n],)
    elif MODE == "sigmoid":
        c = ()
        for n in tl.static_range(NT):
            c = c + (tl.sigmoid(b[n]),)
    else:
        tl.static_assert(MODE == "none")
        c = b
    return c, log_sum


@triton.jit
def scaled(c, a, NT: tl.constexpr):
    """All tiles times a number per sample, a [BB]."""
    product = ()
    for n in tl.static_range(NT):
        product = product + (c[n] * a[:, None],)
    return product


@triton.jit
def agreement_gradient(
    c, dc, valid, MASKED: tl.constexpr, rows_ptr, delta, dlse_ptr, rows, ok, i, B, I, NT: tl.constexpr,
    MODE: tl.constexpr,
):
    """db = c (dc - sum c dc + dlse), summed over what the softmax runs over.

    delta: for MODE "in" that sum, NT tiles, without what dc does not have: if dc is of x - s, as for a large c the
    difference of x . ds and s . ds would lose its digits.

    dlse_ptr: [B, I] or None, for MODE "out"; in other modes it is part of delta or of the rows.
    """
    db = ()
    if MODE == "in":
        for n in tl.static_range(NT):
            db = db + (where_valid(valid[n], c[n] * (dc[n] - delta[n]), 0.0, MASKED),)
    elif MODE == "sigmoid":
        for n in tl.static_range(NT):
            db = db + (where_valid(valid[n], c[n] * (1.0 - c[n]) * dc[n], 0.0, MASKED),)
    elif MODE == "none":
        for n in tl.static_range(NT):
            db = db + (where_valid(valid[n], dc[n], 0.0, MASKED),)
    else:
        if MODE == "out":
            inner = ()
            for n in tl.static_range(NT):
                inner = inner + (where_valid(valid[n], c[n] * dc[n], 0.0, MASKED),)
            total = over_tiles(inner, NT)
            if dlse_ptr is not None:
                total -= per_input(dlse_ptr, rows, ok, i, I)
        else:
            at = rows_ptr + ((2 * tl.cast(B, tl.int64) + rows[0]) * I + i) + rows[1] * I
            total = tl.load(at, mask=ok, other=0.0)
        for n in tl.static_range(NT):
            db = db + (where_valid(valid[n], c[n] * (dc[n] - total[:, None]), 0.0, MASKED),)
    return db
