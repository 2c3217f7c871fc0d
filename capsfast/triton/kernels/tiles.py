"""What every kernel does with a tile [BB, N]: BB samples, N columns. A column is one component d of one output j.

A kernel holds a tuple of NT tiles with N = JT * DP columns each: JT outputs, their D components padded to DP. The
address of a tile has 64 bits. Offsets within a tile have 32 bits, which takes half the registers: launch.py refuses
tensors that need more.

Given votes have their columns in memory order, output after output (LANES = 0). Computed votes have their columns in an
order in which LANES neighbouring lanes of a warp have all of an output: a dot product over d sums within lanes, then
over LANES lanes. Tensor cores leave the columns 8 q + 2 t and 8 q + 2 t + 1, for all q, in lane t of four. For JT = 2,
DP = 16, LANES = 2, where [j, d] is component d of output j of the tile:

    column        0 1     2 3     4 5     6 7  |   8 9    10 11   12 13   14 15  | ...    30 31
    lane          0       1       2       3    |   0       1       2       3     | ...    3
    [j, d]      [0, 0:2] [0, 8:10] [1, 0:2] [1, 8:10] | [0, 2:4] ...               ...    [1, 14:16]

A warp has 16 whole rows. If rows are too long, several warps share the columns of a row: each warp has whole outputs if
LANES is at most 4, with more lanes an output is spread over warps.

A pose matrix takes P rows of a tile, padded to PP. All its rows use the same weight, as all samples do, so the product
treats each row as a vector with D / P components. What a sample has once, such as its logits and coupling, is the same
in all its rows, and the first of its rows stores it.

Votes with positions, [B, I, J, D, S], have B S samples, and all samples of a tile have the same b. Tensors [B, I, J]
and [B, I, J, D] have positions as their last axis; all others, such as [B, J, D] and [B, I], have a row for each
sample. All tensors but u, votes and the weight are contiguous. Logits [I, J] (SHARED_LOGITS) serve every sample.
"""

import triton
import triton.language as tl

from .arguments import Rows


