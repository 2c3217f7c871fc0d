"""The dtype of sums, the casts of autocast, and torch's setting for the precision of float32 products."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..environment.private_torch import constant_while_tracing, matmul_precision
from .arguments import Call

LOW = (torch.float32, torch.float16, torch.bfloat16)


@constant_while_tracing
def tf32_allowed() -> bool:
    """Whether any setting of torch allows float32 products on CUDA devices to be rounded to TF32.

    Reading ``allow_tf32`` would raise an error if ``fp32_precision`` was set. torch.compile keeps the answer and
    compiles again when the setting changes.
    """
    return bool(matmul_precision() == "tf32")


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are formed in: float32 for 16-bit inputs, else the dtype of the inputs."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def cast(args: Sequence[Any], dtype: torch.dtype, count: int) -> list[Any]:
    """Casts the first ``count`` of args to dtype. float64 is not cast, as in torch's own autocast rules."""
    return [
        arg.to(dtype) if n < count and isinstance(arg, Tensor) and arg.dtype in LOW else arg
        for n, arg in enumerate(args)
    ]


def as_under_autocast(*tensors: Any) -> tuple[Sequence[Any], AbstractContextManager[Any]]:
    """For a substitute of an op: the tensors, cast as autocast would cast them, and a context without autocast."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors, nullcontext()
    return cast(tensors, torch.get_autocast_dtype(device), len(tensors)), torch.autocast(device, enabled=False)


def in_wide_dtype(
    definition: Callable[[Call], tuple[Tensor, ...]], call: Call, narrow: Sequence[int]
) -> tuple[Tensor, ...]:
    """``definition(call)`` with the precision of an op: 16-bit tensors become float32 before any sum.

    narrow: the results that are cast back to the dtype of u. As with ops, autocast casts u and weight only.
    """
    (u, weight), no_autocast = as_under_autocast(call.u, call.weight)
    dtype = u.dtype
    with no_autocast:
        wide = replace(call, u=u, weight=weight).with_tensors(lambda value: value.to(wide_dtype(dtype)))
        results = definition(wide)
        return tuple(value.to(dtype) if n in narrow else value for n, value in enumerate(results))
