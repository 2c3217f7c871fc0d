"""Inputs for the pass ops, as problems for the tests of all routing ops."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

import capsfast
from capsfast.options import PassOptions

from . import problems
from .backends import Shape
from .problems import Case, Op, Problem, product


@dataclass(frozen=True)
class PassCase:
    """One combination of the arguments of a pass. Defaults as in the functions; str() shows the other values.

    shared: axes of the weight or the votes with size 1, such as "I", "J" or "IJ". logits: "", "IJ" or "BIJ".
    poses and spatial: as in problems.Case; out_mask and prior have no positions. Other fields: an option of the same
    name, or whether the tensor is given.
    """

    query: bool = False
    precision: bool = False
    center: bool = False
    prior: bool = False
    logits: str = ""
    activation: bool = False
    mask: bool = False
    out_mask: bool = False
    normalize: str = "out"
    leaky: bool = False
    second: bool = False
    weights: bool = False
    lse: bool = False
    shared: str = ""
    poses: int = 0
    spatial: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = []
        for item in fields(self):
            value = getattr(self, item.name)
            if value != item.default:
                text.append(item.name if value is True else f"{item.name}={value}")
        return ",".join(text) or "plain"

    @property
    def linear(self) -> bool:
        """Whether the CUDA kernels serve the pass: a softmax of scores that are linear in votes of one pair each."""
        more = self.precision or self.center or self.activation or self.second or self.poses or self.spatial
        return not more and self.normalize in ("out", "in") and "J" not in self.shared

    @property
    def options(self) -> PassOptions:
        return PassOptions(self.normalize, self.leaky, self.second)

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.options._asdict(), "return_weights": self.weights, "return_lse": self.lse}

    @property
    def requests(self) -> tuple[bool, ...]:
        return self.weights, self.lse

    @staticmethod
    def outputs(result: capsfast.Moments) -> dict[str, Tensor]:
        named = {**result._asdict(), "log_sum": result.lse}
        del named["lse"]  # also the name of an argument
        return {name: value for name, value in named.items() if value is not None}


# The passes of each kind of routing; each runs with every way of normalising.
LINEAR = PassCase(query=True)
QUADRATIC = PassCase(precision=True, center=True, prior=True, activation=True, second=True)
EVERYTHING = PassCase(
    query=True,
    precision=True,
    center=True,
    prior=True,
    logits="BIJ",
    activation=True,
    mask=True,
    out_mask=True,
    leaky=True,
    second=True,
    weights=True,
    lse=True,
)
# A linear pass with all its arguments.
LOADED = PassCase(
    query=True, prior=True, logits="BIJ", mask=True, out_mask=True, leaky=True, weights=True, lse=True, shared="I"
)
WAYS = ("out", "in", "sigmoid", "none", "lse")


def normalized(case: PassCase, how: str) -> PassCase:
    """The same case with another way of normalising, without options that only a softmax has."""
    softmax = how in ("out", "in")
    return replace(case, normalize=how, leaky=case.leaky and softmax, lse=case.lse and softmax)


CASES = (
    PassCase(),
    LINEAR,
    PassCase(query=True, weights=True, lse=True),
    PassCase(query=True, second=True),
    PassCase(precision=True),
    PassCase(query=True, precision=True, center=True),
    PassCase(query=True, prior=True, logits="IJ"),
    PassCase(query=True, activation=True),
    PassCase(second=True),
    PassCase(center=True, second=True),
    PassCase(logits="IJ", normalize="none"),
    PassCase(query=True, shared="I"),
    PassCase(query=True, shared="J", second=True),
    PassCase(query=True, shared="IJ"),
    PassCase(query=True, precision=True, center=True, logits="BIJ", mask=True, out_mask=True, shared="J", second=True),
    QUADRATIC,
    replace(QUADRATIC, shared="I"),
    LOADED,
    normalized(LOADED, "in"),
    *(normalized(LINEAR, how) for how in WAYS[1:]),
    *(normalized(QUADRATIC, how) for how in WAYS[1:]),
    *(normalized(EVERYTHING, how) for how in WAYS),
)

SMALL = Shape(3, 7, 4, 5, 6)
EACH_WAY = tuple(normalized(EVERYTHING, how) for how in WAYS)
LINEAR_WAYS = (LOADED, normalized(LOADED, "in"))
SHARED = PassCase(query=True, precision=True, shared="J", second=True, weights=True)


def without_weight(cases: Sequence[PassCase]) -> list[PassCase]:
    """The same cases for given votes, without duplicates: these have no weight that input capsules could share."""
    return list(dict.fromkeys(replace(case, shared=case.shared.replace("I", "")) for case in cases))


def make(
    shape: Shape | tuple[int, ...],
    case: PassCase,
    op: str = "routing_pass",
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    seed: int = 0,
) -> Problem:
    """Inputs for which the coupling is neither uniform nor saturated; drawn in float64, then converted."""
    B, I, J, D, K = shape
    S = case.spatial
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    def uniform(*size: int) -> Tensor:
        return 0.2 + torch.rand(*size, generator=draw, dtype=torch.float64)

    spread = min(1.0, (8 / max(D, 1)) ** 0.5)
    columns = 1 if "J" in case.shared else J
    inputs: dict[str, Tensor] = {}
    if op == "routing_pass":
        inputs |= product(normal, shape, case.poses, 1 if "I" in case.shared else I, columns, spread)
    else:
        inputs["votes"] = normal(B, I, columns, D, *S) * spread
    wanted: dict[str, Any] = {
        "query": lambda: 0.5 * normal(B, J, D, *S),
        "precision": lambda: uniform(B, J, D, *S) / max(D, 1) ** 0.5,
        "center": lambda: 0.3 * normal(B, J, D, *S),
        "prior": lambda: normal(B, J),
        "logits": lambda: normal(*((I, J) if case.logits == "IJ" else (B, I, J, *S))),
        "activation": lambda: uniform(B, I, *S),
    }
    inputs |= {name: value() for name, value in wanted.items() if getattr(case, name)}
    if case.normalize == "lse":
        inputs["lse"] = 1 + normal(B, I, *S)
    masks = {}
    if case.mask:
        masks["mask"] = torch.rand(B, I, *S, generator=draw) > 0.3
        if case.lse and I > 0:
            masks["mask"][:, 0] = True  # an empty log-sum-exp is infinite and cannot be compared
    if case.out_mask:
        masks["out_mask"] = torch.rand(B, J, generator=draw) > 0.3
        if case.lse and J > 0:
            masks["out_mask"][:, 0] = True
    gradients = {
        "mass": normal(B, J, *S),
        "first": normal(B, J, D, *S),
        "second": normal(B, J, D, *S),
        "weights": 0.3 * normal(B, I, J, *S),
        "log_sum": normal(B, J if case.normalize == "in" else I, *S),
    }
    return Problem(op, case, inputs, masks, gradients).to(dtype, device)


def make_either(
    shape: Shape | tuple[int, ...], case: Case | PassCase, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> Problem:
    """A problem for the ops of this type of case; with positions, for the op on votes."""
    if isinstance(case, PassCase):
        return make(shape, case, "votes_pass" if case.spatial else "routing_pass", dtype, device)
    return problems.make(shape, case, "route_votes" if case.spatial else "dynamic_routing", dtype, device)


class PassOp(Op):
    """A pass function, for tests of all functions."""

    family = PassCase

    def make(  # type: ignore[override]
        self, shape: Shape, case: PassCase, dtype: torch.dtype = torch.float64, device: str = "cpu"
    ) -> Problem:
        case = case if "weight" in self.tensors else without_weight([case])[0]
        return make(self.fit(shape), case, self.name, dtype, device)


PASS_OPS = (PassOp("routing_pass", ("u", "weight")), PassOp("votes_pass", ("votes",)))
