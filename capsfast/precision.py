"""The dtype of sums, and how exact torch wants float32 products to be."""

import torch

from ._torch import constant_while_tracing


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
