"""Vector routing against its definition with all votes in memory."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from capsfast.nn import VectorRouting

from .support.plain import assert_alike

B, I, J, K, D = 3, 13, 4, 5, 6


def plain(u: Tensor, p: dict[str, Tensor], num_iterations: int, normalize: bool) -> Tensor:
    """Computes votes ``[B, I, J, D]``, the used shares and the ignored shares explicitly."""

    def standard(v: Tensor) -> Tensor:
        if v.shape[2] == 1:
            return v
        return (v - v.mean(2, keepdim=True)) / (v.var(2, correction=0, keepdim=True) + 1e-5).sqrt()

    s = u / u.shape[1] ** 0.5
    votes = torch.einsum("bik,jk,kd->bijd", s, p["W_F1"], p["W_F2"]) + p["B_F2"]
    f = 1 / (1 + torch.exp(-(torch.einsum("bik,ik->bi", s, p["W_A"].expand(u.shape[1:])) + p["B_A"])))
    if "beta_use" in p:
        use, ignore = p["beta_use"], p["beta_ign"]
    else:
        use, ignore = (F.linear(u, p[f"{name}.weight"], p[f"{name}.bias"]) for name in LINEAR)
    R = torch.full_like(use.expand(votes.shape[:3]), 1 / votes.shape[2])
    for t in range(num_iterations):
        used = f[..., None] * R
        v = torch.einsum("bij,bijd->bjd", use * used - ignore * (f[..., None] - used), votes)
        if t == num_iterations - 1:
            break
        predicted = torch.einsum("bjd,dk,jk->bjk", standard(v), p["W_G1"], p["W_G2"]) + p["B_G2"]
        belief = 1 / (1 + torch.exp(-(torch.einsum("bik,bjk->bij", u, predicted) * p["W_S"] + p["B_S"])))
        R = belief / belief.sum(2, keepdim=True)
    return standard(v) if normalize else v


LINEAR = ("compute_beta_use", "compute_beta_ign")


def made(in_caps: int | None = I, out_dim: int = D, **options: Any) -> VectorRouting:
    torch.manual_seed(0)
    layer = VectorRouting(in_caps, J, K, out_dim, dtype=torch.float64, **options)
    with torch.no_grad():
        for name, each in layer.named_parameters():
            if name.startswith("B_"):  # start at 0
                each.normal_()
    return layer


@pytest.mark.parametrize("by", ["reference", "cpp"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("num_iterations", "out_dim"), [(1, D), (2, D), (3, D), (2, 1)])
@pytest.mark.parametrize("in_caps", [I, None])
def test_equals_its_definition(
    in_caps: int | None, num_iterations: int, out_dim: int, normalize: bool, by: str
) -> None:
    layer = made(in_caps, out_dim, num_iterations=num_iterations, normalize=normalize, backend=by)
    u = torch.randn(B, I, K, dtype=torch.float64, requires_grad=True)
    given = {"u": u, **dict(layer.named_parameters())}
    found, wanted = layer(u), plain(u, given, num_iterations, normalize)
    assert_alike(found, wanted, [*given.values()])


def test_any_number_of_inputs() -> None:
    layer = made(None)
    for size in (1, 7, 40):
        u = torch.randn(B, size, K, dtype=torch.float64)
        torch.testing.assert_close(layer(u), plain(u, dict(layer.named_parameters()), 2, True))


def test_the_state_dict_is_the_authors() -> None:
    of_outputs = {"CONST_ones_over_n_out": (J,), "W_F2": (K, D), "B_F2": (J, D), "W_G1": (D, K)}
    of_outputs |= dict.fromkeys(("W_F1", "W_G2", "B_G2"), (J, K))
    fixed = {"W_A": (I, K), "B_A": (I,), **dict.fromkeys(("W_S", "B_S", "beta_use", "beta_ign"), (I, J))}
    free = {"W_A": (1, K), "B_A": (1,), "W_S": (1, J), "B_S": (1, J)}
    for name in LINEAR:
        free |= {f"{name}.weight": (J, K), f"{name}.bias": (J,)}
    for in_caps, of_inputs in ((I, fixed), (None, free)):
        state = made(in_caps).state_dict()
        assert {name: tuple(each.shape) for name, each in state.items()} == of_outputs | of_inputs


def test_a_draw_has_the_authors_deviations() -> None:
    layer = VectorRouting(400, 60, 100, 25)
    wanted = {"W_A": 0.2, "W_F1": 1, "W_F2": 0.2, "W_G1": 0.2, "W_G2": 1, "W_S": 0.1, "beta_use": 1, "beta_ign": 1}
    for name, each in layer.named_parameters():
        assert each.std().item() == pytest.approx(wanted.get(name, 0), rel=0.1), name


def test_what_is_refused() -> None:
    layer, free = VectorRouting(I, J, K, D), VectorRouting(None, J, K, D)
    cases = {
        "out_caps must be at least 2, got 1": lambda: VectorRouting(I, 1, K, D),
        f"u must be [B, I={I}, K={K}], got": lambda: layer(torch.randn(B, I + 1, K)),
        f"u must be [B, I, K={K}], got": lambda: free(torch.randn(B, I, K + 1)),
        "u must hold at least one input vector, got [3, 0, 5]": lambda: free(torch.randn(B, 0, K)),
        "u and W_A must have one dtype, got float64": lambda: layer(torch.randn(B, I, K, dtype=torch.float64)),
    }
    for message, call in cases.items():
        with pytest.raises((ValueError, TypeError), match="^capsfast.nn.VectorRouting: .*" + re.escape(message)):
            call()
    assert str(made(None, num_iterations=3, backend="cpp")).startswith(
        f"VectorRouting(\n  None, {J}, {K}, {D}, num_iterations=3, backend='cpp'\n"
    )
