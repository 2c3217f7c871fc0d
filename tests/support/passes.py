"""The cases of the pass ops, for the tests of all routing ops."""

from dataclasses import replace

from capsfast.bench.problems import LINEAR, QUADRATIC
from capsfast.bench.problems import LOADED_PASS as LOADED

from .backends import Shape
from .problems import PASS_OPS, PassCase, make
from .problems import Op as PassOp

__all__ = ["LINEAR", "LOADED", "PASS_OPS", "QUADRATIC", "PassCase", "PassOp", "make"]

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
