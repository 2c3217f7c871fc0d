"""The layers whose kernels are looked at one by one: the canonical one in two dtypes and several batch sizes."""

import dataclasses

from capsfast.bench.cases import CANONICAL, Case

BATCHES = (128, 256, 512, 1024)
DTYPES = ("float32", "bfloat16")


def layers(batches: tuple[int, ...] = BATCHES, small: bool = False) -> list[Case]:
    """Forward and backward of each. small: in sizes for a rehearsal."""
    case = dataclasses.replace(CANONICAL, direction="forward+backward", **({"I": 16} if small else {}))
    sizes = [max(1, batch // 64) for batch in batches] if small else batches
    return [dataclasses.replace(case, dtype=dtype, B=B) for dtype in DTYPES for B in sizes]
