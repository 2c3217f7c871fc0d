"""The steps between passes: they add up the partial sums of the splits in order and compute s, v and V, or G and ds.

A program has RB rows. A row is one output capsule of one sample, its D components padded to DP.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .begin import begin
from .softmax import finite_or_zero, inverse
from .squash import squash, squash_gradient
from .strips import fours, numbers, place, power_of_two


class Own(NamedTuple):
    """The rows of a program: numbers of the rows, and which rows exist, [RB]; d, [DP]; offsets in [B, J, D], and which
    offsets exist, [RB, DP]."""

    rows: Any
    ok: Any
    d: Any
    at: Any
    within: Any


@triton.jit
def own_rows(B, L: tl.constexpr, DP: tl.constexpr, RB: tl.constexpr):
    rows = tl.cast(tl.program_id(0), tl.int64) * RB + tl.arange(0, RB)
    ok = rows < tl.cast(B, tl.int64) * L.J
    d = tl.arange(0, DP)
    return Own(rows, ok, d, (rows * L.D)[:, None] + d[None, :], ok[:, None] & (d < L.D)[None, :])


@triton.jit
def load_splits(partial_ptr, at, within, start, splits, plane, SB: tl.constexpr):
    """Rows at the offsets ``at`` of SB splits, [SB, RB, DP], 0 where a split does not exist."""
    split = start + tl.arange(0, SB)
    there = (split < splits)[:, None, None] & within[None, :, :]
    offset = tl.cast(split, tl.int64)[:, None, None] * plane + at[None, :, :]
    return tl.load(partial_ptr + offset, mask=there, other=0.0)


@triton.jit
def sum_splits(partial_ptr, at, within, splits, plane, online, SB: tl.constexpr):
    """Rows at the offsets ``at`` [RB, DP], summed over the splits: SB sums side by side, which are added up last.

    online: if every split has a softmax of its own, a tuple of the maxima [splits, B, J], the rows, which rows exist,
    B J, and the maximum over the splits, [RB]; otherwise a tuple that begins with None.
    """
    total = tl.zeros([SB, at.shape[0], at.shape[1]], tl.float32)
    # The loads of a turn are in flight while the numbers of the turn before are added, in whatever order the compiler
    # has loads and additions.
    following = load_splits(partial_ptr, at, within, 0, splits, plane, SB)
    for start in range(0, splits, SB):
        part = following
        following = load_splits(partial_ptr, at, within, start + SB, splits, plane, SB)
        if online[0] is not None:
            part *= tl.exp(maxima(online, start + tl.arange(0, SB), splits) - online[4][None, :])[:, :, None]
        total += part
    return tl.sum(total, 0)


@triton.jit
def maxima(online, split, splits):
    """The maxima of some splits, [SB, RB], -inf where a split does not exist."""
    at = tl.cast(split, tl.int64)[:, None] * online[3] + online[1][None, :]
    return tl.load(online[0] + at, mask=(split < splits)[:, None] & online[2][None, :], other=float("-inf"))


@triton.jit
def common_factor(
    online_ptr, factor_ptr, factor, norm_ptr, inverse_ptr, own, splits, plane,
    L: tl.constexpr, SB: tl.constexpr, LEAKY: tl.constexpr,
):
    """The factor of a row, the coupling of a uniform pass or 1 / sum of a softmax, and the maximum of the softmax, 0 in
    place of -inf. Stores both for softmax "in"; in a uniform pass all logits are 0, so the maximum is 0.
    """
    rows, ok = own.rows, own.ok
    m = tl.full([rows.shape[0]], 0.0 if LEAKY else float("-inf"), tl.float32)
    each = tl.zeros([rows.shape[0]], tl.float32) + factor
    if online_ptr is not None:
        for start in range(0, splits, SB):
            m = tl.maximum(m, tl.max(maxima((online_ptr, rows, ok, plane), start + tl.arange(0, SB), splits), 0))
    m = finite_or_zero(m)
    if online_ptr is not None:
        online = (online_ptr, rows, ok, plane, m)
        totals_ptr = online_ptr + splits * plane
        total = tl.sum(sum_splits(totals_ptr, rows[:, None], ok[:, None], splits, plane, online, SB), 1)
        if LEAKY:
            total += tl.exp(-m)
        each = inverse(total)
    elif factor_ptr is not None:
        each = tl.load(factor_ptr + rows // L.J, mask=ok, other=0.0)
    if norm_ptr is not None:
        tl.store(norm_ptr + rows, m, mask=ok)
        tl.store(inverse_ptr + rows, each, mask=ok)
    return each, m


@triton.jit
def row_is_valid(out_mask_ptr, own):
    ok = own.ok
    if out_mask_ptr is not None:
        ok = ok & (tl.load(out_mask_ptr + own.rows, mask=ok, other=0) != 0)
    return ok


@triton.jit
def add_bias(s, bias_ptr, own, L: tl.constexpr):
    if bias_ptr is not None:
        at = bias_ptr + ((own.rows % L.J) * L.D)[:, None] + own.d[None, :]
        s += tl.load(at, mask=own.within, other=0.0).to(tl.float32)
    return s


# These pointers point into [R, ...] tensors, so their alignment depends on B: Triton would compile a kernel for each.
@triton.jit(
    do_not_specialize=["B", "splits"], do_not_specialize_on_alignment=["s_ptr", "norm_ptr", "inverse_ptr"]
)
def update_kernel(
    partial_ptr,  # [splits, B, J, D] float32
    partial_mass_ptr,  # [splits, B, J] float32, of a routing pass, or None
    partial_second_ptr,  # [splits, B, J, D] float32, of a routing pass, or None
    online_ptr,  # [2, splits, B, J] float32, for softmax "in": maximum and sum of exponentials of each split, or None
    factor_ptr,  # [B] float32 or None: the coupling of a uniform pass
    bias_ptr,  # [J, D] contiguous or None
    out_mask_ptr,
    V_ptr,  # V of the pass, see strips.py, or None for zero
    s_ptr, mass_ptr, second_ptr,  # [B, J, D], [B, J], [B, J, D] float32, out; None if the partial sums are None
    norm_ptr, inverse_ptr,  # [B, J] float32, out for softmax "in"
    next_ptr,  # V of the next iteration, out: V + v, or None
    v_ptr,  # [B, J, D], out, or None
    B, splits, factor, eps,
    L: tl.constexpr, DP: tl.constexpr, RB: tl.constexpr, SB: tl.constexpr,
    LEAKY: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr = False,
):
    """Adds up the partial sums of a pass; 0 for masked outputs, whose votes may be NaN. A routing has v or next too."""
    begin(PDL)
    own = own_rows(B, L, DP, RB)
    plane = tl.cast(B, tl.int64) * L.J
    each, m = common_factor(
        online_ptr, factor_ptr, factor, norm_ptr, inverse_ptr, own, splits, plane, L, SB, LEAKY
    )
    online = (online_ptr, own.rows, own.ok, plane, m)
    alive = row_is_valid(out_mask_ptr, own)[:, None]
    s = sum_splits(partial_ptr, own.at, own.within, splits, plane * L.D, online, SB)
    s = tl.where(alive, s * each[:, None], 0.0)
    tl.store(s_ptr + own.at, s, mask=own.within)
    if mass_ptr is not None:
        mass = sum_splits(partial_mass_ptr, own.rows[:, None], own.ok[:, None], splits, plane, online, SB)
        tl.store(mass_ptr + own.rows[:, None], tl.where(alive, mass * each[:, None], 0.0), mask=own.ok[:, None])
    if second_ptr is not None:
        second = sum_splits(partial_second_ptr, own.at, own.within, splits, plane * L.D, online, SB)
        tl.store(second_ptr + own.at, tl.where(alive, second * each[:, None], 0.0), mask=own.within)
    if v_ptr is not None or next_ptr is not None:
        v = tl.where(alive, squash(add_bias(s, bias_ptr, own, L), eps, KIND), 0.0)
        if v_ptr is not None:
            tl.store(v_ptr + own.at, v, mask=own.within)
        if next_ptr is not None:
            if V_ptr is not None:
                at, within = in_strips(own, L, 1)
                v += tl.load(V_ptr + at, mask=within, other=0.0)
            store_vector(next_ptr, v, own, L, 1)


@triton.jit
def load_rows(ptr, own):
    return tl.load(ptr + own.at, mask=own.within, other=0.0).to(tl.float32)


@triton.jit
def in_strips(own, L: tl.constexpr, S: tl.constexpr):
    """Where the rows of a program are among S vectors in the order of strips.py, and which numbers are there."""
    C: tl.constexpr = L.D // L.P
    row, c = (own.rows // L.J)[:, None], own.d[None, :]
    within = 4 * fours(C)
    if L.P > 1:
        row = row * power_of_two(L.P) + c // C
        c = c % C
        within = L.D
    strip = (row // L.ROWS * L.J + (own.rows % L.J)[:, None]) * (S * numbers(C, L.ROWS))
    return strip + place(row % L.ROWS, c, L.ROWS), own.ok[:, None] & (own.d < within)[None, :]


@triton.jit
def store_vector(ptr, value, own, L: tl.constexpr, S: tl.constexpr):
    """Stores vectors [RB, DP], whose padding is 0, as one of S."""
    at, within = in_strips(own, L, S)
    tl.store(ptr + at, value, mask=within)


@triton.jit
def store_ds(
    s, dv, bias_ptr, out_mask_ptr, ds_ptr, own, eps,
    L: tl.constexpr, R: tl.constexpr, KIND: tl.constexpr,
):
    """Computes ds from dv and v = squash(s + bias), and stores ds at ds_ptr, which points into a state."""
    s = add_bias(s, bias_ptr, own, L)
    ds = tl.where(row_is_valid(out_mask_ptr, own)[:, None], squash_gradient(s, dv, eps, KIND), 0.0)
    store_vector(ds_ptr, ds, own, L, 2 * R)


@triton.jit(do_not_specialize=["B"])
def restore_kernel(
    s_ptr,  # [r, B, J, D] float32
    dv_ptr,  # [B, J, D]
    bias_ptr,  # [J, D] contiguous or None
    out_mask_ptr,
    state_ptr,  # V and ds of R iterations, see strips.py, out: V of every iteration, ds of the last
    vectors_ptr,  # s of R iterations in the order of strips.py, out, or None
    B, eps,
    L: tl.constexpr, DP: tl.constexpr, RB: tl.constexpr, R: tl.constexpr,
    KIND: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr = False,
):
    """KIND: the squash of all iterations but the last; LAST: the squash of the last iteration."""
    begin(PDL)
    own = own_rows(B, L, DP, RB)
    alive = row_is_valid(out_mask_ptr, own)
    plane = tl.cast(B, tl.int64) * L.J * L.D
    V = tl.zeros([RB, DP], tl.float32)
    for t in range(R - 1):
        store_vector(state_ptr + 2 * t * numbers(L.D // L.P, L.ROWS), V, own, L, 2 * R)
        s = load_rows(s_ptr + t * plane, own)
        if vectors_ptr is not None:
            store_vector(vectors_ptr + t * numbers(L.D // L.P, L.ROWS), s, own, L, R)
        V += tl.where(alive[:, None], squash(add_bias(s, bias_ptr, own, L), eps, KIND), 0.0)
    s = load_rows(s_ptr + (R - 1) * plane, own)
    last_ptr = state_ptr + 2 * (R - 1) * numbers(L.D // L.P, L.ROWS)
    store_vector(last_ptr, V, own, L, 2 * R)
    if vectors_ptr is not None:
        store_vector(vectors_ptr + (R - 1) * numbers(L.D // L.P, L.ROWS), s, own, L, R)
    dv = load_rows(dv_ptr, own)
    store_ds(s, dv, bias_ptr, out_mask_ptr, last_ptr + numbers(L.D // L.P, L.ROWS), own, eps, L, R, LAST)


@triton.jit(do_not_specialize=["B", "splits"], do_not_specialize_on_alignment=["s_ptr"])
def update_gradient_kernel(
    partial_ptr,  # [splits, B, J, D] float32, what this pass adds to G
    G_ptr,  # [B, J, D] float32: G so far, updated
    bias_ptr,  # [J, D] contiguous or None
    out_mask_ptr,
    s_ptr,  # [B, J, D] float32, of the iteration whose ds is computed
    ds_ptr,  # ds of that iteration, in a state of R iterations, out
    B, splits, eps,
    L: tl.constexpr, DP: tl.constexpr, RB: tl.constexpr, SB: tl.constexpr,
    R: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr = False,
):
    begin(PDL)
    own = own_rows(B, L, DP, RB)
    s = load_rows(s_ptr, own)
    dv = load_rows(G_ptr, own)
    dv += sum_splits(partial_ptr, own.at, own.within, splits, tl.cast(B, tl.int64) * L.J * L.D, (None,), SB)
    tl.store(G_ptr + own.at, dv, mask=own.within)
    store_ds(s, dv, bias_ptr, out_mask_ptr, ds_ptr, own, eps, L, R, KIND)


@triton.jit
def arrange(from_ptr, to_ptr, own, L: tl.constexpr, S: tl.constexpr):
    """Copies vectors [B, J, D] to the order of strips.py, as one of S."""
    if to_ptr is not None:
        value = tl.zeros(own.within.shape, tl.float32)
        if from_ptr is not None:
            value = load_rows(from_ptr, own)
        store_vector(to_ptr, value, own, L, S)


@triton.jit(do_not_specialize=["B"])
def arrange_kernel(
    query_ptr, dfirst_ptr, precision_ptr, center_ptr, dsecond_ptr, s_ptr,  # [B, J, D] float32, or None for 0
    # Out, or None: the vectors in the order of strips.py.
    V_ptr, ds_ptr, of_precision_ptr, of_center_ptr, of_dsecond_ptr, of_s_ptr,
    B, eps,
    L: tl.constexpr, DP: tl.constexpr, RB: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr = False,
):
    """With ds, V and ds are a state of one iteration."""
    begin(PDL)
    own = own_rows(B, L, DP, RB)
    S: tl.constexpr = 1 if ds_ptr is None else 2
    arrange(query_ptr, V_ptr, own, L, S)
    arrange(dfirst_ptr, ds_ptr, own, L, S)
    arrange(precision_ptr, of_precision_ptr, own, L, 1)
    arrange(center_ptr, of_center_ptr, own, L, 1)
    arrange(dsecond_ptr, of_dsecond_ptr, own, L, 1)
    arrange(s_ptr, of_s_ptr, own, L, 1)


@triton.jit(do_not_specialize=["splits"])
def add_up_kernel(
    partial_ptr,  # [splits, n] float32
    sum_ptr,  # [n], out
    n, splits,
    WIDTH: tl.constexpr, SB: tl.constexpr, PDL: tl.constexpr = False,
):
    """A program has WIDTH of the n sums."""
    begin(PDL)
    at = tl.cast(tl.program_id(0), tl.int64) * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(sum_ptr + at, sum_splits(partial_ptr, at, at < n, splits, n, (None,), SB), mask=at < n)
