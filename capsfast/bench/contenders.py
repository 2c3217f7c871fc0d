"""The contenders: every available backend, and the einsum reference, compiled and eager."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..backend import backends
from ..functional import dynamic_routing, route_votes
from . import layers
from .cases import Case
from .routings import Routed

Forward = Callable[..., Tensor | tuple[Tensor, ...]]

GIB = 2**30
# Largest memory of a call beyond inputs and gradients. A GPU's limit is higher, because nothing else uses the GPU.
LIMITS = {"cpu": 8 * GIB, "cuda": 64 * GIB}

EAGER = "eager einsum"
COMPILED = "torch.compile einsum"
OURS = "capsfast "
CPP = OURS + "cpp"


@dataclass(frozen=True)
class Contender:
    """One way to compute a case.

    Args:
        name: name in tables and records.
        make: takes a case and returns the function from the case's inputs to its outputs.
        growth: estimates the bytes that a call needs beyond inputs and gradients.
        devices: device types that the contender runs on; "any" for all.
    """

    name: str
    make: Callable[[Case], Forward]
    growth: Callable[[Case], int]
    devices: tuple[str, ...] = ("any",)

    @property
    def ours(self) -> bool:
        return self.name.startswith(OURS)

    def serves(self, device: torch.device) -> bool:
        return "any" in self.devices or device.type in self.devices

    def why_not(self, case: Case, device: torch.device, free: int | None = None) -> str:
        """Why the contender is skipped on this case, "" if it is not. free: free bytes of the device, if known."""
        if not self.serves(device):
            return f"runs on {' and '.join(self.devices)} only"
        growth = self.growth(case)
        # The gradients, the measured copy of the inputs and one rotated set.
        needed = growth + 2 * case.input_bytes + case.gradient_bytes
        limit = LIMITS[device.type]
        # All contenders hold the inputs, so the inputs count only if memory is short.
        if growth <= limit and free is not None:
            growth, limit = needed, free * 3 // 4
        if growth <= limit:
            return ""
        return f"would need about {growth / GIB:.1f} GiB, the limit is {limit / GIB:.1f} GiB"


def _forward(backend: str, case: Case) -> Forward:
    if case.routing:
        return Routed(case.routing, case.I, case.J, case.K, case.D, case.r, backend)
    if case.layer:
        layer = case.module(backend=backend)
        return partial(layers.unfolded, layer, case.r) if backend == "reference" else layers.Layered(layer)
    function = dynamic_routing if case.op == "dynamic_routing" else route_votes
    return partial(function, num_iterations=case.r, backend=backend)  # type: ignore[return-value]


einsum = partial(_forward, "reference")


def _backend_growth(case: Case) -> int:
    # s of every iteration, its running sum and its gradients, in at least float32. A routing with torch operations
    # between the passes stores more.
    arrays = 32 * max(case.r, 3) if case.routing else 4 * case.r
    return arrays * case.samples * case.J * case.D * max(4, case.torch_dtype.itemsize)


def _votes_growth(case: Case, copies: int) -> int:
    """Bytes of ``copies`` of the votes in a call forward, twice as many with backward.

    Measured for compiled einsum, at B=32 I=576: 1.3 copies forward, 3.3 with backward.
    """
    if case.routing and case.backward:
        # Autograd stores what every pass makes of the votes, such as the centered votes and their squares.
        return case.votes_bytes * (copies * max(case.r, 3) + 4)
    return case.votes_bytes * copies * (2 if case.routing or case.backward else 1)


def _compiled(case: Case) -> Forward:
    # dynamic=False: a kernel for each shape, the best that the compiler can do.
    return torch.compile(einsum(case), fullgraph=True, dynamic=False)


def missing(device: torch.device) -> dict[str, str]:
    """The fused backends for ``device`` that are not available, each with the reason."""
    return {
        name: status.reason
        for name, status in backends().items()
        if not status.available and name != "reference" and device.type in status.devices
    }


def contenders() -> list[Contender]:
    """All contenders that can run here: the available backends, then the einsum reference."""
    fused = [
        Contender(OURS + name, partial(_forward, name), _backend_growth, status.devices)
        for name, status in backends().items()
        # "reference" is the eager einsum below.
        if status.available and name != "reference"
    ]
    compiled = Contender(COMPILED, _compiled, partial(_votes_growth, copies=2))
    # Eager einsum also copies the votes into the order that the batched product needs.
    return [*fused, compiled, Contender(EAGER, einsum, partial(_votes_growth, copies=3))]


def contender(name: str) -> Contender:
    """The contender with this name."""
    return next(contender for contender in contenders() if contender.name == name)
