"""What the gradient pass writes. Tiles of outputs and of the batch after the first are added to what is there."""

import triton
import triton.language as tl

from .tiles import below, columns, components, existing, outputs, place, store_pairs


@triton.jit
def add_to(at, value, within, stored):
    """Stores value or, if stored > 0, adds it to what this program stored before."""
    again = tl.zeros(within.shape, tl.int32) + stored > 0
    before = tl.load(at, mask=within & again, other=0.0)
    tl.store(at, before.to(tl.float32) + value, mask=within)


@triton.jit
def fragment(R: tl.constexpr, C: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, WIDE: tl.constexpr):
    """Rows [M] and columns [M, 2] of a product [R, C], in the order in which tensor cores leave it: the compiler deals
    out the M first to lanes, then to warps, then to registers. Four lanes have 32 bytes of a row, so that memory needs
    no other order, and a store no exchange between lanes.

    Of the warps DOWN have 16 rows each, one below the other, or ACROSS 8 rows each, twice, as weights_together() has
    it.
    """
    TWO: tl.constexpr = min(2, R // (8 * DOWN * ACROSS))
    index = tl.arange(0, R * C // 2)
    warp = index // 32 % (DOWN * ACROSS)
    register = index // (32 * DOWN * ACROSS)
    of_16 = (register // TWO % (R // (8 * TWO * DOWN * ACROSS))) * DOWN + warp % DOWN
    row = ((of_16 * TWO + register % TWO) * ACROSS + warp // DOWN) * 8 + index // 4 % 8
    column = register // (R // (8 * DOWN * ACROSS)) * 8 + index % 4 * 2
    if WIDE:
        row, column = row.to(tl.int64), column.to(tl.int64)
    return row, column[:, None] + tl.arange(0, 2)[None, :]


@triton.jit
def as_fragment(tile, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """A product [R, C] as [M, 2], in that order."""
    R: tl.constexpr = tile.shape[0]
    C: tl.constexpr = tile.shape[1]
    TWO: tl.constexpr = min(2, R // (8 * DOWN * ACROSS))
    parts = tl.reshape(tile, [R // (8 * TWO * DOWN * ACROSS), DOWN, TWO, ACROSS, 8, C // 8, 4, 2])
    return tl.reshape(tl.permute(parts, (5, 0, 2, 3, 1, 4, 6, 7)), [R * C // 2, 2])


@triton.jit
def add_weight_gradient(
    dw_ptr, value, n, k0, stored,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr,
    LANES: tl.constexpr, KP: tl.constexpr, WIDE: tl.constexpr,
):
    """Stores tile n of dW [J, D, K] of an input capsule, components k from k0 on."""
    ACROSS: tl.constexpr = JT * LANES // 4
    DOWN: tl.constexpr = BB // 16 if ACROSS == 1 and JT * DP % BB == 0 else 1
    column, k = fragment(JT * DP, KP, DOWN, ACROSS, WIDE)
    j, d = place(column, JT, DP, LANES)
    within = (existing(n, n * JT + j, J, JT) & below(d, D, DP))[:, None] & below(k0 + k, K, KP)
    at = dw_ptr + (j * (D * K) + d * K)[:, None] + (k0 + k) + tl.cast(n, tl.int64) * (JT * D * K)
    add_to(at, as_fragment(value, DOWN, ACROSS), within, stored)


@triton.jit
def add_input_gradient(
    dx_ptr, value, rows, i, k0, I, stored, K: tl.constexpr, P: tl.constexpr, KP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Stores du of input capsule i for the rows, in [B, I, P K], components k from k0 on."""
    BB: tl.constexpr = rows[1].shape[0]
    PP: tl.constexpr = rows[2].shape[0]
    row, k = fragment(BB, KP, BB // 16, 1, WIDE)
    sample, pose = row // PP, row % PP
    at = dx_ptr + (rows[0] * I + i) * (P * K) + (sample * I * (P * K) + pose * K)[:, None] + (k0 + k)
    inside = ((sample < rows[3]) & below(pose, P, PP))[:, None] & below(k0 + k, K, KP)
    add_to(at, as_fragment(value, BB // 16, 1), inside, stored)


@triton.jit
def store_votes_gradient(
    dx_ptr, value, rows, inside, i, n, I, positions,
    J: tl.constexpr, D: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
):
    """Stores tile n of dvotes of input capsule i for the samples, in [B, I, J, D]."""
    j, d = columns(n, JT, DP, LANES, WIDE)
    if positions is None:
        at = dx_ptr + (rows[0] * I + i) * (J * D) + (rows[1] * I * (J * D))[:, None] + (j * D + d)[None, :]
    else:
        batch = rows[0] // positions
        at = dx_ptr + rows[0] + ((batch * I + i) * (J * D) - batch) * positions
        at = at + rows[1][:, None] + ((j * D + d) * positions)[None, :]
    tl.store(at, value, mask=inside[:, None] & ((j < J) & (d < D))[None, :])


@triton.jit
def add_common_votes_gradient(
    dx_ptr, value, rows, inside, i, I, stored, D: tl.constexpr, DP: tl.constexpr, WIDE: tl.constexpr
):
    """Stores dvotes [BB, DP] of input capsule i for the samples, in [B, I, 1, D]: of votes that all outputs share."""
    d = components(0, DP, WIDE)
    at = dx_ptr + (rows[0] * I + i) * D + (rows[1] * I * D)[:, None] + d[None, :]
    add_to(at, value, inside[:, None] & (d < D)[None, :], stored)


@triton.jit
def add_inputs_gradient(ptr, value, rows, inside, i, I, stored):
    """Stores a number of input capsule i for each sample, [BB], in [B, I]."""
    add_to(ptr + (rows[0] * I + i) + rows[1] * I, value, inside, stored)


@triton.jit
def store_logits_gradient(
    dl_ptr, value, rows, inside, i, n, sizes, split, stored,
    J: tl.constexpr, JT: tl.constexpr, WIDE: tl.constexpr, SUM: tl.constexpr,
):
    """Stores tile n of dlogits of input capsule i: per sample in [B, I, J] or, if SUM, summed in [splits, I, J]."""
    j = outputs(n, JT, WIDE)
    if SUM:
        add_to(dl_ptr + (tl.cast(split, tl.int64) * sizes[0] + i) * J + j, tl.sum(value, 0), j < J, stored)
    else:
        store_pairs(dl_ptr, value, rows, inside, i, n, sizes, J, JT, WIDE)
