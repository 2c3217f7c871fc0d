"""Passes over the input capsules and the steps between them. A routing is a sequence of passes, a routing pass is one.

Every function appends its kernels to the plan of the call. The device of the call must be the current device.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config import power_of_two
from .kernels.accumulate import accumulate_gradient_kernel, accumulate_kernel
from .kernels.arguments import Norms, OutputGradients, Vectors
from .kernels.gradient import gradient_kernel
from .kernels.row_norm import join_row_norms_kernel, row_norm_kernel
from .kernels.update import (
    add_up_kernel,
    arrange_kernel,
    bias_gradient_kernel,
    inverse_counts_kernel,
    restore_kernel,
    update_gradient_kernel,
    update_kernel,
)
from .launch import KernelCall, cdiv, compiled_in
from .plan import Slot

NOTHING = OutputGradients()
# The gradient pass keeps V and ds of all iterations in registers, within two limits. With votes and dvotes they take at
# most MOST_HELD columns of a warp, two columns a register. They are at most MOST_VECTORS vectors, because kept
# iterations are compiled one by one.
MOST_HELD, MOST_VECTORS = 352, 9


class Sums(NamedTuple):
    """The sums of a pass, or its partial sums, which have an axis of splits in front."""

    first: Slot  # [B, J, D]
    mass: Slot | None = None  # [B, J]
    second: Slot | None = None  # [B, J, D]


def mode(call: KernelCall, kernel: str) -> str:
    """MODE of kernels/softmax.py. A program that does not hold all outputs needs the rows of row_norm."""
    if call.normalize == "out":
        return "out" if call.tiles(kernel).sections == 1 else "row_norm"
    return "row_norm" if call.normalize == "lse" else call.normalize


def uniform_factor(call: KernelCall) -> tuple[Slot | None, float]:
    """The coupling of a first pass without logits: a tensor [B] and 0, or None and one number for all samples."""
    B, I, J, *_ = call.sizes
    parameters = call.parameters
    valid, count = (parameters.mask, I) if call.normalize == "in" else (parameters.out_mask, J)
    extra = int(call.options.leaky)
    if valid is None:
        return None, 1 / max(count + extra, 1)
    factor = call.new(B)
    call.x.plan.launch(inverse_counts_kernel, (B,), valid, factor, count, EXTRA=extra, WIDTH=512, num_warps=1)
    return factor, 0.0


def _rows(lse: Tensor) -> Tensor:
    """Norms.rows [B, I, 4] for a given log-sum-exp: the log-sum-exp stands for the maximum, and 1 for the sum.

    The coupling is 0 where the log-sum-exp is -inf. The entry for sum c dc is 0, so it does not change the gradient.
    """
    nothing = torch.isneginf(lse)
    nought = torch.zeros_like(lse, dtype=torch.float32)
    return torch.stack([lse.masked_fill(nothing, 0.0), (~nothing).float(), nought, nought], -1)


def _log_sum(maximum: Tensor, scale: Tensor) -> Tensor:
    """maximum + log(sum), -inf where no logit is finite. scale: 1 / sum, or 0."""
    return torch.where(scale == 0.0, -torch.inf, maximum - scale.log())


def _launch(call: KernelCall, name: str, kernel: Any, arguments: tuple[Any, ...], **constants: Any) -> None:
    """Launches a kernel with as many programs as the device runs at once."""
    tiles = call.tiles(name)
    splits, chunk = call.split(name)
    grid = (call.batch_tiles(tiles), splits, tiles.sections)
    call.x.plan.launch(kernel, grid, *arguments, *call.walk, chunk, **call.constants(name), **constants)


def rows_of(
    call: KernelCall, kind: str, state: Slot | None, with_ds: bool = False, douts: OutputGradients = NOTHING
) -> Any:
    """Norms.rows [B, I, 4] for the kernels of a mode; None if the mode is not "row_norm".

    state: V or, if with_ds, V and ds of one iteration of a state.
    """
    if kind != "row_norm" or call.normalize == "lse":
        return call.compute(_rows, call.parameters.lse) if kind == "row_norm" else None
    B, I, *_ = call.sizes
    sections = call.tiles("row_norm").sections
    parts = call.new(2 + with_ds, sections, B, I)
    rows = call.new(B, I, 4)
    arguments = (*call.tensors, *douts, state, parts)
    _launch(call, "row_norm", row_norm_kernel, arguments, WITH_DS=with_ds, R=call.iterations)
    # A warp joins 32 rows; all loads of 32 sections are in flight at once.
    call.x.plan.launch(
        join_row_norms_kernel, (cdiv(B * I, 32),), parts, call.parameters.activation, douts.dlse, rows, B * I, sections,
        LEAKY=call.options.leaky, WITH_DS=with_ds, WIDTH=32, GB=32, num_warps=1,
    )  # fmt: skip
    return rows


def weighted_sums(
    call: KernelCall,
    V: Slot | None,
    first_iteration: bool,
    coupling: Slot | None = None,
    with_lse: bool = False,
    norm: Slot | None = None,
    **step: Slot | None,
) -> tuple[Sums, Slot | None]:
    """One pass of a forward: its sums, and the log-sum-exp of the logits if with_lse, [B, I] or for "in" [B, J].

    V: the query, or None for zero. first_iteration: whether this is the first iteration of a routing, or a pass. Fills
    coupling [B, I, J] and, for normalize="in", norm [2, B, J] if they are not None. step: what update() fills.
    """
    B, I, J, *_ = call.sizes
    inward = call.normalize == "in"
    # For "in" the coupling is known only after all splits are added up, so it takes a pass of its own.
    uniform = first_iteration and call.uniform_start and not with_lse and (coupling is None or inward)
    kind = "uniform" if uniform else mode(call, "accumulate")
    rows = rows_of(call, kind, V)
    lse = call.new(B, I) if with_lse and kind == "out" else None

    merged = call.merged() if uniform else call
    partial = partial_sums(merged, "accumulate", call.of_pass, call.second)
    online = call.new(2, partial.first.shape[0], B, J) if kind == "in" else None
    _accumulate(merged, kind, V, Norms(rows), partial, online, None if inward else coupling, lse)
    before = V if call.accumulate else None
    sums = update(call, partial, online, uniform_factor(call) if uniform else (None, 1.0), norm, before, **step)
    if inward and coupling is not None:
        assert norm is not None
        _accumulate(call, kind="in", V=V, norms=Norms(None, *norm), coupling=coupling)
    if with_lse and lse is None:
        lse = call.compute(_log_sum, *(norm or (rows[..., 0], rows[..., 1])))
    return sums, lse


def _accumulate(
    call: KernelCall,
    kind: str,
    V: Slot | None,
    norms: Norms,
    partial: Sums | None = None,
    online: Slot | None = None,
    coupling: Slot | None = None,
    lse: Slot | None = None,
) -> None:
    """Fills what is not None: partial sums [splits, B, J, D], for "in" the maxima and sums of exponentials of the
    splits [2, splits, B, J], the coupling, and for mode "out" the log-sum-exp."""
    first, mass, second = partial or (None, None, None)
    arguments = (*call.tensors, V, *norms[:3], first, online, mass, second, coupling, lse)
    constants = {"MODE": kind, "KEPT": call.choice("accumulate").kept, "TOGETHER": call.together}
    _launch(call, "accumulate", accumulate_kernel, arguments, **constants)


def partial_sums(call: KernelCall, kernel: str, mass: bool = False, second: bool = False) -> Sums:
    """Memory for the partial sums of a kernel."""
    B, _, J, D, _ = call.sizes
    splits, _ = call.split(kernel)
    return Sums(
        call.new(splits, B, J, D),
        call.new(splits, B, J) if mass else None,
        call.new(splits, B, J, D) if second else None,
    )


def accumulate_gradient(
    call: KernelCall,
    state: Slot,
    norms: Norms,
    douts: OutputGradients,
    pairs: Slot | None,
    sums: Sums | None,
    terms: Slot | None = None,
) -> None:
    """The backward of one iteration. Fills what is not None: pairs [B, I, J, 2] float32 with the coefficients c and db
    in dvotes, terms [B, I, J] with c dc, and partial sums over i of db x, db and db x^2.

    state: V and ds of the iteration, from restore(). douts: contiguous, and float32 except dcoupling.
    """
    kind = mode(call, "accumulate_gradient")
    norms = norms._replace(rows=rows_of(call, kind, state, True, douts))
    arguments = (*call.tensors, *douts, state, *norms, pairs, terms, *(sums or (None, None, None)))
    _launch(call, "accumulate_gradient", accumulate_gradient_kernel, arguments, MODE=kind, R=call.iterations)


def _step(call: KernelCall, kernel: Any, *arguments: Any, summing: bool = True, **constants: Any) -> None:
    """Launches a step between passes. A step takes one trip to L2 after the other. So a program has few numbers, 16 or
    one output, and reads up to 32 splits at once, four loads of 16 bytes a lane; up to 128 if the batch is small."""
    B, _, J, D, _ = call.sizes
    DP: int = max(4, power_of_two(D))
    RB, warps = max(1, 16 // DP), 4 if summing and call.small else 1
    L = compiled_in(Vectors(J, D, call.poses, call.strip))
    constants = {"KIND": call.squashes[0], "L": L, "DP": DP, "RB": RB, "num_warps": warps} | constants
    if summing:
        constants["SB"] = max(1, min(32, 512 // (RB * DP))) * warps
    call.x.plan.launch(kernel, (cdiv(B * J, RB),), *arguments, *call.numbers, **constants)


def update(
    call: KernelCall,
    partial: Sums,
    online: Slot | None = None,
    factor: tuple[Slot | None, float] = (None, 1.0),
    norm: Slot | None = None,
    V: Slot | None = None,
    *,
    s: Slot | None = None,
    mass: Slot | None = None,
    second: Slot | None = None,
    following: Slot | None = None,
    v: Slot | None = None,
) -> Sums:
    """Adds up the splits and multiplies the sums by factor. Fills norm and, if given, s, mass and second with the sums.
    An iteration also fills following, V of the next iteration; the last iteration fills v, the output, instead."""
    B, _, J, D, _ = call.sizes
    sums = Sums(
        s or call.new(B, J, D),
        None if partial.mass is None else mass or call.new(B, J),
        None if partial.second is None else second or call.new(B, J, D),
    )
    _step(
        call, update_kernel,
        *partial, online, factor[0], call.bias, call.parameters.out_mask, V, *sums, *(norm or (None, None)), following,
        v, B, partial.first.shape[0], factor[1], KIND=call.squashes[v is not None], LEAKY=call.options.leaky,
    )  # fmt: skip
    return sums


def restore(call: KernelCall, s: Slot, dv: Slot) -> tuple[Slot, Slot | None]:
    """A state, which is V and ds of R iterations in the order of kernels/strips.py, from s [R, B, J, D]: V of every
    iteration, ds of the last, room for the other ds. For softmax "in" also s in this order."""
    R, B = s.shape[:2]
    state = call.vectors(R, 2)
    ordered = call.vectors(R) if call.normalize == "in" else None
    arguments = (s, dv, call.bias, call.parameters.out_mask, state, ordered, B)
    constants = {"LAST": call.squashes[1], "ACCUMULATE": call.accumulate, "R": R}
    _step(call, restore_kernel, *arguments, summing=False, **constants)
    return state, ordered


def arrange(call: KernelCall, gradients: tuple[Slot | None, ...] | None = None) -> tuple[Slot | None, ...]:
    """Puts the vectors of a pass in the order of kernels/strips.py. Sets call.arranged to precision and center. Returns
    (V, dsecond, s): in the forward V is the query, in the backward V is a state of one iteration; None for what is not
    there. gradients: dfirst, dsecond and s, in the backward."""
    query, precision, center, *_ = call.parameters
    dfirst, dsecond, s = gradients or (None,) * 3
    vectors = (query, dfirst, precision, center, dsecond, s)
    ordered: list[Slot | None] = [None if vector is None else call.vectors() for vector in vectors]
    state = None
    if gradients is not None:
        state = call.vectors(1, 2)
        ordered[:2] = state[:, :, 0, 0], state[:, :, 0, 1]
    call.arranged = ordered[2], ordered[3]
    if any(ordered):
        _step(call, arrange_kernel, *vectors, *ordered, call.sizes[0], summing=False, R=1)
    return (state or ordered[0], *ordered[4:])


def arrange_iteration(
    call: KernelCall, t: int, dfirst: Slot, dsecond: Slot, state: Slot, vectors: tuple[Slot, ...]
) -> None:
    """As arrange(), for iteration t of several passes. state: V and ds of all iterations. vectors: precision, center
    and dsecond of all iterations."""
    _, precision, center, *_ = call.parameters
    ordered = [vector[:, :, t] for vector in vectors]
    call.arranged = None if precision is None else ordered[0], ordered[1]
    vectors_of_pass = (None, dfirst, precision, center, dsecond, None)
    of_t = (None, state[:, :, t, 1], *ordered, None)
    _step(call, arrange_kernel, *vectors_of_pass, *of_t, call.sizes[0], summing=False, R=call.iterations)


def update_gradient(call: KernelCall, partial: Slot, G: Slot, s: Slot, ds: Slot) -> None:
    arguments = (partial, G, call.bias, call.parameters.out_mask, s, ds, call.sizes[0], partial.shape[0])
    _step(call, update_gradient_kernel, *arguments, R=call.iterations)


def new_coefficients(call: KernelCall, iterations: int) -> Slot:
    """Memory for c and db of T iterations, [T, B, I, J, 2], or with positions [T, B, I, J, S, 2]."""
    positions = () if call.positions is None else (call.positions,)
    return call.new(iterations, *call.x.shape[:2], call.sizes[2], *positions, 2)


def gradients(
    call: KernelCall,
    state: Slot,
    pairs: Slot | None,
    uniform: bool,
    needed: tuple[bool, bool, bool],
    dtype: torch.dtype | None = None,
    dx: Slot | None = None,
    dsecond: Slot | None = None,
) -> tuple[Slot | None, Slot | None, Slot | None]:
    """dx, dweight and dlogits; None for what is not needed, and without input capsules.

    pairs: [T, B, I, J, 2] from accumulate_gradient, for the last T iterations. uniform: whether the iteration before
    these T has a gradient too, with equal couplings. dtype: the dtype of sums over samples; None: the tensors' dtypes.
    dx: the memory for dx; None for new memory, and if output capsules share the votes.
    """
    need_x, need_weight, need_logits = needed
    parts = dlogits = None
    if call.sizes[1] == 0:
        # Without input capsules the gradient pass has no programs, so it would write nothing.
        return None, None, None
    if need_x or need_weight:
        dx, parts = _gradient(call, state, pairs, uniform, (need_x, need_weight), dx, dsecond)
    if need_logits:
        assert pairs is not None
        dlogits = _sum_of_db(call, pairs, dtype or call.parameters.logits.dtype)
    return dx, None if parts is None else _add_up(call, parts, dtype), dlogits


def _sum_of_db(call: KernelCall, pairs: Slot, dtype: torch.dtype) -> Slot:
    """dlogits: sums db over iterations and, if samples share logits [I, J], over samples."""
    logits = call.parameters.logits
    if call.shared_logits and call.positions is not None:
        found: Slot = call.compute(_sum_over_positions, pairs, dtype)
        return found
    total = call.new(*logits.shape, dtype=dtype)
    # The logits [B, I, J] of an empty batch have no sums.
    if n := total.numel():
        count, at_once = pairs.numel() // (2 * n), 64 if call.shared_logits else 4
        width = 2048 // at_once
        grid = (cdiv(n, width),)
        call.x.plan.launch(add_up_kernel, grid, pairs[..., 1], total, n, count, STEP=2, WIDTH=width, SB=at_once)
    return total


def _sum_over_positions(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    return pairs[..., 1].sum((0, 1, 4)).to(dtype)


def bias_gradient(call: KernelCall, ds: Slot, dtype: torch.dtype) -> Slot:
    """dbias: the sum over samples and iterations of ds, which is a part of a state, [strips, J, T, fours, 16, 4]."""
    B, _, J, D, _ = call.sizes
    DP = max(4, power_of_two(D))
    total = call.new(J, D, dtype=dtype)
    L = compiled_in(Vectors(J, D, call.poses, call.strip))
    at_once = max(1, 2048 // DP)
    # A program takes eight turns of loads; 128 programs of an output fill any GPU.
    parts = max(1, min(128, cdiv(B, 8 * at_once)))
    samples = cdiv(B, parts)
    sums = total if parts == 1 else call.new(parts, J, D)
    constants = {"L": L, "DP": DP, "SB": at_once, "T": ds.shape[2], "R": call.iterations}
    call.x.plan.launch(bias_gradient_kernel, (J, parts), ds, sums, B, samples, **constants)
    if parts > 1:
        call.x.plan.launch(add_up_kernel, (cdiv(J * D, 64),), sums, total, J * D, parts, WIDTH=64, SB=32)
    return total


def _add_up(call: KernelCall, parts: Slot, dtype: torch.dtype | None) -> Slot:
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


def _gradient(
    call: KernelCall,
    state: Slot,
    pairs: Slot | None,
    uniform: bool,
    needed: tuple[bool, bool],
    dx: Slot | None,
    dsecond: Slot | None,
) -> tuple[Slot | None, Slot | None]:
    """As gradients(), but dweight in parts [n, ...]."""
    tiles = call.tiles("gradient")
    B, I, J, D, K = call.sizes
    room = dw = None
    if needed[0]:
        # If output capsules share votes, dvotes are a sum over output capsules.
        shape = (B, I, J, D) if call.common else call.x.shape
        dx = dx or call.new(*shape, dtype=torch.float32 if call.common else call.x.dtype)
        # du is a sum over sections of outputs, in float32 until the last section.
        if tiles.sections > 1 and call.weight is not None and dx.dtype != torch.float32:
            room = call.new(*call.x.shape)
    start = call.iterations - (0 if pairs is None else pairs.shape[0])
    factor = uniform_factor(call) if uniform else (None, 0.0)
    vectors = 2 * (call.iterations - start) + uniform
    held = vectors <= MOST_VECTORS and (vectors + 2) * tiles.columns <= MOST_HELD
    # Loads of vectors for every input capsule would be pipelined too.
    ahead = held and not call.quadratic
    chunks, chunk, splits, batch_tiles = call.split_gradient("gradient")
    if needed[1]:
        assert call.weight is not None
        # One part per split of the batch; for a shared weight one part per program.
        dw = call.new(chunks * splits if call.shared else splits, *call.weight.shape)
    constants = call.constants("gradient") | {
        "BACK_DOT": call.back_dot, "START": start, "R": call.iterations, "UNIFORM": uniform,
        "AGREEMENT": call.agreement, "SHARED": call.shared, "HELD": held,
        "num_stages": tiles.stages if ahead else 1,
    }  # fmt: skip
    call.x.plan.launch(gradient_kernel, (splits, chunks),
        *call.tensors, dsecond, state, pairs, factor[0], dx, room, dw,
        *call.walk, chunk, batch_tiles, tiles.sections, factor[1], **constants,
    )  # fmt: skip
    if dx is not None and call.common:
        dx = call.compute(_over_outputs, dx, call.x.dtype)
    return dx, dw


def _over_outputs(dvotes: Tensor, dtype: torch.dtype) -> Tensor:
    return dvotes.sum(2, keepdim=True).to(dtype)


def returned(
    call: KernelCall,
    tensors: tuple[Slot | None, ...],
    needed: tuple[bool, ...],
    gradients: tuple[Slot | None, ...],
    dtype: torch.dtype | None = None,
) -> tuple[Slot, ...]:
    """The gradients that an op returns, in the dtypes of the tensors; all but dx in ``dtype``, if given. A needed
    gradient that is None becomes zeros; a gradient that is not needed becomes empty."""
    found = []
    for tensor, wanted, gradient in zip(tensors, needed, gradients, strict=True):
        own = (call.x if tensor is None else tensor).dtype
        own = own if tensor is call.x else dtype or own
        if not wanted or tensor is None:
            found.append(call.new(0, dtype=own))
        elif gradient is not None:
            found.append(call.compute(Tensor.to, gradient, own))
        else:
            found.append(call.x.plan.zeros(*tensor.shape, dtype=own))
    return tuple(found)
