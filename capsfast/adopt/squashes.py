"""Finds the squash of a layer from weighted sums and the layer's results, and options to try; or says why none fits."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calls.checks import SMALLEST_EPS
from ..reference.squash import RADIAL
from .identification import DEFAULTS

# For votes near 0 the factors differ from the factors under equal coupling by about the length of the votes.
CLOSE = 0.02
LARGEST_EPS = 0.1
MOST_ITERATIONS = 10
# Values of eps to try if the result does not show it.
USUAL_EPS = (SMALLEST_EPS, 1e-8, 1e-7, 1e-9, 1e-6, 1e-5, 1e-12)
# Largest share of an output that may point elsewhere than the sum of votes.
SAME_DIRECTION = 1e-2

OTHER_DIRECTION = (
    "for votes near 0, where all coupling is equal, its output does not point along the sum of the votes: the votes "
    "are another product, the logits do not start at 0 or do not stay near it (an agreement of normalised vectors), "
    "the coupling is not a softmax over capsules, or the squash is element-wise"
)
OTHER_AGREEMENT = (
    "for votes near 0 it is a routing with a squash that capsfast has, for others not: the agreement or what it is "
    f"added to differs, the squash takes other lengths, or there are more than {MOST_ITERATIONS} iterations"
)
OTHER_SQUASH = (
    "its output points along the sum of the votes, but has the length of no squash that capsfast has: {:.3g} where "
    "equal coupling 1/J makes the sum {:.3g} long. Lengths over the output capsules or a softmax over the batch do so"
)


class Fit(NamedTuple):
    """A squash with its eps. softmax, leaky: they determine the equal coupling in the first iteration."""

    softmax: str
    leaky: bool
    squash: str
    eps: float


def fits(sums: list[Tensor], results: list[Tensor], I: int, J: int) -> list[Fit]:
    """The squashes that turn sums of all votes, of different lengths, into results ``[B, J, D]`` by equal coupling."""
    fitting = []
    for softmax, leaky in (("out", False), ("in", False), ("out", True), ("in", True)):
        coupling = 1 / ((J if softmax == "out" else I) + leaky)
        squared = [(coupling * weighted).square().sum(-1) for weighted in sums]
        factors = [(v * s).sum(-1) / (coupling * s.square().sum(-1)) for v, s in zip(results, sums, strict=True)]
        for kind in RADIAL:
            eps = DEFAULTS["eps"] if kind == "identity" else _eps(kind, squared[0], factors[0])
            off = max(
                float((RADIAL[kind](n, eps) / factor - 1).abs().max())
                for n, factor in zip(squared, factors, strict=True)
            )
            # "eps_outside" without eps is "paper".
            if off < CLOSE and (kind, eps) != ("eps_outside", SMALLEST_EPS):
                fitting.append((off, Fit(softmax, leaky, kind, eps)))
    # Equally good fits keep their order: the paper first.
    return [fit for _, fit in sorted(fitting, key=lambda fit: round(fit[0], 6))]


def options(fitting: list[Fit]) -> Iterator[dict[str, Any]]:
    """Options to try, common ones first."""
    kinds: list[dict[str, Any]] = []
    for fit in fitting:
        kinds.append(fit._asdict())
        if fit.squash == "identity":
            kinds += [
                {**fit._asdict(), "squash": kind, "eps": eps, "squash_last": False}
                for kind, eps in product((kind for kind in RADIAL if kind != "identity"), USUAL_EPS)
            ]
    for num_iterations, averaged, kind in product((3, 2, 4, 1, *range(5, MOST_ITERATIONS + 1)), (False, True), kinds):
        yield {**kind, "num_iterations": num_iterations, "averaged": averaged}


def _eps(kind: str, n: Tensor, factor: Tensor) -> float:
    """Finds eps by bisection: the factor of every squash falls as eps grows."""
    low, high = torch.full_like(n, math.log(SMALLEST_EPS)), torch.full_like(n, math.log(LARGEST_EPS))
    for _ in range(60):
        middle = (low + high) / 2
        too_small = RADIAL[kind](n, middle.exp()) > factor  # type: ignore[arg-type]
        low, high = torch.where(too_small, middle, low), torch.where(too_small, high, middle)
    return _round(float(high.exp().median()))


def _round(eps: float) -> float:
    """Rounds to a number that code is likely to hold: one digit and a power of ten, or the resolution of a dtype."""
    if eps < 1e3 * SMALLEST_EPS:
        return SMALLEST_EPS
    written = [float(f"{eps:.0e}"), torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps]
    return next((number for number in written if abs(eps / number - 1) < 1e-3), eps)


def off_direction(v: Tensor, total: Tensor) -> float:
    """The share of the outputs that is not parallel to the sums of votes.

    Infinite if an output points the opposite way, all outputs are 0, or an output is not finite.
    """
    if not bool(v.isfinite().all()) or not bool(v.any()):
        return float("inf")
    along = (v * total).sum(-1, keepdim=True) / total.square().sum(-1, keepdim=True)
    return float((v - along * total).norm() / v.norm()) if bool((along > 0).all()) else float("inf")


def no_options(sums: list[Tensor], results: list[Tensor], fitting: bool) -> tuple[float, str]:
    """How far a candidate came, as a rank, and the reason why no options fit, judged by its outputs for tiny votes."""
    if fitting:
        return 4, OTHER_AGREEMENT
    if any(off_direction(v, total) > SAME_DIRECTION for v, total in zip(results, sums, strict=True)):
        return 2, OTHER_DIRECTION
    return 3, OTHER_SQUASH.format(float(results[0][0, 0].norm()), float(sums[0][0, 0].norm()) / sums[0].shape[1])
