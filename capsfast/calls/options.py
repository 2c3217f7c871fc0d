"""The options of the ops, their permitted values and their checks."""

from typing import Any, Literal, NamedTuple, TypedDict, get_args

from . import checks

Softmax = Literal["out", "in"]
Normalize = Literal["out", "in", "sigmoid", "none", "lse"]
Gradient = Literal["full", "last"]
Squash = Literal["paper", "half", "eps_outside", "exp", "unit", "identity"]
Backend = Literal["cpp", "triton", "cuda", "reference"]
SOFTMAX, NORMALIZE, GRADIENT, SQUASH = map(get_args, (Softmax, Normalize, Gradient, Squash))


class RoutingOptions(NamedTuple):
    """Static options of the routing ops, in the order in which the op schemas list them.

    num_iterations, softmax, gradient, leaky: see :class:`Options`.
    squash, last_squash: the kinds of squash before and in the last iteration. eps: of both.
    sharpness: factor of v before the last iteration, and so of the agreement.
    accumulate: the logits of an iteration are the given logits plus all agreements so far. False: the last agreement
        alone, without the given logits after the first iteration.
    wide: v has the dtype of sums, float32 for 16-bit inputs, because the caller computes with v before rounding it.
    """

    num_iterations: int
    softmax: str
    gradient: str
    leaky: bool
    squash: str
    last_squash: str
    eps: float
    sharpness: float = 1.0
    accumulate: bool = True
    wide: bool = False


class Options(NamedTuple):
    """Static options of dynamic routing, as the public functions take them.

    num_iterations: r >= 1, the number of weighted sums.
    softmax: the axis the coupling coefficients sum to one over: "out" (the output capsules,
        Sabour et al. 2017, eq. 3) or "in" (the input capsules).
    gradient: "full" differentiates through all iterations; "last" treats the agreement that was
        added to the logits as a constant.
    leaky: every softmax gets one more entry with logit 0, whose coupling is thrown away.
    squash, eps: see :func:`capsfast.squash`.
    squash_last: False omits the squash of the last iteration: the result is the weighted sum plus bias.
    """

    num_iterations: int = 3
    softmax: str = "out"
    gradient: str = "full"
    leaky: bool = False
    squash: str = "paper"
    eps: float = 1e-8
    squash_last: bool = True

    def checked(self, op: str) -> RoutingOptions:
        """The options of the op, with Python's numbers instead of NumPy's.

        Raises:
            TypeError, ValueError: an option that is not admissible.
        """
        return checked_options(op, *self)


def checked_options(
    op: str, number: int, softmax: str, gradient: str, leaky: bool, squash: str, eps: float, squash_last: bool
) -> RoutingOptions:
    """As :meth:`Options.checked`, from the fields; saves a tuple in every call."""
    # The quick check, which nearly every call passes.
    if not (
        type(number) is int
        and type(softmax) is type(gradient) is type(squash) is str
        and type(eps) is float
        and type(leaky) is type(squash_last) is bool
        and 0 < number <= checks.MOST
        and softmax in SOFTMAX
        and gradient in GRADIENT
        and squash in SQUASH
        and checks.SMALLEST_EPS <= eps < 1.0
    ):
        number, softmax, gradient, leaky, squash, eps, squash_last = map(
            checks.plain, (number, softmax, gradient, leaky, squash, eps, squash_last)
        )
        checks.integer(op, "num_iterations", number)
        checks.choice(op, "softmax", softmax, SOFTMAX)
        checks.choice(op, "gradient", gradient, GRADIENT)
        checks.boolean(op, "leaky", leaky)
        checks.choice(op, "squash", squash, SQUASH)
        checks.positive_eps(op, eps)
        checks.boolean(op, "squash_last", squash_last)
    return RoutingOptions(number, softmax, gradient, leaky, squash, squash if squash_last else "identity", eps)


# Keywords of routing_options() that the public functions do not have.
STEPS = frozenset(("last_squash", "sharpness", "accumulate", "wide"))


def routing_options(
    op: str,
    num_iterations: int,
    *,
    last_squash: str | None = None,
    sharpness: float = 1.0,
    accumulate: bool = True,
    wide: bool = False,
    **options: Any,
) -> RoutingOptions:
    """The options of a routing op from keywords: the fields of :class:`Options`, and what only the op has.

    Raises:
        TypeError, ValueError: an option that is not admissible.
    """
    checked = Options(num_iterations, **options).checked(op)
    if last_squash is not None:
        # Errors name it squash, as classes do that choose the squash of all other iterations themselves.
        checks.choice(op, "squash", last_squash, SQUASH)
        checked = checked._replace(last_squash=last_squash)
    checks.positive(op, "sharpness", sharpness)
    return checked._replace(sharpness=sharpness, accumulate=accumulate, wide=wide)


class OptionKeywords(TypedDict, total=False):
    """The fields of :class:`Options` after num_iterations, as keywords."""

    softmax: Softmax
    gradient: Gradient
    leaky: bool
    squash: Squash
    eps: float
    squash_last: bool


class PassOptions(NamedTuple):
    """Static options of a routing pass, in the order in which the op schemas list them.

    normalize: how logits become coupling coefficients: by a softmax over the output capsules ("out") or over the input
        capsules ("in"), by a sigmoid of each logit ("sigmoid"), by ``exp(logit - lse)`` with a given log-sum-exp
        ("lse"), or unchanged ("none").
    leaky: every softmax gets one more entry with logit 0, whose coupling is thrown away.
    second: compute the second moments.
    """

    normalize: str
    leaky: bool
    second: bool

    def check(self, op: str) -> None:
        """
        Raises:
            TypeError, ValueError: an option that is not admissible.
        """
        # The quick check, which nearly every pass has.
        known = type(self.normalize) is str and self.normalize in NORMALIZE
        if known and type(self.second) is bool and self.leaky is False:
            return
        checks.choice(op, "normalize", self.normalize, NORMALIZE)
        checks.boolean(op, "leaky", self.leaky)
        checks.boolean(op, "second", self.second)
        if self.leaky and self.normalize not in SOFTMAX:
            raise ValueError(
                f'{op}: leaky adds an entry to a softmax, so normalize must be "out" or "in", '
                f"got {checks.shown(self.normalize)}"
            )


class EMOptions(NamedTuple):
    """Static options of the EM update between two passes, in the order in which the op schema lists them.

    floor, momentum, isotropic, cost, nonlinearity: see :class:`capsfast.nn.EMRouting`.
    cost_scale: factor of the cost; 0 means 1 / mean of the mass.
    inverse_temperature: the inverse temperature of this iteration.
    final: return activations, and nothing for another pass.
    """

    floor: float
    momentum: float
    isotropic: bool
    cost: str
    cost_scale: float
    nonlinearity: str
    inverse_temperature: float
    final: bool
