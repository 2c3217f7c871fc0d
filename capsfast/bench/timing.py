"""Interleaved timing: contenders take turns, so that a drift of the machine meets all of them."""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from .inputs import Step

# A contender's turn: long enough that the caches and threads are its own, short enough to interleave.
TURN_SECONDS = 0.02
MOST_CALLS_A_TURN = 50

# From the number of the first call and how many to make, to the seconds of each.
Turn = Callable[[int, int], list[float]]


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median, 10 % and 90 % quantiles, least; calls: how many were timed."""

    median: float
    p10: float
    p90: float
    least: float
    calls: int

    @staticmethod
    def of(seconds: list[float]) -> "Timing":
        ordered = torch.tensor(sorted(seconds), dtype=torch.float64)
        p10, median, p90 = torch.quantile(ordered, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        return Timing(median, p10, p90, float(ordered[0]), len(seconds))


def _cpu_turn(step: Step, first: int, calls: int) -> list[float]:
    seconds = []
    for n in range(first, first + calls):
        begin = time.perf_counter()
        step(n)
        seconds.append(time.perf_counter() - begin)
    return seconds


def _cuda_turn(step: Step, first: int, calls: int) -> list[float]:
    # Events lie in the stream: they exclude the host's launch time as long as the queue is full.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for n in range(calls):
        step(first + n)
        events[n + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def turn_of(step: Step, device: torch.device) -> Turn:
    """Calls of ``step``, each timed by itself."""
    return partial(_cuda_turn if device.type == "cuda" else _cpu_turn, step)


def interleave(
    steps: Mapping[str, Step],
    device: torch.device,
    seconds: float = 2.0,
    least_rounds: int = 5,
    most_rounds: int = 200,
) -> dict[str, Timing]:
    """:func:`take_turns` of the calls of each step."""
    turns = {name: turn_of(step, device) for name, step in steps.items()}
    return take_turns(turns, seconds, least_rounds, most_rounds)


def take_turns(
    turns: Mapping[str, Turn],
    seconds: float = 2.0,
    least_rounds: int = 5,
    most_rounds: int = 200,
) -> dict[str, Timing]:
    """Times in turns until ``seconds`` have passed and each had ``least_rounds`` turns.

    A turn is several calls when they are short; its first call is then not counted, because the
    contender before left the caches and the threads in its own state. One call of each goes before all
    turns; compiling is the caller's business.
    """
    warm = {name: turn(0, 1)[0] for name, turn in turns.items()}
    calls = {name: max(1, min(MOST_CALLS_A_TURN, int(TURN_SECONDS / max(warm[name], 1e-7)))) for name in turns}
    seen: dict[str, list[float]] = {name: [] for name in turns}
    # Every turn goes on in the rotation of the input sets where the last one of the same step ended.
    position = dict.fromkeys(turns, 1)
    order = list(turns)
    begin = time.perf_counter()
    for done in range(most_rounds):
        if done >= least_rounds and time.perf_counter() - begin > seconds:
            break
        for name in order:
            spent = turns[name](position[name], calls[name])
            position[name] += calls[name]
            seen[name] += spent[1:] if len(spent) > 1 else spent
        # Nobody always follows the same neighbour.
        order = order[1:] + order[:1]
    return {name: Timing.of(spent) for name, spent in seen.items()}
