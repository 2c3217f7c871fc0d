"""What is measured: a case is one call of one op, a sweep is a list of cases."""

import dataclasses
import math
from dataclasses import dataclass

import torch

from . import routings

OPS = ("dynamic_routing", "route_votes")
# A routing of capsfast.nn as a whole, with what its layer holds besides the weight.
ROUTING = "routing"
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

    K is 0 for route_votes, whose votes ``[B, I, J, D]`` have no input dimension. ``routing``, a name of
    :data:`capsfast.nn.ROUTINGS`, belongs to the op "routing"; r is 0 for one that takes no number of iterations.
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
    routing: str = ""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("op", self.op, (*OPS, ROUTING)),
            ("direction", self.direction, DIRECTIONS),
            ("dtype", self.dtype, tuple(DTYPES)),
        ):
            if value not in allowed:
                raise ValueError(f"Case: {name} must be one of {', '.join(allowed)}, got {value!r}")
        if (self.K == 0) != (self.op == "route_votes"):
            raise ValueError(f"Case: K must be 0 for route_votes and positive otherwise, got K={self.K} for {self.op}")
        if bool(self.routing) != (self.op == ROUTING):
            raise ValueError(
                f"Case: routing must be a name for the op {ROUTING} and '' for others, got {self.routing!r}"
            )

    @property
    def name(self) -> str:
        sizes = f"B={self.B} I={self.I} J={self.J} D={self.D}"
        if self.K:
            sizes += f" K={self.K}"
        if self.r:
            sizes += f" r={self.r}"
        op = f"{self.op} {self.routing}" if self.routing else self.op
        return f"{op} {self.direction} {sizes} {self.dtype}"

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
        products: dict[str, tuple[int, ...]] = {
            "u": (self.B, self.I, self.K),
            "weight": (self.I, self.J, self.D, self.K),
        }
        if not self.routing:
            return products
        own = routings.parameter_shapes(self.routing, self.I, self.J, self.K, self.D, self.r)
        activation = {"activation": (self.B, self.I)} if routings.uses_activation(self.routing) else {}
        return {**products, **activation, **own}

    @property
    def batched(self) -> tuple[str, ...]:
        """Those of the inputs that have an axis of samples."""
        return tuple(name for name in self.shapes if name in ("u", "votes", "activation"))

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """What a call returns, in order."""
        if self.routing:
            return {"poses": (self.B, self.J, self.D), "activations": (self.B, self.J)}
        return {"v": (self.B, self.J, self.D)}

    @property
    def votes_bytes(self) -> int:
        return self.B * self.I * self.J * self.D * self.torch_dtype.itemsize

    @property
    def output_bytes(self) -> int:
        return sum(math.prod(shape) for shape in self.outputs.values()) * self.torch_dtype.itemsize

    @property
    def input_bytes(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values()) * self.torch_dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        return self.input_bytes if self.backward else 0

    @property
    def forward_flops(self) -> int:
        """The least a forward of dynamic routing needs: votes once, r weighted sums, r - 1 agreements."""
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


# What the routings are compared on with each other.
ROUTED: list[dict[str, int | str]] = [{"B": n} for n in (1, 16, 64, 128)]

# Sweeps that are not an axis; "quick" has its own directions.
_OTHERS = {"roofline": ROOFLINE, "long": LONG, "routings": ROUTED, "smoke": SMOKE}
SWEEPS = (*AXES, *_OTHERS, "quick", "all")


def sweep(
    name: str, op: str = "dynamic_routing", directions: tuple[str, ...] = DIRECTIONS, routing: str = ""
) -> list[Case]:
    """The cases of a named sweep, each once. "all" is every axis and "roofline". ``routing``: for the op "routing".

    Raises:
        ValueError: no sweep, op or routing of that name.
    """
    if name not in SWEEPS:
        raise ValueError(f"sweep must be one of {', '.join(SWEEPS)}, got {name!r}")
    if op == ROUTING:
        routings.check(routing)
    elif op not in OPS:
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
    elif op == ROUTING:
        counted = routings.takes_iterations(routing)
        cases = [dataclasses.replace(case, op=op, routing=routing, r=case.r if counted else 0) for case in cases]
    return list(dict.fromkeys(cases))
