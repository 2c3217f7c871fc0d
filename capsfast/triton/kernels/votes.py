"""The votes of one input capsule, read or computed, and the logits and their gradient that follow from them."""

import triton
import triton.language as tl

from .arguments import Capsule
from .products import product
from .tiles import below, columns, existing, per_pair, pose_rows, valid_inputs, where_valid
from .vectors import load_numbers, load_vectors, score, slope, spread


@triton.jit
def reread(p_target, i32, AGAIN: tl.constexpr):
    """p_target. If AGAIN, adds a 0 that the compiler does not recognize, because it does not know that i >= 0. So the
    target is loaded again for every i, from L1. Loaded once before the loop, it would take too many registers."""
    if AGAIN:
        p_target += (i32 >> 31) * 16
    return p_target


@triton.jit
def input_capsule(inputs, rows, i32, T: tl.constexpr, SHARED: tl.constexpr = False):
    """Input capsule i32 of the rows. SHARED: all input capsules have the weight of input capsule 0."""
    # KEPT: the compiler does not see that maximum(i32, 0) is i32. So it keeps addresses without i, and the loop adds i
    # times a stride to an address, one instruction. Otherwise the loop would advance every address, two instructions.
    # Given votes have few addresses; the tiles of a section have more addresses than registers, see pairs().
    KEPT: tl.constexpr = not T.VOTES and not (T.SECTIONED and T.NT > 1)
    i = tl.cast(tl.maximum(i32, 0) if KEPT else i32, tl.int64)
    m_rows = valid_inputs(inputs, rows, i)
    if T.VOTES:
        p_w, b_u = rows.p_x, tl.zeros([1], tl.float32)
    else:
        p_w = reread(inputs.p_w, i32, SHARED and T.J * T.D * T.K > 4096)
        b_u = pose_tile(inputs, rows, m_rows, i, 0, T, T.KP)
    return Capsule(i, m_rows, b_u, p_w)


@triton.jit
def pose_tile(inputs, rows, m_rows, i, k0, T: tl.constexpr, KP: tl.constexpr):
    """u of input capsule i for the rows, components k from k0 on: [BB, KP], 0 outside."""
    o_k = k0 + tl.arange(0, KP)
    x_b, x_i, _, x_k = inputs.xs
    p_tile = rows.p_x + (rows.start * x_b + i * x_i) + (rows.o_b * x_b)[:, None] + (o_k * x_k)[None, :]
    if T.PP > 1:
        p_tile += (pose_rows(T.K, T) * x_k)[:, None]
    return tl.load(p_tile, mask=m_rows[:, None] & below(o_k, T.K, KP)[None, :], other=0.0)


