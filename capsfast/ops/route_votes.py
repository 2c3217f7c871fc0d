"""The op behind :func:`capsfast.route_votes`.

``capsfast::route_votes`` and ``capsfast::route_votes_backward`` are ``capsfast::dynamic_routing`` with
the votes in the place of u and weight: the same outputs, ``dvotes`` in the place of ``du, dweight``.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..backend import select
from ..options import Options
from ..reference.route_votes import route_votes as reference
from ._register import functional, functional_backward, register, wide_dtype


def why_not_fused(share_batch_logits: bool) -> Mapping[str, Callable[[], str]]:
    """By backend, why it can't serve a call."""

    def reason() -> str:
        return "share_batch_logits is served by the reference backend only" if share_batch_logits else ""

    return {"cpp": reason}


def run_reference(
    definition: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    parameters: tuple[Tensor | None, ...],
    options: Options,
    share_batch_logits: bool,
) -> tuple[Tensor, Tensor]:
    if share_batch_logits and not torch.compiler.is_compiling():
        warnings.warn(
            "capsfast: share_batch_logits averages the routing logits over the batch, so a sample's "
            "result depends on the others; kept to reproduce older models, accuracy falls at small batches",
            UserWarning,
            stacklevel=4,
        )
    return definition(*tensors, *parameters, options, share_batch_logits)


def call(
    votes: Tensor,
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
    chosen = select("capsfast.route_votes", votes.device, backend, why_not_fused(share_batch_logits))
    if chosen == "reference":
        return run_reference(reference, (votes,), (logits, bias, mask, out_mask), options, share_batch_logits)
    v, c, _, _ = _op(votes, logits, bias, mask, out_mask, *options, return_coupling)
    return v, c


def _fake(
    votes: Tensor,
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
    torch._check(votes.dim() == 4, lambda: "votes must be [B, I, J, D]")
    B, I, J, D = votes.shape
    wide = wide_dtype(votes.dtype)
    return (
        votes.new_empty(B, J, D),
        votes.new_empty(B, I, J) if return_coupling else votes.new_empty(0),
        votes.new_empty(num_iterations, B, J, D, dtype=wide),
        votes.new_empty(2, num_iterations, B, J, dtype=wide) if softmax == "in" else votes.new_empty(0, dtype=wide),
    )


def _fake_backward(
    dv: Tensor,
    dcoupling: Tensor | None,
    votes: Tensor,
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
    need_votes: bool,
    need_logits: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    def gradient_of(tensor: Tensor | None, needed: bool) -> Tensor:
        return tensor.new_empty(tensor.shape) if needed and tensor is not None else votes.new_empty(0)

    return gradient_of(votes, need_votes), gradient_of(logits, need_logits), gradient_of(bias, need_bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    votes, logits, bias, mask, out_mask, *options, _ = inputs
    _, coupling, s, norm = output
    ctx.save_for_backward(votes, logits, bias, mask, out_mask, coupling, s, norm)
    ctx.options = options
    ctx.mark_non_differentiable(s, norm)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dv: Tensor | None, dcoupling: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    votes, logits, bias, mask, out_mask, coupling, s, norm = ctx.saved_tensors
    if dv is None:
        dv = s.new_zeros(s.shape[1:], dtype=votes.dtype)
    if coupling.dim() == 1:
        dcoupling = None
    needed = ctx.needs_input_grad[:3]
    gradients = _op_backward(
        dv, dcoupling, votes, logits, bias, mask, out_mask, coupling, s, norm, *ctx.options, *needed
    )
    none = (None,) * (len(ctx.options) + 3)
    return (*(g if needed else None for g, needed in zip(gradients, needed, strict=True)), *none)


if native.extension is not None:
    register("route_votes", _fake, _fake_backward, _save, _backward, cast=(0,))
_op = functional("route_votes", _save, _backward)
_op_backward = functional_backward("route_votes")
