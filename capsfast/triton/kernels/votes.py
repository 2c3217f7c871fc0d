"""The votes of one input capsule, read or computed, and the logits and their gradient that follow from them."""

import triton
import triton.language as tl

from .arguments import Capsule
from .products import product
from .tiles import (
    below,
    columns,
    existing,
    per_pair,
    pose_rows,
    valid_inputs,
    where_valid,
)
from .vectors import load_numbers, load_vectors, score, slope, spread


@triton.jit
def reread(ptr, i32, AGAIN: tl.constexpr):
    """ptr. If AGAIN, adds a 0 that the compiler does not recognize, as it does not know that i >= 0. So every turn of
    the loop over i loads the target again, from L1. Loaded once before the loop, it takes too many registers."""
    if AGAIN:
        ptr += (i32 >> 31) * 16
    return ptr


@triton.jit
def input_capsule(inputs, rows, i32, T: tl.constexpr, SHARED: tl.constexpr = False):
    """SHARED: all input capsules have the weight of the first."""
    # The compiler does not see that the maximum is i32. So it keeps addresses without i; every turn of the loop adds i
    # times a stride, one instruction. Otherwise it would advance every address, which takes two. Given votes have few
    # addresses; the tiles of a group have more than fit in registers, see pairs().
    KEPT: tl.constexpr = not T.VOTES and not (T.GROUPED and T.NT > 1)
    i = tl.cast(tl.maximum(i32, 0) if KEPT else i32, tl.int64)
    ok = valid_inputs(inputs, rows, i)
    if T.VOTES:
        w, u = rows.x, tl.zeros([1], tl.float32)
    else:
        w = reread(inputs.w, i32, SHARED and T.J * T.D * T.K > 4096)
        u = pose_tile(inputs, rows, ok, i, 0, T, T.KP)
    return Capsule(i, ok, u, w)


@triton.jit
def pose_tile(inputs, rows, ok, i, k0, T: tl.constexpr, KP: tl.constexpr):
    """u of input capsule i for the rows, components k from k0 on: [BB, KP], 0 outside."""
    k = k0 + tl.arange(0, KP)
    x_b, x_i, _, x_k = inputs.xs
    at = rows.x + (rows.first * x_b + i * x_i) + (rows.local * x_b)[:, None] + (k * x_k)[None, :]
    if T.PP > 1:
        at += (pose_rows(T.K, T) * x_k)[:, None]
    return tl.load(at, mask=ok[:, None] & below(k, T.K, KP)[None, :], other=0.0)


@triton.jit
def weight_tile(w_ptr, inputs, i, n, k0, T: tl.constexpr, KP: tl.constexpr):
    """W of input capsule i for the columns of tile n, components k from k0 on: [N, KP], 0 outside."""
    j, d = columns(0, T)
    k = k0 + tl.arange(0, KP)
    w_i, w_j, w_d, w_k = inputs.ws
    OF_ONE: tl.constexpr = T.K // inputs.together  # components of an input capsule
    along = k * w_k
    if inputs.together > 1:
        along = k // OF_ONE * (w_i // inputs.together) + k % OF_ONE * w_k
    at = w_ptr + tl.cast(n, tl.int64) * (T.JT * w_j) + i * w_i + (j * w_j + d * w_d)[:, None] + along[None, :]
    inside = (existing(n, n * T.JT + j, T) & below(d, T.D // T.P, T.DP))[:, None] & below(k, T.K, KP)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def votes_tile(inputs, rows, here, n, T: tl.constexpr):
    """Tile n of the votes of an input capsule: read if VOTES, else computed as W_ij u_i, with D / P components a row.

    tl.dot does not sum over the loop of i: tensor cores round sums towards zero, an error that would grow with I.
    """
    if T.VOTES:
        x_b, x_i, x_j, x_d = inputs.xs
        j, d = columns(n, T)
        inside = here.ok[:, None] & ((j < T.J) & (d < T.D // T.P))[None, :]
        at = rows.x + (rows.first * x_b + here.i * x_i) + (rows.local * x_b)[:, None] + (j * x_j + d * x_d)[None, :]
        votes = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    else:
        w = weight_tile(here.w, inputs, here.i, n, 0, T, T.KP)
        votes = product(here.u, tl.trans(w), tl.zeros([T.BB, T.JT * T.DP], tl.float32), T.DOT)
        if T.K > T.KP:
            for k0 in range(T.KP, T.K, T.KP):
                more = pose_tile(inputs, rows, here.ok, here.i, k0, T, T.KP)
                w_more = weight_tile(here.w, inputs, here.i, n, k0, T, T.KP)
                votes = product(more, tl.trans(w_more), votes, T.DOT)
        if inputs.mask is not None:
            # The weight of a masked input capsule may hold NaN.
            votes = tl.where(here.ok[:, None], votes, 0.0)
    return votes


@triton.jit
def votes_about_center(inputs, rows, vectors, here, n, valid, T: tl.constexpr):
    """Tile n of x: the votes, minus the center if there is one.

    If QUADRATIC, x is 0 for masked pairs: the votes of a masked output capsule may be NaN, and a coupling of 0 times
    NaN is NaN.
    """
    x = votes_tile(inputs, rows, here, n, T)
    if T.QUADRATIC:
        if inputs.center is not None:
            x -= load_vectors(inputs.center, vectors, n, T)
        if inputs.mask is not None or inputs.out_mask is not None:
            x = tl.where(spread(valid, T), x, 0.0)
    return x


@triton.jit
def routing_logits(
    inputs, x, V, rows, vectors, here, n, valid, T: tl.constexpr, NOTHING: tl.constexpr = float("-inf")
):
    """b = logits + prior + x . V - 1/2 sum_d precision x^2 of tile n, NOTHING where not valid. V: a tile, if there is a
    QUERY."""
    b = tl.zeros([T.BB, T.JT], tl.float32)
    if T.QUERY or inputs.precision is not None:
        b = score(x, slope(V if T.QUERY else None, x, inputs.precision, -0.5, vectors, n, T), T)
    if inputs.prior is not None:
        b += load_numbers(inputs.prior, rows, valid, n, T)
    if inputs.logits is not None:
        b += per_pair(inputs.logits, inputs, rows, here.i, n, valid, T, T.SHARED_LOGITS)
    return where_valid(valid, b, NOTHING, T.MASKED or T.J % T.JT > 0)


@triton.jit
def coupling_gradient(inputs, given, x, s, ds, rows, vectors, here, n, valid, T: tl.constexpr):
    """dc = dcoupling + dmass + x . ds + x^2 . dsecond of tile n.

    s: sum_i c x, or None. With s, dc excludes s . ds + s^2 . dsecond: kernels sum (x - s) (ds + (x + s) dsecond).
    """
    about = x
    if s is not None:
        about = x - s
        if given.dsecond is not None:
            x += s
    dc = score(about, slope(ds, x, given.dsecond, 1.0, vectors, n, T), T)
    if given.dmass is not None:
        dc += load_numbers(given.dmass, rows, valid, n, T)
    if given.dcoupling is not None:
        dc += per_pair(given.dcoupling, inputs, rows, here.i, n, valid, T)
    return dc
