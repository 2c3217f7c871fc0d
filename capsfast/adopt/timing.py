"""Times a layer's own forward against capsfast's call."""

from dataclasses import dataclass

import torch

from ..bench.timing import interleave
from .beside import Beside, Given

LEAST_ROUNDS = 3
# The first timing takes so many samples.
SAMPLES = 8
# If the ratio with a few samples is farther from 1 than this, no larger batch is timed.
CLEAR = 1.5


@dataclass(frozen=True)
class Speed:
    """Median seconds of a call with ``samples`` samples: of the layer's own forward, and of capsfast's call."""

    own: float
    fused: float
    samples: int

    @property
    def ratio(self) -> float:
        return self.own / self.fused

    def __str__(self) -> str:
        return f"{self.ratio:.1f}x ({1e3 * self.own:.3g} to {1e3 * self.fused:.3g} ms, B={self.samples})"


def speeds(beside: Beside, given: Given, autocast: torch.dtype | None, seconds: float) -> tuple[Speed, Speed]:
    """Times forward, and forward plus backward, in turns; on the whole batch if a few samples give no clear result."""
    found = _speeds(beside, beside.few(given, SAMPLES), autocast, seconds)
    if 1 / CLEAR < found[1].ratio < CLEAR and found[1].samples < given[0].shape[0]:
        found = _speeds(beside, given, autocast, seconds)
    return found


def _speeds(beside: Beside, given: Given, autocast: torch.dtype | None, seconds: float) -> tuple[Speed, Speed]:
    copies = (given[0].detach().clone().requires_grad_(), *given[1:])
    inputs = [each for each in (*copies, *beside.layer.parameters()) if each.requires_grad]
    ways = {"own": beside.own, "fused": beside.fused}

    def forward(way: str) -> None:
        with torch.no_grad():
            ways[way](copies, autocast)

    def both(way: str) -> None:
        with torch.enable_grad():
            torch.autograd.grad(ways[way](copies, autocast)[0].sum(), inputs, allow_unused=True)

    found = []
    for run in (forward, both):
        steps = {way: lambda way=way, run=run: run(way) for way in ways}
        timings = interleave(steps, given[0].device, seconds, LEAST_ROUNDS)
        found.append(Speed(timings["own"].median, timings["fused"].median, len(given[0])))
    return found[0], found[1]
