"""The factor on the learning rate, a function of the step alone."""

from math import cos, pi


class Schedule:
    """Linear warm-up, times ``rate ** (step / steps)``.

    Without a rate, times half a cosine from 1 to 0 over ``steps`` (Loshchilov, Hutter 2017, eq. 5, without restarts),
    then 0. steps: 0 until they are known.
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
