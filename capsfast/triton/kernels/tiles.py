"""What every kernel does with a tile: [BB samples, N columns], a column being one component d of one output j.

A kernel holds NT such tiles (tuples below), N = JT * DP columns each: JT outputs, their D components padded
to DP. rows is (number of the first sample, 0 ... BB-1). Strides come as tuples: xs of u (b, i, -, k) or votes
(b, i, j, d), ws of the weight (i, j, d, k). Offsets within a tile are 32-bit, for half the registers, unless the
launcher finds that they don't fit (WIDE); where the tile is in memory is 64-bit always.
"""

import triton
import triton.language as tl


@triton.jit
def batch_rows(tile, BB: tl.constexpr, WIDE: tl.constexpr):
    local = tl.arange(0, BB)
    if WIDE:
        local = local.to(tl.int64)
    return tl.cast(tile, tl.int64) * BB, local


@triton.jit
def outputs(n, JT: tl.constexpr, WIDE: tl.constexpr):
    """The j of tile n."""
    j = n * JT + tl.arange(0, JT)
    if WIDE:
        j = j.to(tl.int64)
    return j


@triton.jit
def columns(n, JT: tl.constexpr, DP: tl.constexpr, WIDE: tl.constexpr):
    """j and d of the columns of tile n."""
    column = tl.arange(0, JT * DP)
    if WIDE:
        column = column.to(tl.int64)
    return n * JT + column // DP, column % DP


@triton.jit
def components(k0, KP: tl.constexpr, WIDE: tl.constexpr):
    k = k0 + tl.arange(0, KP)
    if WIDE:
        k = k.to(tl.int64)
    return k


@triton.jit
def load_vectors(
    ptr, rows, ok, n, J: tl.constexpr, D: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr,
    S: tl.constexpr = 1, AGAIN: tl.constexpr = False,
):
    """Tile n of float32 vectors [B, J, D], or, ptr pointing to the one that is wanted, of [B, J, S, D]. 0 outside.

    AGAIN: loads what was loaded before, from L1. The compiler would keep the tile in registers if it saw that it is
    the same load.
    """
    j, d = columns(n, JT, DP, False)
    inside = ok[:, None] & ((j < J) & (d < D))[None, :]
    at = ptr + rows[0] * (J * S * D) + (rows[1] * (J * S * D))[:, None] + (j * (S * D) + d)[None, :]
    if AGAIN:
        tile = tl.load(at, mask=inside, other=0.0, cache_modifier=".ca")
    else:
        tile = tl.load(at, mask=inside, other=0.0)
    return tile


@triton.jit
def store_vectors(ptr, value, rows, ok, n, J: tl.constexpr, D: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr):
    j, d = columns(n, JT, DP, False)
    inside = ok[:, None] & ((j < J) & (d < D))[None, :]
    at = ptr + rows[0] * (J * D) + (rows[1] * (J * D))[:, None] + (j * D + d)[None, :]
    tl.store(at, value, mask=inside)


@triton.jit
def load_numbers(ptr, rows, valid, n, J: tl.constexpr, JT: tl.constexpr):
    """Tile n of float32 numbers [B, J], 0 where not valid."""
    j = outputs(n, JT, False)
    return tl.load(ptr + rows[0] * J + (rows[1] * J)[:, None] + j[None, :], mask=valid, other=0.0)


@triton.jit
def score(x, p, BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr):
    """Dot products over d of two tiles: [BB, JT]."""
    return tl.sum(tl.reshape(x * p, [BB, JT, DP]), 2)


@triton.jit
def spread(c, BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr):
    """A number per output [BB, JT] to all its columns."""
    return tl.reshape(tl.broadcast_to(c[:, :, None], [BB, JT, DP]), [BB, JT * DP])


