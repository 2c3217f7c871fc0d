"""Forward and backward of a routing as sequences of passes, for computed and for given votes.

All launches go to the current stream, and nothing waits for a result, so that a CUDA graph can capture them.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..positions import to_samples
from . import passes
from .kernels.arguments import Norms
from .launch import Call, cdiv
from .plan import Slot

# Bytes that the coefficients c and db of all pairs and iterations may always take in a backward, however few the votes.
MOST_COEFFICIENTS = 64 * 1024**2
# A part of the batch has a multiple of this many samples, so that tiles are full.
FULL = 32


def forward(call: Call, return_coupling: bool) -> tuple[Slot, Slot, Slot, Slot]:
    """Returns ``(v, coupling, s, norm)``; ops/dynamic_routing.py has the contract."""
    B, I, J, D, _ = call.sizes
    r, inward = call.iterations, call.normalize == "in"
    v = call.new(B, J, D, dtype=call.x.dtype)
    dtype = torch.float32 if inward else call.x.dtype
    coupling = call.new_pairs(dtype) if return_coupling else call.new(0, dtype=dtype)
    s = call.new(r, B, J, D)
    norm = call.new(2, r, B, J) if inward else call.new(0)
    if B == 0 or J == 0:
        return v, coupling, s, norm

    split_outputs = not inward and call.tiles("accumulate").groups > 1
    V: Slot | None = None if call.uniform_start and not (return_coupling and r == 1) else call.zeros(B, J, D)
    rows: Slot | None = None
    for t in range(r):
        last = t == r - 1
        # For softmax "in" the coupling is known only after all splits are added up, so it takes a pass of its own.
        given = coupling if return_coupling and last and not inward else None
        uniform = t == 0 and call.uniform_start and given is None
        if split_outputs and not uniform:
            assert V is not None
            rows = call.new(B, I, 4) if rows is None else rows
            passes.row_norm(call, V, None, rows, False)
        sums, online = passes.accumulate(call, V, rows, uniform, given)
        factor = passes.uniform_factor(call) if uniform else (None, 1.0)
        if not last:
            following = call.new(B, J, D) if V is None else V
        kept = (norm[0, t], norm[1, t]) if inward else (None, None)
        passes.update(call, sums, online, factor, kept, s[t], V, None if last else following, v if last else None)
        V = V if last else following
    if return_coupling and inward:
        passes.coupling(call, V, Norms(None, *norm[:, -1]), coupling)
    return v, coupling, s, norm


def backward(
    call: Call,
    dv: Slot,
    dcoupling: Slot | None,
    coupling: Slot,
    s: Slot,
    norm: Slot,
    needed: tuple[bool, bool, bool, bool],
) -> tuple[Slot, ...]:
    """Returns ``(dx, dweight, dlogits, dbias)``; a gradient that is not needed is empty. dx: du, or dvotes.

    Takes the batch in parts if the coefficients of all samples would take too much memory.
    """
    B, step = call.x.shape[0], samples_at_once(call)
    if step >= B or not any(needed[:3]):
        return _backward(call, dv, dcoupling, coupling, s, norm, needed)
    each = call.positions or 1
    # The parts of dx are written where they belong: dvotes are as large as the votes.
    dx = call.new(*call.x.shape, dtype=call.x.dtype) if needed[0] and not call.common else None
    found = []
    for lo in range(0, B, step):
        b, rows = slice(lo, lo + step), slice(lo * each, (lo + step) * each)
        part = replace(
            call,
            x=call.x[b],
            logits=call.logits if call.logits is None or call.shared_logits else call.logits[b],
            mask=None if call.mask is None else call.mask[rows],
            out_mask=None if call.out_mask is None else call.out_mask[rows],
        )
        of_coupling = None if dcoupling is None else dcoupling[b]
        of_norm = norm[:, :, rows] if call.normalize == "in" else norm
        of_dx = None if dx is None else dx[b]
        found.append(
            _backward(part, dv[rows], of_coupling, coupling[b], s[:, rows], of_norm, needed, torch.float32, of_dx)
        )
    together = (_cat, _sum, _sum if call.shared_logits else _cat, _sum)
    columns = [*zip(together, zip(*found, strict=True), _given(call), strict=True)][0 if dx is None else 1 :]
    joined = (call.compute(join, (call.x if like is None else like).dtype, *parts) for join, parts, like in columns)
    return (*joined,) if dx is None else (dx, *joined)


def first_iterations(call: Call) -> tuple[int, int]:
    """The first iteration that has a gradient, and from there on the first whose couplings differ."""
    start = 0 if call.agreement else call.iterations - 1
    return start, start + (start == 0 and call.uniform_start)


def samples_at_once(call: Call) -> int:
    """How many samples of the batch have coefficients at the same time. The coefficients of all iterations take at most
    half the size of the float32 votes, or MOST_COEFFICIENTS if that is more."""
    B, D = call.x.shape[0], call.sizes[3]
    pairs = math.prod(call.sizes[:3])
    parts = cdiv(8 * (call.iterations - first_iterations(call)[1]) * pairs, max(2 * D * pairs, MOST_COEFFICIENTS, 1))
    step = cdiv(B, max(parts, 1))
    return step if call.positions is not None else cdiv(step, FULL) * FULL


def _sum(dtype: torch.dtype, *parts: Tensor) -> Tensor:
    return torch.stack(parts).sum(0).to(dtype)


def _cat(dtype: torch.dtype, *parts: Tensor) -> Tensor:
    return torch.cat(parts).to(dtype)


def _backward(
    call: Call,
    dv: Slot,
    dcoupling: Slot | None,
    coupling: Slot,
    s: Slot,
    norm: Slot,
    needed: tuple[bool, bool, bool, bool],
    dtype: torch.dtype | None = None,
    dx: Slot | None = None,
) -> tuple[Slot, ...]:
    """As backward(), for one part of the batch. dtype: for sums over samples; None takes the dtype of the tensors. dx:
    the memory for it, as in passes.gradient()."""
    B, I, J, D, K = call.sizes
    r, inward = call.iterations, call.normalize == "in"
    if B == 0 or J == 0:
        return tuple(zeros(call, tensor, wanted) for tensor, wanted in zip(_given(call), needed, strict=True))

    dcoupling = None if dcoupling is None else dcoupling.contiguous()
    s = s.aligned()
    state = passes.restore(call, s, dv.contiguous())
    delta: Slot | None = None
    if inward and dcoupling is not None:
        delta = call.compute(_delta, coupling, dcoupling, r)

    start, first = first_iterations(call)
    uniform = first > start
    need_x, need_weight, need_logits, need_bias = needed
    pairs = passes.new_coefficients(call, r - first) if r > first and (need_x or need_weight or need_logits) else None
    norms = Norms(None, norm[0], norm[1], delta, s) if inward else Norms()
    G: Slot | None = None
    for t in range(r - 1, -1, -1):
        sums = passes.partial_sums(call, "accumulate_gradient") if start == 0 and t > 0 else None
        kept = None if pairs is None or t < first else pairs[t - first]
        if sums is not None or kept is not None:
            of_t = Norms(*(None if each is None else each[t] for each in norms))
            of_last = dcoupling if t == r - 1 else None
            passes.accumulate_gradient(call, state[:, :, t], of_last, of_t, kept, sums)
        if sums is not None:
            partial = sums.first
            if G is None:
                # The first of these passes adds its parts to its own last part, so G needs no zeros.
                G, partial = partial[-1], partial[:-1]
            passes.update_gradient(call, partial, G, s[t - 1], state[:, :, t - 1, 1])

    empty, dweight, dlogits, dbias = (zeros(call, tensor, False) for tensor in _given(call))
    if I == 0:
        # Without input capsules the gradient pass has no programs, so it would write nothing.
        dx, dweight, dlogits = (
            zeros(call, tensor, wanted) for tensor, wanted in zip(_given(call)[:3], needed[:3], strict=True)
        )
    else:
        if need_x or need_weight:
            dx, parts = passes.gradient(call, state, pairs, uniform, (need_x, need_weight), dx=dx)
            dweight = dweight if parts is None else passes.add_up(call, parts, dtype)
        if need_logits:
            dlogits = logits_gradient(call, pairs, dtype)
    if need_bias:
        assert call.bias is not None
        dbias = call.compute(_dbias, state[:, :, start:, 1, :D], dtype or call.bias.dtype)
    return dx or empty, dweight, dlogits, dbias


def logits_gradient(call: Call, pairs: Slot | None, dtype: torch.dtype | None = None) -> Slot:
    """dlogits, from pairs [T, B, I, J, 2]."""
    assert call.logits is not None
    found: Slot = call.compute(_sum_of_db, pairs, call.shared_logits, dtype or call.logits.dtype)
    return found


def _sum_of_db(pairs: Tensor, shared: bool, dtype: torch.dtype) -> Tensor:
    """Sums db over iterations and, if samples share logits [I, J], over samples."""
    db = pairs[..., 1]
    return db.sum((0, 1, *range(4, db.dim())) if shared else 0).to(dtype)


def over_inputs(pairs: Tensor) -> Tensor:
    """Sums [B, I, J] or [B, I, J, S] over i. The result has a row for each sample."""
    found = pairs.sum(1)
    return found if pairs.dim() == 3 else to_samples(found)


def _delta(coupling: Tensor, dcoupling: Tensor, iterations: int) -> Tensor:
    """sum_i c dcoupling [iterations, B, J], which is 0 for all iterations but the last."""
    last = over_inputs(coupling.float() * dcoupling)
    return torch.cat([last.new_zeros(iterations - 1, *last.shape), last[None]])


def _dbias(ds: Tensor, dtype: torch.dtype) -> Tensor:
    return ds.sum((0, 2)).to(dtype)


def _given(call: Call) -> tuple[Slot | None, ...]:
    return (call.x, call.weight, call.logits, call.bias)


def zeros(call: Call, slot: Slot | None, wanted: bool) -> Slot:
    """Zeros in the shape of the tensor, or an empty gradient if the tensor is absent or its gradient not wanted."""
    dtype = call.x.dtype if slot is None else slot.dtype
    return call.x.plan.zeros(*slot.shape, dtype=dtype) if wanted and slot is not None else call.new(0, dtype=dtype)
