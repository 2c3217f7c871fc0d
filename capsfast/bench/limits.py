"""What the machine can do: the rates that a case's time is held against."""

from collections.abc import Callable

import torch

from .. import native
from .timing import Timing, interleave


def sizes(device: torch.device) -> tuple[int, int]:
    """Bytes of a copied buffer, several times the last cache, and rows of a multiplied square matrix."""
    return (2 * 2**30, 8192) if device.type == "cuda" else (256 * 2**20, 2048)


def _random_bytes(count: int, device: torch.device) -> torch.Tensor:
    # Zeros are cheaper to move and to multiply on some devices.
    return torch.empty(count // 4, dtype=torch.int32, device=device).random_()


def _product(size: int, dtype: torch.dtype, device: torch.device, tf32: bool = False) -> Callable[[int], object]:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def multiply(n: int) -> object:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            return torch.mm(a, b, out=out)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return multiply


def multiply_adds(samples: int = 9) -> float | None:
    """FLOP per second of float32 multiply-adds on registers, all threads: the median; None without the extension."""
    if native.extension is None:
        return None
    return sorted(native.extension.peak_flops() for _ in range(samples))[samples // 2]  # type: ignore[no-any-return]


def limits(device: torch.device, seconds: float = 1.0) -> dict[str, float]:
    """Measured bytes per second of a copy, read and written, and FLOP per second of matrix products.

    "matmul_flops_per_second" is that of float32 products; on CUDA there are "tf32_..." and "bf16_..." too, on the CPU
    "multiply_add_...", that of the instruction set without any memory.
    """
    copied, size = sizes(device)
    source = _random_bytes(copied, device)
    target = torch.empty_like(source)
    steps: dict[str, Callable[[int], object]] = {
        "copy": lambda n: target.copy_(source),
        "matmul": _product(size, torch.float32, device),
    }
    if device.type == "cuda":
        steps["tf32"] = _product(size, torch.float32, device, tf32=True)
        steps["bf16"] = _product(size, torch.bfloat16, device)
    for step in steps.values():
        step(0)  # loads the libraries
    timings: dict[str, Timing] = interleave(steps, device, seconds=seconds, least_rounds=5)
    found = {"copy_bytes_per_second": 2 * source.nbytes / timings.pop("copy").median}
    rate = multiply_adds() if device.type == "cpu" else None
    if rate is not None:
        found["multiply_add_flops_per_second"] = rate
    return found | {f"{name}_flops_per_second": 2 * size**3 / timing.median for name, timing in timings.items()}
