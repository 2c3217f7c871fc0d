"""The votes of one input capsule, read or computed, and the logits and their gradient that follow from them."""

import triton
import triton.language as tl

from .products import product
from .tiles import below, columns, components, existing, per_pair, pose_rows, where_valid
from .vectors import load_numbers, score, slope


@triton.jit
def reread(ptr, i32, AGAIN: tl.constexpr):
    """ptr, so that if AGAIN what it points to is loaded in every turn of the loop over i: it is in L1. Loaded once
    before the loop, as the compiler would, it leaves too little room. That i is not negative it does not know."""
    if AGAIN:
        ptr += (i32 >> 31) * 16
    return ptr


@triton.jit
def input_capsules(x_ptr, rows, ok, i, k0, xs, K: tl.constexpr, KP: tl.constexpr, WIDE: tl.constexpr):
    """u of input capsule i for the rows, components k from k0 on: [BB, KP], 0 outside."""
    k = components(k0, KP, WIDE)
    at = x_ptr + (rows[0] * xs[0] + i * xs[1]) + (rows[1] * xs[0])[:, None] + (k * xs[3])[None, :]
    if rows[2].shape[0] > 1:
        at += (pose_rows(rows, K) * xs[3])[:, None]
    return tl.load(at, mask=ok[:, None] & below(k, K, KP)[None, :], other=0.0)


@triton.jit
def weight_tile(
    w_ptr, i, n, k0, ws,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr,
    KP: tl.constexpr, WIDE: tl.constexpr,
):
    """W of input capsule i for the columns of tile n, components k from k0 on: [N, KP], 0 outside."""
    j, d = columns(0, JT, DP, LANES, WIDE)
    k = components(k0, KP, WIDE)
    at = w_ptr + i * ws[0] + (j * ws[1] + d * ws[2])[:, None] + (k * ws[3])[None, :]
    at += tl.cast(n, tl.int64) * (JT * ws[1])
    inside = (existing(n, n * JT + j, J, JT) & below(d, D, DP))[:, None] & below(k, K, KP)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def votes_tile(
    u, x_ptr, w_ptr, mask_ptr, rows, ok, i, n, xs, ws,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr, KP: tl.constexpr,
    VOTES: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr,
):
    """Tile n of the votes of input capsule i: if VOTES they are read, else computed as W_ij u_i, with D components a
    row. u: the first KP components of the pose.

    tl.dot does not sum over i: tensor cores round sums towards zero, an error that would grow with I.
    """
    if VOTES:
        j, d = columns(n, JT, DP, LANES, WIDE)
        inside = ok[:, None] & ((j < J) & (d < D))[None, :]
        at = x_ptr + (rows[0] * xs[0] + i * xs[1]) + (rows[1] * xs[0])[:, None] + (j * xs[2] + d * xs[3])[None, :]
        votes = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    else:
        w = weight_tile(w_ptr, i, n, 0, ws, J, D, K, JT, DP, LANES, KP, WIDE)
        votes = product(u, tl.trans(w), tl.zeros([BB, JT * DP], tl.float32), DOT)
        if K > KP:
            for k0 in range(KP, K, KP):
                more = input_capsules(x_ptr, rows, ok, i, k0, xs, K, KP, WIDE)
                w_more = weight_tile(w_ptr, i, n, k0, ws, J, D, K, JT, DP, LANES, KP, WIDE)
                votes = product(more, tl.trans(w_more), votes, DOT)
        if mask_ptr is not None:
            # The weight of a masked input capsule may hold NaN.
            votes = tl.where(ok[:, None], votes, 0.0)
    return votes


@triton.jit
def routing_logits(
    x, V, logits_ptr, precision_ptr, prior_ptr, rows, at, i, n, sizes, valid, MASKED: tl.constexpr,
    J: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr,
    LANES: tl.constexpr, WIDE: tl.constexpr,
    NOTHING: tl.constexpr = float("-inf"),
):
    """b = logits + prior + x . V - 1/2 sum_d precision x^2 of tile n, NOTHING where not valid. V: a tile or None.

    sizes: of the logits, as tiles.pairs() takes them.
    """
    if V is None and precision_ptr is None:
        b = tl.zeros([BB, JT], tl.float32)
    else:
        b = score(x, slope(V, x, precision_ptr, -0.5, at, n, J, D, P, JT, DP, LANES), rows, BB, JT, DP, LANES)
    if prior_ptr is not None:
        b += load_numbers(prior_ptr, rows, valid, n, J, JT)
    if logits_ptr is not None:
        b += per_pair(logits_ptr, rows, i, n, sizes, valid, J, JT, WIDE)
    return where_valid(valid, b, NOTHING, MASKED or J % JT > 0)


@triton.jit
def coupling_gradient(
    x, s, ds, dcoupling_ptr, dmass_ptr, dsecond_ptr, rows, at, i, n, sizes, valid, last,
    J: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr,
    LANES: tl.constexpr, WIDE: tl.constexpr,
):
    """dc = dcoupling + dmass + x . ds + x^2 . dsecond of tile n. dcoupling is that of the last iteration.

    s: sum_i c x, or None. With it s . ds + s^2 . dsecond is taken off, as (x - s) (ds + (x + s) dsecond).
    """
    about = x
    if s is not None:
        about = x - s
        if dsecond_ptr is not None:
            x += s
    dc = score(about, slope(ds, x, dsecond_ptr, 1.0, at, n, J, D, P, JT, DP, LANES), rows, BB, JT, DP, LANES)
    if dmass_ptr is not None:
        dc += load_numbers(dmass_ptr, rows, valid, n, J, JT)
    if dcoupling_ptr is not None:
        dc += per_pair(dcoupling_ptr, rows, i, n, sizes, valid & last, J, JT, WIDE)
    return dc
