"""What both pass ops share: fakes, and which backend serves a call."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import toolchain
from ..options import PassOptions
from ..precision import wide_dtype
from ..reference.votes_pass import PassParameters
from ._glue import check_shapes, in_wide_dtype
from ._routing import why_not_in_cuda

# The option has another name than the moment, which the backward gets too.
OPTIONS = "str normalize, bool leaky, bool with_second"
MOMENTS = ("mass", "first", "second", "weights", "lse_out")
# The one result that has the dtype of the inputs.
WEIGHTS = MOMENTS.index("weights")
# The parts of a contract in which routing_pass and votes_pass agree.
SHARED: dict[str, Any] = {
    "parameters": PassParameters._fields[:-2],
    "requests": ("weights", "lse"),
    "outputs": (*MOMENTS, "norm"),
    "differentiable": len(MOMENTS),
    "saved": (*MOMENTS, "norm"),
    "optional": MOMENTS,
}


def why_not_fused(
    dtype: torch.dtype,
    D: int,
    parameters: PassParameters,
    options: PassOptions,
    shared_outputs: bool = False,
    poses: int = 1,
    positions: bool = False,
) -> Mapping[str, Callable[[], str]]:
    """For each fused backend a function that says why it cannot serve a pass, or returns "" if it can.

    shared_outputs, poses and positions: as in _routing.why_not_fused.
    """

    def triton() -> str:
        if dtype == torch.float64:
            return "it serves float32, bfloat16 and float16, got float64"
        return toolchain.too_large_for_triton(D, poses)

    def cuda() -> str:
        lacking = [name for name in ("precision", "center", "activation") if getattr(parameters, name) is not None]
        lacking += ["second"] * options.second
        if lacking:
            return f"it serves linear passes, those without {', '.join(lacking)}"
        if options.normalize not in ("out", "in"):
            return f"it serves normalize 'out' and 'in', got {options.normalize!r}"
        return why_not_in_cuda(shared_outputs, poses, positions)

    return {"triton": triton, "cuda": cuda}


def run_reference(
    definition: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]],
    tensors: tuple[Tensor, ...],
    parameters: PassParameters,
    J: int,
    options: PassOptions,
    weights: bool,
    lse: bool,
) -> tuple[Tensor, ...]:
    """What the ops return, without norm, from the definition."""

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        count = len(tensors)
        found = definition(*given[:count], PassParameters(*given[count:]), J, options)
        mass, first, second, r, log_sum = found
        empty = mass.new_empty(0)
        return mass, first, second, r if weights else empty, log_sum if lse and log_sum is not None else empty

    return in_wide_dtype(run, tensors, parameters, (WEIGHTS,))


def fake_outputs(
    anchor: Tensor, sizes: tuple[int, int, int, int], rest: tuple[Any, ...], S: Sequence[int] = ()
) -> tuple[Tensor, ...]:
    """Fake outputs. anchor: u or votes. sizes: (B, I, J, D). rest: the arguments from query on. S: positions."""
    B, I, J, D = sizes
    parameters, options = PassParameters(*rest[:9]), PassOptions(*rest[9:12])
    weights, lse = rest[-2:]
    wide = wide_dtype(anchor.dtype)
    check_shapes(parameters._asdict(), sizes, S)
    inward = options.normalize == "in"

    def new(*size: int, wanted: bool = True, dtype: torch.dtype = wide) -> Tensor:
        return anchor.new_empty(size if wanted else (0,), dtype=dtype)

    return (
        new(B, J, *S),
        new(B, J, D, *S),
        new(B, J, D, *S, wanted=options.second),
        new(B, I, J, *S, wanted=weights, dtype=anchor.dtype),
        new(B, J if inward else I, *S, wanted=lse),
        new(2, B * math.prod(S), J, wanted=inward),
    )


def received(
    given: Sequence[Tensor | None], tensors: Sequence[Tensor | None], saved: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients of the moments as the backward takes them: None for those that were not asked for."""
    return tuple(
        None if gradient is None or output.dim() == 1 else gradient
        for gradient, output in zip(given, saved[: len(MOMENTS)], strict=True)
    )
