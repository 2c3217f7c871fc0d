"""The exceptions for layers that capsfast can't compute or does not replace."""

from .identification import Identification


class LeftAloneError(Exception):
    """A layer is not fused. The text is the reason in the report."""


class NotReproduced(ValueError):  # noqa: N818
    """No options of capsfast compute what the layer computes.

    Attributes:
        reason: the reason in words, without the name of the layer.
        nearest: the call that came nearest, None if no call could be tried.
        difference: the relative difference of its values or gradients from the layer's; None without a nearest call.
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
