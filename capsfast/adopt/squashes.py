"""Finds the squash of a layer from weighted sums and the layer's results, and options to try with it."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import SMALLEST_EPS
from ..reference.squash import RADIAL
from .identification import DEFAULTS

# For votes near 0 the factors differ from the factors under equal coupling by about the length of the votes.
CLOSE = 0.02
LARGEST_EPS = 0.1
MOST_ITERATIONS = 10
# Values of eps to try if the result does not show it.
USUAL_EPS = (SMALLEST_EPS, 1e-8, 1e-7, 1e-9, 1e-6, 1e-5, 1e-12)


class Fit(NamedTuple):
    """A squash with its eps. softmax, leaky: they determine the equal coupling in the first iteration."""

    softmax: str
    leaky: bool
    squash: str
    eps: float


def fits(sums: list[Tensor], results: list[Tensor], I: int, J: int) -> list[Fit]:
    """The squashes that turn sums of all votes, of different lengths, into results ``[B, J, D]`` by equal coupling."""
    found = []
    for softmax, leaky in (("out", False), ("in", False), ("out", True), ("in", True)):
        coupling = 1 / ((J if softmax == "out" else I) + leaky)
        squared = [(coupling * each).square().sum(-1) for each in sums]
        factors = [(v * s).sum(-1) / (coupling * s.square().sum(-1)) for v, s in zip(results, sums, strict=True)]
        for kind in RADIAL:
            eps = DEFAULTS["eps"] if kind == "identity" else _eps(kind, squared[0], factors[0])
            off = max(
                float((RADIAL[kind](n, eps) / factor - 1).abs().max())
                for n, factor in zip(squared, factors, strict=True)
            )
            # "eps_outside" without eps is "paper".
            if off < CLOSE and (kind, eps) != ("eps_outside", SMALLEST_EPS):
                found.append((off, Fit(softmax, leaky, kind, eps)))
    # Equally good fits keep their order: the paper first.
    return [fit for _, fit in sorted(found, key=lambda each: round(each[0], 6))]


def options(found: list[Fit], most: int = MOST_ITERATIONS) -> Iterator[dict[str, Any]]:
    """Options to try, common ones first."""
    kinds: list[dict[str, Any]] = []
    for each in found:
        kinds.append(each._asdict())
        if each.squash == "identity":
            kinds += [
                {**each._asdict(), "squash": kind, "eps": eps, "squash_last": False}
                for kind, eps in product((kind for kind in RADIAL if kind != "identity"), USUAL_EPS)
            ]
    for num_iterations, averaged, kind in product((3, 2, 4, 1, *range(5, most + 1)), (False, True), kinds):
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
    return next((each for each in written if abs(eps / each - 1) < 1e-3), eps)
