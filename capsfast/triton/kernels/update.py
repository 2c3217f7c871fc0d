"""The steps between passes: they add up the partial sums of the splits in order and compute s, v and V, or G and ds.

A program has RB rows. A row is one output capsule of one sample, its D components padded to DP.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .begin import begin
from .softmax import finite_or_zero, inverse
from .squash import squash, squash_gradient
from .strips import fours, numbers, power_of_two, strip_offset


class RowTile(NamedTuple):
    """The rows of a program. o_row, m_row: numbers of the rows, and which rows exist, [RB]. o_d: components, [DP].
    o_tile, m_tile: offsets in [B, J, D], and which of these exist, [RB, DP]."""

    o_row: Any
    m_row: Any
    o_d: Any
    o_tile: Any
    m_tile: Any


@triton.jit
def row_tile(B, L: tl.constexpr, DP: tl.constexpr, RB: tl.constexpr):
    o_row = tl.cast(tl.program_id(0), tl.int64) * RB + tl.arange(0, RB)
    m_row = o_row < tl.cast(B, tl.int64) * L.J
    o_d = tl.arange(0, DP)
    return RowTile(o_row, m_row, o_d, (o_row * L.D)[:, None] + o_d[None, :], m_row[:, None] & (o_d < L.D)[None, :])


@triton.jit
def load_splits(p_partial, o_tile, m_tile, start, splits, plane, SB: tl.constexpr):
    """Rows at the offsets o_tile of SB splits, [SB, RB, DP], 0 where a split does not exist."""
    split = start + tl.arange(0, SB)
    p_split = p_partial + tl.cast(split, tl.int64)[:, None, None] * plane + o_tile[None, :, :]
    return tl.load(p_split, mask=(split < splits)[:, None, None] & m_tile[None, :, :], other=0.0)


@triton.jit
def sum_splits(p_partial, o_tile, m_tile, splits, plane, online, SB: tl.constexpr):
    """Rows at the offsets o_tile [RB, DP], summed over the splits: first SB sums side by side, then the sum of these.

    online: if every split has a softmax of its own, a tuple of the maxima [splits, B, J], the rows, which rows exist,
    B J, and the maximum over the splits, [RB]; otherwise a tuple that begins with None.
    """
    b_total = tl.zeros([SB, o_tile.shape[0], o_tile.shape[1]], tl.float32)
    # The next SB splits are loaded before the last SB splits are added, so that loads and additions overlap, whatever
    # order the compiler chooses for loads and additions.
    b_following = load_splits(p_partial, o_tile, m_tile, 0, splits, plane, SB)
    for start in range(0, splits, SB):
        b_part = b_following
        b_following = load_splits(p_partial, o_tile, m_tile, start + SB, splits, plane, SB)
        if online[0] is not None:
            b_part *= tl.exp(maxima(online, start + tl.arange(0, SB), splits) - online[4][None, :])[:, :, None]
        b_total += b_part
    return tl.sum(b_total, 0)


@triton.jit
def maxima(online, split, splits):
    """The maxima of some splits, [SB, RB], -inf where a split does not exist."""
    o_part = tl.cast(split, tl.int64)[:, None] * online[3] + online[1][None, :]
    return tl.load(online[0] + o_part, mask=(split < splits)[:, None] & online[2][None, :], other=float("-inf"))


@triton.jit
def common_factor(
    p_online, p_factor, factor, p_norm, p_inverse, tile, splits, plane,
    L: tl.constexpr, SB: tl.constexpr, LEAKY: tl.constexpr,
):
    """The factor and the maximum of every row; both are stored for softmax "in". The factor is the coupling of a
    uniform pass, or 1 / sum of a softmax. The maximum of a softmax is 0 instead of -inf. In a uniform pass all logits
    are 0, so the maximum is 0.
    """
    o_row, m_row = tile.o_row, tile.m_row
    b_max = tl.full([o_row.shape[0]], 0.0 if LEAKY else float("-inf"), tl.float32)
    b_factor = tl.zeros([o_row.shape[0]], tl.float32) + factor
    if p_online is not None:
        for start in range(0, splits, SB):
            b_max = tl.maximum(
                b_max, tl.max(maxima((p_online, o_row, m_row, plane), start + tl.arange(0, SB), splits), 0)
            )
    b_max = finite_or_zero(b_max)
    if p_online is not None:
        online = (p_online, o_row, m_row, plane, b_max)
        p_totals = p_online + splits * plane
        b_total = tl.sum(sum_splits(p_totals, o_row[:, None], m_row[:, None], splits, plane, online, SB), 1)
        if LEAKY:
            b_total += tl.exp(-b_max)
        b_factor = inverse(b_total)
    elif p_factor is not None:
        b_factor = tl.load(p_factor + o_row // L.J, mask=m_row, other=0.0)
    if p_norm is not None:
        tl.store(p_norm + o_row, b_max, mask=m_row)
        tl.store(p_inverse + o_row, b_factor, mask=m_row)
    return b_factor, b_max


@triton.jit
def row_is_valid(p_out_mask, tile):
    m_row = tile.m_row
    if p_out_mask is not None:
        m_row = m_row & (tl.load(p_out_mask + tile.o_row, mask=m_row, other=0) != 0)
    return m_row


@triton.jit
def add_bias(b_s, p_bias, tile, L: tl.constexpr):
    if p_bias is not None:
        p_tile = p_bias + ((tile.o_row % L.J) * L.D)[:, None] + tile.o_d[None, :]
        b_s += tl.load(p_tile, mask=tile.m_tile, other=0.0).to(tl.float32)
    return b_s


# These pointers point into [R, ...] tensors, so their alignment depends on B: Triton would compile a kernel for each.
@triton.jit(do_not_specialize=["B", "splits"], do_not_specialize_on_alignment=["p_s", "p_norm", "p_inverse"])
def update_kernel(
    p_partial,  # [splits, B, J, D] float32
    p_partial_mass,  # [splits, B, J] float32, of a routing pass, or None
    p_partial_second,  # [splits, B, J, D] float32, of a routing pass, or None
    p_online,  # [2, splits, B, J] float32, for softmax "in": maximum and sum of exponentials of each split, or None
    p_factor,  # [B] float32 or None: the coupling of a uniform pass
    p_bias,  # [J, D] contiguous or None
    p_out_mask,
    p_V,  # V of the pass, see strips.py, which p_next adds to, or None
    p_s, p_mass, p_second,  # [B, J, D], [B, J], [B, J, D] float32, out; None if the partial sums are None
    p_norm, p_inverse,  # [B, J] float32, out for softmax "in"
    p_next,  # V of the next iteration, out: V + sharpness v, or None
    p_v,  # [B, J, D], out, or None
    B, splits, factor, eps, sharpness,
    L: tl.constexpr, DP: tl.constexpr, RB: tl.constexpr, SB: tl.constexpr,
    LEAKY: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr = False,
):
    """Adds up the partial sums of a pass; 0 for masked outputs, whose votes may be NaN. A routing has v or next too."""
    begin(PDL)
    tile = row_tile(B, L, DP, RB)
    plane = tl.cast(B, tl.int64) * L.J
    b_factor, b_max = common_factor(p_online, p_factor, factor, p_norm, p_inverse, tile, splits, plane, L, SB, LEAKY)
    online = (p_online, tile.o_row, tile.m_row, plane, b_max)
    m_valid = row_is_valid(p_out_mask, tile)[:, None]
    b_s = sum_splits(p_partial, tile.o_tile, tile.m_tile, splits, plane * L.D, online, SB)
    b_s = tl.where(m_valid, b_s * b_factor[:, None], 0.0)
    tl.store(p_s + tile.o_tile, b_s, mask=tile.m_tile)
    if p_mass is not None:
        b_mass = sum_splits(p_partial_mass, tile.o_row[:, None], tile.m_row[:, None], splits, plane, online, SB)
        tl.store(
            p_mass + tile.o_row[:, None], tl.where(m_valid, b_mass * b_factor[:, None], 0.0), mask=tile.m_row[:, None]
        )
    if p_second is not None:
        b_second = sum_splits(p_partial_second, tile.o_tile, tile.m_tile, splits, plane * L.D, online, SB)
        tl.store(p_second + tile.o_tile, tl.where(m_valid, b_second * b_factor[:, None], 0.0), mask=tile.m_tile)
    if p_v is not None or p_next is not None:
        b_v = tl.where(m_valid, squash(add_bias(b_s, p_bias, tile, L), eps, KIND), 0.0)
        if p_v is not None:
            tl.store(p_v + tile.o_tile, b_v, mask=tile.m_tile)
        if p_next is not None:
            b_v *= sharpness
            if p_V is not None:
                o_tile, m_tile = in_strips(tile, L, 1)
                b_v += tl.load(p_V + o_tile, mask=m_tile, other=0.0)
            store_vector(p_next, b_v, tile, L, 1)


@triton.jit
def load_rows(p_rows, tile):
    return tl.load(p_rows + tile.o_tile, mask=tile.m_tile, other=0.0).to(tl.float32)


@triton.jit
def in_strips(tile, L: tl.constexpr, S: tl.constexpr):
    """Offsets of the rows of a program among S vectors in the order of strips.py, and which numbers have a place."""
    C: tl.constexpr = L.D // L.P
    row, o_c = (tile.o_row // L.J)[:, None], tile.o_d[None, :]
    columns = 4 * fours(C)
    if L.P > 1:
        row = row * power_of_two(L.P) + o_c // C
        o_c = o_c % C
        columns = L.D
    strip = (row // L.ROWS * L.J + (tile.o_row % L.J)[:, None]) * (S * numbers(C, L.ROWS))
    return strip + strip_offset(row % L.ROWS, o_c, L.ROWS), tile.m_row[:, None] & (tile.o_d < columns)[None, :]


@triton.jit
def store_vector(p_vectors, b_value, tile, L: tl.constexpr, S: tl.constexpr):
    """Stores vectors [RB, DP], whose padding is 0, as one of S."""
    o_tile, m_tile = in_strips(tile, L, S)
    tl.store(p_vectors + o_tile, b_value, mask=m_tile)


@triton.jit
def store_ds(b_s, b_dv, p_bias, p_out_mask, p_ds, tile, eps, L: tl.constexpr, R: tl.constexpr, KIND: tl.constexpr):
    """Computes ds from dv and v = squash(s + bias), and stores ds at p_ds, which points into a state."""
    b_s = add_bias(b_s, p_bias, tile, L)
    b_ds = tl.where(row_is_valid(p_out_mask, tile)[:, None], squash_gradient(b_s, b_dv, eps, KIND), 0.0)
    store_vector(p_ds, b_ds, tile, L, 2 * R)


@triton.jit(do_not_specialize=["B"])
def restore_kernel(
    p_s,  # [r, B, J, D] float32
    p_dv,  # [B, J, D]
    p_bias,  # [J, D] contiguous or None
    p_out_mask,
    p_state,  # V and ds of R iterations, see strips.py, out: V of every iteration, ds of the last
    p_vectors,  # s of R iterations in the order of strips.py, out, or None
    B, eps, sharpness,
    L: tl.constexpr, DP: tl.constexpr, RB: tl.constexpr, R: tl.constexpr,
    KIND: tl.constexpr, LAST: tl.constexpr, ACCUMULATE: tl.constexpr, PDL: tl.constexpr = False,
):
    """KIND: the squash of all iterations but the last; LAST: the squash of the last iteration."""
    begin(PDL)
    tile = row_tile(B, L, DP, RB)
    m_valid = row_is_valid(p_out_mask, tile)
    plane = tl.cast(B, tl.int64) * L.J * L.D
    b_V = tl.zeros([RB, DP], tl.float32)
    for t in range(R - 1):
        store_vector(p_state + 2 * t * numbers(L.D // L.P, L.ROWS), b_V, tile, L, 2 * R)
        b_s = load_rows(p_s + t * plane, tile)
        if p_vectors is not None:
            store_vector(p_vectors + t * numbers(L.D // L.P, L.ROWS), b_s, tile, L, R)
        b_v = sharpness * tl.where(m_valid[:, None], squash(add_bias(b_s, p_bias, tile, L), eps, KIND), 0.0)
        b_V = b_V + b_v if ACCUMULATE else b_v
    b_s = load_rows(p_s + (R - 1) * plane, tile)
    p_last = p_state + 2 * (R - 1) * numbers(L.D // L.P, L.ROWS)
    store_vector(p_last, b_V, tile, L, 2 * R)
    if p_vectors is not None:
        store_vector(p_vectors + (R - 1) * numbers(L.D // L.P, L.ROWS), b_s, tile, L, R)
    b_dv = load_rows(p_dv, tile)
    store_ds(b_s, b_dv, p_bias, p_out_mask, p_last + numbers(L.D // L.P, L.ROWS), tile, eps, L, R, LAST)


@triton.jit(do_not_specialize=["B", "splits"], do_not_specialize_on_alignment=["p_s"])
def update_gradient_kernel(
    p_partial,  # [splits, B, J, D] float32, what this pass adds to G
    p_G,  # [B, J, D] float32: G so far, updated
    p_bias,  # [J, D] contiguous or None
    p_out_mask,
    p_s,  # [B, J, D] float32, of the iteration whose ds is computed
    p_ds,  # ds of that iteration, in a state of R iterations, out
    B, splits, eps, sharpness,
    L: tl.constexpr, DP: tl.constexpr, RB: tl.constexpr, SB: tl.constexpr,
    R: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr = False,
):
    begin(PDL)
    tile = row_tile(B, L, DP, RB)
    b_s = load_rows(p_s, tile)
    b_dv = load_rows(p_G, tile)
    b_dv += sum_splits(p_partial, tile.o_tile, tile.m_tile, splits, tl.cast(B, tl.int64) * L.J * L.D, (None,), SB)
    tl.store(p_G + tile.o_tile, b_dv, mask=tile.m_tile)
    store_ds(b_s, sharpness * b_dv, p_bias, p_out_mask, p_ds, tile, eps, L, R, KIND)


@triton.jit
def arrange(p_from, p_to, tile, L: tl.constexpr, S: tl.constexpr):
    """Copies vectors [B, J, D] to the order of strips.py, as one of S."""
    if p_to is not None:
        b_value = tl.zeros(tile.m_tile.shape, tl.float32)
        if p_from is not None:
            b_value = load_rows(p_from, tile)
        store_vector(p_to, b_value, tile, L, S)


@triton.jit(do_not_specialize=["B"])
def arrange_kernel(
    p_query, p_dfirst, p_precision, p_center, p_dsecond, p_s,  # [B, J, D] float32, or None for 0
    # Out, or None: the vectors in the order of strips.py.
    p_V, p_ds, p_precision_strips, p_center_strips, p_dsecond_strips, p_s_strips,
    B, eps, sharpness,
    L: tl.constexpr, DP: tl.constexpr, RB: tl.constexpr, R: tl.constexpr, KIND: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Each output is one of R vectors. If p_ds is given, V and ds are one iteration of a state of R iterations."""
    begin(PDL)
    tile = row_tile(B, L, DP, RB)
    S: tl.constexpr = R if p_ds is None else 2 * R
    arrange(p_query, p_V, tile, L, S)
    arrange(p_dfirst, p_ds, tile, L, S)
    arrange(p_precision, p_precision_strips, tile, L, R)
    arrange(p_center, p_center_strips, tile, L, R)
    arrange(p_dsecond, p_dsecond_strips, tile, L, R)
    arrange(p_s, p_s_strips, tile, L, R)


