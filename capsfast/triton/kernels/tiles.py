"""What every kernel does with a tile [BB, N]: BB samples, N columns. A column is one component d of one output j.

A kernel holds a tuple of NT tiles with N = JT * DP columns each: JT outputs, their D components padded to DP. rows is
(number of the first sample, the sample of every row from there on [BB], the rows of a pose [PP], samples there are).
Strides are tuples: xs of u (b, i, -, k) or votes (b, i, j, d), ws of the weight (i, j, d, k). The address of a tile is
64-bit. Offsets within it are 32-bit, which takes half the registers, unless they may be too large (WIDE, launch.py).

The columns of votes that are read are output after output (LANES = 0). Those of a product lie such that LANES
neighbouring lanes of a warp have all of an output: a dot product over d is one within lanes and a sum over a few of
them. Tensor cores leave lane t of four the columns 8 q + 2 t and 8 q + 2 t + 1, for all q. So with JT = 2, DP = 16,
LANES = 2, where [j, d] is component d of output j of the tile:

    column        0 1     2 3     4 5     6 7  |   8 9    10 11   12 13   14 15  | ...    30 31
    lane          0       1       2       3    |   0       1       2       3     | ...    3
    [j, d]      [0, 0:2] [0, 8:10] [1, 0:2] [1, 8:10] | [0, 2:4] ...               ...    [1, 14:16]

A warp has 16 whole rows or, if these are too long, some warps share the columns of a row, whole outputs again if
these are short enough (LANES up to 4; with more an output is spread over warps).

Pose matrices are P rows of a tile for every sample, padded to PP. They share the weight as samples do, so their product
is that of vectors, with D / P components. What a sample has once, such as its logits and coupling, is the same in all
its rows, and the first of them stores it.

Votes with positions, [B, I, J, D, S], have B S samples, and a tile has those of one b. x_b, l_b and d_b then are
strides over positions, and x_jump, l_jump and d_jump are added for every b before. Tensors [B, I, J] and [B, I, J, D]
have the positions behind; all others, such as [B, J, D] and [B, I], have a row for each sample.
"""

import triton
import triton.language as tl


