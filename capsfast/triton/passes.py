"""A function for each kernel, which launches it. The device of the call must be the current one."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..options import Options, PassOptions
from .config import power_of_two
from .kernels.accumulate import accumulate_gradient_kernel, accumulate_kernel
from .kernels.arguments import Norms
from .kernels.gradient import gradient_kernel
from .kernels.row_norm import row_norm_kernel
from .kernels.update import add_up_kernel, moments_kernel, restore_kernel, update_gradient_kernel, update_kernel
from .launch import Call, cdiv
from .plan import Slot


class Given(NamedTuple):
    """Gradients of the outputs of a pass beside those of its first moment, float32 and contiguous."""

    mass: Slot | None = None  # [B, J]
    second: Slot | None = None  # [B, J, D]
    lse: Slot | None = None  # [B, I], [B, J] for normalize="in"


NOTHING = Given()
# The gradient pass keeps V and ds of all iterations, if with votes and dvotes they are no more columns of a warp, two
# to a register, and no more vectors: iterations whose V and ds are kept are compiled one by one.
MOST_HELD, MOST_VECTORS = 352, 9


class Sums(NamedTuple):
    """What a pass adds up, or the partial sums of it with an axis of splits in front."""

    first: Slot  # [B, J, D]
    mass: Slot | None = None  # [B, J]
    second: Slot | None = None  # [B, J, D]


def mode(call: Call, kernel: str) -> str:
    """MODE of kernels/softmax.py. If a program does not hold all outputs, it needs rows."""
    if call.normalize == "out":
        return "out" if call.tiles(kernel).groups == 1 else "row_norm"
    return "row_norm" if call.normalize == "lse" else call.normalize


def uniform_factor(call: Call) -> tuple[Slot | None, float]:
    """The coupling of a first pass without logits: [B] and 0, or None and one number for all samples."""
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
    """Fills rows [B, I, 4]. state: V [B, J, D] or, if with_ds, V and ds of one iteration in [B, J, R, 2, D]."""

    _launch(
        call, "row_norm", row_norm_kernel, (*call.tensors, dcoupling, *given, state, rows),
        call.tiles("row_norm").groups, WITH_DS=with_ds, R=call.iterations,
    )  # fmt: skip


def _launch(call: Call, name: str, kernel: Any, arguments: tuple[Any, ...], *more: Any, **constants: Any) -> None:
    """Launches a kernel in as many programs as the device runs at once. more: arguments after the sizes."""
    tiles = call.tiles(name)
    splits, chunk = call.split(name)
    grid = (call.batch_tiles(tiles), splits, 1 if name == "row_norm" else tiles.groups)
    call.x.plan.launch(kernel, grid, *arguments, *call.walk, chunk, *more, **call.constants(tiles), **constants)


def accumulate(
    call: Call,
    V: Slot | None,
    rows: Slot | None,
    uniform: bool,
    coupling: Slot | None = None,
    lse: Slot | None = None,
) -> tuple[Sums, Slot | None]:
    """Partial sums [splits, B, J, D] and, for softmax "in", their maxima and sums of exponentials [2, splits, B, J].

    In a routing pass V is the query, and the sums are those of all moments. Fills coupling [B, I, J], except for
    softmax "in", and lse [B, I], if the mode is "out".
    """
    B, I, J, *_ = call.sizes
    kind = "uniform" if uniform else mode(call, "accumulate")
    of_pass = call.options if isinstance(call.options, PassOptions) else None

    splits, _ = call.split("accumulate")
    sums = _partial_sums(call, splits, of_pass is not None, of_pass is not None and of_pass.second)
    online = call.new(2, splits, B, J) if kind == "in" else None
    arguments = (
        *call.tensors, V, rows, None, None, sums.first, online, sums.mass, sums.second,
        None if kind == "in" else coupling, lse if kind == "out" else None,
    )  # fmt: skip
    _launch(call, "accumulate", accumulate_kernel, arguments, MODE=kind)
    return sums, online


def _partial_sums(call: Call, splits: int, mass: bool, second: bool) -> Sums:
    B, _, J, D, _ = call.sizes
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
    given: Given = NOTHING,
    wanted: tuple[bool, bool] = (False, False),
) -> Sums:
    """Partial sums over i of db x, which an iteration adds to G, and if wanted of db and of db x^2.

    Fills norms.rows, if a program holds all outputs.
    """
    kind = mode(call, "accumulate_gradient")

    sums = _partial_sums(call, call.split("accumulate_gradient")[0], *wanted)
    arguments = (*call.tensors, dcoupling, *given, state, *norms, *sums)
    _launch(call, "accumulate_gradient", accumulate_gradient_kernel, arguments, MODE=kind, R=call.iterations)
    return sums


def coupling(call: Call, V: Slot | None, norms: Norms, out: Slot) -> None:
    """Fills out [B, I, J] for softmax "in"."""

    arguments = (*call.tensors, V, *norms[:3], None, None, None, None, out, None)
    _launch(call, "accumulate", accumulate_kernel, arguments, MODE="in")


def _update_grid(call: Call, last: bool = False) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and sizes of a step between passes. A program has 128 numbers and reads 16 splits at once: 2 048 loads.

    last: it is that of the last iteration.
    """
    B, _, J, D, _ = call.sizes
    DP: int = power_of_two(D)
    RB = max(1, 128 // DP)
    shape: dict[str, Any] = {"J": J, "D": D, "DP": DP, "RB": RB}
    if isinstance(call.options, Options):
        shape["KIND"] = call.options.squash if call.options.squash_last or not last else "identity"
    return (cdiv(B * J, RB),), shape


def _splits_at_once(shape: dict[str, Any]) -> int:
    rows: int = shape["RB"] * shape["DP"]
    return max(1, min(16, 2048 // rows))


def update(
    call: Call,
    partial: Slot,
    online: Slot | None,
    factor: tuple[Slot | None, float],
    V: Slot | None,
    s: Slot,
    norm: tuple[Slot | None, ...],
    following: Slot | None,
    v: Slot | None,
) -> None:
    """Fills s, norm, and V of the next iteration (following) or, in the last one, the output v."""
    assert isinstance(call.options, Options)
    grid, shape = _update_grid(call, last=v is not None)
    call.x.plan.launch(update_kernel, grid,
        partial, online, factor[0], call.bias, call.out_mask, V, s, *norm, following, v,
        call.sizes[0], partial.shape[0], factor[1], call.options.eps,
        **shape, SB=_splits_at_once(shape), LEAKY=call.options.leaky, num_warps=4,
    )  # fmt: skip


def update_moments(
    call: Call,
    partial: Sums,
    online: Slot | None = None,
    factor: tuple[Slot | None, float] = (None, 1.0),
    norm: Slot | None = None,
) -> Sums:
    """Adds up the splits. Fills norm [2, B, J] if it is given. factor: what the sums are multiplied by."""
    grid, shape = _update_grid(call)
    B, _, J, D, _ = call.sizes
    sums = Sums(
        call.new(B, J, D),
        None if partial.mass is None else call.new(B, J),
        None if partial.second is None else call.new(B, J, D),
    )
    call.x.plan.launch(moments_kernel, grid,
        *partial, online, factor[0], call.out_mask, *sums, *((None, None) if norm is None else norm),
        B, partial.first.shape[0], factor[1],
        **shape, SB=_splits_at_once(shape), LEAKY=call.options.leaky, num_warps=4,
    )  # fmt: skip
    return sums


def restore(call: Call, s: Slot, dv: Slot) -> Slot:
    """From s [R, B, J, D]: state [B, J, R, 2, D], with V of every iteration, ds of the last one and room for others."""
    assert isinstance(call.options, Options)
    R, B, J, D = s.shape
    state = call.new(B, J, R, 2, D)
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


def _parts(call: Call, splits: int, like: Slot | None) -> Slot:
    """Room for partial sums. Those of a single split need no adding up."""
    assert like is not None
    return call.new(*(() if splits == 1 else (splits,)), *like.shape)


def _add_up(call: Call, parts: Slot, like: Slot) -> Slot:
    """The sum of _parts() over the splits, in the dtype of the tensor that it is a gradient of."""
    if parts.shape == like.shape and parts.dtype == like.dtype:
        return parts
    total = call.new(*like.shape, dtype=like.dtype)
    n = total.numel()
    # A shared weight has a part per program. Whatever the number, a program reads 2 048 numbers at once.
    at_once = 64 if call.shared else 4
    width = 2048 // at_once
    call.x.plan.launch(
        add_up_kernel, (cdiv(n, width),), parts, total, n, parts.numel() // max(n, 1), WIDTH=width, SB=at_once
    )
    return total


class Sweep(NamedTuple):
    """How the backward goes over the outputs. kernel: a name of config.TABLE. rows: whether a pass needs what row_norm
    finds; row_norm: whether row_norm has to find it, and not accumulate_gradient."""

    kernel: str
    rows: bool
    row_norm: bool


def sweep(call: Call, once: bool, summed: bool, launched: bool) -> Sweep:
    """What a backward needs. once: whether only one iteration has a gradient; summed, launched: whether
    accumulate_gradient and gradient are launched."""
    once = once and not (call.votes_given or call.quadratic)
    kernel = "gradient once" if once and call.tiles("gradient once").groups == 1 else "gradient"
    if call.normalize != "out":
        return Sweep(kernel, False, False)
    grouped = summed and call.tiles("accumulate_gradient").groups > 1
    return Sweep(kernel, grouped or (launched and call.tiles(kernel).groups > 1), grouped or not summed)


def gradient(
    call: Call,
    kernel: str,
    state: Slot,
    dcoupling: Slot | None,
    norms: Norms,
    given: Given,
    start: int,
    uniform: bool,
    needed: tuple[bool, bool, bool],
    dactivation: Slot | None = None,
    drow: Slot | None = None,
) -> tuple[Slot | None, Slot | None, Slot | None]:
    """dx, dweight and dlogits, as far as they are needed.

    kernel: a name of config.TABLE. uniform: in iteration start all couplings are equal. dactivation [B, I] and drow
    [B, I], the gradient of a log-sum-exp that is given, are filled unless they are None.
    """
    tiles = call.tiles(kernel)
    B, I, J, D, K = call.sizes
    need_x, need_weight, need_logits = needed
    dx = room = dl = None
    if need_x:
        dx = call.new(*call.x.shape, dtype=call.x.dtype)
        # du and dvotes that all outputs share are sums over groups of outputs, kept in float32 until the last.
        if tiles.groups > 1 and (call.common or not call.votes_given) and dx.dtype != torch.float32:
            room = call.new(*call.x.shape)
    if need_logits and not call.shared_logits:
        assert call.logits is not None
        dl = call.new_pairs(call.logits.dtype)
    factor = uniform_factor(call) if uniform else (None, 0.0)
    first = start + uniform
    vectors = 2 * (call.iterations - first) + uniform
    held = not call.votes_given and vectors <= MOST_VECTORS and (vectors + 2) * tiles.columns <= MOST_HELD
    # Tiles of vectors that are loaded for every input capsule would be pipelined too.
    ahead = tiles.stages > 1 and held and not call.quadratic and norms.s is None
    constants = call.constants(tiles) | {
        "BACK_DOT": call.back_dot, "MODE": mode(call, kernel), "START": first, "R": call.iterations,
        "UNIFORM": uniform, "AGREEMENT": call.agreement, "SHARED": call.shared, "COMMON": call.common,
        "HELD": held, "AHEAD": ahead, "num_stages": tiles.stages if ahead else 1,
    }  # fmt: skip

    chunks, chunk, splits, batch_tiles = call.split_gradient(kernel)
    # Partial sums, one per split of the batch, or for a shared weight one per program.
    dw = _parts(call, chunks * splits if call.shared else splits, call.weight) if need_weight else None
    if need_logits and call.shared_logits:
        dl = _parts(call, splits, call.logits)
    call.x.plan.launch(gradient_kernel, (splits, chunks),
        *call.tensors, dcoupling, *given, state, *norms, factor[0], dx, room, dw, dl, dactivation, drow,
        *call.walk, chunk, batch_tiles, tiles.groups, factor[1], **constants,
    )  # fmt: skip
    if dw is not None:
        assert call.weight is not None
        dw = _add_up(call, dw, call.weight)
    if dl is not None and call.shared_logits:
        assert call.logits is not None
        dl = _add_up(call, dl, call.logits)
    return dx, dw, dl
