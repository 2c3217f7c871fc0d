"""Forward and backward as sequences of passes, whether votes are made or given.

All launches go to the current stream, and nothing waits for a result, so that a CUDA graph can capture them.
"""

from torch import Tensor

from . import passes
from .kernels.arguments import Norms
from .launch import Call


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
    uniform = start == 0 and call.uniform_start
    first = start + uniform  # of the iterations whose couplings differ
    need_x, need_weight, need_logits, need_bias = needed
    pairs = passes.new_coefficients(call, r - first) if r > first and (need_x or need_weight or need_logits) else None
    norms = Norms(None, norm[0], norm[1], delta, s) if inward else Norms()
    G: Tensor | None = None
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
                # What the first of these passes adds is added to its own last part, which needs no zeros.
                G, partial = partial[-1], partial[:-1]
            passes.update_gradient(call, partial, G, s[t - 1], state[:, :, t - 1, 1])

    dx, dweight, dlogits, dbias = (zeros(call, tensor, False) for tensor in _given(call))
    if I == 0:
        # Without input capsules the gradient pass has no programs, so it would write nothing.
        dx, dweight, dlogits = (
            zeros(call, tensor, wanted) for tensor, wanted in zip(_given(call)[:3], needed[:3], strict=True)
        )
    else:
        if need_x or need_weight:
            found, parts = passes.gradient(call, state, pairs, uniform, (need_x, need_weight))
            dx = dx if found is None else found
            dweight = dweight if parts is None else passes.add_up(call, parts)
        if need_logits:
            assert pairs is not None
            dlogits = logits_gradient(call, pairs)
    if need_bias:
        assert call.bias is not None
        dbias = state[:, :, start:, 1].sum((0, 2)).to(call.bias.dtype)
    return dx, dweight, dlogits, dbias


def logits_gradient(call: Call, pairs: Tensor) -> Tensor:
    """The sum of db, from pairs [T, B, I, J, 2], over iterations and, for logits [I, J], over samples."""
    assert call.logits is not None
    db = pairs[..., 1]
    over = (0, 1, *range(4, db.dim())) if call.shared_logits else (0,)
    return db.sum(over).to(call.logits.dtype)


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
