"""Coupling coefficients of one input capsule i from its routing logits b; both are tuples of NT tiles [BB, JT].

MODE "out": softmax over the outputs; the tiles hold all of them. MODE "row_norm": softmax over the outputs; the tiles hold
some of them. row_norm has computed each row's maximum, 1 / sum and sum_j c dc, rows_ptr [3, B, I]. MODE "in": softmax
over the input capsules, whose maximum and 1 / sum, [B, J] each, are known from the forward.
"""

import triton
import triton.language as tl


@triton.jit
def finite_or_zero(m):
    """The maximum m to subtract from logits, or 0 if it is -inf: then exp(b - m) is 0 instead of NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def inverse(total):
    return tl.where(total == 0.0, 0.0, 1.0 / total)


@triton.jit
def over_outputs(b, NT: tl.constexpr, LEAKY: tl.constexpr):
    m = tl.max(b[0], 1)
    for n in tl.static_range(1, NT):
        m = tl.maximum(m, tl.max(b[n], 1))
    if LEAKY:
        m = tl.maximum(m, 0.0)
    m = finite_or_zero(m)
    exponentials = ()
    total = tl.exp(-m) if LEAKY else tl.zeros_like(m)
    for n in tl.static_range(NT):
        e = tl.exp(b[n] - m[:, None])
        exponentials = exponentials + (e,)
        total += tl.sum(e, 1)
    scale = inverse(total)[:, None]
    c = ()
    for n in tl.static_range(NT):
        c = c + (exponentials[n] * scale,)
    return c


@triton.jit
def couple(
    b, rows_ptr, norm, rows, ok, i, B, I, NT: tl.constexpr, LEAKY: tl.constexpr, MODE: tl.constexpr
):
    """c of all tiles. norm: for MODE "in" a pair (maximum, 1 / sum) of tuples of NT tiles [BB, JT]."""
    if MODE == "out":
        c = over_outputs(b, NT, LEAKY)
    elif MODE == "row_norm":
        at = rows_ptr + (rows[0] * I + i) + rows[1] * I
        m = tl.load(at, mask=ok, other=0.0)
        scale = tl.load(at + tl.cast(B, tl.int64) * I, mask=ok, other=0.0)
        c = ()
        for n in tl.static_range(NT):
            c = c + (tl.exp(b[n] - m[:, None]) * scale[:, None],)
    else:
        c = ()
        for n in tl.static_range(NT):
            c = c + (tl.exp(b[n] - norm[0][n]) * norm[1][n],)
    return c


@triton.jit
def agreement_gradient(
    c, dc, valid, rows_ptr, delta, rows, ok, i, B, I, NT: tl.constexpr, MODE: tl.constexpr
):
    """db = c (dc - sum c dc), summed over what the softmax runs over. delta: for MODE "in" that sum, NT tiles."""
    db = ()
    if MODE == "in":
        for n in tl.static_range(NT):
            db = db + (tl.where(valid[n], c[n] * (dc[n] - delta[n]), 0.0),)
    else:
        if MODE == "out":
            total = tl.sum(tl.where(valid[0], c[0] * dc[0], 0.0), 1)
            for n in tl.static_range(1, NT):
                total += tl.sum(tl.where(valid[n], c[n] * dc[n], 0.0), 1)
        else:
            at = rows_ptr + ((2 * tl.cast(B, tl.int64) + rows[0]) * I + i) + rows[1] * I
            total = tl.load(at, mask=ok, other=0.0)
        for n in tl.static_range(NT):
            db = db + (tl.where(valid[n], c[n] * (dc[n] - total[:, None]), 0.0),)
    return db
