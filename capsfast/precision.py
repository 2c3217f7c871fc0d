"""The dtype of sums, what autocast makes of a call, and how exact torch wants float32 products to be."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ._torch import constant_while_tracing
from .arguments import Call

LOW = (torch.float32, torch.float16, torch.bfloat16)


@constant_while_tracing
def tf32_allowed() -> bool:
    """Whether float32 products on CUDA devices may be rounded to TF32, by any of torch's settings.

    Not from ``allow_tf32``, which is an error where ``fp32_precision`` was set. torch.compile keeps the answer, and
    compiles anew when the setting changes.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are formed in: float32 for 16-bit inputs, else that of the inputs."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def cast(args: Sequence[Any], dtype: torch.dtype, count: int) -> list[Any]:
    """args, the first ``count`` of them cast to dtype. float64 is not cast, as in torch's own autocast rules."""
    return [
        arg.to(dtype) if n < count and isinstance(arg, Tensor) and arg.dtype in LOW else arg
        for n, arg in enumerate(args)
    ]


def as_under_autocast(*tensors: Any) -> tuple[Sequence[Any], AbstractContextManager[Any]]:
    """For what stands in for an op: the tensors as autocast casts those of ops, and a context without autocast."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors, nullcontext()
    return cast(tensors, torch.get_autocast_dtype(device), len(tensors)), torch.autocast(device, enabled=False)


def in_wide_dtype(
    definition: Callable[[Call], tuple[Tensor, ...]], call: Call, narrow: Sequence[int]
) -> tuple[Tensor, ...]:
    """``definition(call)`` as an op computes: 16-bit tensors become float32 before any sum.

    narrow: which results get the dtype of u back. As with ops, autocast casts u and weight alone.
    """
    (u, weight), no_autocast = as_under_autocast(call.u, call.weight)
    dtype = u.dtype
    with no_autocast:
        wide = replace(call, u=u, weight=weight).with_tensors(lambda value: value.to(wide_dtype(dtype)))
        found = definition(wide)
        return tuple(value.to(dtype) if n in narrow else value for n, value in enumerate(found))
