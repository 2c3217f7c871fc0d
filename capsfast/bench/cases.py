"""The cases to measure: a case is one call of one op, a sweep is a list of cases."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from ..nn import ROUTINGS
from . import layers, routings

OPS = ("dynamic_routing", "route_votes")
# A complete routing of capsfast.nn, including its own parameters.
ROUTING = "routing"
# A convolutional layer of capsfast.nn.
LAYER = "layer"
# Names for several ops, routings or layers.
GROUPS = {"both": OPS, "routings": tuple(ROUTINGS), "layers": tuple(layers.LAYERS)}
MEASURED = (*OPS, *ROUTINGS, *layers.LAYERS, *GROUPS)
DIRECTIONS = ("forward", "forward+backward")


@dataclass(frozen=True)
class Case:
    """One call: sizes, iterations r, dtype by name, direction and op.

    K is 0 for route_votes, whose votes ``[B, I, J, D]`` have no input dimension. ``routing``, a name of
    :data:`capsfast.nn.ROUTINGS`, belongs to the op "routing"; r is 0 for a routing that takes no number of iterations.
    ``layer``, a name of :data:`capsfast.bench.layers.LAYERS`, belongs to the op "layer": B images of ``size`` places
    along every axis, I and J are numbers of capsule types.
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
    layer: str = ""
    size: int = 0

    @property
    def name(self) -> str:
        sizes = [f"{size}={getattr(self, size)}" for size in "BIJDKr" if getattr(self, size)]
        return " ".join(filter(None, [self.op, self.module_name, self.image, self.direction, *sizes, self.dtype]))

    @property
    def module_name(self) -> str:
        """The name of the routing or the layer, "" for an op."""
        return self.routing or self.layer

    @property
    def image(self) -> str:
        """The size of the image, such as ``64^2``; "" without an image."""
        return f"{self.size}^{len(self.grid)}" if self.layer else ""

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def backward(self) -> bool:
        return self.direction == "forward+backward"

    def module(self, **factory_kwargs: Any) -> Any:
        """The routing of the op "routing", or the layer of the op "layer"."""
        maker = layers.make if self.layer else routings.make
        return maker(self.module_name, self.I, self.J, self.K, self.D, self.r, **factory_kwargs)

    @functools.cached_property
    def on_meta(self) -> Any:
        """:meth:`module` with parameters on the meta device."""
        return self.module(device="meta")

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of windows along each axis of the image."""
        return tuple(self.size - extent + 1 for extent in self.on_meta.kernel_size) if self.layer else ()

    @property
    def samples(self) -> int:
        """The number of samples of the routing: every window of a layer is one."""
        return self.B * math.prod(self.grid)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the inputs by name, in the order of the op."""
        if self.op == "route_votes":
            return {"votes": (self.B, self.I, self.J, self.D)}
        u: dict[str, tuple[int, ...]] = {"u": (self.B, self.I, self.K, *(self.size for _ in self.grid))}
        weight = {} if self.layer else {"weight": (self.I, self.J, self.D, self.K)}
        if not self.module_name:
            return {**u, **weight}
        activation = {"activation": (self.B, self.I)} if self.routing and self.on_meta.uses_activation else {}
        of_module = {f"{self.op}.{name}": tuple(value.shape) for name, value in self.on_meta.named_parameters()}
        return {**u, **weight, **activation, **of_module}

    @property
    def batched(self) -> tuple[str, ...]:
        """The names of the inputs with a batch axis."""
        return tuple(name for name in self.shapes if name in ("u", "votes", "activation"))

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the outputs by name, in order."""
        if self.routing:
            return {"poses": (self.B, self.J, self.D), "activations": (self.B, self.J)}
        return {"v": (self.B, self.J, self.D, *self.grid)}

    @property
    def votes_bytes(self) -> int:
        in_caps = layers.in_caps(self.on_meta) if self.layer else self.I
        return self.samples * in_caps * self.J * self.D * self.torch_dtype.itemsize

    @property
    def input_bytes(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values()) * self.torch_dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        return self.input_bytes if self.backward else 0

    @property
    def least_bytes(self) -> int:
        """The bytes that a call must move: a direction reads its inputs once and writes its results once."""
        outputs = sum(math.prod(shape) for shape in self.outputs.values()) * self.torch_dtype.itemsize
        return 3 * self.input_bytes + 2 * outputs if self.backward else self.input_bytes + outputs

    @property
    def flops(self) -> int:
        """FLOPs of an op that makes the votes again in every pass, without softmax and squash; 0 for a module."""
        if self.module_name:
            return 0
        of_a_vote = max(self.K, 1) + (self.r - 1) * (self.K + 2)
        if self.backward:
            of_a_vote += 3 * self.K + 1 + (self.r - 1) * (self.K + 7)
        return 2 * of_a_vote * self.B * self.I * self.J * self.D


CANONICAL = Case()

Changes = list[dict[str, Any]]

# Each axis takes these values while all other sizes stay canonical.
AXES: dict[str, Changes] = {
    "I": [{"I": n} for n in (64, 256, 576, 1152, 2304, 4608, 9216, 18432)],
    "J": [{"J": n} for n in (2, 5, 10, 32, 100, 320, 1000)],
    "batch": [{"B": n} for n in (1, 16, 128, 512)],
    "dims": [{"D": d, "K": k} for d, k in ((4, 4), (8, 8), (16, 8), (16, 16), (21, 11), (32, 32))],
    "iterations": [{"r": n} for n in (1, 2, 3, 4, 5)],
    "dtype": [{"dtype": name} for name in ("float32", "bfloat16")],
    # At B=128 the einsum contenders run out of memory for the widest layers. Here they can compete.
    "corners": [{"B": 1, "I": 18432}, {"B": 1, "J": 1000}, {"B": 16, "J": 1000, "I": 256}],
}
# Cases that show what limits the CPU kernels: the canonical layer by iterations and batch, a wide and a long layer.
ROOFLINE: Changes = [
    *({"r": n} for n in (1, 2, 3)),
    *({"B": n} for n in (16, 1)),
    {"B": 64, "I": 256, "J": 320},
    {"B": 32, "I": 18432},
]
OTHERS: dict[str, Changes] = {
    # The default of `pytest benchmarks`. At B=16 the votes of 320 output capsules take 377 MB; einsum needs more.
    "capsules": [
        {"B": 16, **each} for each in ({}, *({"I": n} for n in (64, 256, 4608)), *({"J": n} for n in (2, 32, 320)))
    ],
    "roofline": ROOFLINE,
    # Up to a weight of 5 GB: too much for einsum on most machines.
    "long": [{"B": 4, "I": n} for n in (62_500, 250_000, 1_000_000)],
    "routings": [{"B": n} for n in (1, 16, 64, 128)],
    # Every contender takes milliseconds: for tests and to check an installation.
    "smoke": [{"B": 4, "I": 64}, {"B": 3, "I": 33, "J": 5, "D": 7, "K": 3, "r": 2}],
    # About a minute on two cores, most of it for torch.compile: only one batch size has a backward.
    "quick": [{"B": n} for n in (1, 16, 128)],
    "all": [changes for axis in (*AXES.values(), ROOFLINE) for changes in axis],
}
SWEEPS = (*AXES, *OTHERS)
# The sweeps of a layer, by the end of its name. In three axes poses are short, so that einsum fits into memory: at 32^3
# the votes of 27 places for each window take 1.4 GiB.
IMAGES: dict[str, dict[str, Changes]] = {
    "images": {
        "2d": [{"B": B, "size": size, "D": 16, "K": 16} for B, size in ((16, 14), (4, 64))],
        "3d": [{"B": 1, "size": size, "D": 8, "K": 8} for size in (16, 32)],
    },
    "smoke": {axes: [{"B": 2, "size": 6, "D": 4, "K": 4}] for axes in ("2d", "3d")},
}


def sweep(name: str, op: str = "dynamic_routing") -> list[Case]:
    """The cases of a named sweep, each once. op: one of MEASURED. Layers have the sweeps of IMAGES.

    Raises:
        ValueError: no op, routing or layer with this name, or no such sweep of it.
    """
    members = GROUPS.get(op, (op,))
    sweeps = tuple(IMAGES) if members[0] in layers.LAYERS else SWEEPS
    for what, value, allowed in (("op", op, MEASURED), ("sweep", name, sweeps)):
        if value not in allowed:
            raise ValueError(f"{what} must be one of {', '.join(allowed)}, got {value!r}")
    cases = []
    for member in members:
        variations = IMAGES[name][member[-2:]] if member in layers.LAYERS else {**AXES, **OTHERS}[name]
        pairs = [(changes, direction) for changes in variations for direction in DIRECTIONS]
        if name == "quick":
            pairs = [*((changes, "forward") for changes in variations), ({}, "forward+backward")]
        cases += [
            dataclasses.replace(CANONICAL, direction=direction, **{**changes, **_decided(member)})
            for changes, direction in pairs
        ]
    return list(dict.fromkeys(cases))


def _decided(op: str) -> dict[str, Any]:
    """The fields of a case that an op, a routing or a layer decides."""
    if op in layers.LAYERS:
        return {"op": LAYER, "layer": op, "I": 8, "J": 8}
    if op in OPS:
        return {"op": op} | ({"K": 0} if op == "route_votes" else {})
    return {"op": ROUTING, "routing": op} | ({} if routings.takes_iterations(op) else {"r": 0})
