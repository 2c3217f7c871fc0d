"""What every kernel does with a tile [BB, N]: BB samples, N columns. A column is one component d of one output j.

Names follow flash-linear-attention: p_x is a pointer to x, b_x a block of x in registers or a tuple of NT blocks, m_x a
mask, o_x are offsets along x; upper case is known when a kernel is compiled. n0 is the first tile of a section of
outputs. Formulas in comments have no prefixes: b_logits holds their b, b_c their c.

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
treats each row as a vector with D / P components. Numbers that a sample has once, such as logits and coupling, are the
same in all rows of the sample; the first row stores them.

Votes with positions, [B, I, J, D, S], have B S samples, and all samples of a tile have the same b. Tensors [B, I, J]
and [B, I, J, D] have positions as their last axis; all others, such as [B, J, D] and [B, I], have a row for each
sample. All tensors but u, votes and the weight are contiguous. Logits [I, J] (SHARED_LOGITS) serve every sample.
"""

import triton
import triton.language as tl

from .arguments import Rows


@triton.jit
def batch_rows(tile, inputs, T: tl.constexpr):
    o_b = tl.arange(0, T.BB)
    if T.PP > 1:
        o_b = o_b // T.PP
    p_x = inputs.p_x
    if inputs.positions is None:
        start = tl.cast(tile, tl.int64) * (T.BB // T.PP)
        count = inputs.B - start
    else:
        tiles = (inputs.positions + T.BB - 1) // T.BB
        start = tl.cast(tile // tiles, tl.int64) * inputs.positions + (tile % tiles) * T.BB
        count = (start // inputs.positions + 1) * inputs.positions - start
        p_x += start // inputs.positions * inputs.jump
    m_rows = o_b < count
    m_once = m_rows
    if T.P > 1:
        o_pose = pose_rows(1, T)
        m_rows = m_rows & (o_pose < T.P)
        m_once = m_once & (o_pose == 0)
    return Rows(start, o_b, count, p_x, m_rows, m_once)


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
def first_tile(section, T: tl.constexpr):
    """The first tile of a section of outputs. With one section this is a constant, and so are the offsets of tiles."""
    return section * T.NT if T.SECTIONED else 0


@triton.jit
def zeros(N: tl.constexpr, T: tl.constexpr):
    """NT tiles [BB, N]."""
    b_tiles = ()
    for _ in tl.static_range(T.NT):
        b_tiles = b_tiles + (tl.zeros([T.BB, N], tl.float32),)
    return b_tiles


@triton.jit
def outputs(n, T: tl.constexpr):
    """The output capsules j of tile n: [JT]."""
    return n * T.JT + tl.arange(0, T.JT)


@triton.jit
def columns(n, T: tl.constexpr):
    """j and d of the columns of tile n: [N] each."""
    o_j, o_d = place(tl.arange(0, T.JT * T.DP), T)
    return n * T.JT + o_j, o_d


@triton.jit
def place(column, T: tl.constexpr):
    """j and d of columns of a tile, j counted from the first output of the tile."""
    if T.LANES == 0:
        o_j, o_d = column // T.DP, column % T.DP
    else:
        lane = column // 2 % (T.JT * T.LANES)
        o_j = lane // T.LANES
        o_d = lane % T.LANES * (T.DP // T.LANES) + column // (2 * T.JT * T.LANES) * 2 + column % 2
    return o_j, o_d


@triton.jit
def below(index, LIMIT: tl.constexpr, STEP: tl.constexpr):
    """index < LIMIT, for one of the tiles of STEP that cover LIMIT. If STEP divides LIMIT, this returns a constant:
    the compiler drops a constant mask, but would not find out that index < LIMIT always holds."""
    FITS: tl.constexpr = LIMIT > 0 and LIMIT // STEP * STEP == LIMIT
    return tl.full(index.shape, True, tl.int1) if FITS else index < LIMIT


@triton.jit
def existing(n, o_j, T: tl.constexpr):
    """Which of the outputs j of tile n exist. The last section may have tiles without any output, unless the NT tiles
    of every section are full."""
    WHOLE: tl.constexpr = T.J % T.JT == 0 and T.J % (T.JT * T.NT) > 0
    return tl.zeros(o_j.shape, tl.int32) + n * T.JT < T.J if WHOLE else below(o_j, T.J, T.JT * T.NT)


@triton.jit
def per_input(p_numbers, rows, m_rows, i, inputs):
    """Numbers [B, I] of input capsule i: [BB], 0 outside m_rows."""
    return tl.load(p_numbers + (rows.start * inputs.I + i) + rows.o_b * inputs.I, mask=m_rows, other=0.0)


@triton.jit
def valid_inputs(inputs, rows, i):
    """Which rows exist and have an input capsule i that is not masked: [BB]."""
    m_rows = rows.m_rows
    if inputs.p_mask is not None:
        m_rows = m_rows & (per_input(inputs.p_mask, rows, m_rows, i, inputs) != 0)
    return m_rows


@triton.jit
def valid_outputs(p_out_mask, rows, m_rows, n, T: tl.constexpr):
    """Which outputs of tile n exist and are not masked, for each sample: [BB, JT]."""
    o_j = outputs(n, T)
    m_outputs = m_rows[:, None] & existing(n, o_j, T)[None, :]
    if p_out_mask is not None:
        p_tile = p_out_mask + rows.start * T.J + (rows.o_b * T.J)[:, None] + o_j[None, :]
        m_outputs = m_outputs & (tl.load(p_tile, mask=m_outputs, other=0) != 0)
    return m_outputs


@triton.jit
def where_valid(m_pairs, b_value, other: tl.constexpr, SOME: tl.constexpr):
    """b_value; if SOME, other outside m_pairs. SOME is needed if votes may be NaN, if a center makes invalid votes
    differ from 0, or if there are tiles without any output. Such tiles read V of other outputs, so a coupling may be
    infinite, and its product with 0 is NaN. Otherwise invalid votes are 0 and add nothing to a sum.
    """
    if SOME:
        b_value = tl.where(m_pairs, b_value, other)
    return b_value


@triton.jit
def pairs(p_pairs, inputs, rows, i, n, T: tl.constexpr, SHARED: tl.constexpr):
    """Addresses of the numbers of tile n and input capsule i in [B, I, J] or, if SHARED, in [I, J]: [BB, JT]."""
    o_j = outputs(n, T)
    if T.SECTIONED and T.NT > 1:
        # Adds a 0 that the compiler does not recognize. Otherwise the compiler would keep, for every tile, the part of
        # the address that does not depend on i, and too few registers are left for these parts.
        o_j += (i >> 63).to(tl.int32)
    if SHARED:
        p_tile = p_pairs + i * T.J + (rows.o_b * 0)[:, None] + o_j[None, :]
    elif inputs.positions is None:
        p_tile = p_pairs + rows.start * inputs.I * T.J + (rows.o_b * inputs.I * T.J)[:, None] + o_j[None, :] + i * T.J
    else:
        batch = rows.start // inputs.positions
        p_tile = p_pairs + rows.start + ((batch * inputs.I + i) * T.J - batch) * inputs.positions
        p_tile = p_tile + rows.o_b[:, None] + (o_j * inputs.positions)[None, :]
    return p_tile


@triton.jit
def per_pair(p_pairs, inputs, rows, i, n, m_pairs, T: tl.constexpr, SHARED: tl.constexpr = False):
    """Numbers [B, I, J], or [I, J], of tile n as float32 [BB, JT], 0 outside m_pairs."""
    return tl.load(pairs(p_pairs, inputs, rows, i, n, T, SHARED), mask=m_pairs, other=0.0).to(tl.float32)


@triton.jit
def store_pairs(p_pairs, b_value, inputs, rows, i, n, T: tl.constexpr):
    """Stores numbers [BB, JT] of tile n and input capsule i in [B, I, J].

    For computed votes, every lane of an output has the numbers. The first of these lanes stores what it has, without an
    exchange: the numbers [M] are in the order in which the compiler distributes M to lanes, to warps, to registers.
    """
    if T.LANES == 0:
        p_tile = pairs(p_pairs, inputs, rows, i, n, T, False)
        tl.store(p_tile, b_value, mask=rows.m_once[:, None] & (outputs(n, T) < T.J)[None, :])
    else:
        # A warp has 16 rows, or the columns of whole outputs.
        DOWN: tl.constexpr = T.BB // 16
        ACROSS: tl.constexpr = T.JT * T.LANES // 4
        M: tl.constexpr = T.BB * T.JT * T.LANES
        b_value = tl.broadcast_to(b_value[:, :, None], [T.BB, T.JT, T.LANES])
        b_value = tl.permute(tl.reshape(b_value, [DOWN, 2, 8, ACROSS, 4]), (1, 0, 3, 2, 4))
        index = tl.arange(0, M)
        lane = index // 32 % ACROSS * 4 + index % 4
        row = (index // (32 * ACROSS) % DOWN * 2 + index // (32 * ACROSS * DOWN)) * 8 + index // 4 % 8
        o_j, o_b = lane // T.LANES, row // T.PP
        m_once = (lane % T.LANES == 0) & (row % T.PP == 0)
        # Adds i and the tile last, see input_capsule(). With one section, the tile's offset is part of the instruction.
        p_tile = p_pairs + rows.start * inputs.I * T.J + (o_b * (inputs.I * T.J) + o_j) + i * T.J + n * T.JT
        tl.store(p_tile, tl.reshape(b_value, [M]), mask=m_once & (o_b < rows.count) & (n * T.JT + o_j < T.J))


@triton.jit
def store_coefficients(p_pairs, b_c, b_db, inputs, rows, i, n, T: tl.constexpr):
    """Stores two numbers [BB, JT] of tile n and input capsule i side by side in [B, I, J, 2], as one of 64 bits."""
    b_low = b_c.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    b_both = (b_db.to(tl.int32, bitcast=True).to(tl.int64) << 32) | b_low
    store_pairs(p_pairs.to(tl.pointer_type(tl.int64), bitcast=True), b_both, inputs, rows, i, n, T)


@triton.jit
def load_coefficients(p_pairs, inputs, rows, i, n, m_pairs, T: tl.constexpr):
    """The two numbers that store_coefficients() stored, 0 outside m_pairs."""
    p_tile = pairs(p_pairs.to(tl.pointer_type(tl.int64), bitcast=True), inputs, rows, i, n, T, False)
    b_both = tl.load(p_tile, mask=m_pairs, other=0)
    return b_both.to(tl.int32).to(tl.float32, bitcast=True), (b_both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
