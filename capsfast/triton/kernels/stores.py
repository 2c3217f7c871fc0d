"""What the gradient pass writes. Tiles of outputs and of the batch after the first are added to what is there."""

import triton
import triton.language as tl

from .tiles import columns, components, outputs, pose_rows, store_pairs


@triton.jit
def add_to(at, value, within, stored):
    """Stores value or, if stored > 0, adds it to what this program stored before."""
    again = tl.zeros(within.shape, tl.int32) + stored > 0
    before = tl.load(at, mask=within & again, other=0.0)
    tl.store(at, before.to(tl.float32) + value, mask=within)


@triton.jit
def add_weight_gradient(
    dw_ptr, value, n, k0, stored,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr,
    KP: tl.constexpr, WIDE: tl.constexpr,
):
    """Stores tile n of dW [J, D, K] of an input capsule, components k from k0 on."""
    j, d = columns(n, JT, DP, LANES, WIDE)
    k = components(k0, KP, WIDE)
    within = ((j < J) & (d < D))[:, None] & (k < K)[None, :]
    add_to(dw_ptr + ((j * D + d) * K)[:, None] + k[None, :], value, within, stored)


@triton.jit
def add_input_gradient(
    dx_ptr, value, rows, inside, i, k0, I, stored, K: tl.constexpr, P: tl.constexpr, KP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Stores du of input capsule i for the rows, in [B, I, P K], components k from k0 on."""
    k = components(k0, KP, WIDE)
    at = dx_ptr + (rows[0] * I + i) * (P * K) + (rows[1] * I * (P * K))[:, None] + k[None, :]
    if P > 1:
        at += pose_rows(rows, K)[:, None]
    add_to(at, value, inside[:, None] & (k < K)[None, :], stored)


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
