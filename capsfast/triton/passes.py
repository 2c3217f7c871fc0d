"""A function for each kernel, which launches the kernel. The device of the call must be the current device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..options import Options, PassOptions
from .config import padded, power_of_two
from .kernels.accumulate import accumulate_gradient_kernel, accumulate_kernel
from .kernels.arguments import Norms
from .kernels.gradient import gradient_kernel
from .kernels.row_norm import row_norm_kernel
from .kernels.update import add_up_kernel, restore_kernel, update_gradient_kernel, update_kernel
from .launch import Call, cdiv
from .plan import Slot


class Given(NamedTuple):
    """Gradients of the outputs of a pass other than the first moment, float32 and contiguous."""

    mass: Slot | None = None  # [B, J]
    second: Slot | None = None  # [B, J, D]
    lse: Slot | None = None  # [B, I], [B, J] for normalize="in"


NOTHING = Given()
# The gradient pass keeps V and ds of all iterations if these, with votes and dvotes, take at most MOST_HELD columns of
# a warp, two to a register, and are at most MOST_VECTORS vectors: kept iterations are compiled one by one.
MOST_HELD, MOST_VECTORS = 352, 9


class Sums(NamedTuple):
    """The sums of a pass, or its partial sums, which have an axis of splits in front."""

    first: Slot  # [B, J, D]
    mass: Slot | None = None  # [B, J]
    second: Slot | None = None  # [B, J, D]


def mode(call: Call, kernel: str) -> str:
    """MODE of kernels/softmax.py. A program that does not hold all outputs needs the rows of row_norm."""
    if call.normalize == "out":
        return "out" if call.tiles(kernel).groups == 1 else "row_norm"
    return "row_norm" if call.normalize == "lse" else call.normalize


def uniform_factor(call: Call) -> tuple[Slot | None, float]:
    """The coupling of a first pass without logits: a tensor [B] and 0, or None and one number for all samples."""
    B, I, J, *_ = call.sizes
    valid, count = (call.mask, I) if call.normalize == "in" else (call.out_mask, J)
    extra = int(call.options.leaky)
    if valid is None:
        return None, 1 / max(count + extra, 1)
    return call.compute(_inverse_counts, valid, extra), 0.0


def _inverse_counts(valid: Tensor, extra: int) -> Tensor:
    counts = valid.sum(1, dtype=torch.float32)
    return torch.where(counts > 0, 1 / (counts + extra), 0.0)


def row_norm(
    call: Call, state: Slot | None, dcoupling: Slot | None, rows: Slot, with_ds: bool, given: Given = NOTHING
) -> None:
    """Fills rows [B, I, 4]. state: V [B, J, D] or, if with_ds, V and ds of one iteration of a state."""

    _launch(
        call, "row_norm", row_norm_kernel, (*call.tensors, dcoupling, *given, state, rows),
        call.tiles("row_norm").groups, WITH_DS=with_ds, R=call.iterations,
    )  # fmt: skip


def _launch(call: Call, name: str, kernel: Any, arguments: tuple[Any, ...], *more: Any, **constants: Any) -> None:
    """Launches a kernel with as many programs as the device runs at once. more: arguments after the sizes."""
    tiles = call.tiles(name)
    splits, chunk = call.split(name)
    grid = (call.batch_tiles(tiles), splits, 1 if name == "row_norm" else tiles.groups)
    call.x.plan.launch(kernel, grid, *arguments, *call.walk, chunk, *more, **call.constants(name), **constants)


def accumulate(
    call: Call,
    V: Slot | None,
    rows: Slot | None,
    uniform: bool,
    coupling: Slot | None = None,
    lse: Slot | None = None,
) -> tuple[Sums, Slot | None]:
    """Partial sums [splits, B, J, D] and, for softmax "in", their maxima and sums of exponentials [2, splits, B, J].

    In a routing pass V is the query, and the sums make all moments. Fills coupling [B, I, J], except for softmax "in",
    and lse [B, I], if the mode is "out".
    """
    call = call.merged() if uniform else call
    B, _, J, *_ = call.sizes
    kind = "uniform" if uniform else mode(call, "accumulate")
    of_pass = call.options if isinstance(call.options, PassOptions) else None

    sums = partial_sums(call, "accumulate", of_pass is not None, of_pass is not None and of_pass.second)
    online = call.new(2, sums.first.shape[0], B, J) if kind == "in" else None
    arguments = (
        *call.tensors, V, rows, None, None, sums.first, online, sums.mass, sums.second,
        None if kind == "in" else coupling, lse if kind == "out" else None,
    )  # fmt: skip
    _accumulate(call, arguments, kind)
    return sums, online


def _accumulate(call: Call, arguments: tuple[Any, ...], kind: str) -> None:
    constants = {"MODE": kind, "KEPT": call.choice("accumulate").kept, "TOGETHER": call.together}
    _launch(call, "accumulate", accumulate_kernel, arguments, **constants)


def partial_sums(call: Call, kernel: str, mass: bool = False, second: bool = False) -> Sums:
    """Memory for the partial sums of a kernel."""
    B, _, J, D, _ = call.sizes
    splits, _ = call.split(kernel)
    return Sums(
        call.new(splits, B, J, D),
        call.new(splits, B, J) if mass else None,
        call.new(splits, B, J, D) if second else None,
    )


def accumulate_gradient(
    call: Call,
    state: Slot,
    dcoupling: Slot | None,
    norms: Norms,
    pairs: Slot | None,
    sums: Sums | None,
    given: Given = NOTHING,
    terms: Slot | None = None,
) -> None:
    """Launches the backward of one iteration. Fills what is not None: pairs [B, I, J, 2] float32 with the coefficients
    c and db in dvotes, terms [B, I, J] with c dc, and partial sums over i of db x, db and db x^2.

    state: V and ds of the iteration, of what restore() makes.
    """
    B, I, *_ = call.sizes
    kind = mode(call, "accumulate_gradient")
    if kind == "row_norm" and call.normalize == "out":
        norms = norms._replace(rows=call.new(B, I, 4))
        row_norm(call, state, dcoupling, norms.rows, True, given)
    arguments = (*call.tensors, dcoupling, *given, state, *norms, pairs, terms, *(sums or (None, None, None)))
    _launch(call, "accumulate_gradient", accumulate_gradient_kernel, arguments, MODE=kind, R=call.iterations)


def coupling(call: Call, V: Slot | None, norms: Norms, out: Slot) -> None:
    """Fills out [B, I, J] for softmax "in"."""

    _accumulate(call, (*call.tensors, V, *norms[:3], None, None, None, None, out, None), "in")


def _update_grid(call: Call, last: bool = False) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and sizes of a step between passes. A program has 128 numbers and reads 16 splits at once: 2 048 loads.

    last: whether the step belongs to the last iteration.
    """
    B, _, J, D, _ = call.sizes
    DP: int = power_of_two(D)
    RB = max(1, 128 // DP)
    squashed = isinstance(call.options, Options) and (call.options.squash_last or not last)
    kind = call.options.squash if isinstance(call.options, Options) and squashed else "identity"
    return (cdiv(B * J, RB),), {"J": J, "D": D, "DP": DP, "RB": RB, "KIND": kind}


def _splits_at_once(shape: dict[str, Any]) -> int:
    rows: int = shape["RB"] * shape["DP"]
    return max(1, min(16, 2048 // rows))


def update(
    call: Call,
    partial: Sums,
    online: Slot | None = None,
    factor: tuple[Slot | None, float] = (None, 1.0),
    norm: Sequence[Slot | None] = (None, None),
    s: Slot | None = None,
    V: Slot | None = None,
    following: Slot | None = None,
    v: Slot | None = None,
) -> Sums:
    """Adds up the splits and multiplies the sums by factor. Fills norm and, if given, s with the first sums. An
    iteration also fills following, V of the next iteration; the last iteration fills v, the output, instead."""
    B, _, J, D, _ = call.sizes
    grid, shape = _update_grid(call, last=v is not None)
    sums = Sums(
        call.new(B, J, D) if s is None else s,
        None if partial.mass is None else call.new(B, J),
        None if partial.second is None else call.new(B, J, D),
    )
    eps = call.options.eps if isinstance(call.options, Options) else 0.0
    call.x.plan.launch(update_kernel, grid,
        *partial, online, factor[0], call.bias, call.out_mask, V, *sums, *norm, following, v,
        B, partial.first.shape[0], factor[1], eps,
        **shape, SB=_splits_at_once(shape), LEAKY=call.options.leaky, num_warps=4,
    )  # fmt: skip
    return sums


def restore(call: Call, s: Slot, dv: Slot) -> Slot:
    """Makes a state [B, J, R, 2, padded D] from s [R, B, J, D]: V of every iteration, ds of the last, room for the
    other ds."""
    assert isinstance(call.options, Options)
    R, B, J, D = s.shape
    state = call.new(B, J, R, 2, padded(D))
    grid, shape = _update_grid(call)
    call.x.plan.launch(restore_kernel, grid,
        s, dv, call.bias, call.out_mask, state, B, call.options.eps,
        **shape, LAST=_update_grid(call, last=True)[1]["KIND"], R=R, num_warps=4,
    )  # fmt: skip
    return state


def update_gradient(call: Call, partial: Slot, G: Slot, s: Slot, ds: Slot) -> None:
    assert isinstance(call.options, Options)
    grid, shape = _update_grid(call)
    call.x.plan.launch(update_gradient_kernel, grid,
        partial, G, call.bias, call.out_mask, s, ds, call.sizes[0], partial.shape[0],
        call.options.eps, **shape, SB=_splits_at_once(shape), R=call.options.num_iterations, num_warps=4,
    )  # fmt: skip


def new_coefficients(call: Call, iterations: int) -> Slot:
    """Memory for c and db of T iterations, [T, B, I, J, 2], or with positions [T, B, I, J, S, 2]."""
    positions = () if call.positions is None else (call.positions,)
    return call.new(iterations, *call.x.shape[:2], call.sizes[2], *positions, 2)


def add_up(call: Call, parts: Slot, dtype: torch.dtype | None = None) -> Slot:
    """dweight: the sum of its parts [n, ...], in ``dtype`` or the dtype of the weight."""
    assert call.weight is not None
    dtype = dtype or call.weight.dtype
    if parts.shape[0] == 1 and parts.dtype == dtype:
        return parts[0]
    total = call.new(*call.weight.shape, dtype=dtype)
    # A shared weight has a part per program. A program reads 2 048 numbers at once, however many parts there are.
    at_once = 64 if call.shared else 4
    n, width = total.numel(), 2048 // at_once
    call.x.plan.launch(add_up_kernel, (cdiv(n, width),), parts, total, n, parts.shape[0], WIDTH=width, SB=at_once)
    return total


def gradient(
    call: Call,
    state: Slot,
    pairs: Slot | None,
    uniform: bool,
    needed: tuple[bool, bool],
    dsecond: Slot | None = None,
    dx: Slot | None = None,
) -> tuple[Slot | None, Slot | None]:
    """dx, and dweight in parts [n, ...] that add_up() adds up; None for what is not needed.

    pairs: [T, B, I, J, 2] from accumulate_gradient, for the last T iterations. uniform: whether the iteration before
    these T has a gradient too, with equal couplings.
    dx: the memory for dx, unless output capsules share the votes. None: new memory.
    """
    tiles = call.tiles("gradient")
    B, I, J, D, K = call.sizes
    room = dw = None
    if needed[0]:
        # If output capsules share votes, dvotes are a sum over output capsules.
        shape = (B, I, J, D) if call.common else call.x.shape
        dx = dx or call.new(*shape, dtype=torch.float32 if call.common else call.x.dtype)
        # du is a sum over groups of outputs, in float32 until the last group.
        if tiles.groups > 1 and call.weight is not None and dx.dtype != torch.float32:
            room = call.new(*call.x.shape)
    first = call.iterations - (0 if pairs is None else pairs.shape[0])
    factor = uniform_factor(call) if uniform else (None, 0.0)
    vectors = 2 * (call.iterations - first) + uniform
    held = vectors <= MOST_VECTORS and (vectors + 2) * tiles.columns <= MOST_HELD
    # Loads of vectors for every input capsule would be pipelined too.
    ahead = held and not call.quadratic
    chunks, chunk, splits, batch_tiles = call.split_gradient("gradient")
    if needed[1]:
        assert call.weight is not None
        # One part per split of the batch; for a shared weight one part per program.
        dw = call.new(chunks * splits if call.shared else splits, *call.weight.shape)
    constants = call.constants("gradient") | {
        "BACK_DOT": call.back_dot, "START": first, "R": call.iterations, "UNIFORM": uniform,
        "AGREEMENT": call.agreement, "SHARED": call.shared, "HELD": held,
        "num_stages": tiles.stages if ahead else 1,
    }  # fmt: skip
    call.x.plan.launch(gradient_kernel, (splits, chunks),
        *call.tensors, dsecond, state, pairs, factor[0], dx, room, dw,
        *call.walk, chunk, batch_tiles, tiles.groups, factor[1], **constants,
    )  # fmt: skip
    if dx is not None and call.common:
        dx = call.compute(_over_outputs, dx, call.x.dtype)
    return dx, dw


def _over_outputs(dvotes: Tensor, dtype: torch.dtype) -> Tensor:
    return dvotes.sum(2, keepdim=True).to(dtype)
