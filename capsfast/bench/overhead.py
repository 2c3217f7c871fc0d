"""What a call costs the host: Python, dispatch, autograd, launches."""

import time
from collections.abc import Callable

import torch

from ..backend import backends
from .cases import Case
from .contenders import OURS, contender
from .inputs import input_set, step
from .timing import Timing

# Few enough that their kernels fit into the device's queue: a full one makes the host wait.
CALLS = 16
ROUNDS = 50
# The launches of the canonical layer, on little data.
CASE = Case(B=16, I=64)
MATMUL = "torch.matmul"


def host_seconds(call: Callable[[int], object], device: torch.device, rounds: int = ROUNDS) -> Timing:
    """The host's seconds for a call whose kernels it does not wait for. On the CPU the kernels count as well."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = []
    for _ in range(rounds + 1):
        wait()
        begin = time.perf_counter()
        for k in range(CALLS):
            call(k)
        seconds.append((time.perf_counter() - begin) / CALLS)
        wait()
    # The first round compiles and loads.
    return Timing.of(seconds[1:])


def _matmul(device: torch.device, backward: bool) -> Callable[[int], object]:
    a, b = (torch.randn(64, 64, device=device, requires_grad=True) for _ in range(2))
    dout = torch.randn(64, 64, device=device)

    def forward(n: int) -> object:
        return torch.matmul(a, b)

    def both(n: int) -> object:
        return torch.autograd.grad(torch.matmul(a, b), (a, b), dout)

    return both if backward else forward


def overheads(device: torch.device, rounds: int = ROUNDS) -> dict[str, dict[str, Timing]]:
    """By direction and function: every fused backend that serves ``device``, and torch.matmul. Autograd records."""
    both = Case(CASE.B, CASE.I, direction="forward+backward")
    inputs = input_set(both, device)
    found: dict[str, dict[str, Timing]] = {"forward": {}, "forward+backward": {}}
    names = [name for name, s in backends().items() if s.available and name != "reference" and device.type in s.devices]
    for name in names:
        function = contender(OURS + name).make(both)
        found["forward"][OURS + name] = host_seconds(lambda n, f=function: f(*inputs.tensors), device, rounds)  # type: ignore[misc]
        found["forward+backward"][OURS + name] = host_seconds(step(function, both, [inputs]), device, rounds)
    for direction, timings in found.items():
        timings[MATMUL] = host_seconds(_matmul(device, direction == "forward+backward"), device, rounds)
    return found
