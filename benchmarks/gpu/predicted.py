"""What the rows kernels of the backend "cuda" should take, by counts of their code; needs no torch.

A kernel can be no faster than the busiest of three things, each of which works beside the others: the issue of
instructions, the data path of shared memory and L1 cache, and the tensor cores. So the least time is the longest of
three, and what a launch takes beyond it is latency, waiting at barriers, tails and the steps between the passes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Samples of a warp.
SAMPLES = 16
# Instructions that a multiprocessor issues in a clock: one for each of its schedulers.
ISSUED = 4
# Clocks of a multiprocessor's tensor cores for an mma.m16n8k8 of TF32 numbers. From a warp's registers they reach five
# eighths of the rate at which one takes a clock.
PRODUCT_CLOCKS = 1.6


@dataclass(frozen=True)
class Cost:
    """Of 16 samples and one input capsule of the canonical layer.

    instructions: of a warp. memory: clocks of the data path of shared memory and L1 cache. products: mma.m16n8k8.
    """

    instructions: float
    memory: float
    products: float


# Instructions as tests/all/test_cuda_sass.py counts them (docs/cuda-kernels.md has the table); those of the first pass,
# which has no logits to compute, with the sum of a chunk. The gradient pass is for three iterations. bfloat16 takes one
# product for three, and loads one part of the weights.
COSTS = {
    "float32": {
        "unweighted": Cost(165, 84, 60),
        "forward": Cost(344, 164, 60),
        "backward": Cost(475, 244, 60),
        "gradient": Cost(1906, 1082, 200),
    },
    "bfloat16": {
        "unweighted": Cost(102, 44, 20),
        "forward": Cost(280, 124, 20),
        "backward": Cost(413, 204, 20),
        "gradient": Cost(1425, 1026, 80),
    },
}


class Prediction(NamedTuple):
    """instructions: of all warps. memory: clocks of all multiprocessors together. seconds: the least. limit: why."""

    instructions: float
    memory: float
    seconds: float
    limit: str


@dataclass(frozen=True)
class Device:
    multiprocessors: int
    hertz: float

    def predict(self, passes: Sequence[str], B: int, I: int, dtype: str) -> Prediction:
        """Of a launch that runs these passes one after the other, over B samples and I input capsules."""
        pairs = -(-B // SAMPLES) * I
        instructions = memory = seconds = 0.0
        limits = []
        for each in passes:
            cost = COSTS[dtype][each]
            clocks = {
                "issue": cost.instructions / ISSUED,
                "L1/shared": cost.memory,
                "tensor": cost.products * PRODUCT_CLOCKS,
            }
            limit = max(clocks, key=clocks.__getitem__)
            limits.append(limit)
            instructions += pairs * cost.instructions
            memory += pairs * cost.memory
            seconds += pairs * clocks[limit] / self.multiprocessors / self.hertz
        return Prediction(instructions, memory, seconds, ", ".join(dict.fromkeys(limits)))


# Names as a demangler, ncu or nobody has written them.
_BACKWARD = re.compile(r"accumulate_kernel(?:<.*,\s*(?:\(bool\))?(true|false|0|1)>\s*\(|.*Lb([01])EEEv)")
_GRADIENT = re.compile(r"(?<![a-z_])gradient_kernel")
_ANY = re.compile(r"([A-Za-z]\w*?_kernel)\w*")


def kind_of(name: str) -> str:
    """Of a kernel by its name: forward, backward or gradient of the rows family, else a short name."""
    if "rows" in name or "Rows<" in name:
        found = _BACKWARD.search(name)
        if found:
            return "backward" if (found[1] or found[2]) in ("true", "1") else "forward"
        if _GRADIENT.search(name):
            return "gradient"
    short = _ANY.search(re.sub(r"^_Z\w*?\d+(?=[a-z_]+_kernel)", "", name))
    return short[1] if short else name.partition("(")[0].strip()[:40]


def passes_of(kinds: Sequence[str], iterations: int) -> list[list[str]]:
    """The passes of each launch of a forward and backward, in order; none of what is no pass of the rows family.

    Either one launch runs all passes of a direction or each has one.
    """
    plan = {
        "forward": ["unweighted"] + ["forward"] * (iterations - 1),
        "backward": ["backward"] * (iterations - 1),
        "gradient": ["gradient"],
    }
    seen = dict.fromkeys(plan, 0)
    found = []
    for kind in kinds:
        wanted = plan.get(kind, [])
        count, n = kinds.count(kind), seen.get(kind, 0)
        if kind in seen:
            seen[kind] += 1
        found.append(wanted if count == 1 else wanted[n : n + 1])
    return found
