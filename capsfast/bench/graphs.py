"""GPU time without the host's: many calls in one CUDA graph, timed by replays."""

import math

import torch

from .inputs import Step

# A replay starts some microseconds after its event: so many calls that this does not count.
LEAST_CALLS = 8


class Replay:
    """The turn of a step that was captured once for every input set: see timing.take_turns.

    The sets follow each other inside the graph, so that no call finds its inputs in the L2 cache.

    step: its work goes to the current stream and allocates through torch only.
    sets: how many input sets the step rotates.

    Raises:
        RuntimeError: the step cannot be captured.
    """

    def __init__(self, step: Step, sets: int, device: torch.device) -> None:
        self.calls = sets * math.ceil(LEAST_CALLS / sets)
        self.device = device
        # Kernels are chosen by alignment: what a set needs is compiled before.
        for n in range(sets):
            step(n)
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        # The stream that the step has run on so far: autograd waits for no other one then.
        with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream(device)):
            for n in range(self.calls):
                step(n)
        torch.cuda.synchronize(device)

    def __call__(self, first: int, calls: int) -> list[float]:
        """Seconds a call for each of the replays that ``calls`` calls take, rounded up."""
        replays = math.ceil(calls / self.calls)
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
        for begin, end in events:
            begin.record()
            self.graph.replay()
            end.record()
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) / 1e3 / self.calls for begin, end in events]
