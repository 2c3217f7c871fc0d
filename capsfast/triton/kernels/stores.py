"""What the gradient pass writes. Later sections of outputs and later tiles of the batch add to what is there."""

import triton
import triton.language as tl

from .tiles import below, columns, existing, place


@triton.jit
def add_to(p_tile, b_value, m_tile, stored):
    """Stores b_value or, if stored > 0, adds it to what this program stored before."""
    m_stored = tl.zeros(m_tile.shape, tl.int32) + stored > 0
    b_stored = tl.load(p_tile, mask=m_tile & m_stored, other=0.0)
    tl.store(p_tile, b_stored.to(tl.float32) + b_value, mask=m_tile)


@triton.jit
def add_group(p_out, p_room, o_tile, b_value, m_tile, n0, last):
    """As add_to(), for a sum over sections of outputs. n0: the first tile of this section. p_room: float32 memory for
    the sum so far, or None if there is one section or the gradient is float32. last: whether this section is the last.
    """
    if p_room is None:
        add_to(p_out + o_tile, b_value, m_tile, n0)
    else:
        m_stored = tl.zeros(m_tile.shape, tl.int32) + n0 > 0
        b_value += tl.load(p_room + o_tile, mask=m_tile & m_stored, other=0.0)
        if last:
            tl.store(p_out + o_tile, b_value, mask=m_tile)
        else:
            tl.store(p_room + o_tile, b_value, mask=m_tile)


@triton.jit
def fragment(R: tl.constexpr, C: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Rows [M] and columns [M, 2] of a product [R, C], in the order in which tensor cores leave the product: the
    compiler distributes M to lanes first, then to warps, then to registers. Four lanes have 32 bytes of a row, so a
    store in this order suits memory and needs no exchange between lanes.

    Either DOWN warps have 16 rows each, one below the other, or ACROSS warps have 8 rows each, twice, as in
    weights_together().
    """
    TWO: tl.constexpr = min(2, R // (8 * DOWN * ACROSS))
    index = tl.arange(0, R * C // 2)
    warp = index // 32 % (DOWN * ACROSS)
    register = index // (32 * DOWN * ACROSS)
    of_16 = (register // TWO % (R // (8 * TWO * DOWN * ACROSS))) * DOWN + warp % DOWN
    row = ((of_16 * TWO + register % TWO) * ACROSS + warp // DOWN) * 8 + index // 4 % 8
    column = register // (R // (8 * DOWN * ACROSS)) * 8 + index % 4 * 2
    return row, column[:, None] + tl.arange(0, 2)[None, :]


@triton.jit
def as_fragment(b_tile, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """A product [R, C] as [M, 2], in the order of fragment()."""
    R: tl.constexpr = b_tile.shape[0]
    C: tl.constexpr = b_tile.shape[1]
    TWO: tl.constexpr = min(2, R // (8 * DOWN * ACROSS))
    b_parts = tl.reshape(b_tile, [R // (8 * TWO * DOWN * ACROSS), DOWN, TWO, ACROSS, 8, C // 8, 4, 2])
    return tl.reshape(tl.permute(b_parts, (5, 0, 2, 3, 1, 4, 6, 7)), [R * C // 2, 2])


@triton.jit
def add_weight_gradient(p_dw, b_dw, n, k0, stored, T: tl.constexpr, KP: tl.constexpr):
    """Stores tile n of dW [J, D / P, K] of an input capsule, components k from k0 on."""
    C: tl.constexpr = T.D // T.P
    ACROSS: tl.constexpr = T.JT * T.LANES // 4
    DOWN: tl.constexpr = T.BB // 16 if ACROSS == 1 and T.JT * T.DP % T.BB == 0 else 1
    column, o_k = fragment(T.JT * T.DP, KP, DOWN, ACROSS)
    o_j, o_d = place(column, T)
    m_tile = (existing(n, n * T.JT + o_j, T) & below(o_d, C, T.DP))[:, None] & below(k0 + o_k, T.K, KP)
    p_tile = p_dw + tl.cast(n, tl.int64) * (T.JT * C * T.K) + (o_j * (C * T.K) + o_d * T.K)[:, None] + (k0 + o_k)
    add_to(p_tile, as_fragment(b_dw, DOWN, ACROSS), m_tile, stored)


@triton.jit
def add_input_gradient(p_dx, p_room, b_du, inputs, rows, capsule, k0, n0, last, T: tl.constexpr, KP: tl.constexpr):
    """Stores du of an input capsule for the rows, in [B, I, P K], components k from k0 on."""
    if inputs.p_mask is not None:
        b_du = tl.where(capsule.m_rows[:, None], b_du, 0.0)
    row, o_k = fragment(T.BB, KP, T.BB // 16, 1)
    o_b, o_pose = row // T.PP, row % T.PP
    NUMBERS: tl.constexpr = T.P * T.K
    o_tile = rows.start * inputs.I * NUMBERS + (o_b * inputs.I * NUMBERS + o_pose * T.K)[:, None] + (k0 + o_k)
    o_tile += capsule.i * NUMBERS  # added last, see input_capsule()
    m_tile = ((o_b < rows.count) & below(o_pose, T.P, T.PP))[:, None] & below(k0 + o_k, T.K, KP)
    add_group(p_dx, p_room, o_tile, as_fragment(b_du, T.BB // 16, 1), m_tile, n0, last)


@triton.jit
def store_votes_gradient(p_dx, b_dvotes, inputs, rows, capsule, n, T: tl.constexpr):
    """Stores tile n of dvotes of an input capsule for the samples, in [B, I, J, D]."""
    b_dvotes = tl.where(capsule.m_rows[:, None], b_dvotes, 0.0)
    o_j, o_d = columns(n, T)
    NUMBERS: tl.constexpr = T.J * T.D
    if inputs.positions is None:
        p_tile = p_dx + (rows.start * inputs.I + capsule.i) * NUMBERS
        p_tile = p_tile + (rows.o_b * inputs.I * NUMBERS)[:, None] + (o_j * T.D + o_d)[None, :]
    else:
        batch = rows.start // inputs.positions
        p_tile = p_dx + rows.start + ((batch * inputs.I + capsule.i) * NUMBERS - batch) * inputs.positions
        p_tile = p_tile + rows.o_b[:, None] + ((o_j * T.D + o_d) * inputs.positions)[None, :]
    tl.store(p_tile, b_dvotes, mask=rows.m_rows[:, None] & ((o_j < T.J) & (o_d < T.D))[None, :])