@triton.jit
def weight_tile(p_w, inputs, i, n, k0, T: tl.constexpr, KP: tl.constexpr):
    """W of input capsule i for the columns of tile n, components k from k0 on: [N, KP], 0 outside."""
    o_j, o_d = columns(0, T)
    o_k = k0 + tl.arange(0, KP)
    w_i, w_j, w_d, w_k = inputs.ws
    OF_ONE: tl.constexpr = T.K // inputs.together  # components of an input capsule
    o_w = o_k * w_k
    if inputs.together > 1:
        o_w = o_k // OF_ONE * (w_i // inputs.together) + o_k % OF_ONE * w_k
    p_tile = p_w + tl.cast(n, tl.int64) * (T.JT * w_j) + i * w_i + (o_j * w_j + o_d * w_d)[:, None] + o_w[None, :]
    m_tile = (existing(n, n * T.JT + o_j, T) & below(o_d, T.D // T.P, T.DP))[:, None] & below(o_k, T.K, KP)[None, :]
    return tl.load(p_tile, mask=m_tile, other=0.0)


@triton.jit
def votes_tile(inputs, rows, capsule, n, T: tl.constexpr):
    """Tile n of the votes of an input capsule: read if VOTES, else computed as W_ij u_i, with D / P components a row.

    tl.dot does not sum over the loop of i: tensor cores round sums towards zero, an error that would grow with I.
    """
    if T.VOTES:
        x_b, x_i, x_j, x_d = inputs.xs
        o_j, o_d = columns(n, T)
        m_tile = capsule.m_rows[:, None] & ((o_j < T.J) & (o_d < T.D // T.P))[None, :]
        p_tile = rows.p_x + (rows.start * x_b + capsule.i * x_i) + (rows.o_b * x_b)[:, None]
        p_tile += (o_j * x_j + o_d * x_d)[None, :]
        b_votes = tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
    else:
        b_w = weight_tile(capsule.p_w, inputs, capsule.i, n, 0, T, T.KP)
        b_votes = product(capsule.b_u, tl.trans(b_w), tl.zeros([T.BB, T.JT * T.DP], tl.float32), T.DOT)
        if T.K > T.KP:
            for k0 in range(T.KP, T.K, T.KP):
                b_u_k = pose_tile(inputs, rows, capsule.m_rows, capsule.i, k0, T, T.KP)
                b_w_k = weight_tile(capsule.p_w, inputs, capsule.i, n, k0, T, T.KP)
                b_votes = product(b_u_k, tl.trans(b_w_k), b_votes, T.DOT)
        if inputs.p_mask is not None:
            # The weight of a masked input capsule may hold NaN.
            b_votes = tl.where(capsule.m_rows[:, None], b_votes, 0.0)
    return b_votes


@triton.jit
def valid_votes(inputs, rows, capsule, n, m_pairs, T: tl.constexpr):
    """Tile n of the votes, 0 for masked pairs: the votes of a masked output capsule may be NaN, and a coupling of 0
    times NaN is NaN."""
    b_votes = votes_tile(inputs, rows, capsule, n, T)
    if inputs.p_mask is not None or inputs.p_out_mask is not None:
        b_votes = tl.where(spread(m_pairs, T), b_votes, 0.0)
    return b_votes


@triton.jit
def votes_about_center(inputs, rows, o_vectors, capsule, n, m_pairs, T: tl.constexpr, S: tl.constexpr = 1):
    """Tile n of x: the votes, minus the center if there is one, which is one of S vectors.

    If QUADRATIC, x is 0 for masked pairs, as valid_votes() is.
    """
    b_x = votes_tile(inputs, rows, capsule, n, T)
    if T.QUADRATIC:
        if inputs.p_center is not None:
            b_x -= load_vectors(inputs.p_center, o_vectors, n, T, S)
        if inputs.p_mask is not None or inputs.p_out_mask is not None:
            b_x = tl.where(spread(m_pairs, T), b_x, 0.0)
    return b_x


@triton.jit
def routing_logits(
    inputs, b_x, b_V, rows, o_vectors, capsule, n, m_pairs, T: tl.constexpr, NOTHING: tl.constexpr = float("-inf"),
    S: tl.constexpr = 1,
):
    """b = logits + prior + x . V - 1/2 sum_d precision x^2 of tile n, NOTHING outside m_pairs. b_V: a tile, if there is
    a QUERY. The precision is one of S vectors."""
    b_logits = tl.zeros([T.BB, T.JT], tl.float32)
    if T.QUERY or inputs.p_precision is not None:
        b_logits = score(b_x, slope(b_V if T.QUERY else None, b_x, inputs.p_precision, -0.5, o_vectors, n, T, S), T)
    if inputs.p_prior is not None:
        b_logits += load_numbers(inputs.p_prior, rows, m_pairs, n, T)
    if inputs.p_logits is not None:
        b_logits += per_pair(inputs.p_logits, inputs, rows, capsule.i, n, m_pairs, T, T.SHARED_LOGITS)
    return where_valid(m_pairs, b_logits, NOTHING, T.MASKED or T.J % T.JT > 0)


@triton.jit
def coupling_gradient(
    inputs, douts, b_x, b_s, b_ds, rows, o_vectors, capsule, n, m_pairs, T: tl.constexpr, S: tl.constexpr
):
    """dc = dcoupling + dmass + x . ds + x^2 . dsecond of tile n. dsecond is one of S vectors.

    b_s: sum_i c x, or None. With s, dc excludes s . ds + s^2 . dsecond: kernels sum (x - s) (ds + (x + s) dsecond).
    """
    b_about = b_x
    if b_s is not None:
        b_about = b_x - b_s
        if douts.dsecond is not None:
            b_x += b_s
    b_dc = score(b_about, slope(b_ds, b_x, douts.dsecond, 1.0, o_vectors, n, T, S), T)
    if douts.dmass is not None:
        b_dc += load_numbers(douts.dmass, rows, m_pairs, n, T)
    if douts.dcoupling is not None:
        b_dc += per_pair(douts.dcoupling, inputs, rows, capsule.i, n, m_pairs, T)
    return b_dc
