"""Matrix routing against its definition with all votes in memory."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from capsfast.nn import MatrixRouting

from .support import plain

B, I, J, P, Q, R = 3, 13, 4, 2, 3, 5


def definition(
    u: Tensor, scores: Tensor, p: dict[str, Tensor], num_iterations: int, model: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Votes ``[B, I, J, P, R]``, one Gaussian or center for each output matrix."""
    votes = torch.einsum("bipq,ijqr->bijpr", u.unflatten(2, (P, Q)), p["W"].expand(u.shape[1], -1, -1, -1)) + p["B"]
    f = 1 / (1 + torch.exp(-scores))[:, :, None]
    share = torch.full_like(votes[..., 0, 0], 1 / votes.shape[2])
    for _ in range(num_iterations):
        used = f * share
        ignored = f - used
        s = (p["beta_use"] * used - p.get("beta_ign", p["beta_use"]) * ignored).sum(1)
        weights = used / (used.sum(1, keepdim=True) + eps)
        mean = torch.einsum("bij,bijpr->bjpr", weights, votes)
        distance = (votes - mean[:, None]) ** 2
        variance = torch.einsum("bij,bijpr->bjpr", weights, distance) + eps
        if model == "gaussian":
            deviations = variance[:, None].sqrt().prod(4).prod(3)
            density = torch.exp(-(distance / (2 * variance[:, None])).sum((3, 4))) / deviations
        else:
            density = torch.exp(-distance.sum((3, 4)))
        joint = density / (1 + torch.exp(-s[:, None]))
        share = joint / joint.sum(2, keepdim=True)
    return mean.flatten(2), s, variance.flatten(2)


def made(in_caps: int | None = I, **options: Any) -> MatrixRouting:
    torch.manual_seed(0)
    layer = MatrixRouting(in_caps, J, P * Q, P * R, P, dtype=torch.float64, **options)
    with torch.no_grad():
        for each in layer.parameters():
            each.normal_(std=0.5)
    return layer


def given(size: int = I) -> tuple[Tensor, Tensor]:
    u, scores = torch.randn(B, size, P * Q, dtype=torch.float64), torch.randn(B, size, dtype=torch.float64)
    return u.requires_grad_(), scores.requires_grad_()


@plain.on_cpu
@pytest.mark.parametrize("in_caps", [I, None])
@pytest.mark.parametrize(
    "options",
    [
        {"num_iterations": 1},
        {"num_iterations": 3},
        {"num_iterations": 2, "single_beta": True, "eps": 0.1},
        {"num_iterations": 3, "model": "k-means"},
    ],
    ids=str,
)
def test_equals_its_definition(options: dict[str, Any], in_caps: int | None, by: Any) -> None:
    layer = made(in_caps, backend=by.name, **options)
    inputs = given()
    parameters = dict(layer.named_parameters())
    wanted = definition(*inputs, parameters, layer.num_iterations, layer.model, layer.eps)
    plain.assert_alike(layer(*inputs), wanted, [*inputs, *parameters.values()])


def test_any_number_of_inputs() -> None:
    layer = made(None)
    for size in (1, 7, 600):
        inputs = given(size)
        plain.assert_same(
            tuple(layer(*inputs)), definition(*inputs, dict(layer.named_parameters()), 3, "gaussian", 1e-5), 1e-8
        )


def test_a_score_of_minus_infinity_takes_an_input_out() -> None:
    layer, (u, scores) = made(None), given()
    with torch.no_grad():
        scores[:, 5:] = -torch.inf
    found = layer(u, scores)
    plain.assert_same(tuple(found), tuple(layer(u[:, :5], scores[:, :5])), 1e-9)
    for each in torch.autograd.grad(found.scores.sum() + found.variances.sum(), (u, scores)):
        assert each.isfinite().all() and not each[:, 5:].any()


def test_variances_of_far_votes_do_not_cancel() -> None:
    """Votes around 300, in float32."""
    layer, (u, scores) = made(None), given(500)
    with torch.no_grad():
        layer.B.add_(300)
        exact = layer(u, scores)
        found = layer.float()(u.float(), scores.float())
    torch.testing.assert_close(found.variances.double(), exact.variances, rtol=1e-2, atol=1e-3)


def test_the_state_dict_is_the_authors() -> None:
    for in_caps, n in ((I, I), (None, 1)):
        for single_beta in (False, True):
            layer = made(in_caps, single_beta=single_beta)
            assert len([*layer.parameters()]) == (3 if single_beta else 4)
            state = layer.state_dict()
            assert {name: tuple(each.shape) for name, each in state.items()} == {
                "CONST_one": (),
                "W": (n, J, Q, R),
                "B": (n, J, P, R),
                "beta_use": (n, J),
                "beta_ign": (n, J),
            }


def test_a_draw_has_the_authors_deviation() -> None:
    layer = MatrixRouting(200, 20, 2 * 8, 2 * 4, 2)
    assert layer.W.std().item() == pytest.approx(1 / 8, rel=0.02)
    assert not any(each.any() for each in (layer.B, layer.beta_use, layer.beta_ign))


def test_what_is_refused() -> None:
    layer, free = MatrixRouting(I, J, P * Q, P * R, P), MatrixRouting(None, J, P * Q, P * R, P)
    u, scores = torch.randn(B, I, P * Q), torch.randn(B, I)
    cases = {
        "out_caps must be at least 2, got 1": lambda: MatrixRouting(I, 1, 4, 4, 2),
        "pose_rows must divide in_dim=5, got 2": lambda: MatrixRouting(I, J, 5, 4, 2),
        f"u must be [B, I={I}, K={P * Q}], got": lambda: layer(u[:, 1:], scores[:, 1:]),
        f"u must be [B, I, K={P * Q}], got": lambda: free(u[..., 1:], scores),
        f"scores must be [B={B}, I={I}], got": lambda: free(u, scores[:, 1:]),
        "scores must have the dtype of u (float32)": lambda: layer(u, scores.double()),
        "must have one dtype, got float64": lambda: layer(u.double(), scores.double()),
    }
    for message, call in cases.items():
        with pytest.raises((ValueError, TypeError), match="^capsfast.nn.MatrixRouting: .*" + re.escape(message)):
            call()
    assert str(made(None, model="k-means", eps=0.1)) == (
        f"MatrixRouting(None, {J}, {P * Q}, {P * R}, {P}, num_iterations=3, model='k-means', eps=0.1)"
    )
