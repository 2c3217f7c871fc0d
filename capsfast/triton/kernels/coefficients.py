"""What the backward makes of the votes of an input capsule in one iteration: their coefficients c and db in dvotes."""

import triton
import triton.language as tl

from .softmax import agreement_gradient, couple, scaled
from .vectors import load_state, load_vectors
from .votes import coupling_gradient, routing_logits


@triton.jit
def agreement(
    inputs, given, norms, state_ptr, x, valid, rows, vectors, states, here, n, last,
    T: tl.constexpr, R: tl.constexpr, MODE: tl.constexpr,
):
    """b and dc of tile n, without the activation.

    state_ptr: to V and ds of this iteration in [B, J, R, 2, D] float32. vectors and states: where tiles of a vector and
    of both are. last: whether it is the last iteration.
    """
    V, ds = load_state(state_ptr, vectors, states, n, T, 2 * R)
    b = routing_logits(
        inputs, x, V, rows, vectors, here, n, valid, T, 0.0 if MODE == "none" else float("-inf")
    )
    s = None
    if norms.s is not None:
        s = load_vectors(norms.s, vectors, n, T)
    return b, coupling_gradient(inputs, given, x, s, ds, rows, vectors, here, n, valid, last, T)


@triton.jit
def coefficients(
    b, dc, a, inputs, given, norms, valid, rows, here, known, first, T: tl.constexpr, MODE: tl.constexpr
):
    """c, without the activation, and db of all tiles. a: the activation [BB], or None. known: which outputs there are.
    """
    c, _ = couple(b, norms, inputs, rows, here, known, first, T, MODE)
    if a is not None:
        dc = scaled(dc, a, T)
    return c, agreement_gradient(c, dc, valid, norms, given.dlse, inputs, rows, here, known, first, T, MODE)
