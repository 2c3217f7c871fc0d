"""What is measured: a case is one call of one op, a sweep is a list of cases."""

import dataclasses
import math
from dataclasses import dataclass

import torch

OPS = ("dynamic_routing", "route_votes")
DIRECTIONS = ("forward", "forward+backward")
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Case:
    """One call: sizes, iterations r, dtype by name, direction and op.

    K is 0 for route_votes, whose votes ``[B, I, J, D]`` have no input dimension.
    """

    B: int = 128
    I: int = 1152
    J: int = 10
    D: int = 16
    K: int = 8
    r: int = 3
    dtype: str = "float32"
    direction: str = "forward"
    op: str = "dynamic_routing"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("op", self.op, OPS),
            ("direction", self.direction, DIRECTIONS),
            ("dtype", self.dtype, tuple(DTYPES)),
        ):
            if value not in allowed:
                raise ValueError(f"Case: {name} must be one of {', '.join(allowed)}, got {value!r}")
        if (self.K == 0) != (self.op == "route_votes"):
            raise ValueError(f"Case: K must be 0 for route_votes and positive otherwise, got K={self.K} for {self.op}")

    @property
    def name(self) -> str:
        sizes = f"B={self.B} I={self.I} J={self.J} D={self.D}"
        if self.K:
            sizes += f" K={self.K}"
        return f"{self.op} {self.direction} {sizes} r={self.r} {self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def backward(self) -> bool:
        return self.direction == "forward+backward"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The inputs by name, in the order in which the op takes them."""
        if self.op == "route_votes":
            return {"votes": (self.B, self.I, self.J, self.D)}
        return {"u": (self.B, self.I, self.K), "weight": (self.I, self.J, self.D, self.K)}

    @property
    def votes_bytes(self) -> int:
        return self.B * self.I * self.J * self.D * self.torch_dtype.itemsize

    @property
    def output_bytes(self) -> int:
        return self.B * self.J * self.D * self.torch_dtype.itemsize

    @property
    def input_bytes(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values()) * self.torch_dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        return self.input_bytes if self.backward else 0

    @property
    def forward_flops(self) -> int:
        """One evaluation of the votes, r weighted sums, r - 1 agreements: the least a forward needs."""
        pairs = self.B * self.I * self.J * self.D
        return 2 * pairs * self.K + 2 * pairs * (2 * self.r - 1)


CANONICAL = Case()

# Each axis takes these values while everything else stays canonical.
AXES: dict[str, list[dict[str, int | str]]] = {
    "I": [{"I": n} for n in (64, 256, 576, 1152, 2304, 4608, 9216, 18432)],
    "J": [{"J": n} for n in (2, 5, 10, 32, 100, 320, 1000)],
    "batch": [{"B": n} for n in (1, 16, 128, 512)],
    "dims": [{"D": d, "K": k} for d, k in ((4, 4), (8, 8), (16, 8), (16, 16), (21, 11), (32, 32))],
    "iterations": [{"r": n} for n in (1, 2, 3, 4, 5)],
    "dtype": [{"dtype": name} for name in ("float32", "bfloat16")],
    # At B=128 the widest layers leave the einsum contenders without memory; here they can compete.
    "corners": [{"B": 1, "I": 18432}, {"B": 1, "J": 1000}, {"B": 16, "J": 1000, "I": 256}],
}

# What bounds the CPU kernels: the canonical layer by iterations and batch, a wide layer, a long one.
ROOFLINE: list[dict[str, int | str]] = [
    {"r": 1},
    {"r": 2},
    {"r": 3},
    {"B": 16},
    {"B": 1},
    {"B": 64, "I": 256, "J": 320},
    {"B": 32, "I": 18432},
]

# Up to a weight of 5 GB. Too much for the einsum contenders on most machines.
LONG: list[dict[str, int | str]] = [{"B": 4, "I": n} for n in (62_500, 250_000, 1_000_000)]

# Sizes at which every contender takes milliseconds: for tests and for checking an installation.
SMOKE: list[dict[str, int | str]] = [{"B": 4, "I": 64}, {"B": 3, "I": 33, "J": 5, "D": 7, "K": 3, "r": 2}]

# About a minute on two cores, most of it spent compiling and on the slow contenders.
QUICK: list[dict[str, int | str]] = [{"B": 1}, {"B": 16}, {"B": 128}]


# Sweeps that are not an axis; "quick" has its own directions.
_OTHERS = {"roofline": ROOFLINE, "long": LONG, "smoke": SMOKE}
SWEEPS = (*AXES, *_OTHERS, "quick", "all")


def sweep(name: str, op: str = "dynamic_routing", directions: tuple[str, ...] = DIRECTIONS) -> list[Case]:
    """The cases of a named sweep, each once. "all" is every axis and "roofline".

    Raises:
        ValueError: no sweep or op of that name.
    """
    if name not in SWEEPS:
        raise ValueError(f"sweep must be one of {', '.join(SWEEPS)}, got {name!r}")
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if name == "quick":
        # Backward at one batch size: its compilation is what takes long.
        cases = [dataclasses.replace(CANONICAL, **changes) for changes in QUICK]  # type: ignore[arg-type]
        cases.append(dataclasses.replace(CANONICAL, direction="forward+backward"))
    else:
        if name == "all":
            variations = [changes for each in (*AXES.values(), ROOFLINE) for changes in each]
        else:
            variations = {**AXES, **_OTHERS}[name]
        cases = [
            dataclasses.replace(CANONICAL, direction=direction, **changes)  # type: ignore[arg-type]
            for changes in variations
            for direction in directions
        ]
    if op == "route_votes":
        cases = [dataclasses.replace(case, op=op, K=0) for case in cases]
    return list(dict.fromkeys(cases))
