"""What the backward makes of the votes of an input capsule in one iteration: their coefficients c and db in dvotes."""

import triton
import triton.language as tl

from .softmax import agreement_gradient, couple, scaled
from .vectors import load_vectors
from .votes import coupling_gradient, routing_logits


@triton.jit
def agreement(
    inputs, given, norms, V, ds, x, valid, rows, vectors, here, n, last, T: tl.constexpr, MODE: tl.constexpr
):
    """b and dc of tile n, without the activation. last: whether it is the last iteration."""
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
    """c, without the activation, and db of all tiles; for MODE "out" also what row_norm finds, [BB] each. a: the
    activation [BB], or None. known: which outputs there are."""
    c, m, scale = couple(b, norms, inputs, rows, here, known, first, T, MODE)
    if a is not None:
        dc = scaled(dc, a, T)
    db, total = agreement_gradient(c, dc, valid, norms, given.dlse, inputs, rows, here, known, first, T, MODE)
    return c, db, (m, scale, total)
