"""Memory of a training loop with every routing: the C library's allocator must find freed memory again."""

import re
from pathlib import Path

import pytest
import torch

from capsfast.bench import memory
from capsfast.environment import native
from capsfast.nn import ROUTINGS, RoutedCaps

pytestmark = [
    pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}"),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc"),
]
MIB = 2**20


def resident() -> int:
    (kib,) = re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kib)


def grown(routing: str, graphs: bool, steps: int = 300) -> int:
    """For a process of its own: the growth in so many steps after 40. The gradient of W takes 2.5 MiB.

    graphs: keeps the loss of every step, and with it the nodes of its graph.
    """
    torch.set_num_threads(1)
    layer = RoutedCaps(512, 10, 8, 16, routing=routing)
    optimizer = torch.optim.Adam(layer.parameters())
    losses, before = [], 0
    for step in range(40 + steps):
        before = resident() if step == 40 else before
        u, activation = torch.randn(16, 512, 8, requires_grad=not graphs), torch.rand(16, 512)
        found = layer(u, activation) if layer.uses_activation else layer(u)
        loss = found.poses.square().sum() + found.activations.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss if graphs else loss.detach())
    return resident() - before


@pytest.mark.parametrize("routing", ROUTINGS)
def test_memory_of_steps_is_used_again(routing: str) -> None:
    # Where the allocator puts blocks differs from run to run; what is never freed grows in each.
    assert any(memory.in_a_process(grown, routing, False) < 16 * MIB for _ in range(3))


@pytest.mark.parametrize("routing", ["em", "variational"])
def test_the_remedy_of_the_page_for_kept_graphs(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes themselves take 0.15 MiB a step at most."""
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    (threshold,) = re.findall(r"`MALLOC_MMAP_THRESHOLD_=(\d+)`", page)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", threshold)
    assert memory.in_a_process(grown, routing, True) < 300 * 0.15 * MIB + 16 * MIB
