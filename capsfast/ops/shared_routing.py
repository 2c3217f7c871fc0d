"""The op of dynamic routing with one matrix S for all pairs, which forms no votes. It has kernels on the CPU.

All votes of an input capsule are S u_i. So a weighted sum of votes is ``s_j = S z_j`` with ``z_j = sum_i c_ij u_i``,
and the agreement of a vote with ``v_j = f(|s_j|^2) s_j`` is ``u_i . q_j``, where ``q_j = S^T v_j``. An iteration
multiplies J vectors of a sample by S and by its transpose; votes multiply I by S.

``capsfast::shared_routing`` returns ``(v [B, J, D], kept [B, ...])``: for the backward, kept has z of all iterations,
and with return_all what the backward would compute again: S z of all iterations, q and the couplings of all but the
first. It is empty without return_kept. accumulate: the logits of an iteration are the given ones and all agreements so
far; else the last agreement alone. scale: a factor of the agreement, an inverse temperature.

``capsfast::shared_routing_backward`` returns ``(du, dweight, dlogits)``, each empty if it is not needed.
"""

from typing import Any

import torch
from torch import Tensor

from .. import checks, native
from .._torch import surely, tracing_state, transformed
from ..arguments import Call
from ..backend import choose
from ..options import Options
from .define import Op, check_fake

LARGE_MATRIX, FEW_ROWS = 2**16, 16
# Numbers of all samples. More are as dear to write and read, to memory that the system hands out afresh, as to compute.
MOST_KEPT = 2**23


def serves(call: Call, backend: str | None) -> bool:
    """Whether the op serves a call without bias, with no more multiply-adds than votes ``[B, I, D]`` take.

    A program that is exported or traced never has the op: it has kernels on the CPU alone, and the program may run
    elsewhere.

    weight ``[1 or I, 1, D, K]``, J output capsules.
    """
    u, weight, J, o = call.u, call.weight, call.J, call.options
    logits, bias, *_ = call.parameters
    if torch.compiler.is_exporting() or tracing_state() is not None:
        return False
    if u.device.type not in ("cpu", "meta") or u.dtype not in (torch.float32, torch.float64):
        return False
    if native.extension is None or type(u) not in (Tensor, torch.nn.Parameter) or bias is not None:
        return False
    if weight is None or weight.shape[0] != 1 or weight.shape[3] != u.shape[2]:
        return False
    if o != Options(o.num_iterations, "out", o.gradient, False, o.squash, o.eps):
        return False
    if checks.autocast_dtype(u.device) not in (None, u.dtype):
        return False
    if u.dtype != weight.dtype or (logits is not None and logits.dtype != u.dtype):
        return False
    D, K = weight.shape[2:]
    B, I, sums = *u.shape[:2], (2 * o.num_iterations - 1) * J
    # Of a forward, for a sample: products with S, and sums over I of numbers [K] or [D]. With D = K: sums <= I.
    if not sums * K * (D + I) <= I * D * (K + sums):
        return False
    # Every product reads the matrix again: one that is no longer in the cache wants more rows than a few.
    if D * K > LARGE_MATRIX and not B * J >= FEW_ROWS:
        return False
    return choose(call, backend) == "cpp"


def run(call: Call, accumulate: bool = True, scale: float = 1.0) -> Tensor:
    """v ``[B, J, D]``. Only where :func:`serves` says so."""
    u, weight, J, o = call.u, call.weight, call.J, call.options
    logits, _, mask, out_mask = call.parameters
    assert weight is not None
    chosen = (J, o.num_iterations, o.gradient, accumulate, scale, o.squash, o.eps)
    B, I, K = u.shape
    whole = surely(B * _kept(I, K, J, weight.shape[2], o.num_iterations, True) <= MOST_KEPT)
    v, _ = OP.kernels["cpp"](u, weight, logits, mask, out_mask, *chosen, _may_need_gradients(u, weight, logits), whole)
    return v  # type: ignore[no-any-return]


def _may_need_gradients(*tensors: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    # A tensor of a transform does not say what the one within it needs.
    if torch.compiler.is_compiling() or transformed():
        return True
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _kept(I: int, K: int, J: int, D: int, r: int, whole: bool) -> int:
    """The numbers of a sample in kept, as in csrc/ops/cpu/shared_routing.h."""
    row = (I + 15) // 16 * 16
    return J * (r * K + (r * D + (r - 1) * (K + row) if whole else 0))


def _fake(a: Any) -> tuple[Tensor, ...]:
    torch._check(a.u.dim() == 3 and a.weight.dim() == 4, lambda: "u must be [B, I, K], weight [1, 1, D, K]")
    B, I, K = a.u.shape
    J, D = a.J, a.weight.shape[2]
    torch._check(a.weight.shape[3] == K, lambda: "u and weight must agree in K")
    check_fake({"logits": a.logits, "mask": a.mask, "out_mask": a.out_mask}, (B, I, J, D), ())
    kept = (B, _kept(I, K, J, D, a.num_iterations, a.return_all)) if a.return_kept else (0,)
    return a.u.new_empty(B, J, D), a.u.new_empty(kept)


OP = Op("shared_routing", ("capsfast.dynamic_routing",), _fake, sharded=False, backends=("cpp",))
