"""The op of dynamic routing with weights that all input capsules share. It forms no votes and runs on the CPU only.

A weighted sum of votes ``W_j u_i`` is ``s_j = W_j z_j`` with ``z_j = sum_i c_ij u_i``, and the agreement of a vote with
``v_j = f(|s_j|^2) s_j`` is ``u_i . q_j``, where ``q_j = W_j^T v_j``. An iteration multiplies J vectors of a sample by a
matrix and by its transpose; forming votes multiplies I J vectors.

``capsfast::factored_routing`` is ``capsfast::dynamic_routing`` for a weight ``[1, J or 1, D, K]``, except that s
``[r, B, J, K]`` holds z and norm is empty.

``capsfast::factored_routing_backward`` returns the gradients that are needed, and empty tensors for the others.
"""

from typing import Any

import torch
from torch import Tensor

from ..backend import choose
from ..calls.arguments import Call
from ..calls.precision import wide_dtype
from ..environment.private_torch import tracing_state
from . import flops
from .define import Op, check_fake

LARGE_MATRIX, FEW_ROWS = 2**16, 16


def serves(call: Call, backend: str | None) -> bool:
    """Whether the op serves a call and is faster than the ops that form votes.

    Exported and traced programs never hold the op: it runs on the CPU only, and the program may run elsewhere.
    """
    u, weight = call.u, call.weight
    if weight is None or weight.shape[0] != 1 or call.P != 1 or weight.shape[3] != u.shape[2]:
        return False
    if torch.compiler.is_exporting() or tracing_state() is not None:
        return False
    if type(u) not in (Tensor, torch.nn.Parameter):
        return False
    # choose() comes first: on a GPU, comparing sizes would bind a compiled graph to these sizes for no use.
    return choose(call, backend) in OP.kernels and _pays(call)


def _pays(call: Call) -> bool:
    assert call.weight is not None
    (B, I, K), J, D, r = call.u.shape, call.J, call.D, call.options.num_iterations
    # Compares multiply-adds of a sample: this op's sums and products with matrices, and an op that forms votes.
    sums = (2 * r - 1) * J
    if call.weight.shape[1] != J:
        # Votes are formed once, as [B, I, D].
        if not 0 < sums * K * (D + I) <= I * D * (K + sums):
            return False
        # Every product reads the matrix again. A matrix too large for the cache pays only with enough rows.
        return not D * K > LARGE_MATRIX or B * J >= FEW_ROWS
    return 0 < sums * K * (D + I) <= r * I * J * D * (K + 2)  # type: ignore[no-any-return]


def run(call: Call, return_coupling: bool = False) -> tuple[Tensor, Tensor]:
    """v and c of the op, c empty if it is not wanted. Call it only if :func:`serves` is true."""
    (kernel,) = OP.kernels.values()
    v, c, *_ = kernel(call.u, call.weight, *call.parameters, call.J, *call.options, False, return_coupling)
    return v, c


def _fake(a: Any) -> tuple[Tensor, ...]:
    torch._check(a.u.dim() == 3 and a.weight.dim() == 4, lambda: "u must be [B, I, K], weight [1, J or 1, D, K]")
    (B, I, K), (_, columns, D, size) = a.u.shape, a.weight.shape
    torch._check(size == K, lambda: "u and weight must agree in K")
    J, new = columns if a.J is None else a.J, a.u.new_empty
    parameters = {"logits": a.logits, "bias": a.bias, "mask": a.mask, "out_mask": a.out_mask}
    check_fake(parameters, (B, I, J, D), ())
    wide = wide_dtype(a.u.dtype)
    coupling = new((B, I, J) if a.return_coupling else (0,), dtype=wide if a.softmax == "in" else a.u.dtype)
    return (
        new(B, J, D, dtype=wide if a.wide else a.u.dtype),
        coupling,
        new(a.num_iterations, B, J, K, dtype=wide),
        new(0, dtype=wide),
    )


def _sizes(a: Any) -> tuple[int, int]:
    """The FLOPs of a sum over the input capsules, and of a product of J vectors with matrices, for the batch."""
    (B, I, K), (_, columns, D, _) = a.u.shape, a.weight.shape
    J = columns if a.J is None else a.J
    return 2 * B * I * J * K, 2 * B * J * D * K


def _flops(a: Any) -> Any:
    """The FLOPs of the definition that forms no votes: r weighted sums and r - 1 agreements."""
    return (2 * a.num_iterations - 1) * sum(_sizes(a))


def _flops_backward(a: Any) -> Any:
    over_inputs, matrices = _sizes(a)
    u, weight, logits, _ = a.needed
    sums, couplings, agreements = flops.of_steps(a, logits)
    return over_inputs * (sums * u + couplings + agreements * (1 + u)) + matrices * (
        sums * weight + (sums if u else couplings) + agreements * (1 + weight)
    )


OP = Op(
    "factored_routing",
    ("capsfast.dynamic_routing",),
    _fake,
    flops=(_flops, _flops_backward),
    sharded=False,
    backends=("cpp",),
)
