"""Kinds of routing layers in use, by what their constructors and their checkpoints look like.

Axes are written as letters of ``IJDK``; ``1`` is an axis of length 1, letters in brackets are one axis that holds them
all, the last one fastest. ``"IK(JD)"`` is ``[I, K, J*D]``.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

TABLE = "docs/migration.md"


class Kind(NamedTuple):
    """name: of its class in :mod:`capsfast.compat`; other layers have the same name, so it is a hint.

    arguments: of the constructor, in order. needed: how many of them have no default. parameters: their names in a
    state dict and the orders their axes may have, the weight first.
    """

    name: str
    arguments: tuple[str, ...]
    needed: int
    parameters: Mapping[str, tuple[str, ...]]

    @property
    def of_votes(self) -> bool:
        """Whether it is called with votes."""
        return not any("K" in order for orders in self.parameters.values() for order in orders)


FOUR_SIZES = ("in_capsules", "out_capsules", "in_dim", "out_dim", "num_iterations")

KINDS = (
    Kind("DynamicRouting", FOUR_SIZES, 4, {"W": ("1IJDK", "IJDK")}),
    Kind("DynamicRouting", ("num_iterations",), 0, {}),
    Kind("DynamicRoutingLayer", (*FOUR_SIZES, "share_weights"), 4, {"W": ("IJDK", "1JDK")}),
    Kind(
        "DigitCaps", ("num_lower", "num_higher", "lower_dim", "higher_dim", "num_routing"), 4, {"W": ("IJDK", "1IJDK")}
    ),
    Kind(
        "DigitCapsules",
        ("num_caps_in", "dim_caps_in", "num_caps_out", "dim_caps_out", "routing_iters"),
        4,
        {"W": ("1IJDK", "IJDK")},
    ),
    Kind("Router", ("in_caps", "out_caps", "in_d", "out_d", "iterations"), 5, {"weight": ("IJKD",)}),
    Kind(
        "CapsuleLayer",
        ("num_capsules", "num_route_nodes", "in_channels", "out_channels", "kernel_size", "stride", "num_iterations"),
        4,
        {"route_weights": ("JIKD",)},
    ),
    Kind(
        "DenseCapsule",
        ("in_num_caps", "in_dim_caps", "out_num_caps", "out_dim_caps", "routings"),
        4,
        {"weight": ("JIDK",)},
    ),
    Kind("AgreementRouting", ("input_caps", "output_caps", "n_iterations"), 3, {"b": ("IJ",)}),
    Kind(
        "CapsLayer",
        ("input_caps", "input_dim", "output_caps", "output_dim", "routing_module"),
        5,
        {"weights": ("IK(JD)",), "routing_module.b": ("IJ",)},
    ),
    Kind(
        "CapsuleLinear",
        (
            "out_capsules",
            "in_length",
            "out_length",
            "in_capsules",
            "share_weight",
            "routing_type",
            "num_iterations",
            "squash",
            "bias",
            "return_prob",
        ),
        3,
        {"weight": ("JDK", "JIDK"), "bias": ("JD",)},
    ),
)

LOSSES = (
    Kind("MarginLoss", ("m_pos", "m_neg", "lambda_"), 3, {}),
    Kind("MarginLoss", ("n_labels", "m_positive", "m_negative", "lambda_"), 3, {}),
    Kind("MarginLoss", ("m_plus", "m_minus", "lambda_"), 0, {}),
)

# From a weight w of these axes to [I, J, D, K].
CONVERSIONS = {
    "IJDK": "w",
    "IJKD": "w.transpose(-1, -2)",
    "JIDK": "w.permute(1, 0, 2, 3)",
    "JIKD": "w.permute(1, 0, 3, 2)",
    "1IJDK": "w[0]",
    "1IJKD": "w[0].transpose(-1, -2)",
    "1JIDK": "w[0].permute(1, 0, 2, 3)",
    "1JIKD": "w[0].permute(1, 0, 3, 2)",
    "I(JD)K": "w.view(I, J, D, K)",
    "1I(JD)K1": "w.view(I, J, D, K)",
    "IK(JD)": "w.view(I, K, J, D).permute(0, 2, 3, 1)",
}


def axes(order: str) -> tuple[str, ...]:
    """The letters of each axis: ``"1IK(JD)"`` to ``("1", "I", "K", "JD")``."""
    return tuple(found.strip("()") for found in re.findall(r"\(\w+\)|\w", order))


def spelled(order: str) -> str:
    """``"IK(JD)"`` to ``[I, K, J*D]``."""
    return "[" + ", ".join("*".join(axis) for axis in axes(order)) + "]"


def orders_of(shape: Sequence[int], sizes: Mapping[str, int]) -> list[str]:
    """The orders of :data:`CONVERSIONS` in which a weight of this shape may have its axes."""
    lengths = {**sizes, "1": 1}
    return [
        order
        for order in CONVERSIONS
        if [math.prod(lengths[letter] for letter in axis) for axis in axes(order)] == list(shape)
    ]


def called_with(kinds: Sequence[Kind], positional: int, keywords: Collection[str]) -> list[Kind]:
    """Those of the kinds whose constructor takes such a call."""
    return [
        kind
        for kind in kinds
        if set(keywords) <= set(kind.arguments[positional:])
        and kind.needed <= len({*kind.arguments[:positional], *keywords})
        and positional <= len(kind.arguments)
    ]


def with_weight(name: str, orders: Collection[str]) -> list[Kind]:
    """The kinds whose weight has this name and one of these orders."""
    return [kind for kind in KINDS if set(kind.parameters.get(name, ())) & set(orders)]


def listed(kinds: Sequence[Kind]) -> str:
    """Their classes as text, each once."""
    names = list(dict.fromkeys(f"capsfast.compat.{kind.name}" for kind in kinds))
    return " or ".join(([", ".join(names[:-1])] if names[:-1] else []) + names[-1:])
