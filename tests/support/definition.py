"""Routing by agreement as loops over numbers, to test the reference.

Written from the paper and the option table, without capsfast and without tensor operations, so that it shares no
mistake with an einsum.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def votes(u: Array, weight: Array) -> Array:
    B, I, K = u.shape
    _, J, D, _ = weight.shape
    out = np.zeros((B, I, J, D))
    for b, i, j, d in np.ndindex(B, I, J, D):
        row = weight[0 if weight.shape[0] == 1 else i, j, d]
        out[b, i, j, d] = sum(row[k] * u[b, i, k] for k in range(K))
    return out


def squash(s: list[float], kind: str = "paper", eps: float = 1e-8) -> list[float]:
    n = sum(x * x for x in s)
    if kind == "paper":
        factor = n / (1 + n) / math.sqrt(n + eps)
    elif kind == "half":
        factor = n / (0.5 + n) / math.sqrt(n + eps)
    elif kind == "eps_outside":
        factor = n / (1 + n) / (math.sqrt(n) + eps)
    elif kind == "exp":
        factor = (1 - math.exp(-math.sqrt(n + eps))) / math.sqrt(n + eps)
    elif kind == "unit":
        factor = 1 / math.sqrt(n + eps)
    else:
        assert kind == "identity"
        factor = 1.0
    return [factor * x for x in s]


def coupling(b: Array, mask: Any, out_mask: Any, softmax: str, leaky: bool) -> Array:
    """``b [B, I, J]``: each softmax over its valid entries only."""
    B, I, J = b.shape
    c = np.zeros((B, I, J))
    for n in range(B):
        pairs = [
            (i, j)
            for i in range(I)
            for j in range(J)
            if (mask is None or mask[n, i]) and (out_mask is None or out_mask[n, j])
        ]
        for i, j in pairs:
            group = [q for q in pairs if (q[0] == i if softmax == "out" else q[1] == j)]
            total = sum(math.exp(b[n, p, q]) for p, q in group) + (1.0 if leaky else 0.0)
            c[n, i, j] = math.exp(b[n, i, j]) / total
    return c


def route(
    x: Array,
    num_iterations: int = 3,
    logits: Any = None,
    bias: Any = None,
    mask: Any = None,
    out_mask: Any = None,
    softmax: str = "out",
    leaky: bool = False,
    squash_kind: str = "paper",
    eps: float = 1e-8,
    squash_last: bool = True,
    averaged: bool = False,
    agreement: Array | None = None,
) -> tuple[Array, Array, Array]:
    """``x [B, I, J, D]`` votes to ``(v, c, agreement)``, where agreement was added to the logits.

    With a given agreement only the last iteration runs. gradient="last" is the derivative of this function.
    """
    B, I, J, D = x.shape
    passes = num_iterations if agreement is None else 1
    added = np.zeros((B, I, J)) if agreement is None else agreement
    v, c = np.zeros((B, J, D)), np.zeros((B, I, J))
    for t in range(passes):
        b = np.zeros((B, I, J))
        for n, i, j in np.ndindex(B, I, J):
            prior = 0.0 if logits is None else logits[i, j] if logits.ndim == 2 else logits[n, i, j]
            b[n, i, j] = prior + added[n, i, j]
        if averaged:
            for i, j in np.ndindex(I, J):
                b[:, i, j] = sum(b[n, i, j] for n in range(B)) / B
        c = coupling(b, mask, out_mask, softmax, leaky)
        for n, j in np.ndindex(B, J):
            s = [0.0 if bias is None else bias[j, d] for d in range(D)]
            for i in range(I):
                if mask is None or mask[n, i]:
                    s = [s[d] + c[n, i, j] * x[n, i, j, d] for d in range(D)]
            squashed = squash(s, squash_kind, eps) if squash_last or t + 1 < passes else s
            v[n, j] = squashed if out_mask is None or out_mask[n, j] else 0.0
        if t + 1 < passes:
            added = added.copy()
            for n, i, j in np.ndindex(B, I, J):
                if mask is None or mask[n, i]:
                    added[n, i, j] += sum(x[n, i, j, d] * v[n, j, d] for d in range(D))
    return v, c, added
