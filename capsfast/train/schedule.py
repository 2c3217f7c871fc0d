"""Factors on the learning rate, functions of the step alone."""

from math import cos, pi


class Decay:
    """The factor at a step: linear warm-up, times ``rate ** (step / steps)``."""

    def __init__(self, warmup_steps: int, rate: float, steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.rate = rate
        self.steps = steps

    def __call__(self, step: int) -> float:
        return warm(step, self.warmup_steps) * float(self.rate ** (step / self.steps))


class Cosine:
    """The factor at a step: linear warm-up, times half a cosine from 1 to 0 over ``steps`` (Loshchilov, Hutter 2017,
    eq. 5, without restarts), then 0. steps: 0 until they are known."""

    def __init__(self, warmup_steps: int, steps: int = 0) -> None:
        self.warmup_steps = warmup_steps
        self.steps = steps

    def __call__(self, step: int) -> float:
        done = min(1.0, step / max(1, self.steps))
        return warm(step, self.warmup_steps) * 0.5 * (1 + cos(pi * done))


def warm(step: int, steps: int) -> float:
    """Grows linearly over ``steps``, to 1."""
    return min(1.0, (step + 1) / (steps + 1))
