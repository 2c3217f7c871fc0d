"""Forward and backward as sequences of passes, whether votes are made or given.

All launches go to the current stream, and nothing waits for a result, so that a CUDA graph can capture them.
"""

from torch import Tensor

from . import passes
from .kernels.arguments import Norms
from .launch import Call
from .passes import NOTHING


def forward(call: Call, return_coupling: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns ``(v, coupling, s, norm)``; ops/dynamic_routing.py has the contract."""
    B, I, J, D, _ = call.sizes
    r, inward = call.iterations, call.normalize == "in"
    v = call.new(B, J, D, dtype=call.x.dtype)
    coupling = call.new_pairs(call.x.dtype) if return_coupling else call.new(0, dtype=call.x.dtype)
    s = call.new(r, B, J, D)
    norm = call.new(2, r, B, J) if inward else call.new(0)
    if B == 0 or J == 0:
        return v, coupling, s, norm

    split_outputs = not inward and call.tiles("accumulate").groups > 1
    V: Tensor | None = None if call.uniform_start and not (return_coupling and r == 1) else call.zeros(B, J, D)
    rows: Tensor | None = None
    for t in range(r):
        last = t == r - 1
        # Of softmax "in" the coupling is known when all splits are added up, so it takes a pass of its own.
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
        passes.update(call, sums.first, online, factor, V, s[t], kept, None if last else following, v if last else None)
        V = V if last else following
    if return_coupling and inward:
        passes.coupling(call, V, Norms(None, *norm[:, -1]), coupling)
    return v, coupling, s, norm


def backward(
    call: Call,
    dv: Tensor,
    dcoupling: Tensor | None,
    coupling: Tensor,
    s: Tensor,
    norm: Tensor,
    needed: tuple[bool, bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns ``(dx, dweight, dlogits, dbias)``; those that are not needed are empty. dx: du, or dvotes."""
    B, I, J, D, K = call.sizes
    r, inward = call.iterations, call.normalize == "in"
    if B == 0 or J == 0:
        return tuple(zeros(call, tensor, wanted) for tensor, wanted in zip(_given(call), needed, strict=True))  # type: ignore[return-value]

    dcoupling = None if dcoupling is None else dcoupling.contiguous()
    s = aligned(s)
    state = passes.restore(call, s, dv.contiguous())
    delta: Tensor | None = None
    if inward and dcoupling is not None:
        delta = call.zeros(r, B, J)
        delta[-1] = call.over_inputs(coupling.float() * dcoupling)

    start = 0 if call.agreement else r - 1
    first_varied = max(start, 1) if call.uniform_start else start
    summed = start == 0 and r > 1
    need_x, need_weight, need_logits, need_bias = needed
    sweep = passes.sweep(call, start == r - 1, summed, need_x or need_weight or need_logits)
    rows = call.new(r, B, I, 4) if sweep.rows else None
    norms = Norms(rows, norm[0], norm[1], delta, s) if inward else Norms(rows)

    def norms_of(t: int) -> Norms:
        return Norms(*(None if each is None else each[t] for each in norms))

    def of_last(t: int) -> Tensor | None:
        return dcoupling if t == r - 1 else None

    def row_norm(t: int) -> None:
        if rows is not None and t >= first_varied and (sweep.row_norm or t == 0):
            passes.row_norm(call, state[:, :, t], of_last(t), rows[t], True)

    row_norm(r - 1)
    if summed:
        G: Tensor | None = None
        for t in range(r - 1, 0, -1):
            partial = passes.accumulate_gradient(call, state[:, :, t], of_last(t), norms_of(t)).first
            if G is None:
                # What the first of these passes adds is added to its own last part, which needs no zeros.
                G, partial = partial[-1], partial[:-1]
            before = state[:, :, t - 1, 1]
            passes.update_gradient(call, partial, G, s[t - 1], before)
            row_norm(t - 1)

    dx, dweight, dlogits, dbias = (zeros(call, tensor, False) for tensor in _given(call))
    if I == 0:
        # Without input capsules the gradient pass has no programs, so it would write nothing.
        dx, dweight, dlogits = (
            zeros(call, tensor, wanted) for tensor, wanted in zip(_given(call)[:3], needed[:3], strict=True)
        )
    elif need_x or need_weight or need_logits:
        uniform = start == 0 and call.uniform_start
        found = passes.gradient(call, sweep.kernel, state, dcoupling, norms, NOTHING, start, uniform, needed[:3])
        dx, dweight, dlogits = (
            new if new is not None else old for new, old in zip(found, (dx, dweight, dlogits), strict=True)
        )
    if need_bias:
        assert call.bias is not None
        dbias = state[:, :, start:, 1].sum((0, 2)).to(call.bias.dtype)
    return dx, dweight, dlogits, dbias


def _given(call: Call) -> tuple[Tensor | None, ...]:
    return (call.x, call.weight, call.logits, call.bias)


def aligned(s: Tensor) -> Tensor:
    """s contiguous and at a multiple of 16 bytes, which kernels take for granted. Only part of another tensor may be
    elsewhere, and positions of one sample a view."""
    s = s.contiguous()
    return s.clone() if s.data_ptr() % 16 else s


def zeros(call: Call, tensor: Tensor | None, wanted: bool) -> Tensor:
    """Zeros of the shape of the tensor, or an empty gradient if it is absent or not wanted."""
    like = call.x if tensor is None else tensor
    return like.new_zeros(like.shape) if wanted and tensor is not None else like.new_empty(0)
