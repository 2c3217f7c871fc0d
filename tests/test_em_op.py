"""The CPU kernels of EM routing as one op, against its passes and updates: the same numbers, nearly all to the bit."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from capsfast.calls.arguments import GIVEN
from capsfast.calls.options import EMOptions
from capsfast.environment import native
from capsfast.nn.routing.votes import PassVotes
from capsfast.ops import em_update
from capsfast.reference.em_update import inverse

pytestmark = pytest.mark.skipif(native.extension is None, reason=native.why_absent)
f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16


class Case(NamedTuple):
    """sizes: B, I, J, D, K, or B, I, J, D, S if votes have places, positions. poses: of an input capsule.

    kind: what makes the votes. shared: one weight; given: votes; one: a vote for all output capsules.
    """

    sizes: tuple[int, int, int, int, int] = (3, 40, 5, 6, 4)
    kind: str = "weight"
    dtype: torch.dtype = f32
    poses: int = 1
    stride: int = 1
    r: int = 3
    leaky: bool = False
    activation: bool = True
    masks: bool = False
    momentum: float = 0.0
    isotropic: bool = False
    cost: str = "variance"
    cost_scale: float = 0.0
    nonlinearity: str = "sigmoid"

    def __str__(self) -> str:
        default = self._field_defaults
        return ",".join(f"{name}={value}" for name, value in self._asdict().items() if value != default[name])


MORE: dict[str, Any] = {
    "momentum": 0.1,
    "leaky": True,
    "isotropic": True,
    "cost": "mass",
    "cost_scale": 0.7,
    "nonlinearity": "softmax",
    "masks": True,
    "activation": False,
}
OPTIONS = [Case(**dict(some)) for n in (0, 1, 7, 8) for some in itertools.combinations(MORE.items(), n)]
KINDS = [
    Case(sizes, kind, dtype, poses, masks=masks, momentum=0.1 * masks)
    for sizes, poses in (((3, 40, 5, 6, 4), 1), ((37, 20, 3, 8, 4), 2), ((16, 33, 4, 16, 8), 1))
    for kind in ("weight", "shared", "given", "one", "places")
    for dtype in (f32, f64, bf16)
    for masks in (False, True)
    if poses == 1 or kind in ("weight", "shared")
]
OTHERS = [
    Case((B, 300, 4, 16, 4), kind, stride=17, masks=masks, activation=masks)
    for B in (1, 16, 18)
    for kind in ("weight", "shared", "given", "one")
    for masks in (False, True)
] + [Case(r=r, kind=kind) for r in (1, 2, 5) for kind in ("weight", "given", "places")]
# Tiles in several parts, and positions in several slices.
PARTS = [Case((800, 6, 16, 32, 2), kind, masks=True, r=2) for kind in ("weight", "shared")] + [
    Case((B, 300, 5, 6, S), "places", dtype, stride=17, masks=True)
    for B, S in ((1, 40), (2, 70))
    for dtype in (f32, bf16)
]
EMPTY = [
    Case(sizes, kind)
    for sizes in ((0, 4, 3, 2, 2), (2, 0, 3, 2, 2), (2, 4, 0, 2, 2), (2, 4, 3, 0, 2))
    for kind in ("weight", "shared", "given")
]
NAMES = "u", "weight", "activation", "beta_a", "beta_u"


def problem(case: Case) -> dict[str, Any]:
    """The tensors of a call."""
    torch.manual_seed(0)
    (B, I, J, D, K), P = case.sizes, case.poses
    places = (K,) if case.kind == "places" else ()
    weight: Tensor | None = None
    if case.kind in ("weight", "shared"):
        u, weight = torch.randn(B, I, P * K), torch.randn(1 if case.kind == "shared" else I, J, D // P, K)
    else:
        u = torch.randn(B, I, 1 if case.kind == "one" else J, D, *places)
    wide = f64 if case.dtype == f64 else f32
    activation, mask, out_mask = torch.rand(B, I, *places), torch.rand(B, I, *places), torch.rand(B, J, *places)
    if B > 2:  # a sample without input capsules, and one without output capsules
        mask[0], out_mask[-1] = 1, 1
    return {
        "u": u.to(case.dtype),
        "weight": None if weight is None else weight.to(case.dtype),
        "activation": activation.to(case.dtype) if case.activation else None,
        "beta_a": torch.randn(J, dtype=wide),
        "beta_u": torch.randn(J, dtype=wide),
        "mask": mask < 0.8 if case.masks else None,
        "out_mask": out_mask < 0.8 if case.masks else None,
    }


def arguments(case: Case) -> tuple[Any, ...]:
    """The options of the op."""
    J = None if case.kind in ("weight", "shared") else case.sizes[2]
    update = (0.5, case.momentum, case.isotropic, case.cost, case.cost_scale, case.nonlinearity)
    return J, [0.5 + t for t in range(case.r)], *update, case.leaky, case.stride, False


def by_op(case: Case, given: dict[str, Any], upstream: Any, needed: Any = (True,) * 5) -> list[Tensor | None]:
    """Poses, activations, and the gradients."""
    ops, options = torch.ops.capsfast, arguments(case)
    poses, activations, state = ops.em_routing(*given.values(), *options, True)
    gradients = ops.em_routing_backward(*upstream, *given.values(), state, *options, list(needed))
    return [poses, activations, *gradients]


def leaves_of(given: dict[str, Any]) -> list[Tensor | None]:
    return [None if given[name] is None else given[name].clone().requires_grad_() for name in NAMES]


def mean_at_equal_coupling(case: Case, given: dict[str, Any]) -> Tensor:
    """By the kernels of a pass, while :meth:`Votes.origin` may take a shared weight out of the pass."""
    few = {name: given[name] for name in ("u", "weight", "activation", "mask")}
    for name, value in few.items():
        if value is not None and not (name == "weight" and case.kind == "shared"):
            few[name] = value[:: case.stride] if name == "weight" else value[:, :: case.stride]
    u, weight, activation, mask = few.values()
    parameters = (None, None, None, None, None, activation, None, mask, given["out_mask"])
    options = (arguments(case)[0], "out", False, False, False, False, False)
    mass, first, *_ = torch.ops.capsfast.routing_pass(u, weight, *parameters, *options)
    center: Tensor = first * inverse(mass).unsqueeze(2)
    return center


def passed(case: Case, given: dict[str, Any], leaves: list[Tensor | None]) -> list[Tensor]:
    """Poses and activations by passes and updates."""
    u, weight, activation, beta_a, beta_u = leaves
    assert u is not None
    made: tuple[Tensor, Tensor] = (u, GIVEN if weight is None else weight)
    if case.poses > 1:
        made = (u.unflatten(2, (case.poses, -1)), made[1].transpose(2, 3))
    masks = {name: given[name] for name in ("mask", "out_mask")}
    votes = PassVotes("test", *made, J=case.sizes[2], **masks, backend="cpp")
    with torch.no_grad():
        center = votes.samples("center", mean_at_equal_coupling(case, given))
    assert center is not None
    activation = votes.samples("activation", activation)
    _, temperatures, *update, leaky, _, _ = arguments(case)
    precision: Tensor | None = None
    found: Tensor | None = None
    last = torch.zeros_like(center) if case.momentum else None
    for t, temperature in enumerate(temperatures):
        mass, first, second, *_ = votes.moments(
            center=center, precision=precision, prior=found, activation=activation, second=True, leaky=leaky
        )
        options = EMOptions(*update, temperature, t + 1 == case.r)  # type: ignore[call-arg]
        step: Any = (mass, first, second, center, beta_a, beta_u, last, votes.out_mask, options, "cpp")
        center, precision, found = em_update.call(*step)
        last = center if case.momentum else None
    assert found is not None
    return [votes.restore(center), votes.restore(found)]


def by_passes(case: Case, given: dict[str, Any], upstream: Any) -> list[Tensor | None]:
    leaves = leaves_of(given)
    results = passed(case, given, leaves)
    used = [n for n, gradient in enumerate(upstream) if gradient is not None]
    needing = [leaf for leaf in leaves if leaf is not None]
    found = torch.autograd.grad(
        [results[n] for n in used], needing, [upstream[n] for n in used], materialize_grads=True
    )
    gradients = iter(found)
    return [*(r.detach() for r in results), *(None if v is None else next(gradients) for v in leaves)]


def gradients_of_results(case: Case) -> list[Tensor | None]:
    torch.manual_seed(1)
    B, _, J, D, K = case.sizes
    places, dtype = (K,) if case.kind == "places" else (), f64 if case.dtype == f64 else f32
    return [torch.randn(B, J, D, *places, dtype=dtype), torch.randn(B, J, *places, dtype=dtype)]


def check(case: Case, found: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    """All numbers are equal to the bit, except du and dW of a small batch and dW of tiles.

    There the op adds up gradients of votes, or products, over iterations; the path of passes adds up du and dW.
    """
    for name, got, want in zip(("poses", "activations", *NAMES), found, wanted, strict=True):
        assert got is not None
        if want is None:
            assert got.shape == (0,)
        elif name in ("u", "weight") and case.kind in ("weight", "shared"):
            tolerance = {f32: 1e-6, f64: 2e-15, bf16: 2e-2}[case.dtype]
            size = float(want.abs().max()) if want.numel() else 0.0
            torch.testing.assert_close(got, want, rtol=0, atol=tolerance * size, msg=f"d{name}: {case}")
        else:
            assert got.dtype == want.dtype and torch.equal(got, want), f"{name}: {case}"


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", EMPTY + PARTS + OTHERS + OPTIONS + KINDS, ids=str)
def test_results_and_gradients_are_those_of_passes(case: Case) -> None:
    given, upstream = problem(case), gradients_of_results(case)
    found = by_op(case, given, upstream)
    check(case, found, by_passes(case, given, upstream))
    assert case in EMPTY or all(value is not None and (not value.numel() or value.any()) for value in found)


@pytest.mark.parametrize(
    "case", [Case(), Case((20, 9, 3, 4, 2), leaky=True), Case(kind="places", momentum=0.1)], ids=str
)
def test_gradients_of_one_result_for_some_arguments(case: Case) -> None:
    given = problem(case)
    for upstream in ([None, gradients_of_results(case)[1]], [gradients_of_results(case)[0], None]):
        wanted = by_passes(case, given, upstream)
        found = by_op(case, given, upstream)
        check(case, found, wanted)
        for needed in itertools.product((True, False), repeat=5):
            some = by_op(case, given, upstream, needed)[2:]
            for wish, got, want in zip(needed, some, found[2:], strict=True):
                assert got is not None and want is not None
                assert torch.equal(got, want) if wish else got.shape == (0,)
    zeros = by_op(case, given, [None, None])[2:]
    assert all(gradient is not None and not gradient.any() for gradient in zeros)


@pytest.mark.parametrize("kind", ["weight", "given", "places"])
def test_strides_change_no_bit(kind: str) -> None:
    case = Case((18, 12, 4, 6, 3), kind, masks=True, momentum=0.1)
    given, upstream = problem(case), gradients_of_results(case)

    def turned(value: Tensor | None) -> Tensor | None:
        return value if value is None else value.transpose(0, -1).contiguous().transpose(0, -1)

    laid = {name: turned(value) for name, value in given.items()}
    found, wanted = by_op(case, laid, [*map(turned, upstream)]), by_op(case, given, upstream)
    assert all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True))  # type: ignore[arg-type]


def test_arguments_that_do_not_fit_are_refused() -> None:
    case = Case()
    given, options = problem(case), arguments(case)
    ops = torch.ops.capsfast

    def refused(text: str, options: tuple[Any, ...] = options, **other: Any) -> None:
        with pytest.raises(RuntimeError, match=f"capsfast: .*{text}"):
            ops.em_routing(*{**given, **other}.values(), *options, True)

    refused("activation has a shape", activation=torch.rand(3, 41))
    refused("beta_a and beta_u has a shape", beta_a=torch.rand(4))
    refused("beta_a and beta_u must have the dtype", beta_u=torch.rand(5, dtype=f64))
    refused("out_mask must be bool", out_mask=torch.ones(3, 5))
    refused("J must equal", weight=torch.randn(40, 1, 6, 4), options=(5, *options[1:]))
    refused("inverse_temperatures must not be empty", options=(None, [], *options[2:]))
    refused("stride must be at least 1", options=(*options[:9], 0, False))
    refused("cost must not be", options=(*options[:5], "none", *options[6:]))
    *_, state = ops.em_routing(*given.values(), *options, True)
    for wrong, text in ((state[1:], "state has a shape"), (state.double(), "state must have the dtype")):
        with pytest.raises(RuntimeError, match=f"capsfast: {text}"):
            ops.em_routing_backward(None, None, *given.values(), wrong, *options, [True] * 5)
    with pytest.raises(RuntimeError, match="needed must have 5"):
        ops.em_routing_backward(None, None, *given.values(), state, *options, [True] * 4)
    with pytest.raises(RuntimeError, match="dposes has a shape"):
        ops.em_routing_backward(state, None, *given.values(), state, *options, [True] * 5)
