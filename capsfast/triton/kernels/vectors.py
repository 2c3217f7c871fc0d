"""Tiles of vectors [B, J, D], laid out as the votes they meet, and what is computed of both."""

import triton
import triton.language as tl

from .tiles import columns, outputs, pose_rows


@triton.jit
def vector_tile(
    rows, inside, J: tl.constexpr, D: tl.constexpr, P: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr,
    LANES: tl.constexpr, TWO: tl.constexpr = 1,
):
    """What load_vectors() has to know of the rows, and of where the components of a tile are.

    The tile of a product is loaded as the tensor core leaves votes, so that neither goes through shared memory: as
    [M, F], where a lane has F components that follow each other. The compiler deals out the M first to lanes, then to
    warps, then to registers. TWO = 2: beside it the tile of the vectors that follow in memory, for load_state(). An
    axis of its own for these would be dealt out first by some releases of the compiler.
    """
    if LANES == 0:
        at = (rows[0], rows[1], rows[2], inside)
    else:
        C: tl.constexpr = D // P
        BB: tl.constexpr = rows[1].shape[0]
        PP: tl.constexpr = rows[2].shape[0]
        # A warp has 16 rows, or the columns of whole outputs.
        DOWN: tl.constexpr = BB // 16
        ACROSS: tl.constexpr = JT * LANES // 4
        F: tl.constexpr = min(4, DP // LANES)
        M: tl.constexpr = BB * JT * DP // F
        index = tl.arange(0, TWO * M)
        lane = index // 32 % ACROSS * 4 + index % 4
        register = index // (32 * ACROSS * DOWN)
        row = index // (32 * ACROSS) % DOWN * 16 + register % 2 * 8 + index // 4 % 8
        # Rows outside are not used: they read the last ones, as for a mask the compiler would clear registers.
        last = (tl.minimum(rows[3], BB) - 1).to(rows[1].dtype)
        local = tl.minimum((row // PP).to(rows[1].dtype), last)[:, None]
        j = (lane // LANES)[:, None]
        d = lane % LANES * (DP // LANES) + register // 2 % (DP // LANES // F) * F
        d = d[:, None] + tl.arange(0, F)[None, :]
        within = d < C
        if P > 1:
            within = within & (row % PP < P)[:, None]
            d += (tl.minimum(row % PP, P - 1) * C)[:, None]
        if TWO > 1:
            d += (index // M * D)[:, None]
        at = (rows[0], local, j, d, within)
    return at


@triton.jit
def reread_tiles(at, i32, LANES: tl.constexpr, AGAIN: tl.constexpr):
    """What vector_tile() returned, so that if AGAIN tiles are loaded in every turn of the loop: see votes.reread()."""
    if LANES > 0 and AGAIN:
        at = (at[0] + (i32 >> 31), at[1], at[2], at[3], at[4])
    return at


@triton.jit
def _load(
    ptr, at, n, J: tl.constexpr, D: tl.constexpr, P: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr,
    LANES: tl.constexpr, S: tl.constexpr, AGAIN: tl.constexpr,
):
    CACHE: tl.constexpr = ".ca" if AGAIN else ""
    if LANES == 0:
        j, d = columns(n, JT, DP, LANES, False)
        place = ptr + at[0] * (J * S * D) + (at[1] * (J * S * D))[:, None] + (j * (S * D) + d)[None, :]
        if P > 1:
            place += pose_rows(at, D // P)[:, None]
        tile = tl.load(place, mask=at[3][:, None] & ((j < J) & (d < D // P))[None, :], other=0.0, cache_modifier=CACHE)
    else:
        # A last group may have whole tiles outside. What they read is not used.
        n = tl.minimum(n, (J - 1) // JT)
        # Tiles and components before samples: then what registers differ by is part of the instruction, and what is
        # known of the alignment of ptr is not lost, as it is where two numbers are added to a pointer.
        place = ptr + (at[2] * (S * D) + at[3]) + at[0] * (J * S * D) + at[1] * (J * S * D)
        place += n * (JT * S * D)
        if D // P == DP and J % JT == 0 and P & (P - 1) == 0:
            tile = tl.load(place, cache_modifier=CACHE)
        else:
            tile = tl.load(place, mask=at[4] & (n * JT + at[2] < J), other=0.0, cache_modifier=CACHE)
    return tile


@triton.jit
def _as_votes(tile, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr, TWO: tl.constexpr):
    """A tile [M, F] as [BB, N], or two of them as [BB, N, 2]."""
    F: tl.constexpr = tile.shape[1]
    BB: tl.constexpr = tile.shape[0] * F // (TWO * JT * DP)
    parts = tl.reshape(tile, [TWO, DP // LANES // F, 2, BB // 16, JT * LANES // 4, 8, 4, F // 2, 2])
    parts = tl.permute(parts, (3, 2, 5, 1, 7, 4, 6, 8, 0))
    return tl.reshape(parts, [BB, JT * DP] if TWO == 1 else [BB, JT * DP, 2])


@triton.jit
def load_vectors(
    ptr, at, n, J: tl.constexpr, D: tl.constexpr, P: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr,
    LANES: tl.constexpr, S: tl.constexpr = 1, AGAIN: tl.constexpr = False,
):
    """Tile n of float32 vectors [B, J, D]. With S > 1 they are one of the S vectors in [B, J, S, D], to which ptr
    points. at: from vector_tile(). Columns outside and rows that pad a pose are 0, rows of no sample are anything.

    AGAIN: the same tile was loaded before. The cache modifier makes this a different load, so that the compiler reads
    L1 again instead of keeping the tile in registers in between.
    """
    tile = _load(ptr, at, n, J, D, P, JT, DP, LANES, S, AGAIN)
    if LANES > 0:
        tile = _as_votes(tile, JT, DP, LANES, 1)
    return tile


@triton.jit
def load_state(
    ptr, at, n, J: tl.constexpr, D: tl.constexpr, P: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr,
    LANES: tl.constexpr, S: tl.constexpr, AGAIN: tl.constexpr = False,
):
    """Tile n of V and of ds, which follows it in memory. at: of both. One load for both is less to compile."""
    if LANES > 0:
        V, ds = tl.split(_as_votes(_load(ptr, at, n, J, D, P, JT, DP, LANES, S, AGAIN), JT, DP, LANES, 2))
    else:
        V = load_vectors(ptr, at, n, J, D, P, JT, DP, LANES, S, AGAIN)
        ds = load_vectors(ptr + D, at, n, J, D, P, JT, DP, LANES, S, AGAIN)
    return V, ds


@triton.jit
def store_vectors(
    ptr, value, rows, ok, n, J: tl.constexpr, D: tl.constexpr, P: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr,
    LANES: tl.constexpr,
):
    j, d = columns(n, JT, DP, LANES, False)
    inside = ok[:, None] & ((j < J) & (d < D // P))[None, :]
    at = ptr + rows[0] * (J * D) + (rows[1] * (J * D))[:, None] + (j * D + d)[None, :]
    if P > 1:
        at += pose_rows(rows, D // P)[:, None]
    tl.store(at, value, mask=inside)


@triton.jit
def load_numbers(ptr, rows, valid, n, J: tl.constexpr, JT: tl.constexpr):
    """Tile n of float32 numbers [B, J]: [BB, JT], 0 where not valid."""
    j = outputs(n, JT, False)
    return tl.load(ptr + rows[0] * J + (rows[1] * J)[:, None] + j[None, :], mask=valid, other=0.0)


@triton.jit
def store_numbers(ptr, value, rows, ok, n, J: tl.constexpr, JT: tl.constexpr):
    j = outputs(n, JT, False)
    at = ptr + rows[0] * J + (rows[1] * J)[:, None] + j[None, :]
    tl.store(at, value, mask=ok[:, None] & (j < J)[None, :])


@triton.jit
def parts(x, PARTS: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr):
    """A tile [BB, N] as a tuple of 1, 2 or 4 tiles [BB, JT, M, 2 LANES], what follows each other of what a lane has."""
    BB: tl.constexpr = x.shape[0]
    M: tl.constexpr = DP // (2 * LANES * PARTS)
    if PARTS == 4:
        x = tl.permute(tl.reshape(x, [BB, 2, 2, M, JT, 2 * LANES]), (0, 4, 3, 5, 2, 1))
        first, second = tl.split(x)
        found = tl.split(first) + tl.split(second)
    elif PARTS == 2:
        found = tl.split(tl.permute(tl.reshape(x, [BB, 2, M, JT, 2 * LANES]), (0, 3, 2, 4, 1)))
    else:
        found = (tl.permute(tl.reshape(x, [BB, M, JT, 2 * LANES]), (0, 2, 1, 3)),)
    return found


@triton.jit
def score(x, p, rows, BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr):
    """Dot products over d of two tiles [BB, N]: [BB, JT]. All rows of a pose have their sum."""
    if LANES == 0:
        found = tl.sum(tl.reshape(x * p, [BB, JT, DP]), 2)
    else:
        # The compiler adds up what a lane has as a tree of products. Up to four multiply-adds in a chain first save a
        # quarter of its instructions. More of them save little, and take the compiler long.
        PARTS: tl.constexpr = min(4, DP // (2 * LANES))
        xs = parts(x, PARTS, JT, DP, LANES)
        ps = parts(p, PARTS, JT, DP, LANES)
        total = xs[0] * ps[0]
        for n in tl.static_range(1, PARTS):
            total = tl.fma(xs[n], ps[n], total)
        found = tl.sum(tl.reshape(total, [BB, JT, DP // PARTS]), 2)
    PP: tl.constexpr = rows[2].shape[0]
    if PP > 1:
        found = tl.sum(tl.reshape(found, [BB // PP, PP, JT]), 1)
        found = tl.reshape(tl.broadcast_to(found[:, None, :], [BB // PP, PP, JT]), [BB, JT])
    return found


@triton.jit
def spread(c, BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr):
    """Repeats a number per output, [BB, JT], in all columns of the output: [BB, N]."""
    if LANES == 0:
        found = tl.broadcast_to(c[:, :, None], [BB, JT, DP])
    else:
        found = tl.broadcast_to(tl.reshape(c, [BB, 1, JT, 1]), [BB, DP // (2 * LANES), JT, 2 * LANES])
    return tl.reshape(found, [BB, JT * DP])


@triton.jit
def slope(
    linear, x, curvature_ptr, FACTOR: tl.constexpr, at, n,
    J: tl.constexpr, D: tl.constexpr, P: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr,
    AGAIN: tl.constexpr = False,
):
    """linear + FACTOR curvature x for tile n. linear: a tile or None; curvature: float32 [B, J, D] or None."""
    if curvature_ptr is None:
        tile = linear
    else:
        tile = FACTOR * load_vectors(curvature_ptr, at, n, J, D, P, JT, DP, LANES, 1, AGAIN) * x
        if linear is not None:
            tile += linear
    return tile


@triton.jit
def centered(
    votes, center_ptr, mask_ptr, out_mask_ptr, valid, at, n,
    J: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr,
    LANES: tl.constexpr,
):
    """Tile n of x, the votes about the center, and 0 for masked pairs: the votes of a masked output capsule may be NaN,
    and a coupling of 0 does not hide that where it multiplies x."""
    if center_ptr is not None:
        votes -= load_vectors(center_ptr, at, n, J, D, P, JT, DP, LANES)
    if mask_ptr is not None or out_mask_ptr is not None:
        votes = tl.where(spread(valid, BB, JT, DP, LANES), votes, 0.0)
    return votes
