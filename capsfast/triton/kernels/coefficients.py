"""What the backward makes of the votes of an input capsule in one iteration: their coefficients c and db in dvotes."""

import triton
import triton.language as tl

from .softmax import agreement_gradient, couple, scaled
from .tiles import per_input
from .vectors import load_state, load_vectors
from .votes import coupling_gradient, routing_logits


@triton.jit
def coefficients(
    inputs, given, norms, state_ptr, x, valid, rows, vectors, states, here, known, first, last,
    T: tl.constexpr, R: tl.constexpr, MODE: tl.constexpr,
):
    """c, dc and db of all tiles, without the activation in c and dc.

    state_ptr: to V and ds of this iteration in [B, J, R, 2, D] float32. vectors and states: where tiles of a vector and
    of both are. last: whether it is the last iteration. known: which outputs there are.
    """
    b = ()
    dc = ()
    for n in tl.static_range(T.NT):
        V, ds = load_state(state_ptr, vectors, states, first + n, T, 2 * R)
        b = b + (routing_logits(
            inputs, x[n], V, rows, vectors, here, first + n, valid[n], T, 0.0 if MODE == "none" else float("-inf")
        ),)
        s = None
        if norms.s is not None:
            s = load_vectors(norms.s, vectors, first + n, T)
        dc = dc + (coupling_gradient(
            inputs, given, x[n], s, ds, rows, vectors, here, first + n, valid[n], last, T
        ),)
    c, _ = couple(b, norms, inputs, rows, here, known, first, T, MODE)
    of_logits = dc
    if inputs.activation is not None:
        of_logits = scaled(dc, per_input(inputs.activation, rows, here.ok, here.i, inputs), T)
    db = agreement_gradient(
        c, of_logits, valid, norms, given.dlse, inputs, rows, here, known, first, T, MODE
    )
    return c, dc, db
