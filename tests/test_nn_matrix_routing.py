"""Vector routing and matrix routing against their definitions with all votes in memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capsfast.nn import MatrixRouting, VectorRouting

from .support.plain import assert_alike, assert_same, normalized, on_cpu

B, I, J, K, D = 3, 13, 4, 5, 6
P, Q, R = 2, 3, 5
LINEAR = ("compute_beta_use", "compute_beta_ign")
# Parameters with a row for each input.
OF_INPUTS = ("W_A", "B_A", "W_S", "B_S", "W", "B", "beta_use", "beta_ign")


def standard(v: Tensor) -> Tensor:
    return v if v.shape[2] == 1 else normalized(v)


def rows_of(layer: nn.Module, there: Tensor | None) -> dict[str, Tensor]:
    """The parameters, those of each input in these rows."""
    own = () if there is None or layer.in_caps is None else OF_INPUTS
    return {name: parameter[there] if name in own else parameter for name, parameter in layer.named_parameters()}


def vectors(layer: VectorRouting, u: Tensor, there: Tensor | None = None) -> tuple[Tensor]:
    """Computes votes ``[B, I, J, D]``, the used shares and the ignored shares explicitly."""
    p = rows_of(layer, there)
    s = u / u.shape[1] ** 0.5
    votes = torch.einsum("bik,jk,kd->bijd", s, p["W_F1"], p["W_F2"]) + p["B_F2"]
    f = 1 / (1 + torch.exp(-(torch.einsum("bik,ik->bi", s, p["W_A"].expand(u.shape[1:])) + p["B_A"])))
    if "beta_use" in p:
        use, ignore = p["beta_use"], p["beta_ign"]
    else:
        use, ignore = (F.linear(u, p[f"{name}.weight"], p[f"{name}.bias"]) for name in LINEAR)
    R = torch.full_like(use.expand(votes.shape[:3]), 1 / votes.shape[2])
    for t in range(layer.num_iterations):
        used = f[..., None] * R
        v = torch.einsum("bij,bijd->bjd", use * used - ignore * (f[..., None] - used), votes)
        if t == layer.num_iterations - 1:
            break
        predicted = torch.einsum("bjd,dk,jk->bjk", standard(v), p["W_G1"], p["W_G2"]) + p["B_G2"]
        belief = 1 / (1 + torch.exp(-(torch.einsum("bik,bjk->bij", u, predicted) * p["W_S"] + p["B_S"])))
        R = belief / belief.sum(2, keepdim=True)
    return (standard(v) if layer.normalize else v,)


def matrices(
    layer: MatrixRouting, u: Tensor, scores: Tensor, there: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Votes ``[B, I, J, P, R]``, one Gaussian or center for each output matrix."""
    p = rows_of(layer, there)
    votes = torch.einsum("bipq,ijqr->bijpr", u.unflatten(2, (P, Q)), p["W"].expand(u.shape[1], -1, -1, -1)) + p["B"]
    f = 1 / (1 + torch.exp(-scores))[:, :, None]
    share = torch.full_like(votes[..., 0, 0], 1 / votes.shape[2])
    for _ in range(layer.num_iterations):
        used = f * share
        ignored = f - used
        s = (p["beta_use"] * used - p.get("beta_ign", p["beta_use"]) * ignored).sum(1)
        weights = used / (used.sum(1, keepdim=True) + layer.eps)
        mean = torch.einsum("bij,bijpr->bjpr", weights, votes)
        distance = (votes - mean[:, None]) ** 2
        variance = torch.einsum("bij,bijpr->bjpr", weights, distance) + layer.eps
        if layer.model == "gaussian":
            deviations = variance[:, None].sqrt().prod(4).prod(3)
            density = torch.exp(-(distance / (2 * variance[:, None])).sum((3, 4))) / deviations
        else:
            density = torch.exp(-distance.sum((3, 4)))
        joint = density / (1 + torch.exp(-s[:, None]))
        share = joint / joint.sum(2, keepdim=True)
    return mean.flatten(2), s, variance.flatten(2)


