"""Forward and backward of a routing as sequences of passes, for computed and for given votes.

All launches go to the current stream, and nothing waits for a result, so that a CUDA graph can capture them.
"""

import torch
from torch import Tensor

from ..calls.options import RoutingOptions
from ..calls.positions import to_samples
from . import passes
from .kernels.arguments import Norms, OutputGradients
from .launch import KernelCall
from .plan import Slot


def forward(call: KernelCall, return_coupling: bool) -> tuple[Slot, Slot, Slot, Slot]:
    """Returns ``(v, coupling, s, norm)``; ops/dynamic_routing.py has the contract."""
    B, I, J, D, _ = call.sizes
    r, inward = call.iterations, call.normalize == "in"
    assert isinstance(call.options, RoutingOptions)
    v = call.new(B, J, D, dtype=torch.float32 if call.options.wide else call.x.dtype)
    dtype = torch.float32 if inward else call.x.dtype
    coupling = call.new_pairs(dtype) if return_coupling else None
    s = call.new(r, B, J, D)
    norm = call.new(2, r, B, J) if inward else None
    if B and J:
        V: Slot | None = None if call.uniform_start and not (return_coupling and r == 1) else call.vectors(zeros=True)
        for t in range(r):
            last = t == r - 1
            following = None if last else V or call.vectors()
            passes.weighted_sums(
                call, V, t == 0, coupling if last else None, norm=norm and norm[:, t],
                s=s[t], following=following, v=v if last else None,
            )  # fmt: skip
            V = following
    return v, coupling or call.new(0, dtype=dtype), s, norm or call.new(0)


def first_iterations(options: RoutingOptions, logits: object) -> tuple[int, int]:
    """The first iteration with a gradient, and the first of these whose coupling coefficients differ."""
    start = 0 if options.gradient == "full" else options.num_iterations - 1
    return start, start + (start == 0 and logits is None)


def backward(
    call: KernelCall,
    dv: Slot,
    dcoupling: Slot | None,
    coupling: Slot,
    s: Slot,
    norm: Slot,
    needed: tuple[bool, bool, bool, bool],
    dtype: torch.dtype | None = None,
    dx: Slot | None = None,
) -> tuple[Slot, ...]:
    """Returns ``(dx, dweight, dlogits, dbias)``; a gradient that is not needed is empty. dx: du, or dvotes.

    dtype and dx: as in passes.gradients().
    """
    B, I, J, D, _ = call.sizes
    r, tensors = call.iterations, (call.x, call.weight, call.parameters.logits, call.bias)
    if B == 0 or J == 0:
        return passes.returned(call, tensors, needed, (None,) * 4)
    dcoupling = None if dcoupling is None else dcoupling.contiguous()
    s = s.aligned()
    state, vectors = passes.restore(call, s, dv.contiguous())
    norms = Norms()
    if call.normalize == "in":
        delta = None if dcoupling is None else call.compute(_delta, coupling, dcoupling, r)
        norms = Norms(None, norm[0], norm[1], delta)

    assert isinstance(call.options, RoutingOptions)
    start, paired = first_iterations(call.options, call.parameters.logits)
    pairs = passes.new_coefficients(call, r - paired) if r > paired and any(needed[:3]) else None
    G: Slot | None = None
    for t in range(r - 1, -1, -1):
        sums = passes.partial_sums(call, "accumulate_gradient") if start == 0 and t > 0 else None
        kept = None if pairs is None or t < paired else pairs[t - paired]
        if sums is not None or kept is not None:
            of_t = Norms(*(norm and norm[t] for norm in norms))._replace(s=vectors and vectors[:, :, t])
            douts = OutputGradients(dcoupling if t == r - 1 else None)
            passes.accumulate_gradient(call, state[:, :, t], of_t, douts, kept, sums)
        if sums is not None:
            partial = sums.first
            if G is None or not call.accumulate:
                # If G has no earlier sums to keep, the last part of this pass becomes G, so G needs no zeros.
                G, partial = partial[-1], partial[:-1]
            passes.update_gradient(call, partial, G, s[t - 1], state[:, :, t - 1, 1])

    gradients = passes.gradients(call, state, pairs, paired > start, needed[:3], dtype, dx)
    dbias = None
    if needed[3]:
        assert call.bias is not None
        dbias = passes.bias_gradient(call, state[:, :, start:, 1], dtype or call.bias.dtype)
    return passes.returned(call, tensors, needed, (*gradients, dbias), dtype)


def total(pairs: Tensor, axis: int) -> Tensor:
    """Sums [B, I, J] or [B, I, J, S] over i or j. The result has a row for each sample."""
    summed = pairs.sum(axis)
    return summed if pairs.dim() == 3 else to_samples(summed)


def coupled(coupling: Tensor, dcoupling: Tensor) -> Tensor:
    """sum_i c dcoupling [B, J]."""
    return total(coupling.float() * dcoupling, 1)


def _delta(coupling: Tensor, dcoupling: Tensor, iterations: int) -> Tensor:
    """sum_i c dcoupling [iterations, B, J], which is 0 for all iterations but the last."""
    last = coupled(coupling, dcoupling)
    return torch.cat([last.new_zeros(iterations - 1, *last.shape), last[None]])
