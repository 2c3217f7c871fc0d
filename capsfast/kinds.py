"""Routing layers of other code: their constructors, the layout of their weights, and the equivalent options here.

Axes are written as letters of ``IJDK``. ``1`` is an axis of length 1. Letters in brackets are one flattened axis, the
last letter fastest: ``"IK(JD)"`` is ``[I, K, J*D]``.
"""

import ast
import inspect
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .calls import checks

TABLE = "docs/migration.md"
# The smallest eps, for layers without an eps. Zero vectors have a finite gradient here, unlike there.
NO_EPS = checks.SMALLEST_EPS
# Published routings form 1 to 10 weighted sums. A larger single argument is probably a size such as 16 or 128.
MOST = 10
# The meaning of an argument, by its letter in Form.arguments.
MEANINGS = {
    "I": "number of input capsules, I",
    "J": "number of output capsules, J",
    "K": "size of an input capsule, K",
    "D": "size of an output capsule, D",
    "r": "weighted sums formed, at least 1",
    "n": f"weighted sums formed, from 1 to {MOST}",
    "+": "weighted sums after the first one, at least 0",
    "s": "whether all input capsules share one matrix per output capsule",
    "m": "a margin or a factor",
    "?": "True or False",
    ".": "what the class says",
}


@dataclass(eq=False)
class Form:
    """A constructor of a routing layer of other code. Several layers may share a name.

    name: the class in :mod:`capsfast.compat`. arguments: the constructor's, as ``"name letter=default"`` with the
    letters of :data:`MEANINGS`. weight: name of the parameter and the orders of its axes, the constructor's first (the
    second if the matrix is shared). takes: arguments of the forward call. std: the weight starts as ``std *
    torch.randn``; None: as the class says. options: options with which :func:`capsfast.dynamic_routing` computes the
    same. eps: its default, None if the class takes no eps. result: axes of the result, or "v, c". instead: the
    replacement if compat has no class. sums: weighted sums formed, if no argument says how many.
    """

    name: str
    arguments: str
    weight: str = ""
    takes: str = "u"
    std: float | None = 0.01
    options: Mapping[str, Any] = field(default_factory=dict)
    eps: float | None = 1e-8
    result: str = "[B, J, D]"
    instead: str = ""
    sums: int = 0

    def __post_init__(self) -> None:
        self.letters: dict[str, str] = dict(re.findall(r"(\w+) (\S)", self.arguments))
        # The names of the arguments by their letters.
        self.named = {letter: name for name, letter in self.letters.items()}
        self.iterations = next((self.named[letter] for letter in "rn+" if letter in self.named), "")
        self.of_votes = "n" in self.named or "+" in self.named
        self.weight_name, *self.orders = self.weight.split() or [""]
        self.inputs = self.takes.split()
        found, by_name = [], False
        for star, name, default in re.findall(r"(\*), |(\w+) \S(?:=(\S+?))?(?:,|$)", self.arguments):
            if star:
                by_name = True
                continue
            kind = inspect.Parameter.KEYWORD_ONLY if by_name else inspect.Parameter.POSITIONAL_OR_KEYWORD
            value = ast.literal_eval(default) if default else inspect.Parameter.empty
            found.append(inspect.Parameter(name, kind, default=value))
        # The original layer's arguments. The class in compat takes eps in addition.
        self.call = self.signature = inspect.Signature(found)
        if self.eps is not None:
            eps = inspect.Parameter("eps", inspect.Parameter.KEYWORD_ONLY, default=self.eps)
            self.signature = inspect.Signature([*found, eps])


IN, LAST, OUTSIDE = {"softmax": "in"}, {"gradient": "last"}, {"squash": "eps_outside"}
LAST_OUTSIDE = {**LAST, **OUTSIDE}
FOUR_SIZES = "in_capsules I, out_capsules J, in_dim K, out_dim D, num_iterations r=3"
LINEAR = (
    "out_capsules J, in_length K, out_length D, in_capsules .=None, share_weight s=True, routing_type .='k_means', "
    "num_iterations r=3, "
)