def made(kind: type[nn.Module], in_caps: int | None = I, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = (J, K, options.pop("out_dim", D)) if kind is VectorRouting else (J, P * Q, P * R, P)
    layer = kind(in_caps, *sizes, dtype=torch.float64, **options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if kind is MatrixRouting or name.startswith("B_"):  # start at 0
                parameter.normal_(std=0.5)
    return layer


def given(kind: type[nn.Module], size: int = I) -> list[Tensor]:
    shapes = [(B, size, K)] if kind is VectorRouting else [(B, size, P * Q), (B, size)]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def results(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


CASES: list[tuple[type[nn.Module], dict[str, Any]]] = [
    *((VectorRouting, {"num_iterations": n, "normalize": each}) for n in (1, 3) for each in (True, False)),
    (VectorRouting, {"num_iterations": 2, "out_dim": 1}),
    (MatrixRouting, {"num_iterations": 1}),
    (MatrixRouting, {"num_iterations": 3}),
    (MatrixRouting, {"num_iterations": 2, "single_beta": True, "eps": 0.1}),
    (MatrixRouting, {"num_iterations": 3, "model": "k-means"}),
]
DEFINITIONS: dict[type[nn.Module], Any] = {VectorRouting: vectors, MatrixRouting: matrices}
each_kind = pytest.mark.parametrize("kind", DEFINITIONS, ids=lambda kind: kind.__name__)


@pytest.mark.rows(12)
@on_cpu
@pytest.mark.parametrize("in_caps", [I, None])
@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_equals_its_definition(kind: type[nn.Module], options: dict[str, Any], in_caps: int | None, by: Any) -> None:
    layer, inputs = made(kind, in_caps, backend=by.name, **options), given(kind)
    assert_alike(
        results(layer(*inputs)), DEFINITIONS[kind](layer, *inputs), [*inputs, *dict(layer.named_parameters()).values()]
    )


@pytest.mark.rows(12)
@on_cpu
@pytest.mark.parametrize("in_caps", [I, None])
@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_masked_input_is_not_there(
    kind: type[nn.Module], options: dict[str, Any], in_caps: int | None, by: Any
) -> None:
    """Each sample is its definition without the masked inputs, which hold NaN."""
    layer, inputs = made(kind, in_caps, backend=by.name, **options), given(kind)
    mask = torch.rand(B, I) < torch.tensor([0.3, 0.7, 2.0])[:, None]
    mask[:, 5] = True
    samples = [
        DEFINITIONS[kind](layer, *(value[b : b + 1, there] for value in inputs), there) for b, there in enumerate(mask)
    ]
    hidden = [torch.where(mask.view(B, I, *[1] * (tensor.dim() - 2)), tensor, torch.nan) for tensor in inputs]
    leaves = [*inputs, *dict(layer.named_parameters()).values()]
    assert_alike(results(layer(*hidden, mask)), [torch.cat(tensor) for tensor in zip(*samples, strict=True)], leaves)


@each_kind
def test_a_mask_of_any_batch_compiles_and_exports(kind: type[nn.Module]) -> None:
    layer = made(kind, None)
    inputs = [tensor.detach() for tensor in given(kind)]
    mask = torch.rand(B, I) < 0.5
    mask[0] = False
    wanted = results(layer(*inputs, mask))
    assert all(wanted_one.isfinite().all() for wanted_one in wanted) and not wanted[0][0].any()
    shapes = ({0: torch.export.Dim("B")},) * (len(inputs) + 1)
    program = torch.export.export(layer, (*inputs, mask), dynamic_shapes=shapes).module()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    for other, size in ((program, I), (compiled, I), (compiled, 9)):
        part = [value[:2, :size] for value in (*inputs, mask)]
        assert_same(results(other(*part)), results(layer(*part)), 1e-12)


@each_kind
def test_any_number_of_inputs(kind: type[nn.Module]) -> None:
    layer = made(kind, None)
    for size in (1, 7, 600):
        inputs = given(kind, size)
        assert_same(results(layer(*inputs)), DEFINITIONS[kind](layer, *inputs), 1e-8)


def test_a_score_of_minus_infinity_takes_an_input_out() -> None:
    layer, (u, scores) = made(MatrixRouting, None), given(MatrixRouting)
    with torch.no_grad():
        scores[:, 5:] = -torch.inf
    found = layer(u, scores)
    assert_same(tuple(found), tuple(layer(u[:, :5], scores[:, :5])), 1e-9)
    for tensor in torch.autograd.grad(found.scores.sum() + found.variances.sum(), (u, scores)):
        assert tensor.isfinite().all() and not tensor[:, 5:].any()


def test_variances_of_far_votes_do_not_cancel() -> None:
    """Votes around 300, in float32."""
    layer, (u, scores) = made(MatrixRouting, None), given(MatrixRouting, 500)
    with torch.no_grad():
        layer.B.add_(300)
        exact = layer(u, scores)
        found = layer.float()(u.float(), scores.float())
    torch.testing.assert_close(found.variances.double(), exact.variances, rtol=1e-2, atol=1e-3)


def test_the_state_dict_is_the_authors() -> None:
    def shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}

    for in_caps, n in ((I, I), (None, 1)):
        for single_beta in (False, True):
            layer = made(MatrixRouting, in_caps, single_beta=single_beta)
            assert len([*layer.parameters()]) == (3 if single_beta else 4)
            betas = {"beta_use": (n, J), "beta_ign": (n, J)}
            assert shapes(layer) == {"CONST_one": (), "W": (n, J, Q, R), "B": (n, J, P, R), **betas}
    of_outputs = {"CONST_ones_over_n_out": (J,), "W_F2": (K, D), "B_F2": (J, D), "W_G1": (D, K)}
    of_outputs |= dict.fromkeys(("W_F1", "W_G2", "B_G2"), (J, K))
    fixed = {"W_A": (I, K), "B_A": (I,), **dict.fromkeys(("W_S", "B_S", "beta_use", "beta_ign"), (I, J))}
    free = {"W_A": (1, K), "B_A": (1,), "W_S": (1, J), "B_S": (1, J)}
    for name in LINEAR:
        free |= {f"{name}.weight": (J, K), f"{name}.bias": (J,)}
    assert shapes(made(VectorRouting)) == of_outputs | fixed
    assert shapes(made(VectorRouting, None)) == of_outputs | free


def test_a_draw_has_the_authors_deviations() -> None:
    wanted = {"W_A": 0.2, "W_F1": 1, "W_F2": 0.2, "W_G1": 0.2, "W_G2": 1, "W_S": 0.1, "beta_use": 1, "beta_ign": 1}
    for name, parameter in VectorRouting(400, 60, 100, 25).named_parameters():
        assert parameter.std().item() == pytest.approx(wanted.get(name, 0), rel=0.1), name
    layer = MatrixRouting(200, 20, 2 * 8, 2 * 4, 2)
    assert layer.W.std().item() == pytest.approx(1 / 8, rel=0.02)
    assert not any(each.any() for each in (layer.B, layer.beta_use, layer.beta_ign))


def test_text() -> None:
    text = f"MatrixRouting(None, {J}, {P * Q}, {P * R}, {P}, num_iterations=3, model='k-means', eps=0.1)"
    assert str(made(MatrixRouting, None, model="k-means", eps=0.1)) == text