@triton.jit(do_not_specialize=["n", "J", "S", "terms", "plane"])
def add_terms_kernel(
    p_terms,  # [R, rows, J, S] float32
    p_sum,  # [rows, S], out: sums over the iterations and j
    n, J, S, terms, plane,  # n = rows S, terms = R J, plane = rows J S
    WIDTH: tl.constexpr, SB: tl.constexpr, PDL: tl.constexpr = False,
):
    """The gradient of the activations from its terms. A program has WIDTH of the n sums and reads SB terms at once."""
    begin(PDL)
    o_sum = tl.cast(tl.program_id(0), tl.int64) * WIDTH + tl.arange(0, WIDTH)
    p_row = p_terms + o_sum // S * (tl.cast(J, tl.int64) * S) + o_sum % S
    b_total = tl.zeros([WIDTH, SB], tl.float32)
    for start in range(0, terms, SB):
        term = start + tl.arange(0, SB)
        o_term = tl.cast(term // J, tl.int64) * plane + tl.cast(term % J, tl.int64) * S
        m_tile = (o_sum < n)[:, None] & (term < terms)[None, :]
        b_total += tl.load(p_row[:, None] + o_term[None, :], mask=m_tile, other=0.0)
    tl.store(p_sum + o_sum, tl.sum(b_total, 1), mask=o_sum < n)


@triton.jit(do_not_specialize=["splits"])
def add_up_kernel(
    p_partial,  # [splits, n] float32, or one element of the last axis of [splits, n, STEP]
    p_sum,  # [n], out
    n, splits,
    WIDTH: tl.constexpr, SB: tl.constexpr, STEP: tl.constexpr = 1, PDL: tl.constexpr = False,
):
    """A program has WIDTH of the n sums."""
    begin(PDL)
    o_tile = tl.cast(tl.program_id(0), tl.int64) * WIDTH + tl.arange(0, WIDTH)[None, :]
    plane = tl.cast(n, tl.int64) * STEP
    b_total = sum_splits(p_partial, o_tile * STEP, o_tile < n, splits, plane, (None,), SB)
    tl.store(p_sum + o_tile, b_total, mask=o_tile < n)


@triton.jit(do_not_specialize=["B", "samples"])
def bias_gradient_kernel(
    p_ds,  # ds of the first of T iterations, in a state of R iterations
    p_dbias,  # [parts, J, D], out
    B, samples,
    L: tl.constexpr, DP: tl.constexpr, SB: tl.constexpr, T: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr = False,
):
    """A program sums ds of one output over T iterations and ``samples`` samples, SB samples at once."""
    begin(PDL)
    o_d = tl.arange(0, DP)
    b_total = tl.zeros([SB, DP], tl.float32)
    start_sample = tl.cast(tl.program_id(1), tl.int64) * samples
    last = tl.minimum(start_sample + samples, B)
    for start in range(0, samples, SB):
        o_b = start_sample + start + tl.arange(0, SB)
        m_b = o_b < last
        o_tile, m_tile = in_strips(RowTile(o_b * L.J + tl.program_id(0), m_b, o_d, o_b, m_b), L, 2 * R)
        for t in range(T):
            b_total += tl.load(p_ds + 2 * t * numbers(L.D // L.P, L.ROWS) + o_tile, mask=m_tile, other=0.0)
    row = tl.program_id(1) * L.J + tl.program_id(0)
    tl.store(p_dbias + row * L.D + o_d, tl.sum(b_total, 0), mask=o_d < L.D)


@triton.jit(do_not_specialize=["n"])
def inverse_counts_kernel(
    p_valid,  # [B, n] bytes
    p_inverse,  # [B] float32, out: 1 / (how many are valid + EXTRA), 0 if none is
    n,
    WIDTH: tl.constexpr, EXTRA: tl.constexpr, PDL: tl.constexpr = False,
):
    begin(PDL)
    b = tl.cast(tl.program_id(0), tl.int64)
    b_count = tl.zeros([WIDTH], tl.int32)
    for start in range(0, n, WIDTH):
        o_n = start + tl.arange(0, WIDTH)
        b_count += (tl.load(p_valid + b * n + o_n, mask=o_n < n, other=0) != 0).to(tl.int32)
    count = tl.sum(b_count, 0)
    tl.store(p_inverse + b, tl.where(count > 0, 1.0 / (count + EXTRA), 0.0))