@triton.jit
def batch_rows(tile, inputs, T: tl.constexpr):
    local = tl.arange(0, T.BB)
    if T.PP > 1:
        local = local // T.PP
    x = inputs.x
    if inputs.positions is None:
        first = tl.cast(tile, tl.int64) * (T.BB // T.PP)
        count = inputs.B - first
    else:
        tiles = (inputs.positions + T.BB - 1) // T.BB
        first = tl.cast(tile // tiles, tl.int64) * inputs.positions + (tile % tiles) * T.BB
        count = (first // inputs.positions + 1) * inputs.positions - first
        x += first // inputs.positions * inputs.jump
    inside = local < count
    once = inside
    if T.P > 1:
        pose = pose_rows(1, T)
        inside = inside & (pose < T.P)
        once = once & (pose == 0)
    return Rows(first, local, count, x, inside, once)


@triton.jit
def batch_tiles(inputs, T: tl.constexpr):
    """How many tiles all samples take."""
    if inputs.positions is None:
        tiles = (inputs.B + T.BB // T.PP - 1) // (T.BB // T.PP)
    else:
        tiles = inputs.B // inputs.positions * ((inputs.positions + T.BB - 1) // T.BB)
    return tiles


@triton.jit
def pose_rows(OFFSET: tl.constexpr, T: tl.constexpr):
    """OFFSET times the number of every row in its pose matrix: [BB]."""
    return tl.arange(0, T.BB) % T.PP * OFFSET


@triton.jit
def first_tile(group, T: tl.constexpr):
    """The first tile of a group of outputs. With one group this is a constant, and so are the offsets of its tiles."""
    return group * T.NT if T.GROUPED else 0


@triton.jit
def zeros(N: tl.constexpr, T: tl.constexpr):
    """NT tiles [BB, N]."""
    tiles = ()
    for _ in tl.static_range(T.NT):
        tiles = tiles + (tl.zeros([T.BB, N], tl.float32),)
    return tiles


@triton.jit
def outputs(n, T: tl.constexpr):
    """The output capsules j of tile n: [JT]."""
    return n * T.JT + tl.arange(0, T.JT)


@triton.jit
def columns(n, T: tl.constexpr):
    """j and d of the columns of tile n: [N] each."""
    j, d = place(tl.arange(0, T.JT * T.DP), T)
    return n * T.JT + j, d


@triton.jit
def place(column, T: tl.constexpr):
    """j and d of columns of a tile, j counted from the first output of the tile."""
    if T.LANES == 0:
        j, d = column // T.DP, column % T.DP
    else:
        lane = column // 2 % (T.JT * T.LANES)
        j = lane // T.LANES
        d = lane % T.LANES * (T.DP // T.LANES) + column // (2 * T.JT * T.LANES) * 2 + column % 2
    return j, d


@triton.jit
def below(index, LIMIT: tl.constexpr, STEP: tl.constexpr):
    """index < LIMIT, for one of the tiles of STEP that cover LIMIT. If STEP divides LIMIT, this returns a constant: the
    compiler drops a mask of constants at once, and would not find out that index < LIMIT always holds."""
    FITS: tl.constexpr = LIMIT > 0 and LIMIT // STEP * STEP == LIMIT
    return tl.full(index.shape, True, tl.int1) if FITS else index < LIMIT


@triton.jit
def existing(n, j, T: tl.constexpr):
    """Which of the outputs j of tile n exist. The last group may have tiles without any output, unless the NT tiles of
    every group are full."""
    WHOLE: tl.constexpr = T.J % T.JT == 0 and T.J % (T.JT * T.NT) > 0
    return tl.zeros(j.shape, tl.int32) + n * T.JT < T.J if WHOLE else below(j, T.J, T.JT * T.NT)


@triton.jit
def per_input(ptr, rows, ok, i, inputs):
    """Numbers [B, I] of input capsule i: [BB], 0 where not ok."""
    return tl.load(ptr + (rows.first * inputs.I + i) + rows.local * inputs.I, mask=ok, other=0.0)


@triton.jit
def valid_inputs(inputs, rows, i):
    """Which rows exist and have an input capsule i that is not masked: [BB]."""
    ok = rows.inside
    if inputs.mask is not None:
        ok = ok & (per_input(inputs.mask, rows, ok, i, inputs) != 0)
    return ok


@triton.jit
def valid_outputs(out_mask_ptr, rows, ok, n, T: tl.constexpr):
    """Which outputs of tile n exist and are not masked, for each sample: [BB, JT]."""
    j = outputs(n, T)
    valid = ok[:, None] & existing(n, j, T)[None, :]
    if out_mask_ptr is not None:
        at = out_mask_ptr + rows.first * T.J + (rows.local * T.J)[:, None] + j[None, :]
        valid = valid & (tl.load(at, mask=valid, other=0) != 0)
    return valid


@triton.jit
def where_valid(valid, value, other: tl.constexpr, SOME: tl.constexpr):
    """value, and other where not valid. SOME: needed if votes may be NaN, if a center makes invalid votes
    differ from 0, and if there are tiles without any output: these read V of other outputs, so a coupling may be
    infinite, and its product with 0 NaN. Otherwise invalid votes are 0 and add nothing to a sum.
    """
    if SOME:
        value = tl.where(valid, value, other)
    return value


@triton.jit
def pairs(ptr, inputs, rows, i, n, T: tl.constexpr, SHARED: tl.constexpr):
    """Addresses of the numbers of tile n and input capsule i in [B, I, J] or, if SHARED, in [I, J]: [BB, JT]."""
    j = outputs(n, T)
    if T.GROUPED and T.NT > 1:
        # Adds 0, but the compiler does not know that. Otherwise it would keep the part of every tile's address that
        # does not depend on i, and too few registers are left for that.
        j += (i >> 63).to(tl.int32)
    if SHARED:
        at = ptr + i * T.J + (rows.local * 0)[:, None] + j[None, :]
    elif inputs.positions is None:
        at = ptr + rows.first * inputs.I * T.J + (rows.local * inputs.I * T.J)[:, None] + j[None, :] + i * T.J
    else:
        batch = rows.first // inputs.positions
        at = ptr + rows.first + ((batch * inputs.I + i) * T.J - batch) * inputs.positions
        at = at + rows.local[:, None] + (j * inputs.positions)[None, :]
    return at


@triton.jit
def per_pair(ptr, inputs, rows, i, n, valid, T: tl.constexpr, SHARED: tl.constexpr = False):
    """Numbers [B, I, J], or [I, J], of tile n as float32 [BB, JT], 0 where not valid."""
    return tl.load(pairs(ptr, inputs, rows, i, n, T, SHARED), mask=valid, other=0.0).to(tl.float32)


@triton.jit
def store_pairs(ptr, value, inputs, rows, i, n, T: tl.constexpr):
    """Stores numbers [BB, JT] of tile n and input capsule i in [B, I, J].

    For computed votes, every lane of an output has the numbers. The first of these lanes stores what it has, without an
    exchange: the numbers [M] are in the order in which the compiler distributes M to lanes, to warps, to registers.
    """
    if T.LANES == 0:
        at = pairs(ptr, inputs, rows, i, n, T, False)
        tl.store(at, value, mask=rows.once[:, None] & (outputs(n, T) < T.J)[None, :])
    else:
        # A warp has 16 rows, or the columns of whole outputs.
        DOWN: tl.constexpr = T.BB // 16
        ACROSS: tl.constexpr = T.JT * T.LANES // 4
        M: tl.constexpr = T.BB * T.JT * T.LANES
        value = tl.broadcast_to(value[:, :, None], [T.BB, T.JT, T.LANES])
        value = tl.permute(tl.reshape(value, [DOWN, 2, 8, ACROSS, 4]), (1, 0, 3, 2, 4))
        index = tl.arange(0, M)
        lane = index // 32 % ACROSS * 4 + index % 4
        row = (index // (32 * ACROSS) % DOWN * 2 + index // (32 * ACROSS * DOWN)) * 8 + index // 4 % 8
        j, sample = lane // T.LANES, row // T.PP
        first = (lane % T.LANES == 0) & (row % T.PP == 0)
        # Adds i last, see input_capsule(), and tiles: if there is one group, they are part of the instruction.
        at = ptr + rows.first * inputs.I * T.J + (sample * (inputs.I * T.J) + j) + i * T.J + n * T.JT
        tl.store(at, tl.reshape(value, [M]), mask=first & (sample < rows.count) & (n * T.JT + j < T.J))


@triton.jit
def store_coefficients(ptr, c, db, inputs, rows, i, n, T: tl.constexpr):
    """Stores two numbers [BB, JT] of tile n and input capsule i side by side in [B, I, J, 2], as one of 64 bits."""
    low = c.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    both = (db.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low
    store_pairs(ptr.to(tl.pointer_type(tl.int64), bitcast=True), both, inputs, rows, i, n, T)


@triton.jit
def load_coefficients(ptr, inputs, rows, i, n, valid, T: tl.constexpr):
    """The two numbers that store_coefficients() stored, 0 where not valid."""
    at = pairs(ptr.to(tl.pointer_type(tl.int64), bitcast=True), inputs, rows, i, n, T, False)
    both = tl.load(at, mask=valid, other=0)
    return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
