"""How exact torch wants float32 products to be."""

import torch

from .toolchain import constant_while_tracing


@constant_while_tracing
def tf32_allowed() -> bool:
    """Whether float32 products on CUDA devices may be rounded to TF32, by any of torch's settings.

    Not from ``allow_tf32``, which is an error where ``fp32_precision`` was set. torch.compile keeps the answer, and
    compiles anew when the setting changes.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
