"""Peak memory and time of convolutional capsules, forward and backward, against unfolding.

Measures the rows of the table in docs/convolutional-capsules.md. Each row has its own process: memory that an earlier
call left to the C library would hide growth. Growth does not count inputs, outputs, parameters and gradients.
"unfolded" is the same call in one block.
"""

import os
import statistics
import sys
import timeit
from typing import Any

import torch

from benchmarks.common import keep, options
from capsfast.bench.memory import growth, in_a_process
from capsfast.models import SegCaps
from capsfast.nn import ConvCaps1d, ConvCaps2d, ConvCaps3d, SlimConvCaps2d, SlimConvCaps3d, _blocks

MIB = 2**20
LAYERS: dict[str, Any] = {
    kind.__name__: kind for kind in (ConvCaps1d, ConvCaps2d, ConvCaps3d, SlimConvCaps2d, SlimConvCaps3d)
}
# layer, routing, B, size of the image
ROWS: list[tuple[str, str, int, tuple[int, ...]]] = [
    ("ConvCaps1d", "dynamic", 8, (2048,)),
    ("ConvCaps2d", "dynamic", 4, (64, 64)),
    ("ConvCaps2d", "dynamic", 1, (256, 256)),
    ("ConvCaps2d", "dynamic", 1, (512, 512)),
    ("ConvCaps2d", "em", 4, (64, 64)),
    ("ConvCaps2d", "em", 1, (256, 256)),
    ("ConvCaps2d", "cosine", 1, (256, 256)),
    ("ConvCaps3d", "dynamic", 1, (16, 16, 16)),
    ("ConvCaps3d", "dynamic", 1, (32, 32, 32)),
    ("ConvCaps3d", "em", 1, (32, 32, 32)),
    ("SlimConvCaps2d", "dynamic", 4, (64, 64)),
    ("SlimConvCaps2d", "dynamic", 1, (512, 512)),
    ("SlimConvCaps3d", "dynamic", 1, (24, 24, 24)),
    ("SlimConvCaps3d", "dynamic", 1, (64, 64, 64)),
    ("SegCaps", "dynamic", 1, (512, 512)),
]


def called(
    name: str, routing: str, batch: int, size: tuple[int, ...], times: int, unfolded: bool
) -> tuple[int, float, float]:
    """Bytes of the poses (for SegCaps, of the images), bytes of growth, and the median seconds of the calls."""
    if unfolded:
        _blocks.limits = lambda poses: _blocks.Limits(sys.maxsize, sys.maxsize)
    if name == "SegCaps":
        layer: Any = SegCaps(1, size, routing=routing)
        shape = (batch, 1)
    else:
        layer = LAYERS[name](8, 8, 16, 16, 3, padding=1, routing=routing)
        shape = (batch, 8, 16)

    def call(image: torch.Tensor) -> int:
        found = layer(image)
        outputs = [found] if isinstance(found, torch.Tensor) else [row for row in found if row is not None]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        return 2 * sum(output.nbytes for output in outputs)  # with their gradients

    if name != "SegCaps":
        call(torch.randn(*shape, *(5 for _ in size), requires_grad=True))  # warms up
    layer.zero_grad()
    image = torch.randn(*shape, *size, requires_grad=True)
    outputs: list[int] = []
    grown = growth(lambda: outputs.append(call(image)))
    grown -= outputs[0] + sum(leaf.nbytes for leaf in (image, *layer.parameters()))  # leaves have gradients as large
    seconds = timeit.repeat(lambda: call(image), number=1, repeat=times) or [0.0]
    return image.nbytes, grown, statistics.median(seconds)


def measured(row: tuple[Any, ...], unfolded: bool) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    # In the process that measures growth, freed memory goes back to the system at once.
    for name, threshold in (("growth_mib", "262144"), ("resident_growth_mib", None)):
        os.environ |= {"MALLOC_MMAP_THRESHOLD_": threshold} if threshold else {}
        times = 0 if threshold else 1 if row[0] == "SegCaps" else 3
        try:
            image, grown, seconds = in_a_process(called, *row, times, unfolded)
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"}
        finally:
            os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
        numbers |= {"poses_mib": round(image / MIB, 1), name: round(grown / MIB), "seconds": round(seconds, 3)}
    return numbers


def main() -> None:
    arguments = options("window_memory", __doc__, 0.0)
    rows = []
    for row in ROWS:
        line = dict(zip(("layer", "routing", "B", "size"), row, strict=True))
        rows.append(line | {"blocks": measured(row, False), "unfolded": measured(row, True)})
        print(rows[-1], flush=True)
    keep(arguments, "window_memory", rows=rows)


if __name__ == "__main__":
    main()
