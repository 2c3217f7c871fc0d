"""Tiles of vectors [B, J, D] in the layout of the votes, and what is computed from vectors and votes."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .strips import fours, numbers, place
from .tiles import columns, outputs, pose_rows


class VectorTile(NamedTuple):
    """Where the components [M, F] of a tile are, see strips.py: number of the first strip, strip from there on, output
    in the tile, place in the strip, and whether the layer has these components."""

    first: Any
    local: Any
    j: Any
    place: Any
    within: Any


@triton.jit
def vector_tile(rows, T: tl.constexpr, TWO: tl.constexpr = 1):
    """Where load_vectors() finds the rows and the components of a tile.

    For computed votes, vectors are loaded in the layout in which the tensor core leaves votes, so neither goes through
    shared memory: as [M, F], where a lane has F consecutive components. The compiler distributes M to lanes first, then
    to warps, then to registers. TWO = 2: also the tile of the vectors that follow in memory, for load_state(). These
    share the axis M, because some releases of the compiler would distribute a separate axis first.
    """
    at = rows
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
        c = lane % T.LANES * OF_LANE + register // 2 % (OF_LANE // F) * F
        # The rows of a pose have no padding that is 0.
        within = c[:, None] + tl.arange(0, F)[None, :] < (4 * fours(C) if T.P == 1 else C)
        if T.P < T.PP:
            within = within & (row % T.PP < T.P)[:, None]
        # Rows outside are not used. They read the last row, because for a mask the compiler would clear registers.
        row = tl.minimum(row, (tl.minimum(rows.count * T.PP, T.BB) - 1).to(tl.int32))
        # Adds what differs between registers last. Then these offsets are part of the instruction.
        where = place(row % 16, lane % T.LANES * OF_LANE, 16) + register // 2 % (OF_LANE // F) * (16 * F)
        if TWO > 1:
            where += index // M * numbers(C, 16)
        at = VectorTile(
            rows.first * T.PP // 16, (row // 16)[:, None], (lane // T.LANES)[:, None],
            where[:, None] + tl.arange(0, F)[None, :], within,
        )  # fmt: skip
    return at


@triton.jit
def reread_tiles(at, i32, T: tl.constexpr):
    """What vector_tile() returned. If QUADRATIC, the loop over i loads the tiles again in every turn, see reread()."""
    if T.LANES > 0 and T.QUADRATIC:
        at = VectorTile(at.first + (i32 >> 31), at.local, at.j, at.place, at.within)
    return at


@triton.jit
def _load(ptr, at, n, T: tl.constexpr, S: tl.constexpr):
    C: tl.constexpr = T.D // T.P
    OUTPUT: tl.constexpr = S * numbers(C, 1 if T.VOTES else 16)
    STRIP: tl.constexpr = T.J * OUTPUT
    if T.VOTES:
        j, d = columns(n, T)
        where = ptr + at.first * STRIP + (at.local * STRIP)[:, None] + (j * OUTPUT + d)[None, :]
        tile = tl.load(where, mask=at.inside[:, None] & ((j < T.J) & (d < C))[None, :], other=0.0)
    else:
        # The last group may have tiles without any output. What they read is not used.
        n = tl.minimum(n, (T.J - 1) // T.JT)
        # Adds places and outputs before strips. Then the offsets between registers are part of the instruction.
        where = ptr + (at.j * OUTPUT + at.place) + at.first * STRIP + at.local * STRIP
        where += n * (T.JT * OUTPUT)
        if (4 * fours(C) if T.P == 1 else C) == T.DP and T.J % T.JT == 0 and T.P == T.PP:
            tile = tl.load(where)
        else:
            tile = tl.load(where, mask=at.within & (n * T.JT + at.j < T.J), other=0.0)
    return tile


@triton.jit
def vector_step(T: tl.constexpr):
    """The step from V to the ds of the same iteration."""
    return numbers(T.D // T.P, 1 if T.VOTES else 16)


@triton.jit
def _as_votes(tile, T: tl.constexpr, TWO: tl.constexpr):
    """A tile [M, F] as [BB, N], or two tiles as [BB, N, 2]."""
    F: tl.constexpr = tile.shape[1]
    parts = tl.reshape(
        tile, [TWO, T.DP // T.LANES // F, 2, T.BB // 16, T.JT * T.LANES // 4, 8, 4, F // 2, 2]
    )
    parts = tl.permute(parts, (3, 2, 5, 1, 7, 4, 6, 8, 0))
    return tl.reshape(parts, [T.BB, T.JT * T.DP] if TWO == 1 else [T.BB, T.JT * T.DP, 2])


@triton.jit
def load_vectors(ptr, at, n, T: tl.constexpr, S: tl.constexpr = 1):
    """Tile n of vectors in the order of strips.py. With S > 1, ptr points to one of S vectors. at: from vector_tile().
    Columns outside and rows that pad a pose are 0, rows without a sample hold any numbers."""
    tile = _load(ptr, at, n, T, S)
    if T.LANES > 0:
        tile = _as_votes(tile, T, 1)
    return tile


@triton.jit
def load_state(ptr, vectors, states, n, T: tl.constexpr, S: tl.constexpr):
    """Tile n of V, which means nothing without a QUERY, and of ds, which follows V in memory. vectors and states: from
    vector_tile() with TWO = 1 and TWO = 2. One load for both compiles faster."""
    if not T.QUERY:
        ds = load_vectors(ptr + vector_step(T), vectors, n, T, S)
        V = ds
    elif T.LANES > 0:
        V, ds = tl.split(_as_votes(_load(ptr, states, n, T, S), T, 2))
    else:
        V = load_vectors(ptr, vectors, n, T, S)
        ds = load_vectors(ptr + vector_step(T), vectors, n, T, S)
    return V, ds


@triton.jit
def store_vectors(ptr, value, rows, n, T: tl.constexpr):
    j, d = columns(n, T)
    within = rows.inside[:, None] & ((j < T.J) & (d < T.D // T.P))[None, :]
    at = ptr + rows.first * (T.J * T.D) + (rows.local * (T.J * T.D))[:, None] + (j * T.D + d)[None, :]
    if T.P > 1:
        at += pose_rows(T.D // T.P, T)[:, None]
    tl.store(at, value, mask=within)


@triton.jit
def load_numbers(ptr, rows, valid, n, T: tl.constexpr):
    """Tile n of float32 numbers [B, J]: [BB, JT], 0 where not valid."""
    j = outputs(n, T)
    return tl.load(ptr + rows.first * T.J + (rows.local * T.J)[:, None] + j[None, :], mask=valid, other=0.0)


@triton.jit
def store_numbers(ptr, value, rows, n, T: tl.constexpr):
    j = outputs(n, T)
    at = ptr + rows.first * T.J + (rows.local * T.J)[:, None] + j[None, :]
    tl.store(at, value, mask=rows.once[:, None] & (j < T.J)[None, :])


@triton.jit
def parts(x, T: tl.constexpr):
    """A tile [BB, N] of computed votes as a tuple of 1, 2 or 4 tiles [BB, JT, M, 2 LANES]: consecutive slices of the
    components of a lane."""
    PARTS: tl.constexpr = min(4, T.DP // (2 * T.LANES))
    M: tl.constexpr = T.DP // (2 * T.LANES * PARTS)
    if PARTS == 4:
        x = tl.permute(tl.reshape(x, [T.BB, 2, 2, M, T.JT, 2 * T.LANES]), (0, 4, 3, 5, 2, 1))
        first, second = tl.split(x)
        found = tl.split(first) + tl.split(second)
    elif PARTS == 2:
        found = tl.split(tl.permute(tl.reshape(x, [T.BB, 2, M, T.JT, 2 * T.LANES]), (0, 3, 2, 4, 1)))
    else:
        found = (tl.permute(tl.reshape(x, [T.BB, M, T.JT, 2 * T.LANES]), (0, 2, 1, 3)),)
    return found


@triton.jit
def whole(xs, T: tl.constexpr):
    """The tile that parts() took apart."""
    if len(xs) == 4:
        x = tl.permute(tl.join(tl.join(xs[0], xs[1]), tl.join(xs[2], xs[3])), (0, 5, 4, 2, 1, 3))
    elif len(xs) == 2:
        x = tl.permute(tl.join(xs[0], xs[1]), (0, 4, 2, 1, 3))
    else:
        x = tl.permute(xs[0], (0, 2, 1, 3))
    return tl.reshape(x, [T.BB, T.JT * T.DP])


@triton.jit
def no_terms(T: tl.constexpr, PARTED: tl.constexpr):
    """The sum that add_scaled() starts from: 0."""
    nothing = tl.zeros([T.BB, T.JT * T.DP], tl.float32)
    return parts(nothing, T) if PARTED else (nothing,)


@triton.jit
def add_scaled(xs, c, tile, T: tl.constexpr, PARTED: tl.constexpr):
    """Adds c * tile to xs. c: a number per output, [BB, JT]. PARTED: xs is a tuple from parts(), which keeps the
    compiler from giving the sum and all its terms the layout of an operand of the next product: twice the registers."""
    found = ()
    if PARTED:
        ys = parts(tile, T)
        for n in tl.static_range(len(ys)):
            # Without tl.fma() the compiler would multiply one by one and add in pairs for sm_100.
            found = found + (tl.fma(tl.broadcast_to(c[:, :, None, None], ys[n].shape), ys[n], xs[n]),)
    else:
        found = (xs[0] + spread(c, T) * tile,)
    return found


@triton.jit
def score(x, p, T: tl.constexpr):
    """Dot products over d of two tiles [BB, N]: [BB, JT]. All rows of a pose matrix get the sum over its rows."""
    if T.LANES == 0:
        found = tl.sum(tl.reshape(x * p, [T.BB, T.JT, T.DP]), 2)
    else:
        # The compiler adds up the products of a lane as a tree. A chain of up to eight multiply-adds before the tree
        # saves a third of the instructions. A longer chain saves little and takes long to compile.
        xs = parts(x, T)
        ps = parts(p, T)
        total = None
        for n in tl.static_range(len(xs)):
            x_even, x_odd = tl.split(tl.reshape(xs[n], [T.BB, T.JT, T.DP // (2 * len(xs)), 2]))
            p_even, p_odd = tl.split(tl.reshape(ps[n], [T.BB, T.JT, T.DP // (2 * len(xs)), 2]))
            total = x_even * p_even if n == 0 else tl.fma(x_even, p_even, total)
            total = tl.fma(x_odd, p_odd, total)
        found = tl.sum(total, 2)
    if T.PP > 1:
        found = tl.sum(tl.reshape(found, [T.BB // T.PP, T.PP, T.JT]), 1)
        found = tl.reshape(tl.broadcast_to(found[:, None, :], [T.BB // T.PP, T.PP, T.JT]), [T.BB, T.JT])
    return found


@triton.jit
def spread(c, T: tl.constexpr):
    """Repeats a number per output, [BB, JT], in all columns of the output: [BB, N]."""
    if T.LANES == 0:
        found = tl.broadcast_to(c[:, :, None], [T.BB, T.JT, T.DP])
    else:
        OF_PAIRS: tl.constexpr = T.DP // (2 * T.LANES)
        found = tl.broadcast_to(tl.reshape(c, [T.BB, 1, T.JT, 1]), [T.BB, OF_PAIRS, T.JT, 2 * T.LANES])
    return tl.reshape(found, [T.BB, T.JT * T.DP])


@triton.jit
def slope(linear, x, curvature_ptr, FACTOR: tl.constexpr, vectors, n, T: tl.constexpr):
    """linear + FACTOR curvature x for tile n. linear: a tile or None; curvature: float32 [B, J, D] or None."""
    tile = linear
    if curvature_ptr is not None:
        tile = FACTOR * load_vectors(curvature_ptr, vectors, n, T) * x
        if linear is not None:
            tile += linear
    return tile
