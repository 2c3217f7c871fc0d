"""What both routing ops share: fakes, the call of the reference, and which backend serves a call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import toolchain
from ..options import Options
from ..precision import wide_dtype
from ._glue import check_shapes, in_wide_dtype

OPTIONS = "int num_iterations, str softmax, str gradient, bool leaky, str squash, float eps"
# The parts of a contract in which dynamic_routing and route_votes agree.
SHARED: dict[str, Any] = {
    "parameters": ("logits", "bias"),
    "requests": ("coupling",),
    "outputs": ("v", "coupling", "s", "norm"),
    "differentiable": 2,
    "saved": ("coupling", "s", "norm"),
    "optional": ("coupling",),
}


# Which results of a routing have the dtype of its inputs: v and the coupling.
BOTH = (0, 1)


def why_not_in_cuda(shared_outputs: bool, poses: int, positions: bool) -> str:
    """Why the CUDA kernels take no such votes, "" if they do. The arguments are those of why_not_fused."""
    if shared_outputs:
        return "it does not serve votes that all output capsules share"
    if positions or poses != 1:
        return "it does not serve pose matrices, nor votes with axes of positions"
    return ""


def why_not_fused(
    dtype: torch.dtype,
    D: int,
    share_batch_logits: bool = False,
    shared_outputs: bool = False,
    poses: int = 1,
    positions: bool = False,
) -> Mapping[str, Callable[[], str]]:
    """For each fused backend a function that says why it cannot serve a call, or returns "" if it can.

    shared_outputs: all output capsules have the same votes. poses: P of pose matrices. positions: of the votes.
    """

    def cpp() -> str:
        if share_batch_logits:
            return "no kernel serves share_batch_logits; leave out backend, or ask for the reference"
        return ""

    def triton() -> str:
        if dtype == torch.float64:
            return "it serves float32, bfloat16 and float16, got float64"
        return toolchain.too_large_for_triton(D, poses) or cpp()

    def cuda() -> str:
        return why_not_in_cuda(shared_outputs, poses, positions) or cpp()

    return {"cpp": cpp, "triton": triton, "cuda": cuda}


def run_reference(
    definition: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    parameters: tuple[Tensor | None, ...],
    options: Options,
    share_batch_logits: bool,
    *sizes: int,
) -> tuple[Tensor, Tensor]:

    def run(*given: Tensor) -> tuple[Tensor, Tensor]:
        return definition(*given, options, share_batch_logits, *sizes)

    v, c = in_wide_dtype(run, tensors, parameters, BOTH)
    return v, c


def fake_outputs(
    anchor: Tensor, sizes: tuple[int, int, int, int], rest: tuple[Any, ...], S: Sequence[int] = ()
) -> tuple[Tensor, ...]:
    """Fake outputs. anchor: u or votes. sizes: (B, I, J, D). rest: the arguments from logits on. S: positions."""
    B, I, J, D = sizes
    logits, bias, mask, out_mask, num_iterations, softmax, *_, return_coupling = rest
    check_shapes({"logits": logits, "bias": bias, "mask": mask, "out_mask": out_mask}, sizes, S)
    wide = wide_dtype(anchor.dtype)
    kept = len(S) == 0
    return (
        anchor.new_empty(B, J, D, *S),
        anchor.new_empty(B, I, J, *S) if return_coupling else anchor.new_empty(0),
        anchor.new_empty((num_iterations, B, J, D) if kept else (0,), dtype=wide),
        anchor.new_empty((2, num_iterations, B, J) if kept and softmax == "in" else (0,), dtype=wide),
    )


def received(
    given: Sequence[Tensor | None], tensors: Sequence[Tensor | None], saved: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients of v and of the coupling as the backward takes them: zeros for a v that has none."""
    (dv, dcoupling), (coupling, s, _), anchor = given, saved, tensors[0]
    assert anchor is not None
    if dv is None:
        # Votes with positions, for which s is not kept, have all J output capsules.
        shape = s.shape[1:] if s.dim() == 4 else (anchor.shape[0], *anchor.shape[2:])
        dv = anchor.new_zeros(shape)
    return dv, None if coupling.dim() == 1 else dcoupling
