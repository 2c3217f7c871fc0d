"""The op behind :func:`capsfast.dynamic_routing`.

``capsfast::dynamic_routing`` returns ``(v [B, J, D], c [B, I, J], s [r, B, J, D], norm [2, r, B, J])``:
the output capsules and the last coupling (empty without return_coupling) in the dtype of u, and what
the backward needs in the dtype sums are formed in: every iteration's weighted sum (without the bias),
and with softmax "in" the normaliser over the input capsules: the largest logit m and
``1 / sum_i exp(b - m)`` (else empty). The votes, the coupling and
the logits of earlier iterations are not kept: V_t is the sum of the squashed s up to t.

``capsfast::dynamic_routing_backward`` returns ``(du, dweight, dlogits, dbias)``, empty where the
need_ flag is false.
"""

from typing import Any

import torch
from torch import Tensor

from .. import native
from ..backend import select
from ..options import Options
from ..reference.dynamic_routing import dynamic_routing as reference
from ._register import functional, functional_backward, register, wide_dtype
from .route_votes import run_reference, why_not_fused


def call(
    u: Tensor,
    weight: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    out_mask: Tensor | None,
    options: Options,
    return_coupling: bool,
    share_batch_logits: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """``(v, c)`` from the chosen backend, on arguments that were checked."""
    chosen = select("capsfast.dynamic_routing", u.device, backend, why_not_fused(share_batch_logits))
    if chosen == "reference":
        return run_reference(reference, (u, weight), (logits, bias, mask, out_mask), options, share_batch_logits)
    v, c, _, _ = _op(u, weight, logits, bias, mask, out_mask, *options, return_coupling)
    return v, c


def _fake(
    u: Tensor,
    weight: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    out_mask: Tensor | None,
    num_iterations: int,
    softmax: str,
    gradient: str,
    leaky: bool,
    squash: str,
    eps: float,
    return_coupling: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch._check(u.dim() == 3 and weight.dim() == 4, lambda: "u must be [B, I, K], weight [I, J, D, K]")
    B, I, K = u.shape
    rows, J, D, _ = weight.shape
    torch._check(weight.shape[3] == K, lambda: "u and weight must agree in K")
    torch._check(u.dtype == weight.dtype, lambda: "u and weight must have one dtype")
    wide = wide_dtype(u.dtype)
    return (
        u.new_empty(B, J, D),
        u.new_empty(B, I, J) if return_coupling else u.new_empty(0),
        u.new_empty(num_iterations, B, J, D, dtype=wide),
        u.new_empty(2, num_iterations, B, J, dtype=wide) if softmax == "in" else u.new_empty(0, dtype=wide),
    )


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
    num_iterations: int,
    softmax: str,
    gradient: str,
    leaky: bool,
    squash: str,
    eps: float,
    need_u: bool,
    need_weight: bool,
    need_logits: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def gradient_of(tensor: Tensor | None, needed: bool) -> Tensor:
        return tensor.new_empty(tensor.shape) if needed and tensor is not None else u.new_empty(0)

    return (
        gradient_of(u, need_u),
        gradient_of(weight, need_weight),
        gradient_of(logits, need_logits),
        gradient_of(bias, need_bias),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    u, weight, logits, bias, mask, out_mask, *options, _ = inputs
    _, coupling, s, norm = output
    ctx.save_for_backward(u, weight, logits, bias, mask, out_mask, coupling, s, norm)
    ctx.options = options
    ctx.mark_non_differentiable(s, norm)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dv: Tensor | None, dcoupling: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    u, weight, logits, bias, mask, out_mask, coupling, s, norm = ctx.saved_tensors
    if dv is None:
        dv = s.new_zeros(s.shape[1:], dtype=u.dtype)
    if coupling.dim() == 1:
        dcoupling = None
    needed = ctx.needs_input_grad[:4]
    gradients = _op_backward(
        dv, dcoupling, u, weight, logits, bias, mask, out_mask, coupling, s, norm, *ctx.options, *needed
    )
    none = (None,) * (len(ctx.options) + 3)
    return (*(g if needed else None for g, needed in zip(gradients, needed, strict=True)), *none)


if native.extension is not None:
    register("dynamic_routing", _fake, _fake_backward, _save, _backward, cast=(0, 1))
_op = functional("dynamic_routing", _save, _backward)
_op_backward = functional_backward("dynamic_routing")
