"""What is compared: every available backend, the einsum reference eager and compiled, broadcasting."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..arguments import RoutingParameters, unchecked
from ..backend import backends
from ..functional import dynamic_routing, route_votes
from ..options import Options
from ..reference.dynamic_routing import dynamic_routing as definition
from ..reference.squash import squash
from . import routings
from .cases import OPS, ROUTING, Case

Forward = Callable[..., Tensor | tuple[Tensor, ...]]

GIB = 2**30
LIMIT = 8 * GIB
# Nobody else needs a GPU's memory meanwhile.
CUDA_LIMIT = 64 * GIB

EAGER = "eager einsum"
COMPILED = "torch.compile einsum"
TUNED = "torch.compile max-autotune einsum"
BROADCAST = "broadcast matmul"
OURS = "capsfast "


@dataclass(frozen=True)
class Contender:
    """One way to compute a case.

    make: from a case to the function that takes the case's inputs and returns its outputs, ``v [B, J, D]`` or several.
    growth: estimate of the bytes a call needs beyond inputs and gradients.
    devices: device types it runs on; "any" for all.
    """

    name: str
    make: Callable[[Case], Forward]
    growth: Callable[[Case], int]
    devices: tuple[str, ...] = ("any",)

    @property
    def ours(self) -> bool:
        return self.name.startswith(OURS)

    def why_not(self, case: Case, device: torch.device, free: int | None = None) -> str:
        """Why it is not run on this case, "" if it is. free: bytes free on the device, if known."""
        if "any" not in self.devices and device.type not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        growth = self.growth(case)
        # The measured copy of the inputs and one rotated set beside it, and the gradients.
        needed = growth + 2 * case.input_bytes + case.gradient_bytes
        most = CUDA_LIMIT if device.type == "cuda" else LIMIT
        # What every contender has is no reason to leave one out, as long as it is there.
        if growth > most:
            return _too_much(growth, most)
        if free is not None and needed > free * 3 // 4:
            return _too_much(needed, free * 3 // 4)
        return ""


def _too_much(needed: int, limit: int) -> str:
    return f"would need about {needed / GIB:.1f} GiB, the limit is {limit / GIB:.1f} GiB"


def _backend(name: str, case: Case) -> Forward:
    if case.routing:
        return _routed(case, name)
    function = dynamic_routing if case.op == "dynamic_routing" else route_votes
    return partial(function, num_iterations=case.r, backend=name)  # type: ignore[return-value]


def _routed(case: Case, backend: str | None) -> Forward:
    return routings.Routed(case.routing, case.I, case.J, case.K, case.D, case.r, backend)


def _backend_growth(case: Case) -> int:
    if case.routing:
        # What torch keeps between the passes, and what a pass gives and takes.
        return 32 * max(case.r, 3) * case.B * case.J * case.D * max(4, case.torch_dtype.itemsize)
    # s of every iteration, its running sum and its gradients, in at least float32.
    return 4 * case.r * case.B * case.J * case.D * max(4, case.torch_dtype.itemsize)


def einsum(case: Case) -> Forward:
    """The reference, without the argument checks of the public function: no baseline is made slower."""
    if case.routing:
        return _routed(case, None)
    options = Options(case.r, "out", "full", False, "paper", 1e-8)

    if case.op == "route_votes":

        def forward_votes(votes: Tensor) -> Tensor:
            return definition(unchecked(votes, None, RoutingParameters(), options))[0]

        return forward_votes

    def forward(u: Tensor, weight: Tensor) -> Tensor:
        return definition(unchecked(u, weight, RoutingParameters(), options))[0]

    return forward


def _einsum_growth(case: Case) -> int:
    if case.routing:
        # Autograd keeps the centered votes and their squares of every pass.
        return case.votes_bytes * (3 * max(case.r, 3) + 4 if case.backward else 6)
    # Votes and their gradient, each with a copy in the order the batched product wants.
    return case.votes_bytes * (6 if case.backward else 3)


def _compiled(case: Case) -> Forward:
    # dynamic=False: one kernel per shape, the best the compiler can do for it.
    return torch.compile(einsum(case), fullgraph=True, dynamic=False)


def _tuned(case: Case) -> Forward:
    # The kernels of mode="max-autotune". What that mode adds, a CUDA graph, the timing adds for everyone.
    return torch.compile(einsum(case), fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")


def _compiled_growth(case: Case) -> int:
    if case.routing:
        return case.votes_bytes * (2 * max(case.r, 3) + 4 if case.backward else 4)
    # Measured: 1.3 and 3.3 times the votes at B=32 I=576.
    return case.votes_bytes * (4 if case.backward else 2)


def broadcast_votes(u: Tensor, weight: Tensor) -> Tensor:
    """Votes by a matmul over tiled inputs and a weight expanded to the batch, as is popular."""
    B = u.shape[0]
    J = weight.shape[1]
    tiled = u[:, :, None, :, None].tile(1, 1, J, 1, 1)  # [B, I, J, K, 1]
    expanded = weight[None].expand(B, -1, -1, -1, -1)  # [B, I, J, D, K]
    return torch.matmul(expanded, tiled).squeeze(-1)


def broadcast_routing(votes: Tensor, r: int) -> Tensor:
    """The routing loop with products and sums instead of contractions."""
    b = votes.new_zeros(*votes.shape[:3], 1)
    for t in range(r):
        c = torch.softmax(b, 2)
        v = squash((c * votes).sum(1, keepdim=True))  # [B, 1, J, D]
        if t + 1 < r:
            b = b + (votes * v).sum(-1, keepdim=True)
    return v.squeeze(1)


def _broadcast(case: Case) -> Forward:
    if case.op == "route_votes":
        return partial(broadcast_routing, r=case.r)

    def forward(u: Tensor, weight: Tensor) -> Tensor:
        return broadcast_routing(broadcast_votes(u, weight), case.r)

    return forward


def _broadcast_growth(case: Case) -> int:
    # The expanded weight is K times the votes; the backward makes its gradient, expanded as well.
    # Autograd keeps c * votes and votes * v of every iteration.
    kept = (case.r + 4) if case.backward else 3
    return case.votes_bytes * (kept + case.K * (2 if case.backward else 1))


def missing(device: torch.device) -> dict[str, str]:
    """The fused backends that would serve ``device`` and are not available, each with the reason."""
    return {
        name: status.reason
        for name, status in backends().items()
        if not status.available and name != "reference" and device.type in status.devices
    }


def contenders(op: str = OPS[0]) -> list[Contender]:
    """All that can run here for an op: the backends of this installation first, fastest first."""
    found = [
        Contender(OURS + name, partial(_backend, name), _backend_growth, status.devices)
        for name, status in backends().items()
        # "reference" is the eager einsum below.
        if status.available and name != "reference"
    ]
    found += [Contender(COMPILED, _compiled, _compiled_growth), Contender(EAGER, einsum, _einsum_growth)]
    return found if op == ROUTING else [*found, Contender(BROADCAST, _broadcast, _broadcast_growth)]


def tuned() -> Contender:
    """The compiler with its search for the fastest kernels, which takes minutes: for chosen cases."""
    return Contender(TUNED, _tuned, _compiled_growth)


def contender(name: str) -> Contender:
    """The contender of that name.

    Raises:
        ValueError: none of that name here.
    """
    found = {each.name: each for each in (*contenders(), tuned())}
    if name not in found:
        raise ValueError(f"contender must be one of {', '.join(found)}, got {name!r}")
    return found[name]
