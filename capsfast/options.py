"""The options every routing function shares, and their admissible values."""

from typing import NamedTuple

SOFTMAX = ("out", "in")
NORMALIZE = ("out", "in", "sigmoid", "none", "lse")
GRADIENT = ("full", "last")
SQUASH = ("paper", "half", "eps_outside", "exp", "unit", "identity")


# What the ops have behind a slash in ``squash`` where the last iteration has another one than the others.
NO_SQUASH = "identity"


class Options(NamedTuple):
    """Static routing options; of_op() has them as the op schemas do.

    num_iterations: r >= 1, the number of weighted sums.
    softmax: the axis the coupling coefficients sum to one over: "out" (the output capsules,
        Sabour et al. 2017, eq. 3) or "in" (the input capsules).
    gradient: "full" differentiates through all iterations; "last" treats the agreement that was
        added to the logits as a constant.
    leaky: every softmax gets one more entry with logit 0, whose coupling is thrown away.
    squash, eps: see :func:`capsfast.squash`.
    squash_last: False leaves out the squash of the last iteration: the result is the weighted sum, with its bias.
    """

    num_iterations: int
    softmax: str
    gradient: str
    leaky: bool
    squash: str
    eps: float
    squash_last: bool = True

    def of_op(self) -> tuple[int, str, str, bool, str, float]:
        """In the order in which the op schemas list them.

        squash_last is in the squash, "paper/identity", so that programs exported without it keep their schema.
        """
        squash = self.squash if self.squash_last else f"{self.squash}/{NO_SQUASH}"
        return self.num_iterations, self.softmax, self.gradient, self.leaky, squash, self.eps

    @classmethod
    def from_op(
        cls, num_iterations: int, softmax: str, gradient: str, leaky: bool, squash: str, eps: float
    ) -> "Options":
        kind, slash, last = squash.partition("/")
        if kind not in SQUASH or (slash and last != NO_SQUASH):
            raise ValueError(f"capsfast: squash must be a kind, or one with '/{NO_SQUASH}', got '{squash}'")
        return cls(num_iterations, softmax, gradient, leaky, kind, eps, not slash)


class PassOptions(NamedTuple):
    """Static options of a routing pass, in the order in which the op schemas list them.

    normalize: how logits become coupling coefficients: a softmax over the output capsules ("out") or over the input
        capsules ("in"), a sigmoid of each ("sigmoid"), ``exp(logit - lse)`` with a given log-sum-exp ("lse"), or not at
        all ("none").
    leaky: every softmax gets one more entry with logit 0, whose coupling is thrown away.
    second: the second moments are wanted.
    """

    normalize: str
    leaky: bool
    second: bool


class EMOptions(NamedTuple):
    """Static options of what EM routing does between two passes, in the order in which the op schema lists them.

    floor, momentum, isotropic, cost, nonlinearity: see :class:`capsfast.nn.EMRouting`.
    cost_scale: a number that the cost is multiplied by; 0 for 1 / mean of the mass.
    inverse_temperature: of this iteration.
    final: activations are wanted, and nothing for another pass.
    """

    floor: float
    momentum: float
    isotropic: bool
    cost: str
    cost_scale: float
    nonlinearity: str
    inverse_temperature: float
    final: bool
