"""Interleaved timing: contenders take turns, so that a drift of the machine affects all of them."""

import importlib.util
import itertools
import statistics
import time
import timeit
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

# A turn is long enough to fill the caches and wake the threads, and short enough to interleave.
TURN_SECONDS = 0.02
MOST_CALLS = 50
REPLAYS = 11


@dataclass(frozen=True)
class Timing:
    """Seconds of a call: median, 10 % and 90 % quantiles, minimum. calls: number of measured calls."""

    median: float
    p10: float
    p90: float
    least: float
    calls: int

    @staticmethod
    def of(seconds: list[float]) -> "Timing":
        samples = torch.tensor(seconds, dtype=torch.float64)
        p10, median, p90 = torch.quantile(samples, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        return Timing(median, p10, p90, float(samples.min()), len(seconds))


def _turn(step: Callable[[], object], device: torch.device) -> Callable[[], list[float]]:
    """A function that runs one turn of a step and returns the seconds of each call."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from triton.testing import do_bench

        # do_bench times with events and clears the L2 cache before each call.
        milliseconds = {"warmup": 5, "rep": round(1e3 * TURN_SECONDS)}
        return lambda: [ms / 1e3 for ms in do_bench(step, **milliseconds, return_mode="all")]

    def timed() -> object:
        result = step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return result

    def turn() -> list[float]:
        # The first of several calls is not counted: the previous contender left its state in caches and threads.
        # torch.utils.benchmark.Timer would average over ten calls of a millisecond, after two or more in each turn.
        once = timeit.timeit(timed, number=1)
        calls = min(MOST_CALLS, int(TURN_SECONDS / once))
        return timeit.repeat(timed, number=1, repeat=calls) if calls else [once]

    return turn


def interleave(
    steps: Mapping[str, Callable[[], object]], device: torch.device, seconds: float = 2.0, least_rounds: int = 5
) -> dict[str, Timing]:
    """Times the steps in turns until ``seconds`` have passed and each step had ``least_rounds`` turns.

    The caller must have called each step once, so that compilation is done.
    """
    turns = {name: _turn(step, device) for name, step in steps.items()}
    seen: dict[str, list[float]] = {name: [] for name in turns}
    order = list(turns)
    begin, rounds = time.perf_counter(), 0
    while rounds < least_rounds or time.perf_counter() - begin < seconds:
        for name in order:
            seen[name] += turns[name]()
        # Rotate, so that no contender always follows the same neighbour.
        order = order[1:] + order[:1]
        rounds += 1
    return {name: Timing.of(spent) for name, spent in seen.items()}


def host_seconds(step: Callable[[], object], device: torch.device) -> float:
    """The host's part of a call on a GPU: the median time until it returns, while the GPU works."""
    spent = []
    for _ in range(9):
        torch.cuda.synchronize(device)
        # Few calls at a time: a full queue would make the host wait.
        spent.append(timeit.timeit(step, number=4) / 4)
    torch.cuda.synchronize(device)
    return statistics.median(spent)


def capture(step: Callable[[], object], calls: int = 1) -> torch.cuda.CUDAGraph:
    """A CUDA graph of calls of a step, on the current GPU. The caller must have called the step once.

    Raises the error of a step that can't be captured.
    """
    graph, stream, pool = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step()  # the first call on this stream gets memory
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                for _ in range(calls):
                    step()
        except Exception as error:
            # The allocator of torch 2.11 stays in a capture that failed, and refuses the next one (pytorch#180395).
            with suppress(AttributeError, RuntimeError):  # private functions of torch
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
                torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
            # The end of a failed capture raises, too; the error before it says what the step did.
            cause = error.__context__ if "previous error during capture" in str(error) else None
            raise cause or error from None
    return graph


def graph_seconds(step: Callable[[], object]) -> float:
    """The median time of a call in a CUDA graph of several calls, with warm caches. Raises: as capture()."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    calls = max(1, min(MOST_CALLS, int(TURN_SECONDS / (time.perf_counter() - begin))))
    graph, events = capture(step, calls), [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    for event in events:
        # The first replay is not timed: during it the host launches the others.
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return float(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))) / 1e3 / calls
