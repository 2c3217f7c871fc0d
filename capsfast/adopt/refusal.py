"""The answers for layers that capsfast does not compute, or does not take the place of."""

from .identification import Identification


class LeftAloneError(Exception):
    """Why a layer is not fused. Its text is the reason in the report."""


class NotReproduced(ValueError):  # noqa: N818
    """No options of capsfast compute what the layer computes.

    Attributes:
        reason: why, in words, without the name of the layer.
        nearest: the call that came nearest, None where none could be tried.
        difference: its relative difference from the layer, or that of its gradient; None without a nearest call.
    """

    def __init__(
        self, op: str, layer: str, reason: str, nearest: Identification | None = None, difference: float | None = None
    ) -> None:
        self.reason, self.nearest, self.difference = reason, nearest, difference
        text = f"{op}: {layer} is not reproduced: {reason}"
        if nearest is not None:
            call = nearest.code().replace("\n", "; ")
            text += f". The nearest call differs by {difference:.1e} (relative): {call}"
        super().__init__(text)
