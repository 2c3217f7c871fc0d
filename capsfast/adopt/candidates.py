"""Options and roles of tensors to try, once the structure of a layer is known."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from .identification import Identification
from .squashes import USUAL_EPS, Fit
from .structures import orders

MOST_ITERATIONS = 10


def options(found: list[Fit], most: int = MOST_ITERATIONS) -> Iterator[dict[str, Any]]:
    """Options to try, common ones first."""
    kinds: list[dict[str, Any]] = []
    for each in found:
        kinds.append(each._asdict())
        if each.squash == "identity":
            kinds += [
                {**each._asdict(), "squash": kind, "eps": eps, "squash_last": False}
                for kind, eps in product(("paper", "half", "eps_outside", "exp", "unit"), USUAL_EPS)
            ]
    for num_iterations, shared, kind in product((3, 2, 4, 1, *range(5, most + 1)), (False, True), kinds):
        yield {**kind, "num_iterations": num_iterations, "averaged": shared}


def roles(name: str, shape: tuple[int, ...], found: Identification) -> Iterator[Identification]:
    """Variants of the call with this tensor as logits or as bias, in every order that its shape allows."""
    sizes = found.sizes._asdict()
    if found.logits is None:
        for order, _ in orders(shape, "IJ", sizes, optional="IJ"):
            yield replace(found, logits=name, logits_order=order)
    if found.bias is None:
        for order, _ in orders(shape, "JD", sizes, optional="JD"):
            yield replace(found, bias=name, bias_order=order)
