"""Memory of convolutional capsules that are routed by passes (unfolded poses, parts of the batch), and of inference."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from capsfast.bench import memory
from capsfast.environment import native
from capsfast.nn import ConvCaps1d, ConvCaps2d, ConvCaps3d, EMRouting

from ..support.backends import Shape
from ..support.passes import QUADRATIC, PassCase, make
from ..support.problems import Problem, batched, run

pytestmark = pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")


LAYERS = {1: ConvCaps1d, 2: ConvCaps2d, 3: ConvCaps3d}


def grown(competition: Any, axes: int, size: int) -> int:
    """For a process of its own: the growth in a call forward and backward."""
    torch.set_num_threads(1)
    layer = LAYERS[axes](32, 2, 16, 16, kernel_size=3, routing="em", pose_rows=4, competition=competition)

    def call(size: int) -> None:
        image = torch.ones(1, 32, 16, *[size] * axes, requires_grad=True)
        poses, activations = layer(image)
        torch.autograd.backward((poses, activations), (torch.ones_like(poses), torch.ones_like(activations)))

    call(4)
    return memory.growth(lambda: call(size))


@pytest.mark.skipif(bool(memory.why_not()), reason=memory.why_not())
@pytest.mark.parametrize(
    ("competition", "axes", "size", "least", "most"),
    [
        # Votes are twice as large as the unfolded poses. The poses, and the gradient of a pass, are in memory once.
        ("child", 2, 34, 1.9 * 32**2 * 9, 2.95 * 32**2 * 9),
        # Block by block: the poses, their gradient, the outputs with theirs (a tenth), and as much as the poses. The
        # unfolded poses are 3, 9 and 24 times as large. In a smaller image a call may grow by the fixed limit.
        ("window", 1, 40000, 0, 3.3 * 40000),
        ("window", 2, 200, 0, 3.3 * 200**2),
        ("window", 3, 34, 0, 3.3 * 34**3),
    ],
)
def test_memory_grows_by_the_unfolded_poses_or_by_blocks(
    competition: str, axes: int, size: int, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Filling fresh memory with NaN would make unused pages resident.
    monkeypatch.setenv("CAPSFAST_POISON", "0")
    if competition == "child":  # freed memory goes back at once, so memory that the C library keeps does not count
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "262144")
    assert least < memory.in_a_process(grown, competition, axes, size) / (32 * 16 * 4) < most


def grown_by_a_pass(B: int) -> int:
    """For a process of its own: the growth in a pass of sixteen threads, with few input capsules and its backward."""
    torch.set_num_threads(16)
    problem = make(Shape(B, 40, 32, 16, 8), QUADRATIC)

    def call(problem: Problem) -> None:
        run(problem, "cpp")

    call(samples(problem, slice(0, 32)))
    return memory.growth(lambda: call(problem))


@pytest.mark.skipif(bool(memory.why_not()), reason=memory.why_not())
def test_many_threads_have_no_large_partial_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSFAST_POISON", "0")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "262144")
    B = 2048
    assert memory.in_a_process(grown_by_a_pass, B) < 40 * B * 32 * 16 * 4


# name: threads, shape (B for each thread), dtype, case
B = 150
LAYER = Shape(B, 18, 64, 16, 4)
MASKED = replace(QUADRATIC, mask=True)
PARTS: dict[str, tuple[int, Shape, torch.dtype, PassCase]] = {
    "in place": (1, LAYER, torch.float32, MASKED),
    "16 bits, shared weight": (1, LAYER, torch.bfloat16, replace(MASKED, shared="I")),
    "odd rows, logits of a sample": (1, LAYER._replace(J=63, D=15), torch.float64, replace(MASKED, logits="BIJ")),
    "two threads, few inputs": (2, LAYER._replace(I=1), torch.bfloat16, MASKED),
    "two threads, over the inputs": (2, LAYER, torch.float32, replace(MASKED, normalize="in", out_mask=True)),
}


@pytest.fixture
def _threads(name: str) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(PARTS[name][0])
    yield
    torch.set_num_threads(before)


def samples(problem: Problem, part: slice) -> Problem:
    def taken(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value[part] if batched(name, value) else value for name, value in tensors.items()}

    tensors = {kind: taken(getattr(problem, kind)) for kind in ("inputs", "masks", "gradients")}
    return replace(problem, **tensors)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", PARTS)
def test_a_pass_over_parts_of_the_batch_equals_a_pass_over_all(name: str) -> None:
    threads, shape, dtype, case = PARTS[name]
    count, third = threads * B, threads * B // 3
    problem = make(shape._replace(B=count), case, dtype=dtype)
    assert native.extension is not None
    more = {"itemsize": dtype.itemsize, "shared_weight": "I" in case.shared, "moments": True}
    plans = [native.extension.launch_plan(size, *shape[1:], **more)["parts"] for size in (count, third)]
    assert plans[0] > plans[1]
    parts = [run(samples(problem, slice(n, n + third)), "cpp") for n in range(0, count, third)]
    error = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for key, found in run(problem, "cpp").items():
        each = [part[key] for part in parts]
        wanted = torch.cat(each) if batched(key, found) else torch.stack(each).sum(0)
        assert (found - wanted).norm() <= error * max(1.0, float(wanted.norm())), key


def grown_by_inference(r: int) -> int:
    """For a process of its own: the growth in EM routing of a large batch."""
    torch.set_num_threads(1)
    routing, weight = EMRouting(8, 32, 4, 16, num_iterations=r, backend="cpp"), torch.randn(8, 32, 16, 4)
    u = torch.randn(1024, 8, 4)
    with torch.no_grad():
        routing((u[:2], weight))
        return memory.growth(lambda: routing((u, weight)))


@pytest.mark.skipif(bool(memory.why_not()), reason=memory.why_not())
def test_inference_takes_memory_for_two_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSFAST_POISON", "0")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "262144")
    two, six = (memory.in_a_process(grown_by_inference, r) for r in (2, 6))
    assert two > 2 * 4 * 1024 * 32 * 16 * 4 * 0.9 and six < 1.1 * two