@triton.jit
def batch_rows(tile, B, positions, BB: tl.constexpr, PP: tl.constexpr, WIDE: tl.constexpr):
    local = tl.arange(0, BB)
    if WIDE:
        local = local.to(tl.int64)
    if PP > 1:
        local = local // PP
    if positions is None:
        first = tl.cast(tile, tl.int64) * (BB // PP)
        count = B - first
    else:
        tiles = (positions + BB - 1) // BB
        first = tl.cast(tile // tiles, tl.int64) * positions + (tile % tiles) * BB
        count = (first // positions + 1) * positions - first
    return first, local, tl.arange(0, PP), count


@triton.jit
def valid_rows(rows, P: tl.constexpr):
    """Which rows exist, and of these the first of every sample: [BB] each."""
    inside = rows[1] < rows[3]
    once = inside
    if P > 1:
        pose = pose_rows(rows, 1)
        inside = inside & (pose < P)
        once = once & (pose == 0)
    return inside, once


@triton.jit
def batch_tiles(B, positions, BB: tl.constexpr, PP: tl.constexpr):
    """How many tiles have all samples."""
    if positions is None:
        tiles = (B + BB // PP - 1) // (BB // PP)
    else:
        tiles = B // positions * ((positions + BB - 1) // BB)
    return tiles


@triton.jit
def of_batch(ptr, rows, positions, jump):
    """The pointer from which the strides over positions lead to the samples."""
    if positions is not None:
        ptr += rows[0] // positions * jump
    return ptr


@triton.jit
def pose_rows(rows, OFFSET: tl.constexpr):
    """OFFSET times every row's number in its pose: [BB]."""
    BB: tl.constexpr = rows[1].shape[0]
    PP: tl.constexpr = rows[2].shape[0]
    return (tl.arange(0, BB) % PP).to(rows[1].dtype) * OFFSET


@triton.jit
def outputs(n, JT: tl.constexpr, WIDE: tl.constexpr):
    """The output capsules j of tile n: [JT]."""
    j = n * JT + tl.arange(0, JT)
    if WIDE:
        j = j.to(tl.int64)
    return j


@triton.jit
def columns(n, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr):
    """j and d of the columns of tile n: [N] each."""
    column = tl.arange(0, JT * DP)
    if WIDE:
        column = column.to(tl.int64)
    if LANES == 0:
        j, d = column // DP, column % DP
    else:
        lane = column // 2 % (JT * LANES)
        j, d = lane // LANES, lane % LANES * (DP // LANES) + column // (2 * JT * LANES) * 2 + column % 2
    return n * JT + j, d


@triton.jit
def first_tile(group, J: tl.constexpr, JT: tl.constexpr, NT: tl.constexpr):
    """The first tile of a group of outputs. Of a single one it is a constant, and so are the offsets of its tiles."""
    return 0 if NT * JT >= J else group * NT


@triton.jit
def components(k0, KP: tl.constexpr, WIDE: tl.constexpr):
    k = k0 + tl.arange(0, KP)
    if WIDE:
        k = k.to(tl.int64)
    return k


@triton.jit
def vector_tile(
    rows, inside, J: tl.constexpr, D: tl.constexpr, P: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr,
    LANES: tl.constexpr, TWO: tl.constexpr = 1,
):
    """What load_vectors() has to know of the rows, and of where the components of a tile are.

    The tile of a product is loaded as the tensor core leaves votes, so that neither goes through shared memory: as
    [M, F], where a lane has F components that follow each other. The compiler deals out the M first to lanes, then to
    warps, then to registers. TWO = 2: beside it the tile of the vectors that follow in memory.
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
        sample = (rows[0] + tl.minimum((row // PP).to(tl.int64), rows[3] - 1))[:, None]
        j = (lane // LANES)[:, None]
        d = lane % LANES * (DP // LANES) + register // 2 % (DP // LANES // F) * F
        d = d[:, None] + tl.arange(0, F)[None, :]
        within = d < C
        if P > 1:
            d += (tl.minimum(row % PP, P - 1) * C)[:, None]
        if TWO > 1:
            d += (index // M * D)[:, None]
        at = (sample, j, d, within)
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
        j = tl.minimum(n, (J - 1) // JT) * JT + at[1]
        # 64 bits for the samples alone, so that what tiles and components add is part of the instruction.
        place = ptr + at[0] * (J * S * D) + (j * (S * D) + at[2])
        if D // P == DP and J % JT == 0:
            tile = tl.load(place, cache_modifier=CACHE)
        else:
            tile = tl.load(place, mask=at[3] & (j < J), other=0.0, cache_modifier=CACHE)
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
    points. at: from vector_tile(). Columns outside are 0, rows outside anything that the tile has.

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
def per_input(ptr, rows, ok, i, I):
    """Float32 numbers [B, I] of input capsule i: [BB], 0 where not ok."""
    return tl.load(ptr + (rows[0] * I + i) + rows[1] * I, mask=ok, other=0.0)


@triton.jit
def score(x, p, rows, BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr):
    """Dot products over d of two tiles [BB, N]: [BB, JT]. All rows of a pose have their sum."""
    if LANES == 0:
        found = tl.sum(tl.reshape(x * p, [BB, JT, DP]), 2)
    else:
        # What a lane has, then what the lanes of an output have.
        found = tl.sum(tl.reshape(x * p, [BB, DP // (2 * LANES), JT, LANES, 2]), 1)
        found = tl.sum(found, 3)
        found = tl.reshape(found, [BB, JT]) if LANES == 1 else tl.sum(found, 2)
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
        found = tl.broadcast_to(c[:, None, :, None], [BB, DP // (2 * LANES), JT, 2 * LANES])
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


@triton.jit
def head(x):
    """x cut to TF32. The rest, x - head(x), is exact; it has 2 bits more than TF32 holds."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def nearest(x):
    """x such that the tensor core, which cuts it to TF32, finds the nearest; NaN may have a payload that overflows."""
    return tl.where(x == x, (x.to(tl.int32, bitcast=True) + 4096).to(tl.float32, bitcast=True), x)


@triton.jit
def turned(a, TURN: tl.constexpr):
    """a with its last two axes swapped, if TURN."""
    if TURN:
        a = tl.trans(a) if len(a.shape) == 2 else tl.permute(a, (0, 2, 1))
    return a


@triton.jit
def product(a, b, acc, DOT: tl.constexpr, TURN: tl.constexpr = False):
    """acc + a b, or if TURN acc + a^T b, by tensor cores. DOT "half": 16-bit operands. "tf32": one TF32 product.
    "tf32x3": three TF32 products, for the accuracy of float32. "tf32x2": two, for a b that was converted from 16 bits
    and is exact in TF32.

    input_precision="tf32x3" is not used, as it also replaces infinities, with a select for every element. a is turned
    after it is split: then it goes through shared memory, else through many shuffles. max_num_imprecise_acc means
    nothing for these types but that the compiler leaves sums outside of the tensor core where they are.
    """
    if DOT == "half":
        acc = tl.dot(turned(a, TURN), b, acc, max_num_imprecise_acc=1)
    elif DOT == "tf32":
        acc = tl.dot(turned(nearest(a), TURN), nearest(b), acc, input_precision="tf32", max_num_imprecise_acc=1)
    else:
        a_head = head(a)
        a_rest = turned(a - a_head, TURN)
        a_head = turned(a_head, TURN)
        acc = tl.dot(a_rest, head(b) if DOT == "tf32x3" else b, acc, input_precision="tf32")
        if DOT == "tf32x3":
            b_head = head(b)
            acc = tl.dot(a_head, b - b_head, acc, input_precision="tf32")
            acc = tl.dot(a_head, b_head, acc, input_precision="tf32")
        else:
            acc = tl.dot(a_head, b, acc, input_precision="tf32")
    return acc


@triton.jit
def columns_by_warp(tile, ACROSS: tl.constexpr, PAIRS: tl.constexpr):
    """A tile [BB, N] for a product that sums over columns: [ACROSS, BB, N / ACROSS], those of every warp of a row.

    Within 8 columns the order becomes that in which the tensor core takes them, so that every lane has what it needs:
    two neighbours if PAIRS, as the compiler lays out operands that were 16-bit, else every fourth.
    """
    BB: tl.constexpr = tile.shape[0]
    N: tl.constexpr = tile.shape[1]
    SHAPE: tl.constexpr = [BB, N] if ACROSS == 1 else [ACROSS, BB, N // ACROSS]
    if PAIRS:
        parts = tl.permute(tl.reshape(tile, [BB, N // (8 * ACROSS), ACROSS, 8]), (2, 0, 1, 3))
    else:
        parts = tl.permute(tl.reshape(tile, [BB, N // (8 * ACROSS), ACROSS, 4, 2]), (2, 0, 1, 4, 3))
    return tl.reshape(parts, SHAPE)


@triton.jit
def weights_by_warp(w, ACROSS: tl.constexpr, PAIRS: tl.constexpr):
    """The same for a weight [N, KP]: [ACROSS, N / ACROSS, KP]."""
    N: tl.constexpr = w.shape[0]
    KP: tl.constexpr = w.shape[1]
    SHAPE: tl.constexpr = [N, KP] if ACROSS == 1 else [ACROSS, N // ACROSS, KP]
    if PAIRS:
        parts = tl.permute(tl.reshape(w, [N // (8 * ACROSS), ACROSS, 8, KP]), (1, 0, 2, 3))
    else:
        parts = tl.permute(tl.reshape(w, [N // (8 * ACROSS), ACROSS, 4, 2, KP]), (1, 0, 3, 2, 4))
    return tl.reshape(parts, SHAPE)


@triton.jit
def weights_together(w, ACROSS: tl.constexpr):
    """The opposite of weights_by_warp with PAIRS."""
    M: tl.constexpr = w.shape[1]
    KP: tl.constexpr = w.shape[2]
    return tl.reshape(tl.permute(tl.reshape(w, [ACROSS, M // 8, 8, KP]), (1, 0, 2, 3)), [ACROSS * M, KP])


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
    return tl.load(at, mask=ok[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def weight_tile(
    w_ptr, i, n, k0, ws,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr,
    KP: tl.constexpr, WIDE: tl.constexpr,
):
    """W of input capsule i for the columns of tile n, components k from k0 on: [N, KP], 0 outside."""
    j, d = columns(n, JT, DP, LANES, WIDE)
    k = components(k0, KP, WIDE)
    at = w_ptr + i * ws[0] + (j * ws[1] + d * ws[2])[:, None] + (k * ws[3])[None, :]
    return tl.load(at, mask=((j < J) & (d < D))[:, None] & (k < K)[None, :], other=0.0)


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
def valid_inputs(mask_ptr, rows, ok, i, m_b, m_i):
    """For which samples input capsule i is not masked: [BB]."""
    if mask_ptr is not None:
        at = mask_ptr + (rows[0] * m_b + i * m_i) + rows[1] * m_b
        ok = ok & (tl.load(at, mask=ok, other=0) != 0)
    return ok


@triton.jit
def valid_outputs(out_mask_ptr, rows, ok, n, o_b, o_j, J: tl.constexpr, JT: tl.constexpr, WIDE: tl.constexpr):
    """Which outputs of tile n exist and are not masked, for each sample: [BB, JT]."""
    j = outputs(n, JT, WIDE)
    valid = ok[:, None] & (j < J)[None, :]
    if out_mask_ptr is not None:
        at = out_mask_ptr + rows[0] * o_b + (rows[1] * o_b)[:, None] + (j * o_j)[None, :]
        valid = valid & (tl.load(at, mask=valid, other=0) != 0)
    return valid


@triton.jit
def per_pair(ptr, rows, i, n, strides, valid, JT: tl.constexpr, WIDE: tl.constexpr):
    """Numbers [B, I, J] of tile n as float32 [BB, JT], 0 where not valid."""
    j = outputs(n, JT, WIDE)
    at = ptr + (rows[0] * strides[0] + i * strides[1]) + (rows[1] * strides[0])[:, None] + (j * strides[2])[None, :]
    return tl.load(at, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def store_pairs(ptr, value, rows, inside, i, n, I, positions, J: tl.constexpr, JT: tl.constexpr, WIDE: tl.constexpr):
    """Stores numbers [BB, JT] of tile n and input capsule i in [B, I, J]."""
    j = outputs(n, JT, WIDE)
    if positions is None:
        at = ptr + (rows[0] * I + i) * J + (rows[1] * I * J)[:, None] + j[None, :]
    else:
        batch = rows[0] // positions
        at = ptr + rows[0] + ((batch * I + i) * J - batch) * positions + rows[1][:, None] + (j * positions)[None, :]
    tl.store(at, value, mask=inside[:, None] & (j < J)[None, :])


@triton.jit
def routing_logits(
    x, V, logits_ptr, precision_ptr, prior_ptr, rows, at, i, n, ls, valid,
    J: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr,
    LANES: tl.constexpr, WIDE: tl.constexpr,
    NOTHING: tl.constexpr = float("-inf"),
):
    """b = logits + prior + x . V - 1/2 sum_d precision x^2 of tile n, NOTHING where not valid. V: a tile or None."""
    if V is None and precision_ptr is None:
        b = tl.zeros([BB, JT], tl.float32)
    else:
        b = score(x, slope(V, x, precision_ptr, -0.5, at, n, J, D, P, JT, DP, LANES), rows, BB, JT, DP, LANES)
    if prior_ptr is not None:
        b += load_numbers(prior_ptr, rows, valid, n, J, JT)
    if logits_ptr is not None:
        b += per_pair(logits_ptr, rows, i, n, ls, valid, JT, WIDE)
    return tl.where(valid, b, NOTHING)


@triton.jit
def coupling_gradient(
    x, ds, dcoupling_ptr, dmass_ptr, dsecond_ptr, rows, at, i, n, strides, valid, last,
    J: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr,
    LANES: tl.constexpr, WIDE: tl.constexpr,
):
    """dc = dcoupling + dmass + x . ds + x^2 . dsecond of tile n. dcoupling is that of the last iteration."""
    dc = score(x, slope(ds, x, dsecond_ptr, 1.0, at, n, J, D, P, JT, DP, LANES), rows, BB, JT, DP, LANES)
    if dmass_ptr is not None:
        dc += load_numbers(dmass_ptr, rows, valid, n, J, JT)
    if dcoupling_ptr is not None:
        dc += per_pair(dcoupling_ptr, rows, i, n, strides, valid & last, JT, WIDE)
    return dc
