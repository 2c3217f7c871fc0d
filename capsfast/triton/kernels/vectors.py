"""Tiles of vectors [B, J, D] in the layout of the votes, and what is computed from vectors and votes."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .strips import fours, numbers, strip_offset
from .tiles import columns, outputs, pose_rows


class VectorTile(NamedTuple):
    """Where the components [M, F] of a tile lie, see strips.py. start: the first strip. o_strip: strip, counted from
    start. o_j: output in the tile. o_place: place in the strip. m_components: whether the layer has the component."""

    start: Any
    o_strip: Any
    o_j: Any
    o_place: Any
    m_components: Any


@triton.jit
def vector_tile(rows, T: tl.constexpr, TWO: tl.constexpr = 1):
    """Where load_vectors() finds the rows and the components of a tile.

    For computed votes, vectors are loaded in the layout in which the tensor core leaves votes, so neither votes nor
    vectors go through shared memory. A tile is [M, F]: a lane has F consecutive components. The compiler distributes M
    to lanes first, then to warps, then to registers. TWO = 2: also the tile of the vectors that follow in memory, for
    load_state(). Both tiles share the axis M, because some releases of Triton would distribute a separate axis first.
    """
    o_tile = rows
    if T.LANES > 0:
        C: tl.constexpr = T.D // T.P
        # A warp has 16 rows, or the columns of whole outputs.
        DOWN: tl.constexpr = T.BB // 16
        ACROSS: tl.constexpr = T.JT * T.LANES // 4
        OF_LANE: tl.constexpr = T.DP // T.LANES
        F: tl.constexpr = min(4, OF_LANE)
        M: tl.constexpr = T.BB * T.JT * T.DP // F
        index = tl.arange(0, TWO * M)
        lane = index // 32 % ACROSS * 4 + index % 4
        register = index // (32 * ACROSS * DOWN)
        row = index // (32 * ACROSS) % DOWN * 16 + register % 2 * 8 + index // 4 % 8
        o_c = lane % T.LANES * OF_LANE + register // 2 % (OF_LANE // F) * F
        # Vectors are padded with 0 to fours, but rows of a pose matrix are not.
        m_components = o_c[:, None] + tl.arange(0, F)[None, :] < (4 * fours(C) if T.P == 1 else C)
        if T.P < T.PP:
            m_components = m_components & (row % T.PP < T.P)[:, None]
        # Rows without a sample add 0 times what they read. They read the last row of the last sample, because a mask
        # would clear registers, and because rows that pad a pose may hold NaN.
        row = tl.minimum(row, (tl.minimum(rows.count * T.PP, T.BB) - 1 - (T.PP - T.P)).to(tl.int32))
        # Adds what differs between registers last. Then these offsets are part of the instruction.
        o_place = strip_offset(row % 16, lane % T.LANES * OF_LANE, 16) + register // 2 % (OF_LANE // F) * (16 * F)
        if TWO > 1:
            o_place += index // M * numbers(C, 16)
        o_tile = VectorTile(
            rows.start * T.PP // 16, (row // 16)[:, None], (lane // T.LANES)[:, None],
            o_place[:, None] + tl.arange(0, F)[None, :], m_components,
        )  # fmt: skip
    return o_tile


@triton.jit
def reread_tiles(o_tile, i32, T: tl.constexpr):
    """What vector_tile() returned. If QUADRATIC, the loop over i loads the tiles again in every turn, see reread()."""
    if T.LANES > 0 and T.QUADRATIC:
        o_tile = VectorTile(o_tile.start + (i32 >> 31), o_tile.o_strip, o_tile.o_j, o_tile.o_place, o_tile.m_components)
    return o_tile


@triton.jit
def _load(p_vectors, o_tile, n, T: tl.constexpr, S: tl.constexpr):
    C: tl.constexpr = T.D // T.P
    OUTPUT: tl.constexpr = S * numbers(C, 1 if T.VOTES else 16)
    STRIP: tl.constexpr = T.J * OUTPUT
    if T.VOTES:
        o_j, o_d = columns(n, T)
        p_tile = p_vectors + o_tile.start * STRIP + (o_tile.o_b * STRIP)[:, None] + (o_j * OUTPUT + o_d)[None, :]
        b_tile = tl.load(p_tile, mask=o_tile.m_rows[:, None] & ((o_j < T.J) & (o_d < C))[None, :], other=0.0)
    else:
        # The last section may have tiles without any output. What they read is not used.
        n = tl.minimum(n, (T.J - 1) // T.JT)
        # Adds places and outputs before strips. Then the offsets between registers are part of the instruction.
        p_tile = p_vectors + (o_tile.o_j * OUTPUT + o_tile.o_place) + o_tile.start * STRIP + o_tile.o_strip * STRIP
        p_tile += n * (T.JT * OUTPUT)
        if (4 * fours(C) if T.P == 1 else C) == T.DP and T.J % T.JT == 0 and T.P == T.PP:
            b_tile = tl.load(p_tile)
        else:
            b_tile = tl.load(p_tile, mask=o_tile.m_components & (n * T.JT + o_tile.o_j < T.J), other=0.0)
    return b_tile


@triton.jit
def vector_step(T: tl.constexpr):
    """The step from V to the ds of the same iteration."""
    return numbers(T.D // T.P, 1 if T.VOTES else 16)


@triton.jit
def _as_votes(b_tile, T: tl.constexpr, TWO: tl.constexpr):
    """A tile [M, F] as [BB, N], or two tiles as [BB, N, 2]."""
    F: tl.constexpr = b_tile.shape[1]
    b_parts = tl.reshape(
        b_tile, [TWO, T.DP // T.LANES // F, 2, T.BB // 16, T.JT * T.LANES // 4, 8, 4, F // 2, 2]
    )
    b_parts = tl.permute(b_parts, (3, 2, 5, 1, 7, 4, 6, 8, 0))
    return tl.reshape(b_parts, [T.BB, T.JT * T.DP] if TWO == 1 else [T.BB, T.JT * T.DP, 2])


@triton.jit
def load_vectors(p_vectors, o_vectors, n, T: tl.constexpr, S: tl.constexpr = 1):
    """Tile n of vectors in the order of strips.py. With S > 1, p_vectors points to one of S vectors. Columns outside
    and rows that pad a pose are 0; rows without a sample hold what another row has, or 0."""
    b_tile = _load(p_vectors, o_vectors, n, T, S)
    if T.LANES > 0:
        b_tile = _as_votes(b_tile, T, 1)
    return b_tile


@triton.jit
def load_state(p_state, o_vectors, o_states, n, T: tl.constexpr, S: tl.constexpr):
    """Tile n of V, which means nothing without a QUERY, and of ds, which follows V in memory. o_vectors and o_states:
    from vector_tile() with TWO = 1 and TWO = 2. One load for both compiles faster."""
    if not T.QUERY:
        b_ds = load_vectors(p_state + vector_step(T), o_vectors, n, T, S)
        b_V = b_ds
    elif T.LANES > 0:
        b_V, b_ds = tl.split(_as_votes(_load(p_state, o_states, n, T, S), T, 2))
    else:
        b_V = load_vectors(p_state, o_vectors, n, T, S)
        b_ds = load_vectors(p_state + vector_step(T), o_vectors, n, T, S)
    return b_V, b_ds


@triton.jit
def store_vectors(p_vectors, b_value, rows, n, T: tl.constexpr):
    o_j, o_d = columns(n, T)
    m_tile = rows.m_rows[:, None] & ((o_j < T.J) & (o_d < T.D // T.P))[None, :]
    p_tile = p_vectors + rows.start * (T.J * T.D) + (rows.o_b * (T.J * T.D))[:, None] + (o_j * T.D + o_d)[None, :]
    if T.P > 1:
        p_tile += pose_rows(T.D // T.P, T)[:, None]
    tl.store(p_tile, b_value, mask=m_tile)


@triton.jit
def load_numbers(p_numbers, rows, m_pairs, n, T: tl.constexpr):
    """Tile n of float32 numbers [B, J]: [BB, JT], 0 outside m_pairs."""
    o_j = outputs(n, T)
    return tl.load(p_numbers + rows.start * T.J + (rows.o_b * T.J)[:, None] + o_j[None, :], mask=m_pairs, other=0.0)


@triton.jit
def store_numbers(p_numbers, b_value, rows, n, T: tl.constexpr):
    o_j = outputs(n, T)
    p_tile = p_numbers + rows.start * T.J + (rows.o_b * T.J)[:, None] + o_j[None, :]
    tl.store(p_tile, b_value, mask=rows.m_once[:, None] & (o_j < T.J)[None, :])


@triton.jit
def parts(b_x, T: tl.constexpr):
    """A tile [BB, N] of computed votes as a tuple of 1, 2 or 4 tiles [BB, JT, M, 2 LANES]: consecutive slices of the
    components of a lane."""
    PARTS: tl.constexpr = min(4, T.DP // (2 * T.LANES))
    M: tl.constexpr = T.DP // (2 * T.LANES * PARTS)
    if PARTS == 4:
        b_x = tl.permute(tl.reshape(b_x, [T.BB, 2, 2, M, T.JT, 2 * T.LANES]), (0, 4, 3, 5, 2, 1))
        b_half0, b_half1 = tl.split(b_x)
        b_parts = tl.split(b_half0) + tl.split(b_half1)
    elif PARTS == 2:
        b_parts = tl.split(tl.permute(tl.reshape(b_x, [T.BB, 2, M, T.JT, 2 * T.LANES]), (0, 3, 2, 4, 1)))
    else:
        b_parts = (tl.permute(tl.reshape(b_x, [T.BB, M, T.JT, 2 * T.LANES]), (0, 2, 1, 3)),)
    return b_parts


@triton.jit
def whole(b_parts, T: tl.constexpr):
    """The tile that parts() took apart."""
    if len(b_parts) == 4:
        b_x = tl.permute(tl.join(tl.join(b_parts[0], b_parts[1]), tl.join(b_parts[2], b_parts[3])), (0, 5, 4, 2, 1, 3))
    elif len(b_parts) == 2:
        b_x = tl.permute(tl.join(b_parts[0], b_parts[1]), (0, 4, 2, 1, 3))
    else:
        b_x = tl.permute(b_parts[0], (0, 2, 1, 3))
    return tl.reshape(b_x, [T.BB, T.JT * T.DP])


@triton.jit
def no_terms(T: tl.constexpr, PARTED: tl.constexpr):
    """The sum that add_scaled() starts from: 0."""
    b_zero = tl.zeros([T.BB, T.JT * T.DP], tl.float32)
    return parts(b_zero, T) if PARTED else (b_zero,)


@triton.jit
def add_scaled(b_sums, b_c, b_tile, T: tl.constexpr, PARTED: tl.constexpr):
    """Adds c * tile to b_sums. b_c: [BB, JT]. PARTED: b_sums are from parts(). Otherwise the compiler gives the sum and
    all its terms the layout of an operand of the next product, which takes twice the registers."""
    b_next = ()
    if PARTED:
        b_terms = parts(b_tile, T)
        for n in tl.static_range(len(b_terms)):
            # Without tl.fma() the compiler would multiply one by one and add in pairs for sm_100.
            b_next = b_next + (tl.fma(tl.broadcast_to(b_c[:, :, None, None], b_terms[n].shape), b_terms[n], b_sums[n]),)
    else:
        b_next = (b_sums[0] + spread(b_c, T) * b_tile,)
    return b_next


@triton.jit
def score(b_x, b_p, T: tl.constexpr):
    """Dot products over d of two tiles [BB, N]: [BB, JT]. All rows of a pose matrix get the sum over its rows."""
    if T.LANES == 0:
        b_score = tl.sum(tl.reshape(b_x * b_p, [T.BB, T.JT, T.DP]), 2)
    else:
        # The compiler adds up the products of a lane as a tree. A chain of up to eight multiply-adds before the tree
        # saves a third of the instructions. A longer chain saves little and takes long to compile.
        b_xs = parts(b_x, T)
        b_ps = parts(b_p, T)
        b_total = None
        for n in tl.static_range(len(b_xs)):
            b_x_even, b_x_odd = tl.split(tl.reshape(b_xs[n], [T.BB, T.JT, T.DP // (2 * len(b_xs)), 2]))
            b_p_even, b_p_odd = tl.split(tl.reshape(b_ps[n], [T.BB, T.JT, T.DP // (2 * len(b_xs)), 2]))
            b_total = b_x_even * b_p_even if n == 0 else tl.fma(b_x_even, b_p_even, b_total)
            b_total = tl.fma(b_x_odd, b_p_odd, b_total)
        b_score = tl.sum(b_total, 2)
    if T.PP > 1:
        b_score = tl.sum(tl.reshape(b_score, [T.BB // T.PP, T.PP, T.JT]), 1)
        b_score = tl.reshape(tl.broadcast_to(b_score[:, None, :], [T.BB // T.PP, T.PP, T.JT]), [T.BB, T.JT])
    return b_score


@triton.jit
def spread(b_c, T: tl.constexpr):
    """Repeats a number per output, [BB, JT], in all columns of the output: [BB, N]."""
    if T.LANES == 0:
        b_columns = tl.broadcast_to(b_c[:, :, None], [T.BB, T.JT, T.DP])
    else:
        OF_PAIRS: tl.constexpr = T.DP // (2 * T.LANES)
        b_columns = tl.broadcast_to(tl.reshape(b_c, [T.BB, 1, T.JT, 1]), [T.BB, OF_PAIRS, T.JT, 2 * T.LANES])
    return tl.reshape(b_columns, [T.BB, T.JT * T.DP])


@triton.jit
def slope(
    b_linear, b_x, p_curvature, FACTOR: tl.constexpr, o_vectors, n, T: tl.constexpr, S: tl.constexpr = 1, step=0
):
    """linear + FACTOR curvature x for tile n. b_linear: a tile or None. The curvature is one of S vectors, ``step``
    numbers behind p_curvature; the curvature is 0 if p_curvature is None."""
    b_slope = b_linear
    if p_curvature is not None:
        b_slope = FACTOR * load_vectors(p_curvature + step, o_vectors, n, T, S) * b_x
        if b_linear is not None:
            b_slope += b_linear
    return b_slope
