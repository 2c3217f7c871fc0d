"""Calls that share their work among threads: other processes, other threads and forks must not change results."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from capsfast import dynamic_routing, route_votes
from capsfast.environment import native

Values = tuple[torch.Tensor, ...]

pytestmark = pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def values() -> Values:
    """Results and gradients of a layer of two tiles, of a small batch and of given votes."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).requires_grad_()

    def found(v: torch.Tensor, *inputs: torch.Tensor) -> Values:
        return v.detach(), *torch.autograd.grad(v.square().sum(), inputs)

    weight, votes = tensor(400, 10, 16, 8), tensor(9, 100, 10, 16)
    tiles, few = tensor(32, 400, 8), tensor(2, 400, 8)
    return (
        *found(dynamic_routing(tiles, weight, backend="cpp"), tiles, weight),
        *found(dynamic_routing(few, weight, backend="cpp"), few, weight),
        *found(route_votes(votes, backend="cpp"), votes),
    )


def same(a: Values, b: Values) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


# Four threads are more than the cores of most test machines.
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_busy_machine_changes_no_result(threads: int) -> None:
    torch.set_num_threads(threads)
    wanted = values()
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        assert all(same(values(), wanted) for _ in range(10))
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def test_calls_of_several_threads_at_once() -> None:
    torch.set_num_threads(2)
    wanted = values()

    def calls(_: int) -> bool:
        torch.set_num_threads(2)
        return all(same(values(), wanted) for _ in range(5))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(calls, range(3)))


# What a parent may run before it forks. The operation of torch alone starts threads too.
BEFORE = {"nothing": "", "torch": "torch.ones(1_000_000).add(1)", "a call": "routed()", "a pool of 3": "pool(3)"}
FORKS = """
import multiprocessing
import torch
import capsfast

torch.set_num_threads(2)
draw = torch.Generator().manual_seed(0)
inputs = [torch.randn(32, 64, 8, generator=draw), torch.randn(64, 10, 16, 8, generator=draw)]
inputs = [each.requires_grad_() for each in inputs]
dv = torch.randn(32, 10, 16, generator=draw)

def routed():
    v = capsfast.dynamic_routing(*inputs, backend="cpp")
    found = (v, *torch.autograd.grad(v, inputs, dv))
    return hash(tuple(number for each in found for number in each.flatten().tolist()))

def pool(threads):
    torch.set_num_threads(threads)
    torch.ones(1_000_000).add(1)
    torch.set_num_threads(2)

{before}
context = multiprocessing.get_context("fork")
results = context.SimpleQueue()
child = context.Process(target=lambda: results.put(routed()))
child.start()
child.join(30)
child.kill()
print("the child", "hangs" if child.exitcode is None else results.get() == routed())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("before", BEFORE)
def test_a_forked_process_routes_as_its_parent(before: str) -> None:
    program = FORKS.format(before=BEFORE[before])
    ran = [sys.executable, "-W", "ignore", "-c", program]
    assert subprocess.run(ran, capture_output=True, text=True, timeout=60).stdout == "the child True\n"
