"""What the gradient pass writes. Later groups of outputs and later tiles of the batch add to what is there.
"""

import triton
import triton.language as tl

from .tiles import below, columns, existing, place


@triton.jit
def add_to(at, value, within, stored):
    """Stores value or, if stored > 0, adds it to what this program stored before."""
    again = tl.zeros(within.shape, tl.int32) + stored > 0
    before = tl.load(at, mask=within & again, other=0.0)
    tl.store(at, before.to(tl.float32) + value, mask=within)


@triton.jit
def add_group(out, room, offsets, value, within, first, last):
    """As add_to(), for a sum over groups of outputs. first: the first tile of this group. room: float32 memory for the
    sum so far, or None if there is only one group or the gradient is float32. last: whether this is the last group.
    """
    if room is None:
        add_to(out + offsets, value, within, first)
    else:
        again = tl.zeros(within.shape, tl.int32) + first > 0
        value += tl.load(room + offsets, mask=within & again, other=0.0)
        if last:
            tl.store(out + offsets, value, mask=within)
        else:
            tl.store(room + offsets, value, mask=within)


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
def as_fragment(tile, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """A product [R, C] as [M, 2], in the order of fragment()."""
    R: tl.constexpr = tile.shape[0]
    C: tl.constexpr = tile.shape[1]
    TWO: tl.constexpr = min(2, R // (8 * DOWN * ACROSS))
    parts = tl.reshape(tile, [R // (8 * TWO * DOWN * ACROSS), DOWN, TWO, ACROSS, 8, C // 8, 4, 2])
    return tl.reshape(tl.permute(parts, (5, 0, 2, 3, 1, 4, 6, 7)), [R * C // 2, 2])


@triton.jit
def add_weight_gradient(dw_ptr, value, n, k0, stored, T: tl.constexpr, KP: tl.constexpr):
    """Stores tile n of dW [J, D / P, K] of an input capsule, components k from k0 on."""
    C: tl.constexpr = T.D // T.P
    ACROSS: tl.constexpr = T.JT * T.LANES // 4
    DOWN: tl.constexpr = T.BB // 16 if ACROSS == 1 and T.JT * T.DP % T.BB == 0 else 1
    column, k = fragment(T.JT * T.DP, KP, DOWN, ACROSS)
    j, d = place(column, T)
    within = (existing(n, n * T.JT + j, T) & below(d, C, T.DP))[:, None] & below(k0 + k, T.K, KP)
    at = dw_ptr + tl.cast(n, tl.int64) * (T.JT * C * T.K) + (j * (C * T.K) + d * T.K)[:, None] + (k0 + k)
    add_to(at, as_fragment(value, DOWN, ACROSS), within, stored)


@triton.jit
def add_input_gradient(dx_ptr, room, value, inputs, rows, here, k0, first, last, T: tl.constexpr, KP: tl.constexpr):
    """Stores du of an input capsule for the rows, in [B, I, P K], components k from k0 on."""
    if inputs.mask is not None:
        value = tl.where(here.ok[:, None], value, 0.0)
    row, k = fragment(T.BB, KP, T.BB // 16, 1)
    sample, pose = row // T.PP, row % T.PP
    NUMBERS: tl.constexpr = T.P * T.K
    at = rows.first * inputs.I * NUMBERS + (sample * inputs.I * NUMBERS + pose * T.K)[:, None] + (k0 + k)
    at += here.i * NUMBERS  # last, see input_capsule()
    inside = ((sample < rows.count) & below(pose, T.P, T.PP))[:, None] & below(k0 + k, T.K, KP)
    add_group(dx_ptr, room, at, as_fragment(value, T.BB // 16, 1), inside, first, last)


@triton.jit
def store_votes_gradient(dx_ptr, value, inputs, rows, here, n, T: tl.constexpr):
    """Stores tile n of dvotes of an input capsule for the samples, in [B, I, J, D]."""
    value = tl.where(here.ok[:, None], value, 0.0)
    j, d = columns(n, T)
    NUMBERS: tl.constexpr = T.J * T.D
    if inputs.positions is None:
        at = dx_ptr + (rows.first * inputs.I + here.i) * NUMBERS
        at = at + (rows.local * inputs.I * NUMBERS)[:, None] + (j * T.D + d)[None, :]
    else:
        batch = rows.first // inputs.positions
        at = dx_ptr + rows.first + ((batch * inputs.I + here.i) * NUMBERS - batch) * inputs.positions
        at = at + rows.local[:, None] + ((j * T.D + d) * inputs.positions)[None, :]
    tl.store(at, value, mask=rows.inside[:, None] & ((j < T.J) & (d < T.D))[None, :])
