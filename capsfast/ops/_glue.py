"""What both routing ops share: fakes, autograd glue, the call of the reference, and which backend serves a call."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import toolchain
from ..options import Options


def why_not_fused(dtype: torch.dtype, D: int, share_batch_logits: bool) -> Mapping[str, Callable[[], str]]:
    """For each fused backend a function that says why it cannot serve a call, or returns "" if it can."""

    def cpp() -> str:
        return "share_batch_logits is served by the reference backend only" if share_batch_logits else ""

    def triton() -> str:
        if dtype == torch.float64:
            return "it serves float32, bfloat16 and float16, got float64"
        if D > toolchain.LARGEST_D:
            return f"it serves output capsules of dimension D up to {toolchain.LARGEST_D}, got {D}"
        return cpp()

    return {"cpp": cpp, "triton": triton, "cuda": cpp}


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


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are formed in: float32 for 16-bit inputs, else that of the inputs."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def fake_outputs(anchor: Tensor, sizes: tuple[int, int, int, int], rest: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Fake outputs. anchor: u or votes. sizes: (B, I, J, D). rest: the arguments from logits on."""
    B, I, J, D = sizes
    logits, bias, mask, out_mask, num_iterations, softmax, *_, return_coupling = rest
    if logits is not None:
        torch._check(logits.shape[-1] == J, lambda: "logits must end in J")
        torch._check(logits.shape[-2] == I, lambda: "logits must have I rows")
    if bias is not None:
        torch._check(bias.shape[0] == J, lambda: "bias must be [J, D]")
        torch._check(bias.shape[1] == D, lambda: "bias must be [J, D]")
    for given, size in ((mask, I), (out_mask, J)):
        if given is not None:
            torch._check(given.shape[0] == B, lambda: "masks must have B rows")
            torch._check(given.shape[1] == size, lambda: "mask must be [B, I], out_mask [B, J]")
    wide = wide_dtype(anchor.dtype)
    return (
        anchor.new_empty(B, J, D),
        anchor.new_empty(B, I, J) if return_coupling else anchor.new_empty(0),
        anchor.new_empty(num_iterations, B, J, D, dtype=wide),
        anchor.new_empty(2, num_iterations, B, J, dtype=wide) if softmax == "in" else anchor.new_empty(0, dtype=wide),
    )


def fake_gradients(tensors: tuple[Tensor | None, ...], needed: tuple[bool, ...]) -> tuple[Tensor, ...]:
    """A fake gradient for each tensor, empty if it is not needed."""
    anchor = tensors[0]
    assert anchor is not None
    return tuple(
        (anchor if tensor is None else tensor).new_empty(tensor.shape if wanted and tensor is not None else (0,))
        for tensor, wanted in zip(tensors, needed, strict=True)
    )


def saving(tensors: int) -> Callable[..., None]:
    """setup_context of an op whose first ``tensors`` arguments are tensors; the options and return_coupling follow."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, coupling, s, norm = output
        ctx.save_for_backward(*inputs[:tensors], coupling, s, norm)
        ctx.options = inputs[tensors:-1]
        ctx.mark_non_differentiable(s, norm)
        ctx.set_materialize_grads(False)

    return save


def backward_by(op: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """The backward of an autograd formula. op: the function of the ``..._backward`` op, see _transformable()."""

    def backward(ctx: Any, dv: Tensor | None, dcoupling: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        *tensors, coupling, s, norm = ctx.saved_tensors
        if dv is None:
            dv = s.new_zeros(s.shape[1:], dtype=tensors[0].dtype)
        if coupling.dim() == 1:
            dcoupling = None
        # The last two tensors are the masks.
        needed = ctx.needs_input_grad[: len(tensors) - 2]
        gradients = op(dv, dcoupling, *tensors, coupling, s, norm, *ctx.options, *needed)
        found = tuple(g if wanted else None for g, wanted in zip(gradients, needed, strict=True))
        return (*found, *(None,) * (2 + len(ctx.options) + 1))

    return backward
