"""The op behind :func:`capsfast.dynamic_routing`.

``capsfast::dynamic_routing`` returns ``(v [B, J, D], c [B, I, J], s [r, B, J, D], norm [2, r, B, J])``. v and the last
coupling c (empty without return_coupling) have the dtype of u. s and norm are what the backward needs, in the dtype
that sums are formed in. s is every iteration's weighted sum, without the bias. norm, empty unless softmax is "in", is
the normaliser over the input capsules: a number m that the largest logit exceeds by 8 at most, and
``1 / sum_i exp(b - m)``. The backward recomputes votes, coupling and logits; V_t is the sum of the squashed s up to t.

Pose matrices come as ``u [B, I, P K]`` and ``weight [I or 1, J, R, K]``: P poses that share the weight. Then D is P R,
the numbers of the P votes one after the other.

squash is the kind of every iteration; behind a slash stands that of the last one where it is another:
"paper/identity" leaves out the last squash.

``capsfast::dynamic_routing_backward`` returns ``(du, dweight, dlogits, dbias)``, each empty if its need_ flag is false.
tf32: products of float32 may be rounded to TF32; it has no effect on the CPU.
"""

from typing import Any

import torch
from torch import Tensor

from ..backend import demanded, select
from ..options import Options
from ..precision import tf32_allowed
from ..reference.dynamic_routing import dynamic_routing as reference
from . import _batch_logits, route_votes, shared_routing
from ._glue import fake_gradients, in_wide_dtype
from ._product import fake_sizes, poses, width
from ._register import Contract, define
from ._routing import BOTH, OPTIONS, SHARED, fake_outputs, received, run_reference, why_not_fused
from ._shared_outputs import votes

NAME = "capsfast.dynamic_routing"


def why_no_rows(dtype: torch.dtype, weight: Tensor) -> str:
    """Why the kernels of csrc/ops/cuda/rows/ do not serve a call, "" if they do.

    dtype: of u. weight ``[I or 1, J, D, K]``. Asked only of calls that the backend "cuda" serves.
    """
    # No reason holds a size: torch.compile would compile anew for each one it made text of.
    _, J, D, K = weight.shape
    if dtype == torch.float64:
        return "they serve float32, bfloat16 and float16, got float64"
    if K > 16:
        return "K is larger than 16"
    if D > 16:
        return "D is larger than 16"
    if J > 12:
        return "J is larger than 12"
    # Any stride along I will do: a shared weight has one row. So will that of an axis of length 1.
    dense = zip((J, D, K), weight.stride()[1:], (D * K, K, 1), strict=True)
    if any(length != 1 and stride != wanted for length, stride, wanted in dense):
        return "the weight is not contiguous"
    return ""


def call(
    u: Tensor,
    weight: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    out_mask: Tensor | None,
    J: int,
    options: Options,
    return_coupling: bool,
    share_batch_logits: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """``(v, c)`` from the chosen backend. The arguments were checked by the caller. J: how many output capsules."""
    if weight.shape[1] != J:
        others = bias is not None or return_coupling or share_batch_logits
        if not others and shared_routing.serves(u, weight, logits, J, options, backend):
            v = shared_routing.call(u, weight, logits, mask, out_mask, J, options)
            return v, v.new_empty(0)

        def run(u: Tensor, weight: Tensor, logits: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            # All output capsules have the same votes, 1 / J of the others' size.
            x = votes(u, weight, mask)
            return route_votes.call(
                x, logits, bias, mask, out_mask, J, options, return_coupling, share_batch_logits, backend
            )

        v, c = in_wide_dtype(run, (u, weight), (logits, bias), BOTH)
        return v, c
    if share_batch_logits and demanded(NAME, backend) is None and _batch_logits.serves(mask, out_mask, options.softmax):
        return _batch_logits.dynamic_routing(u, weight, logits, bias, mask, options)
    cannot = why_not_fused(u.dtype, width(u, weight), share_batch_logits, poses=poses(u, weight))
    chosen = select(
        NAME,
        u.device,
        backend,
        cannot,
        lambda: why_no_rows(u.dtype, weight),
    )
    if chosen == "reference":
        return run_reference(reference, (u, weight), (logits, bias, mask, out_mask), options, share_batch_logits)
    tf32 = chosen != "cpp" and tf32_allowed()
    v, c, _, _ = _ops[chosen](u, weight, logits, bias, mask, out_mask, *options.of_op(), tf32, return_coupling)
    return v, c


def _fake(u: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return fake_outputs(u, fake_sizes(u, weight), rest)


def _fake_backward(
    dv: Tensor,
    dcoupling: Tensor | None,
    u: Tensor,
    weight: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    out_mask: Tensor | None,
    coupling: Tensor,
    s: Tensor,
    norm: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    return fake_gradients((u, weight, logits, bias), rest[-4:])


CONTRACT = Contract(
    name="dynamic_routing",
    inputs=("u", "weight"),
    options=f"{OPTIONS}, bool tf32",
    fake=_fake,
    fake_backward=_fake_backward,
    received=received,
    **SHARED,
)
_ops = define(CONTRACT)
