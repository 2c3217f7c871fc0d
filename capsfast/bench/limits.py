"""What the machine can do: the rates that a case's time is held against."""

import torch

from .timing import Timing, interleave

COPY_BYTES = 256 * 2**20
MATMUL_SIZE = 2048


def limits(device: torch.device) -> dict[str, float]:
    """Measured bytes per second of a copy (read and written) and float32 FLOP per second of a matmul."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device)
    product = torch.empty_like(a)
    timings: dict[str, Timing] = interleave(
        {"copy": lambda n: target.copy_(source), "matmul": lambda n: torch.mm(a, a, out=product)},
        device,
        seconds=1.0,
        least_rounds=5,
    )
    return {
        "copy_bytes_per_second": 2 * COPY_BYTES / timings["copy"].median,
        "matmul_flops_per_second": 2 * MATMUL_SIZE**3 / timings["matmul"].median,
    }