@triton.jit
def head(x):
    """The part of a float32 that TF32 holds. The rest, x - head(x), is exact and fits again but for 2 bits."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, acc, DOT: tl.constexpr):
    """acc + a b by tensor cores. DOT "tf32x3": float32 as three TF32 products; "tf32": one; "half": 16-bit operands;
    "tf32x2": b came from 16 bits and is exact in TF32.

    The split is done here: input_precision="tf32x3" also replaces infinities, with a select for every element.
    """
    if DOT == "half":
        acc = tl.dot(a, b, acc)
    elif DOT == "tf32":
        acc = tl.dot(a, b, acc, input_precision="tf32")
    else:
        a_head = head(a)
        acc = tl.dot(a - a_head, head(b) if DOT == "tf32x3" else b, acc, input_precision="tf32")
        if DOT == "tf32x3":
            b_head = head(b)
            acc = tl.dot(a_head, b - b_head, acc, input_precision="tf32")
            acc = tl.dot(a_head, b_head, acc, input_precision="tf32")
        else:
            acc = tl.dot(a_head, b, acc, input_precision="tf32")
    return acc


@triton.jit
def by_warp(tile, BB: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr):
    """[BB, N] as [WARPS, BB, N / WARPS], every warp with the columns it holds.

    A product over the columns then is one for each warp and a sum over warps. Without this every warp would be
    given all columns, and the registers for them.
    """
    return tl.permute(tl.reshape(tile, [BB, WARPS, N // WARPS]), (1, 0, 2))


@triton.jit
def input_capsules(x_ptr, rows, ok, i, k0, xs, K: tl.constexpr, KP: tl.constexpr, WIDE: tl.constexpr):
    """u_i of the samples, components from k0: [BB, KP], 0 outside."""
    k = components(k0, KP, WIDE)
    at = x_ptr + (rows[0] * xs[0] + i * xs[1]) + (rows[1] * xs[0])[:, None] + (k * xs[3])[None, :]
    return tl.load(at, mask=ok[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def weight_tile(
    w_ptr, i, n, k0, ws,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """W_ij of tile n, components from k0: [N, KP], 0 outside."""
    j, d = columns(n, JT, DP, WIDE)
    k = components(k0, KP, WIDE)
    at = w_ptr + i * ws[0] + (j * ws[1] + d * ws[2])[:, None] + (k * ws[3])[None, :]
    return tl.load(at, mask=((j < J) & (d < D))[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def votes_tile(
    u, x_ptr, w_ptr, mask_ptr, rows, ok, i, n, xs, ws,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
    VOTES: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr,
):
    """Tile n of the votes for input capsule i: read where they exist, else W_ij u_i. u: its first components.

    Sums over i are not left to tl.dot: the adders of tensor cores round towards zero, a drift that grows with I.
    """
    if VOTES:
        j, d = columns(n, JT, DP, WIDE)
        inside = ok[:, None] & ((j < J) & (d < D))[None, :]
        at = x_ptr + (rows[0] * xs[0] + i * xs[1]) + (rows[1] * xs[0])[:, None] + (j * xs[2] + d * xs[3])[None, :]
        votes = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    else:
        w = weight_tile(w_ptr, i, n, 0, ws, J, D, K, JT, DP, KP, WIDE)
        votes = product(u, tl.trans(w), tl.zeros([BB, JT * DP], tl.float32), DOT)
        if K > KP:
            for k0 in range(KP, K, KP):
                more = input_capsules(x_ptr, rows, ok, i, k0, xs, K, KP, WIDE)
                w_more = weight_tile(w_ptr, i, n, k0, ws, J, D, K, JT, DP, KP, WIDE)
                votes = product(more, tl.trans(w_more), votes, DOT)
        if mask_ptr is not None:
            # The weight of a masked input capsule may hold anything.
            votes = tl.where(ok[:, None], votes, 0.0)
    return votes


@triton.jit
def valid_inputs(mask_ptr, rows, ok, i, m_b, m_i):
    """Which samples have input capsule i: [BB]."""
    if mask_ptr is not None:
        at = mask_ptr + (rows[0] * m_b + i * m_i) + rows[1] * m_b
        ok = ok & (tl.load(at, mask=ok, other=0) != 0)
    return ok


@triton.jit
def valid_outputs(out_mask_ptr, rows, ok, n, o_b, o_j, J: tl.constexpr, JT: tl.constexpr, WIDE: tl.constexpr):
    """Which outputs of tile n the samples have: [BB, JT]."""
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
def routing_logits(
    x, p, logits_ptr, rows, i, n, ls, valid, BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, WIDE: tl.constexpr
):
    """b = logits + votes . V of tile n, -inf where not valid."""
    b = score(x, p, BB, JT, DP)
    if logits_ptr is not None:
        b += per_pair(logits_ptr, rows, i, n, ls, valid, JT, WIDE)
    return tl.where(valid, b, float("-inf"))
