"""The factor on the learning rate as a function of the step."""

from math import cos, pi


class Schedule:
    """Linear warm-up, times ``rate ** (step / steps)``.

    Without a rate, the warm-up is multiplied by half a cosine that falls from 1 to 0 over ``steps`` and then stays 0
    (Loshchilov, Hutter 2017, eq. 5, without restarts). steps: 0 means not yet known.
    """

    def __init__(self, warmup_steps: int, steps: int, rate: float | None = None) -> None:
        self.warmup_steps = warmup_steps
        self.steps = steps
        self.rate = rate

    def __call__(self, step: int) -> float:
        warm = min(1.0, (step + 1) / (self.warmup_steps + 1))
        if self.rate is not None:
            return warm * float(self.rate ** (step / self.steps))
        return warm * 0.5 * (1 + cos(pi * min(1.0, step / max(1, self.steps))))
