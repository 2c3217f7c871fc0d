"""The input capsules of windows: the ops, and torch's functions, beside loops over places."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from capsfast.calls import replay
from capsfast.calls.windows import Box
from capsfast.environment import native
from capsfast.ops import windows as ops
from capsfast.windows import Windows

f64 = torch.float64
needs_extension = pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")


def drawn(draw: random.Random) -> tuple[Windows, Box, tuple[int, int, int]]:
    """Windows in one to three axes, a box of them, and (B, types, K)."""
    axes = draw.randint(1, 3)
    kernel_size, stride, padding, dilation = (
        tuple(draw.randint(*bounds) for _ in range(axes)) for bounds in ((1, 3), (1, 3), (0, 4), (1, 3))
    )
    reach = [d * (k - 1) + 1 - 2 * p for k, p, d in zip(kernel_size, padding, dilation, strict=True)]
    size = tuple(max(1, least) + draw.randint(0, 5) for least in reach)
    windows = Windows(size, kernel_size, stride, padding, dilation)
    sizes = (2, draw.randint(1, 3), draw.randint(1, 5))
    starts = [draw.randrange(count) for count in (sizes[0], *windows.grid)]
    box = tuple(
        (start, draw.randint(start + 1, count)) for start, count in zip(starts, (sizes[0], *windows.grid), strict=True)
    )
    return windows, box, sizes


def by_loops(windows: Windows, image: Tensor, box: Box) -> Tensor:
    """The definition: capsule by capsule."""
    capsules = []
    for sample, *window in itertools.product(*(range(*bounds) for bounds in box)):
        for capsule_type in range(image.shape[1]):
            for place in itertools.product(*map(range, windows.kernel_size)):
                axes = zip(window, place, windows.stride, windows.padding, windows.dilation, strict=True)
                at = tuple(w * s - p + k * d for w, k, s, p, d in axes)
                inside = all(0 <= x < n for x, n in zip(at, windows.size, strict=True))
                there: Any = (sample, capsule_type, slice(None), *at)
                capsules.append(image[there] if inside else image.new_zeros(image.shape[2]))
    return torch.stack(capsules).unflatten(0, (-1, image.shape[1] * windows.area))


def laid_out(image: Tensor, order: str) -> Tensor:
    """The same values with other strides."""
    if order == "types last":
        return image.movedim((1, 2), (-2, -1)).contiguous().movedim((-2, -1), (1, 2))
    if order == "part":
        larger = torch.full([2 * n + 1 for n in image.shape], math.nan).to(image.dtype)
        part = larger[tuple(slice(1, 2 * n + 1, 2) for n in image.shape)]
        return part.copy_(image)
    return image


@needs_extension
@pytest.mark.rows(1)
@pytest.mark.parametrize("dtype", [f64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("order", ["", "types last", "part"])
def test_ops_are_the_definition(order: str, dtype: torch.dtype) -> None:
    draw = random.Random(f"{order} {dtype}")
    torch.manual_seed(0)
    for _ in range(40):
        windows, box, sizes = drawn(draw)
        image = laid_out(torch.randn(*sizes, *windows.size).to(dtype), order)
        wanted = by_loops(windows, image, box)
        found = ops.unfold(image, windows, box)
        assert found is not None and torch.equal(found, wanted)
        capsules = torch.randn(wanted.shape).to(dtype)
        total, exact = (laid_out(image.clone(), order), image.to(f64).requires_grad_())
        assert ops.fold_into(total, capsules, windows, box)
        one = (0.0 * exact).sum() + by_loops(windows, exact, box)
        (gradient,) = torch.autograd.grad(one, exact, capsules.to(f64))
        tolerance = {f64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
        torch.testing.assert_close(total.to(f64), image.to(f64) + gradient, rtol=tolerance, atol=tolerance)


@needs_extension
def test_sums_of_ops_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, because a place gets its terms in one order."""
    draw = random.Random(1)
    for _ in range(40):
        windows, box, sizes = drawn(draw)
        capsules = torch.randn(math.prod(last - first for first, last in box), sizes[1] * windows.area, sizes[2])
        for dtype in (f64, torch.float32, torch.bfloat16, torch.float16):
            image = torch.randn(*sizes, *windows.size).to(dtype)
            by_op, by_torch = image.clone(), image.clone()
            windows.fold_into(by_op, capsules.to(dtype), box)
            with monkeypatch.context() as without_kernels:
                without_kernels.setattr(ops, "choose_for_windows", lambda device: None)
                windows.fold_into(by_torch, capsules.to(dtype), box)
            assert torch.equal(by_op, by_torch), (windows, box, dtype)


