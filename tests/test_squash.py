"""capsfast.squash: values, gradients, dtypes, zero and huge vectors."""

import math

import pytest
import torch

import capsfast
from capsfast.calls.options import SQUASH

from .support import plain
from .support.backends import ALL_DTYPES
from .support.problems import relayout


@pytest.mark.parametrize(("length", "share"), [(1e-2, 5e-5), (1e-3, 5e-3), (1e-4, 0.29)])
def test_the_least_eps_is_that_of_layers_without_one(length: float, share: float) -> None:
    s = torch.tensor([0.6, -0.8], dtype=torch.float64) * length
    without = length / (1 + length**2) * s
    torch.testing.assert_close(capsfast.squash(s, eps=1e-20), without, rtol=1e-10, atol=0)
    torch.testing.assert_close(capsfast.squash(s.float(), eps=1e-20), without.float(), rtol=1e-6, atol=0)
    assert 1 - (capsfast.squash(s) / without).mean().item() == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize("eps", [1e-8, 0.1])
@pytest.mark.parametrize("kind", SQUASH)
def test_values_are_those_of_the_definition(kind: str, eps: float) -> None:
    s = torch.randn(7, 5, dtype=torch.float64) * torch.logspace(-3, 2, 7, dtype=torch.float64)[:, None]
    torch.testing.assert_close(
        capsfast.squash(s, eps=eps, kind=kind), plain.squash(s, kind, eps), rtol=1e-12, atol=1e-15
    )


def test_the_default_is_the_paper() -> None:
    s = torch.randn(3, 4)
    n = s.square().sum(-1, keepdim=True)
    torch.testing.assert_close(capsfast.squash(s), n / (1 + n) * s / n.sqrt())


@pytest.mark.parametrize("kind", SQUASH)
def test_gradients_are_the_finite_differences(kind: str) -> None:
    s = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda s: capsfast.squash(s, kind=kind), s)
    torch.autograd.gradgradcheck(lambda s: capsfast.squash(s, kind=kind), s)


@pytest.mark.parametrize("kind", SQUASH)
def test_zero_vectors_give_zero_and_finite_derivatives(kind: str) -> None:
    for dtype in ALL_DTYPES:
        s = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
        v = capsfast.squash(s, kind=kind)
        (grad,) = torch.autograd.grad(v.sum(), s, create_graph=True)
        assert v.dtype == dtype
        assert torch.equal(v, torch.zeros_like(v))
        assert grad.isfinite().all()
        if grad.requires_grad:
            (second,) = torch.autograd.grad(grad.sum(), s, allow_unused=True, materialize_grads=True)
            assert dtype != torch.float64 or second.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", SQUASH)
def test_sixteen_bits_cost_one_rounding(kind: str, dtype: torch.dtype) -> None:
    # In float16 |s|^2 and eps vanish with scale 1e-4, and |s|^2 overflows with scale 300.
    info = torch.finfo(dtype)
    for scale in (1e-4, 1.0, 300.0):
        s = (torch.randn(50, 4) * scale).to(dtype)
        got = capsfast.squash(s, kind=kind)
        assert got.dtype == dtype
        wanted = capsfast.squash(s.double(), kind=kind)
        torch.testing.assert_close(got.double(), wanted, rtol=info.eps, atol=info.smallest_normal)


def test_huge_vectors_have_length_one() -> None:
    torch.testing.assert_close(capsfast.squash(torch.full((1, 4), 1e15)).norm(), torch.tensor(1.0))


@pytest.mark.parametrize("layout", ["contiguous", "sliced", "transposed"])
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_dim_is_the_axis_of_the_components(dim: int, layout: str) -> None:
    s = torch.randn(3, 4, 5)
    wanted = capsfast.squash(s.movedim(dim, -1)).movedim(-1, dim)
    torch.testing.assert_close(capsfast.squash(relayout(s, layout), dim), wanted)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty_tensors_keep_their_shape(shape: tuple[int, ...]) -> None:
    s = torch.zeros(shape, requires_grad=True)
    v = capsfast.squash(s)
    v.sum().backward()
    assert v.shape == shape and s.grad is not None and s.grad.shape == shape


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_stay_in_their_vector(bad: float) -> None:
    s = torch.randn(3, 4)
    clean = capsfast.squash(s)
    s[1, 2] = bad
    v = capsfast.squash(s)
    assert not v[1].isfinite().all()
    assert torch.equal(v[[0, 2]], clean[[0, 2]])


def test_compiles_without_a_graph_break() -> None:
    s = torch.randn(3, 4)
    compiled = torch.compile(capsfast.squash, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(s), capsfast.squash(s))
