"""Enumerates the meanings of the axes of a layer's tensors that their shapes allow."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import permutations
from math import prod
from typing import Any

from .identification import Identification
from .orders import Sizes, axes

Found = tuple[str, dict[str, int]]


def orders(
    shape: tuple[int, ...], wanted: str, sizes: Mapping[str, int], optional: str = "", merged: int = 1
) -> Iterator[Found]:
    """Every order in which an array of this shape can hold the axes ``wanted``, with the sizes that follow from it.

    sizes: the known sizes. optional: letters that may be missing. merged: how many axes may hold several letters.
    """
    if not shape:
        if set(wanted) <= set(optional):
            yield "", dict(sizes)
        return
    length, rest = shape[0], shape[1:]
    if length == 1:
        for order, rest_of_order in orders(rest, wanted, sizes, optional, merged):
            yield "1" + order, rest_of_order
    for letter in wanted:
        if sizes.get(letter, length) == length:
            known = {**sizes, letter: length}
            for order, rest_of_order in orders(rest, wanted.replace(letter, ""), known, optional, merged):
                yield letter + order, rest_of_order
    if not merged:
        return
    inner = wanted.replace("B", "")
    for group in (permutation for count in (2, 3) for permutation in permutations(inner, count)):
        left = "".join(letter for letter in wanted if letter not in group)
        for known in _factors(length, group, sizes):
            for order, rest_of_order in orders(rest, left, known, optional, merged - 1):
                yield f"({''.join(group)}){order}", rest_of_order


def _factors(length: int, group: tuple[str, ...], sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Sizes of the letters in one axis, known or derived. Two unknown letters: all divisors are tried."""
    unknown = [letter for letter in group if letter not in sizes]
    known = prod(sizes[letter] for letter in group if letter in sizes)
    if known == 0 or length % known or len(unknown) > 2:
        return
    left = length // known
    if not unknown:
        if left == 1:
            yield dict(sizes)
    elif len(unknown) == 1:
        yield {**sizes, unknown[0]: left}
    else:
        for one in range(1, left + 1):
            if left % one == 0:
                yield {**sizes, unknown[0]: one, unknown[1]: left // one}


def calls(
    name: str | None, weight: tuple[int, ...], u: tuple[int, ...], output: tuple[int, ...]
) -> list[Identification]:
    """Calls that fit the shapes of weight, input and output; the simplest first. Without a name u are votes."""
    identifications = [
        Identification(
            name, weight_order, input_order, output_order, Sizes(*(sizes.get(letter, 0) for letter in "IJDK"))
        )
        for output_order, of_output in orders(output, "BJD", {"B": u[0]})
        for input_order, of_input in orders(u, "BIJD" if name is None else "BIK", of_output)
        if input_order.startswith("B")
        for weight_order, sizes in orders(weight, "" if name is None else "IJDK", of_input, optional="IJ")
    ]
    return sorted(dict.fromkeys(identifications), key=_simplicity)


def roles(name: str, shape: tuple[int, ...], identification: Identification) -> Iterator[Identification]:
    """The call with this tensor as logits or as bias, in every order that its shape allows."""
    for role, wanted in (("logits", "IJ"), ("bias", "JD")):
        if getattr(identification, role) is None:
            for order, _ in orders(shape, wanted, identification.sizes._asdict(), optional=wanted):
                named: dict[str, Any] = {role: name, f"{role}_order": order}
                yield replace(identification, **named)


def _simplicity(identification: Identification) -> tuple[int, ...]:
    """Sort key: fewest merged and missing axes first, then largest D, because any direction fits if D is 1."""
    orders_of = (identification.weight_order, identification.input_order, identification.output_order)
    merged = sum(len(axis) > 1 for order in orders_of for axis in axes(order))
    missing = 0 if identification.weight is None else sum(letter not in identification.weight_order for letter in "IJ")
    return merged + missing, -identification.sizes.D
