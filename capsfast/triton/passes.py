"""A function for each kernel, which launches it. The device of the call must be the current one."""

from typing import Any

import torch
from torch import Tensor

from .config import power_of_two
from .kernels.accumulate import accumulate_gradient_kernel, accumulate_kernel
from .kernels.gradient import gradient_kernel
from .kernels.row_norm import coupling_kernel, row_norm_kernel
from .kernels.update import restore_kernel, update_gradient_kernel, update_kernel
from .launch import Call, cdiv, pair_strides


def mode(call: Call, kernel: str) -> str:
    """MODE of kernels/softmax.py. If a program does not hold all outputs, row_norm has to come first."""
    if call.options.softmax == "in":
        return "in"
    return "out" if call.tiles(kernel).groups == 1 else "row_norm"


def uniform_factor(call: Call) -> tuple[Tensor | None, float]:
    """The coupling of a first pass without logits: [B] and 0, or None and one number for all samples."""
    B, I, J, *_ = call.sizes
    valid, count = (call.mask, I) if call.options.softmax == "in" else (call.out_mask, J)
    extra = int(call.options.leaky)
    if valid is None:
        return None, 1 / max(count + extra, 1)
    counts = valid.sum(1, dtype=torch.float32)
    return torch.where(counts > 0, 1 / (counts + extra), 0.0), 0.0


def row_norm(call: Call, state: Tensor, dcoupling: Tensor | None, rows: Tensor, with_ds: bool) -> None:
    """Fills rows [3, B, I]. state: V [B, J, D] or, if with_ds, V and ds of one iteration in [B, J, R, 2, D]."""
    tiles, splits, chunk, constants = call.plan("row_norm")
    B, I, *_ = call.sizes
    row_norm_kernel[(cdiv(B, tiles.BB), splits)](
        *call.tensors, dcoupling, state, rows, *call.strides, *pair_strides(dcoupling), B, I, chunk, tiles.groups,
        **constants, WITH_DS=with_ds, R=call.options.num_iterations,
    )  # fmt: skip


def accumulate(call: Call, V: Tensor | None, rows: Tensor | None, uniform: bool) -> tuple[Tensor, Tensor | None]:
    """Partial sums [splits, B, J, D] and, for softmax "in", their maxima and sums of exponentials [2, splits, B, J]."""
    tiles, splits, chunk, constants = call.plan("accumulate")
    B, I, J, D, _ = call.sizes
    kind = "uniform" if uniform else mode(call, "accumulate")
    partial = call.new(splits, B, J, D)
    online = call.new(2, splits, B, J) if kind == "in" else None
    accumulate_kernel[(cdiv(B, tiles.BB), splits, tiles.groups)](
        *call.tensors, V, rows, partial, online, *call.strides, B, I, chunk,
        **constants, MODE=kind,
    )  # fmt: skip
    return partial, online


def accumulate_gradient(
    call: Call, state: Tensor, dcoupling: Tensor | None, rows: Tensor | None, norm: tuple[Tensor | None, ...]
) -> Tensor:
    """Partial sums [splits, B, J, D] of what an iteration adds to G. norm: maximum, 1 / sum, s . ds, [B, J] each."""
    tiles, splits, chunk, constants = call.plan("accumulate_gradient")
    B, I, J, D, _ = call.sizes
    partial = call.new(splits, B, J, D)
    accumulate_gradient_kernel[(cdiv(B, tiles.BB), splits, tiles.groups)](
        *call.tensors, dcoupling, state, rows, *norm, partial, *call.strides, *pair_strides(dcoupling), B, I, chunk,
        **constants, MODE=mode(call, "accumulate_gradient"), R=call.options.num_iterations,
    )  # fmt: skip
    return partial


def coupling(call: Call, V: Tensor, rows: Tensor | None, norm: tuple[Tensor | None, ...], out: Tensor) -> None:
    tiles, splits, chunk, constants = call.plan("coupling")
    B, I, *_ = call.sizes
    coupling_kernel[(cdiv(B, tiles.BB), splits, tiles.groups)](
        *call.tensors, V, rows, *norm, out, *call.strides, B, I, chunk,
        **constants, MODE=mode(call, "coupling"),
    )  # fmt: skip


