"""Windows of an image in Triton: values and gradients beside capsfast/windows.py, strides, tiles, padding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capsfast.calls.windows import Box
from capsfast.environment import toolchain
from capsfast.windows import Windows

from .support.interpreter import kernels_of

pytestmark = pytest.mark.skipif(
    bool(toolchain.why_no_triton()) or not toolchain.interpreting(), reason="runs with Triton's interpreter"
)

if not toolchain.why_no_triton():
    from capsfast.triton import windows as kernels

f64 = torch.float64
# Of the image and of the capsules.
DTYPES = [
    (f64, f64),
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (f64, torch.float32),
]


@st.composite
def axes(draw: Any) -> tuple[int, ...]:
    """Windows.size, kernel_size, stride, padding and dilation along one axis, which has one window at least."""
    k, s, p, d = (draw(st.integers(low, high)) for low, high in ((1, 3), (1, 3), (0, 2), (1, 2)))
    return max(1, d * (k - 1) + 1 - 2 * p) + draw(st.integers(0, 5)), k, s, p, d


@st.composite
def problems(draw: Any) -> tuple[torch.Tensor, Windows, Box]:
    """An image of random strides in float64, its windows, and a box of some of them."""
    windows = Windows(*zip(*draw(st.lists(axes(), min_size=1, max_size=3)), strict=True))
    few = st.integers(1, 3)
    shape = (draw(few), draw(few), draw(st.sampled_from((1, 3, 4, 16))), *windows.size)
    order = draw(st.permutations(range(len(shape))))
    image = torch.randn([shape[axis] for axis in order], dtype=f64)
    image = image.permute([order.index(axis) for axis in range(len(shape))])
    box = []
    for count in (shape[0], *windows.grid):
        start = draw(st.integers(0, count - 1))
        box.append((start, draw(st.integers(start + 1, count))))
    return image, windows, tuple(box)


@pytest.mark.drawn
@given(problems(), st.sampled_from(DTYPES))
def test_values_are_those_of_torch(problem: tuple[torch.Tensor, Windows, Box], dtypes: tuple[torch.dtype, ...]) -> None:
    """Bit for bit, because sums have the same order. Only the interpreter rounds to bfloat16 towards zero."""
    image, windows, box = problem
    image = image.to(dtypes[0])
    unfolded = kernels.unfold(image, windows, box)
    assert unfolded.is_contiguous() and torch.equal(unfolded, windows.unfold(image, box))
    capsules = torch.randn(unfolded.shape).to(dtypes[1])
    expected, image = image.clone(), image.clone()
    windows.fold_into(expected, capsules, box)
    kernels.fold_into(image, capsules, windows, box)
    unit = torch.finfo(torch.bfloat16).eps if dtypes[0] == torch.bfloat16 else 0.0
    torch.testing.assert_close(image, expected, rtol=unit, atol=0)


@pytest.mark.drawn
@given(problems())
def test_one_is_the_gradient_of_the_other(problem: tuple[torch.Tensor, Windows, Box]) -> None:
    image, windows, box = problem
    image.requires_grad_()
    unfolded = windows.unfold(image, box)
    capsules = torch.randn_like(unfolded)
    (expected,) = torch.autograd.grad(unfolded, image, capsules)
    gradient = torch.zeros_like(image)
    kernels.fold_into(gradient, capsules, windows, box)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-13)
    # sum(capsules x unfold(image)) as a function of the capsules, and as a function of the image.
    torch.testing.assert_close(
        (kernels.unfold(image.detach(), windows, box) * capsules).sum(), (expected * image).sum()
    )


WIDE = Windows((3, 70), (3, 3), (1, 1), (1, 1), (1, 1))


def test_several_tiles_along_x_and_of_components(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with one place of the window for each program, and with all."""
    image = torch.randn(2, 5, 16, *WIDE.size, dtype=f64)
    box = WIDE.all_of(2)
    expected = WIDE.unfold(image, box)
    for rounds in (1, 1000):
        monkeypatch.setattr(kernels, "ROUNDS", rounds)
        assert torch.equal(kernels.unfold(image, WIDE, box), expected)
    folded, total = torch.zeros_like(image), torch.zeros_like(image)
    WIDE.fold_into(total, expected, box)
    kernels.fold_into(folded, expected, WIDE, box)
    assert torch.equal(folded, total)


def test_one_launch_each(monkeypatch: pytest.MonkeyPatch) -> None:
    image, box = torch.randn(1, 2, 4, *WIDE.size, dtype=f64), WIDE.all_of(1)

    def both() -> None:
        kernels.fold_into(image, kernels.unfold(image, WIDE, box), WIDE, box)

    assert [name for name, _ in kernels_of(both, monkeypatch)] == ["unfold_kernel", "fold_kernel"]


def test_padding_and_places_without_a_window_are_left_alone() -> None:
    """The image has NaN wherever no window of the box reads; capsules have NaN in the padding."""
    windows = Windows((9, 9), (2, 2), (4, 4), (1, 1), (1, 1))
    box = ((1, 2), (0, 3), (1, 3))
    read = torch.zeros(2, 1, 4, 9, 9, dtype=f64)
    windows.fold_into(read, torch.ones(6, 4, 4, dtype=f64), box)
    image = torch.where(read > 0, 1.0, float("nan"))
    unfolded = kernels.unfold(image, windows, box)
    inside = windows.inside(box)
    assert inside is not None and torch.equal(unfolded, inside[:, :, None].expand(-1, -1, 4).to(f64))
    capsules = torch.where(inside[:, :, None], 2.0, float("nan")).to(f64).expand(-1, -1, 4)
    kernels.fold_into(image, capsules, windows, box)
    assert torch.equal(image.nan_to_num(), 3 * read)


def test_nothing_to_unfold() -> None:
    image = torch.randn(2, 2, 4, 5, 6, dtype=f64)
    windows = Windows((5, 6), (3, 3), (1, 1), (0, 0), (1, 1))
    for box in (((0, 0), (0, 3), (0, 4)), ((0, 2), (1, 1), (0, 4))):
        unfolded = kernels.unfold(image, windows, box)
        assert unfolded.shape == (0, 18, 4)
        before = image.clone()
        kernels.fold_into(image, unfolded, windows, box)
        assert torch.equal(image, before)


def test_windows_that_lie_in_the_padding() -> None:
    windows = Windows((2,), (1,), (1,), (3,), (1,))
    image, box = torch.randn(1, 1, 4, 2, dtype=f64), ((0, 1), (0, 2))
    unfolded = kernels.unfold(image, windows, box)
    assert unfolded.shape == (2, 1, 4) and not unfolded.any()
    before = image.clone()
    kernels.fold_into(image, unfolded + 1, windows, box)
    assert torch.equal(image, before)


def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    """A sparse file of 2^31 numbers and a few is the memory of an image; 2^29 numbers lie between its types."""
    memory = torch.from_file(str(tmp_path / "image"), shared=True, size=2**31 + 64, dtype=torch.float16)
    image = memory.as_strided((1, 5, 2, 6), (2**31, 2**29, 8, 1))
    image.copy_(torch.randn(image.shape))
    windows = Windows((6,), (3,), (1,), (1,), (1,))
    box = windows.all_of(1)
    unfolded = kernels.unfold(image, windows, box)
    assert torch.equal(unfolded, windows.unfold(image.clone(), box))
    expected = image.clone()
    windows.fold_into(expected, unfolded, box)
    kernels.fold_into(image, unfolded, windows, box)
    assert torch.equal(image, expected)
