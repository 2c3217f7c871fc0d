"""Coupling coefficients of one input capsule i from its routing logits b, tuples of NT tiles [BB, JT].

MODE "out": softmax over the outputs, all of which are in the tiles. MODE "swept": the same where they are not;
a sweep before has kept each row's maximum and 1 / sum (rows_ptr [3, B, I]: these and sum_j c dc). MODE "in":
softmax over the input capsules, its maximum and 1 / sum known from the forward (norm [B, J] each).
"""

import triton
import triton.language as tl


@triton.jit
def finite_or_zero(m):
    """A maximum to subtract: 0 where no logit is finite, whose softmax then gives 0."""
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
    """c of all tiles. norm: tuples (maximum, 1 / sum) of [BB, JT] for MODE "in"."""
    if MODE == "out":
        c = over_outputs(b, NT, LEAKY)
    elif MODE == "swept":
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
    """db = c (dc - sum c dc), the sum over what the softmax is over. delta: for MODE "in" that sum, [BB, JT] a tile."""
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
