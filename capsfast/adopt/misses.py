"""Reasons why capsfast can't compute a layer, as far as votes near 0 show them."""

from typing import NamedTuple

from torch import Tensor

from .identification import Identification
from .squashes import MOST_ITERATIONS, fits

# Largest share of an output that may point elsewhere than the sum of votes.
SAME_DIRECTION = 1e-2

OVER_OUTPUTS = "its squash takes lengths over the output capsules, along J, not over the numbers of a capsule"
ELEMENT_WISE = "its squash is element-wise: each number of a capsule is squashed alone"
OVER_BATCH = "its coupling is a softmax over the batch"
OTHER_DIRECTION = (
    "for votes near 0, where all coupling is equal, its output does not point along the sum of the votes: the votes "
    "are another product, the logits do not start at 0 or do not stay near it (an agreement of normalised vectors), or "
    "the coupling is not a softmax over capsules"
)
OTHER_AGREEMENT = (
    "for votes near 0 it is a routing with a squash that capsfast has, for others not: the agreement or what it is "
    "added to differs, the squash takes lengths over the output capsules, or there are more than "
    f"{MOST_ITERATIONS} iterations"
)
OTHER_SQUASH = (
    "its output points along the sum of the votes, but has the length of no squash that capsfast has: {:.3g} where "
    "equal coupling 1/J makes the sum {:.3g} long"
)


class Miss(NamedTuple):
    """Why a candidate fails. rank: how far it came."""

    rank: float
    reason: str
    candidate: Identification


def off_direction(v: Tensor, total: Tensor) -> float:
    """The share of the outputs that is not along the sums of votes; infinite if they are opposite or all 0."""
    if not bool(v.isfinite().all()) or not bool(v.any()):
        return float("inf")
    along = (v * total).sum(-1, keepdim=True) / total.square().sum(-1, keepdim=True)
    return float((v - along * total).norm() / v.norm()) if bool((along > 0).all()) else float("inf")


def other_direction(v: Tensor, total: Tensor, off: float) -> tuple[float, str]:
    """Rank and reason for outputs that do not point along the sums of votes."""
    if off < float("inf") and v.shape[2] > 1 and _each_alone(v, total):
        return 2, ELEMENT_WISE
    return 1 - min(off, 2) / 4, OTHER_DIRECTION


def _each_alone(v: Tensor, total: Tensor) -> bool:
    """Whether the numbers of v have the order and the signs of the sums, as with an element-wise squash."""
    numbers = v.flatten()[total.flatten().argsort()]
    return bool((numbers[1:] >= numbers[:-1]).all()) and bool(((v > 0) == (total > 0)).all())


def no_options(sums: list[Tensor], results: list[Tensor], fitting: bool) -> tuple[float, str]:
    """Rank and reason for outputs that point along the sums of votes while the votes are tiny."""
    if fitting:
        return 4, OTHER_AGREEMENT
    if any(off_direction(v, total) > SAME_DIRECTION for v, total in zip(results, sums, strict=True)):
        return 2.5, OTHER_DIRECTION
    B, J, D = sums[0].shape
    # If J and D change places, a squash over the output capsules is a softmax over the numbers of a capsule.
    for length, reason in ((D, OVER_OUTPUTS), (B, OVER_BATCH)):
        if any(not fit.leaky for fit in fits(sums, results, length, length)):
            return 3, reason
    return 3, OTHER_SQUASH.format(float(results[0][0, 0].norm()), float(sums[0][0, 0].norm()) / J)