def test_functions_of_torch_are_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extension, or with a gradient."""
    monkeypatch.setattr(ops, "choose_for_windows", lambda device: None)
    draw = random.Random(0)
    for _ in range(60):
        windows, box, sizes = drawn(draw)
        image = torch.randn(*sizes, *windows.size, dtype=f64, requires_grad=True)
        wanted, found = by_loops(windows, image, box) + 0.0 * image.sum(), windows.unfold(image, box)
        assert torch.equal(found, wanted) and torch.equal(windows.unfold(image.detach(), box), wanted)
        capsules = torch.randn(wanted.shape, dtype=f64)
        (gradient,) = torch.autograd.grad(wanted, image, capsules)
        torch.testing.assert_close(torch.autograd.grad(found, image, capsules)[0], gradient)
        total = image.detach().clone()
        windows.fold_into(total, capsules, box)
        torch.testing.assert_close(total, image.detach() + gradient)
        ones = windows.unfold(torch.ones(1, 1, 1, *windows.size), ((0, 1), *box[1:]))[:, :, 0].bool()
        inside = windows.inside(box)
        assert ones.all() if inside is None else torch.equal(inside, ones)


@needs_extension
def test_results_do_not_depend_on_threads() -> None:
    windows = Windows((33, 40), (3, 3), (1, 1), (1, 1), (1, 1))
    image = torch.randn(1, 2, 16, 33, 40)
    box, before = windows.all_of(1), torch.get_num_threads()
    capsules = torch.randn(33 * 40, 18, 16)
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            total = torch.zeros_like(image)
            ops.fold_into(total, capsules, windows, box)
            found.append((ops.unfold(image, windows, box), total))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@needs_extension
@pytest.mark.parametrize(
    "geometry",
    [
        ([3, 3], [1, 1], [0, 0], [1, 1], [0, 1, 0, 4, 0, 3]),  # a row of windows too many
        ([3, 3], [1, 1], [0, 0], [1, 1], [0, 2, 0, 3, 0, 3]),  # a sample too many
        ([3, 3], [1, 1], [0, 0], [1, 1], [0, 1, 0, 3, 2, 2]),  # no window
        ([3, 3], [1, 1], [0, 0], [1, 1], [0, 1, -1, 3, 0, 3]),
        ([3, 0], [1, 1], [0, 0], [1, 1], [0, 1, 0, 3, 0, 3]),
        ([3, 3], [1, 0], [0, 0], [1, 1], [0, 1, 0, 3, 0, 3]),
        ([3, 3], [1, 1], [0, -1], [1, 1], [0, 1, 0, 3, 0, 3]),
        ([3], [1], [0], [1], [0, 1, 0, 3]),
        ([3, 3], [1, 1], [2**62, 0], [1, 1], [0, 1, 0, 3, 0, 3]),
        ([2, 2], [1, 1], [2**30, 2**30], [2**30, 2**30], [0, 1, 0, 3, 0, 3]),  # more places than 64 bits count
    ],
    ids=str,
)
def test_ops_refuse_windows_outside_the_image(geometry: tuple[list[int], ...]) -> None:
    image = torch.zeros(1, 2, 4, 5, 5)
    with pytest.raises(RuntimeError, match="capsfast: "):
        torch.ops.capsfast.unfold_windows(image, *geometry)
    with pytest.raises(RuntimeError, match="capsfast: "):
        torch.ops.capsfast.fold_windows(image, torch.zeros(9, 18, 4), *geometry)


@needs_extension
def test_ops_refuse_other_tensors() -> None:
    geometry = ([3, 3], [1, 1], [0, 0], [1, 1], [0, 1, 0, 3, 0, 3])
    image, capsules = torch.zeros(1, 2, 4, 5, 5), torch.zeros(9, 18, 4)
    torch.ops.capsfast.fold_windows(image, capsules, *geometry)
    for wrong in (capsules[:8], capsules.double(), capsules.mT.contiguous().mT):
        with pytest.raises(RuntimeError, match="capsfast: capsules"):
            torch.ops.capsfast.fold_windows(image, wrong, *geometry)
    for wrong in (image.int(), torch.zeros(2, 4, 5), torch.zeros(1, 2, 4, 1, 1, 5, 5)):
        with pytest.raises(RuntimeError, match="capsfast: "):
            torch.ops.capsfast.unfold_windows(wrong, *geometry)


def test_results_that_are_replayed_are_those_that_were_recorded() -> None:
    calls: list[tuple[int, ...]] = []

    def op(tensor: Tensor, *sizes: int) -> tuple[Tensor, ...]:
        calls.append(sizes)
        return tuple(torch.full((size, 3), float(len(calls)), dtype=f64) for size in sizes)

    inputs = [(torch.zeros(2), 2, 0), (torch.ones(2), 5, 1)]
    recording = replay.Recording()
    results = [recording.result(op, given) for given in inputs]
    memory = torch.empty(recording.nbytes + 64, dtype=torch.uint8)
    assert recording.keep(memory, 64) == memory.numel()
    replayed = replay.Replay(recording, memory)
    again = [replayed.result(op, given) for given in inputs]
    assert len(calls) == 2
    for one, other in zip(itertools.chain(*results), itertools.chain(*again), strict=True):
        assert torch.equal(one, other) and not other._is_view() and other.is_contiguous()
    different = [(op, (torch.zeros(2), 2, 1)), (op, (torch.zeros(3), 2, 0)), (op, (None, 2, 0)), (max, inputs[0])]
    for other_op, given in different:
        with pytest.raises(replay.DifferentError):
            replay.Replay(recording, memory).result(other_op, given)  # type: ignore[arg-type]
    with pytest.raises(replay.DifferentError):
        replayed.result(op, inputs[0])  # after the last
    with replay.of_ops(recording):
        with replay.of_ops(None):
            assert replay.state.of_ops is None
        assert replay.state.of_ops is recording
    assert replay.state.of_ops is None