def _update_grid(call: Call) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and sizes of a step between passes. A program has 128 numbers and reads 16 splits at once: 2 048 loads."""
    B, _, J, D, _ = call.sizes
    DP: int = power_of_two(D)
    RB = max(1, 128 // DP)
    shape = {"J": J, "D": D, "DP": DP, "RB": RB, "KIND": call.options.squash}
    return (cdiv(B * J, RB),), shape


def _splits_at_once(shape: dict[str, Any]) -> int:
    rows: int = shape["RB"] * shape["DP"]
    return max(1, min(16, 2048 // rows))


def update(
    call: Call,
    partial: Tensor,
    online: Tensor | None,
    factor: tuple[Tensor | None, float],
    V: Tensor | None,
    s: Tensor,
    norm: tuple[Tensor | None, ...],
    following: Tensor | None,
    v: Tensor | None,
) -> None:
    """Fills s, norm, and V of the next iteration (following) or, in the last one, the output v."""
    grid, shape = _update_grid(call)
    update_kernel[grid](
        partial, online, factor[0], call.bias, call.out_mask, V, s, *norm, following, v, *call.out_strides,
        call.sizes[0], partial.shape[0], factor[1], call.options.eps,
        **shape, SB=_splits_at_once(shape), ONLINE=online is not None, LEAKY=call.options.leaky, num_warps=4,
    )  # fmt: skip


def restore(call: Call, s: Tensor) -> Tensor:
    """From s [R, B, J, D]: state [B, J, R, 2, D], with V of every iteration and room for ds."""
    R, B, J, D = s.shape
    state = call.new(B, J, R, 2, D)
    grid, shape = _update_grid(call)
    restore_kernel[grid](
        s, call.bias, call.out_mask, state, *call.out_strides, B, call.options.eps, **shape, R=R, num_warps=4
    )
    return state


def update_gradient(call: Call, partial: Tensor | None, G: Tensor, s: Tensor, ds: Tensor, delta: Tensor | None) -> None:
    grid, shape = _update_grid(call)
    splits = 0 if partial is None else partial.shape[0]
    update_gradient_kernel[grid](
        partial, G, call.bias, call.out_mask, s, ds, delta, *call.out_strides, call.sizes[0], splits,
        call.options.eps, **shape, SB=_splits_at_once(shape), R=call.options.num_iterations, num_warps=4,
    )  # fmt: skip


def gradient(
    call: Call,
    state: Tensor,
    dcoupling: Tensor | None,
    rows: Tensor | None,
    norm: tuple[Tensor | None, ...],
    start: int,
    dx: Tensor | None,
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Fills dx, unless it is None. Returns partial sums of dW, [splits, I, J, D, K] or for a shared weight
    [programs, J, D, K], and dlogits [B, I, J] or their partial sums [splits, I, J].

    needed: whether dW, and whether dlogits.
    """
    tiles, _, _, constants = call.plan("gradient")
    chunks, chunk, splits, batch_tiles = call.split_gradient()
    B, I, J, D, K = call.sizes
    dw = dl = None
    if needed[0]:
        dw = call.new(chunks * splits, J, D, K) if call.shared else call.new(splits, I, J, D, K)
    sum_logits = call.logits is not None and call.logits.dim() == 2
    if needed[1]:
        assert call.logits is not None
        dl = call.new(splits, I, J) if sum_logits else call.new(B, I, J, dtype=call.logits.dtype)
    uniform = start == 0 and call.uniform_start
    factor = uniform_factor(call) if uniform else (None, 0.0)
    gradient_kernel[(chunks, splits)](
        *call.tensors, dcoupling, state, rows, *norm, factor[0], dx, dw, dl, *call.strides,
        *pair_strides(dcoupling), B, I, chunk, batch_tiles, tiles.groups, factor[1],
        **constants, BACK_DOT=call.back_dot, MODE=mode(call, "gradient"),
        START=start + uniform, R=call.options.num_iterations, UNIFORM=uniform,
        AGREEMENT=call.options.gradient == "full", SHARED=call.shared, SUM_LOGITS=sum_logits, WARPS=tiles.warps,
    )  # fmt: skip
    return dw, dl
