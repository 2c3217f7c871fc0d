"""What every kernel does with a tile [BB, N]: BB samples, N columns. A column is one component d of one output j.

A kernel holds a tuple of NT tiles with N = JT * DP columns each: JT outputs, their D components padded to DP. rows is
(number of the first sample, the sample of every row from there on [BB], the rows of a pose [PP], samples there are).
Strides are tuples: xs of u (b, i, -, k) or votes (b, i, j, d), ws of the weight (i, j, d, k). The address of a tile is
64-bit. Offsets within it are 32-bit, which takes half the registers, unless they may be too large (WIDE, launch.py);
those of [J, D] within a sample always are.

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

Votes with positions, [B, I, J, D, S], have B S samples, and a tile has those of one b. x_b then is the stride over
positions, and x_jump is added for every b before. Tensors [B, I, J] and [B, I, J, D] have the positions behind; all
others, such as [B, J, D] and [B, I], have a row for each sample. All but u, votes and the weight are contiguous. Logits
[I, J] (SHARED_LOGITS) are those of every sample. ls and cs are what pairs() has to know of logits and of couplings.
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
    j, d = place(column, JT, DP, LANES)
    return n * JT + j, d


@triton.jit
def place(column, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr):
    """Of columns of a tile: which of its outputs they belong to, and d."""
    if LANES == 0:
        j, d = column // DP, column % DP
    else:
        lane = column // 2 % (JT * LANES)
        j, d = lane // LANES, lane % LANES * (DP // LANES) + column // (2 * JT * LANES) * 2 + column % 2
    return j, d


@triton.jit
def below(index, LIMIT: tl.constexpr, STEP: tl.constexpr):
    """index < LIMIT, for one of the tiles of STEP that cover LIMIT. Where they fit it is a constant, which the compiler
    does not find out: masks of it vanish, and are not taken through every pass of the compiler."""
    FITS: tl.constexpr = LIMIT > 0 and LIMIT // STEP * STEP == LIMIT
    return tl.full(index.shape, True, tl.int1) if FITS else index < LIMIT


@triton.jit
def existing(n, j, J: tl.constexpr, JT: tl.constexpr):
    """Which of the outputs j of tile n exist. A last group may have whole tiles outside."""
    return tl.zeros(j.shape, tl.int32) + n * JT < J if J % JT == 0 else j < J


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
def per_input(ptr, rows, ok, i, I):
    """Numbers [B, I] of input capsule i: [BB], 0 where not ok."""
    return tl.load(ptr + (rows[0] * I + i) + rows[1] * I, mask=ok, other=0.0)


@triton.jit
def valid_inputs(mask_ptr, rows, ok, i, I):
    """For which samples input capsule i is not masked: [BB]."""
    if mask_ptr is not None:
        ok = ok & (per_input(mask_ptr, rows, ok, i, I) != 0)
    return ok


@triton.jit
def valid_outputs(out_mask_ptr, rows, ok, n, J: tl.constexpr, JT: tl.constexpr):
    """Which outputs of tile n exist and are not masked, for each sample: [BB, JT]."""
    j = outputs(n, JT, False)
    valid = ok[:, None] & existing(n, j, J, JT)[None, :]
    if out_mask_ptr is not None:
        at = out_mask_ptr + rows[0] * J + (rows[1] * J)[:, None] + j[None, :]
        valid = valid & (tl.load(at, mask=valid, other=0) != 0)
    return valid


@triton.jit
def where_valid(valid, value, other: tl.constexpr, SOME: tl.constexpr):
    """value, and other where not valid. SOME: a number that is not valid may matter. It does where votes may be NaN, or
    with a center are not 0, and in tiles outside, which have the V of others: a coupling may then be infinite, and its
    product with 0 NaN. Else rows of no sample and padding have votes of 0, and no part in a sum.
    """
    if SOME:
        value = tl.where(valid, value, other)
    return value


@triton.jit
def pairs(ptr, rows, i, n, sizes, J: tl.constexpr, JT: tl.constexpr, WIDE: tl.constexpr):
    """Addresses of the numbers of tile n and input capsule i in [B, I, J]: [BB, JT].

    sizes: I, positions, whether all samples have the same [I, J], and whether there are groups of outputs. Of these the
    compiler would keep what the addresses of all tiles have beside i, for which there is no room.
    """
    I, positions, shared, grouped = sizes
    j = outputs(n, JT, WIDE)
    if grouped:
        j += (i >> 63).to(tl.int32)  # 0, which it does not know
    if shared:
        at = ptr + i * J + (rows[1] * 0)[:, None] + j[None, :]
    elif positions is None:
        at = ptr + (rows[0] * I + i) * J + (rows[1] * I * J)[:, None] + j[None, :]
    else:
        batch = rows[0] // positions
        at = ptr + rows[0] + ((batch * I + i) * J - batch) * positions + rows[1][:, None] + (j * positions)[None, :]
    return at


@triton.jit
def per_pair(ptr, rows, i, n, sizes, valid, J: tl.constexpr, JT: tl.constexpr, WIDE: tl.constexpr):
    """Numbers [B, I, J] of tile n as float32 [BB, JT], 0 where not valid."""
    return tl.load(pairs(ptr, rows, i, n, sizes, J, JT, WIDE), mask=valid, other=0.0).to(tl.float32)


@triton.jit
def store_pairs(ptr, value, rows, inside, i, n, sizes, J: tl.constexpr, JT: tl.constexpr, WIDE: tl.constexpr):
    """Stores numbers [BB, JT] of tile n and input capsule i in [B, I, J]."""
    at = pairs(ptr, rows, i, n, sizes, J, JT, WIDE)
    tl.store(at, value, mask=inside[:, None] & (outputs(n, JT, WIDE) < J)[None, :])
