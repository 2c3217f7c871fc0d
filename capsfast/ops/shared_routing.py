"""The op of dynamic routing with one matrix S for all pairs, which forms no votes. It has kernels on the CPU.

All votes of an input capsule are S u_i. So a weighted sum of votes is ``s_j = S z_j`` with ``z_j = sum_i c_ij u_i``,
and the agreement of a vote with ``v_j = f(|s_j|^2) s_j`` is ``u_i . q_j``, where ``q_j = S^T v_j``. An iteration
multiplies J vectors of a sample by S and by its transpose; votes multiply I by S.

``capsfast::shared_routing`` returns ``(v [B, J, D], kept [B, ...])``: for the backward, kept has z of all iterations,
and with return_all what the backward would compute again: S z of all iterations, q and the couplings of all but the
first. It is empty without return_kept. accumulate: the logits of an iteration are the given ones and all agreements so
far; else the last agreement alone. scale: a factor of the agreement, an inverse temperature.

``capsfast::shared_routing_backward`` returns ``(du, dweight, dlogits)``, each empty if its need_ flag is false.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import checks, native
from ..backend import select
from ..options import Options
from ._glue import check_shapes, fake_gradients
from ._register import Contract, define_cpp

LARGE_MATRIX, FEW_ROWS = 2**16, 16
# Numbers of all samples. More are as dear to write and read, to memory that the system hands out afresh, as to compute.
MOST_KEPT = 2**23


def serves(u: Tensor, weight: Tensor, logits: Tensor | None, J: int, options: Options, backend: str | None) -> bool:
    """Whether the op serves a call, with no more multiply-adds than votes ``[B, I, D]`` take.

    A program that is exported or traced never has the op: it has kernels on the CPU alone, and the program may run
    elsewhere.

    weight ``[1 or I, 1, D, K]``, J output capsules. The arguments were checked by the caller.
    """
    if torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None:
        return False
    if u.device.type not in ("cpu", "meta") or u.dtype not in (torch.float32, torch.float64):
        return False
    if native.extension is None or type(u) not in (Tensor, torch.nn.Parameter):
        return False
    if weight.shape[0] != 1 or weight.shape[3] != u.shape[2]:
        return False
    o = options
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
    return select("capsfast.dynamic_routing", u.device, backend) == "cpp"


def call(
    u: Tensor,
    weight: Tensor,
    logits: Tensor | None,
    mask: Tensor | None,
    out_mask: Tensor | None,
    J: int,
    options: Options,
    accumulate: bool = True,
    scale: float = 1.0,
) -> Tensor:
    """v ``[B, J, D]``. Only where :func:`serves` says so."""
    o = options
    chosen = (J, o.num_iterations, o.gradient, accumulate, scale, o.squash, o.eps)
    B, I, K = u.shape
    whole = _surely(B * _kept(I, K, J, weight.shape[2], o.num_iterations, True) <= MOST_KEPT)
    v, _ = _op(u, weight, logits, mask, out_mask, *chosen, _may_need_gradients(u, weight, logits), whole)
    return v  # type: ignore[no-any-return]


def _may_need_gradients(*tensors: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    # A tensor of a transform does not say what the one within it needs.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _surely(known: bool) -> bool:
    """known; False where torch.compile cannot tell, as a size is not known before the program runs."""
    if not torch.compiler.is_compiling():
        return known
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports sympy

    return True if guard_or_false(known) else False  # noqa: SIM210 - a symbol is no bool


def _kept(I: int, K: int, J: int, D: int, r: int, whole: bool) -> int:
    """The numbers of a sample in kept, as in csrc/ops/shared_routing.h."""
    row = (I + 15) // 16 * 16
    return J * (r * K + (r * D + (r - 1) * (K + row) if whole else 0))


def _fake(u: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    logits, mask, out_mask, J, r = rest[:5]
    torch._check(u.dim() == 3 and weight.dim() == 4, lambda: "u must be [B, I, K], weight [1, 1, D, K]")
    B, I, K = u.shape
    D = weight.shape[2]
    torch._check(weight.shape[3] == K, lambda: "u and weight must agree in K")
    check_shapes({"logits": logits, "mask": mask, "out_mask": out_mask}, (B, I, J, D), ())
    kept, whole = rest[-2:]
    return u.new_empty(B, J, D), u.new_empty(B, _kept(I, K, J, D, r, whole)) if kept else u.new_empty(0)


def _fake_backward(dv: Tensor, u: Tensor, weight: Tensor, logits: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return fake_gradients((u, weight, logits), rest[-3:])


def _received(
    given: Sequence[Tensor | None], tensors: Sequence[Tensor | None], saved: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    return tuple(given)


CONTRACT = Contract(
    name="shared_routing",
    inputs=("u", "weight"),
    parameters=("logits",),
    options="SymInt J, int num_iterations, str gradient, bool accumulate, float scale, str squash, float eps",
    requests=("kept", "all"),
    outputs=("v", "kept"),
    differentiable=1,
    saved=("kept",),
    optional=(),
    fake=_fake,
    fake_backward=_fake_backward,
    received=_received,
    called="dynamic_routing",
)
_op = define_cpp(CONTRACT)