FORMS = (
    Form("DynamicRouting", FOUR_SIZES, "W 1IJDK IJDK", "x", 1.0),
    Form("DynamicRouting", "num_iterations n=3", takes="u_hat batch_size"),
    Form(
        "DynamicRouting",
        "num_input_capsules I, num_output_capsules J, input_capsule_dim K, output_capsule_dim D, num_iterations r=3",
        "weight IJKD",
        std=0.1,
    ),
    Form("DynamicRouting", "n_in I, n_out J, in_dim K, out_dim D, n_iters r=3", "W IJDK 1IJDK", result="v, c"),
    Form(
        "DynamicRouting",
        "j J, n D, bias_routing ?",
        instead="capsfast.nn.RoutingByAgreement(iters)(u_hat.transpose(1, 2), bias=bias)",
    ),
    Form("DynamicRoutingLayer", f"{FOUR_SIZES}, share_weights s=False", "W IJDK 1JDK", std=0.1, options=LAST),
    Form("DigitCaps", "num_lower I, num_higher J, lower_dim K, higher_dim D, num_routing r=3", "W IJDK 1IJDK"),
    Form(
        "DigitCaps",
        "in_dim K, in_caps I, num_caps J, dim_caps D, num_routing r",
        "W 1JIDK JIDK",
        "x",
        options=LAST_OUTSIDE,
    ),
    Form(
        "DigitCaps",
        "in_capsules I, in_dim K, num_capsules J, capsule_dim D",
        "W 1IJDK IJDK",
        "x",
        options=OUTSIDE,
        sums=2,
    ),
    Form(
        "DigitCaps",
        "num_capsules J, num_routes I, in_channels K, out_channels D",
        instead="capsfast.compat.averaged_routing(u, W[0], softmax='in')",
    ),
    Form(
        "DigitCapsules",
        "num_caps_in I, dim_caps_in K, num_caps_out J, dim_caps_out D, routing_iters r=3",
        "W 1IJDK IJDK",
        "x",
        options=OUTSIDE,
    ),
    Form("Router", "in_caps I, out_caps J, in_d K, out_d D, iterations r", "weight IJKD", std=1.0, options=IN),
    Form(
        "CapsuleLayer",
        "num_capsules J, num_route_nodes ., in_channels K, out_channels D, kernel_size .=None, stride .=None, "
        "num_iterations r=3",
        "route_weights JIKD",
        "x",
        1.0,
        IN,
        NO_EPS,
        "[J, B, 1, 1, D]",
    ),
    Form(
        "DenseCapsule",
        "in_num_caps I, in_dim_caps K, out_num_caps J, out_dim_caps D, routings r=3",
        "weight JIDK",
        "x",
        options=LAST_OUTSIDE,
    ),
    Form("AgreementRouting", "input_caps I, output_caps J, n_iterations +", "b IJ", "u_predict", 0.0, eps=NO_EPS),
    Form(
        "CapsLayer",
        "input_caps I, input_dim K, output_caps J, output_dim D, routing_module .",
        "weights IK(JD)",
        "caps_output",
        None,
        eps=None,
    ),
    *(
        Form("CapsuleLinear", LINEAR + more, "weight JIDK JDK", "input", None, eps=NO_EPS, result=result)
        for more, result in (
            ("squash ?=False, *, similarity .='dot'", "v, c"),
            ("bias ?=True, squash ?=True, *, return_prob ?=False, similarity .='dot'", "[B, J, D]"),
        )
    ),
)

LOSSES = (
    Form("MarginLoss", "m_pos m, m_neg m, lambda_ m", takes="lengths targets size_average", eps=None),
    Form("MarginLoss", "n_labels J, m_positive m, m_negative m, lambda_ m=0.5", takes="v labels", eps=None),
    Form("MarginLoss", "*, n_labels J, lambda_ m=0.5, m_positive m=0.9, m_negative m=0.1", takes="v labels", eps=None),
    Form("MarginLoss", "*, m_plus m=0.9, m_minus m=0.1, lambda_ m=0.5", takes="y_pred y_true", eps=None),
)

# Converts a weight w with these axes to [I, J, D, K].
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


def shape_of(order: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    lengths = {**sizes, "1": 1}
    return tuple(math.prod(lengths[letter] for letter in axis) for axis in axes(order))


def orders_of(shape: Sequence[int], sizes: Mapping[str, int]) -> list[str]:
    """The orders in :data:`CONVERSIONS` that fit a weight of this shape."""
    return [order for order in CONVERSIONS if shape_of(order, sizes) == tuple(shape)]


def with_weight(name: str, orders: Collection[str]) -> list[Form]:
    """The forms whose weight has this name and one of these orders."""
    return [form for form in FORMS if name == form.weight_name and set(form.orders) & set(orders)]


def given(form: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call by name, None if the form does not take the call."""
    try:
        return form.signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None


def ambiguous(forms: Sequence[Form], count: int) -> bool:
    """Whether one of the first ``count`` arguments is another size, or another switch, in another of the forms."""
    columns = zip(*([*form.letters.items()][:count] for form in forms), strict=True) if forms else ()
    meant = ({letter if letter in "IJKD" else name for name, letter in each if letter in "IJKD?"} for each in columns)
    return any(len(each) > 1 for each in meant)


def fits(form: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call fits this form: it has the form's arguments, with values of the right types."""
    found = given(form, args, kwargs)
    return found is not None and all(_may_be(form.letters.get(name, "."), value) for name, value in found.items())


def _may_be(letter: str, value: object) -> bool:
    if letter in "?s":
        return isinstance(value, bool)
    if letter == "m":
        return isinstance(value, (int, float)) and not (isinstance(value, int) and value > 1)
    if letter == "n" and isinstance(value, int) and value > MOST:
        return False
    return letter == "." or (isinstance(value, int) and not isinstance(value, bool))


def listed(forms: Sequence[Form]) -> str:
    """The classes of the forms as text, each once."""
    names = list(dict.fromkeys(f"capsfast.compat.{form.name}" for form in forms))
    return " or ".join(([", ".join(names[:-1])] if names[:-1] else []) + names[-1:])


def lead(op: str, forms: Sequence[Form], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The end of an error message: layers that accept the call that ``op`` refuses."""
    meant = [form for form in forms if fits(form, args, kwargs)]
    text = "".join(f"; for {form.name}{form.call} use {form.instead}" for form in meant if form.instead)
    classes = [form for form in meant if not form.instead and f"capsfast.compat.{form.name}" != op]
    if classes:
        text += f"; {listed(classes)} can be called so"
        if any(form.of_votes for form in classes) and op != "capsfast.nn.RoutingByAgreement":
            text += ", and for votes capsfast.nn.RoutingByAgreement"
    return f"{text}; see {TABLE}"
