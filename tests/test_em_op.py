"""The CPU kernels of EM routing as one op, against its passes and updates: the same numbers, nearly all to the bit."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from capsfast import native
from capsfast.arguments import GIVEN
from capsfast.nn.routing.votes import PassVotes
from capsfast.ops import em_update
from capsfast.options import EMOptions
from capsfast.reference.em_update import inverse

pytestmark = pytest.mark.skipif(native.extension is None, reason=native.why_absent)
f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16


class Case(NamedTuple):
    """sizes: B, I, J, D, K. poses: of an input capsule. kind: what makes the votes."""

    sizes: tuple[int, int, int, int, int] = (3, 40, 5, 6, 4)
    kind: str = "weight"  # shared: one row for all input capsules; given; one: a vote for all output capsules; places
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


MORE = {
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
EMPTY = [
    Case(sizes, kind)
    for sizes in ((0, 4, 3, 2, 2), (2, 0, 3, 2, 2), (2, 4, 0, 2, 2), (2, 4, 3, 0, 2))
    for kind in ("weight", "shared", "given")
]
NAMES = "u", "weight", "activation", "beta_a", "beta_u"
S = 3  # positions


def problem(case: Case) -> dict[str, Any]:
    """The tensors of a call."""
    torch.manual_seed(0)
    (B, I, J, D, K), P = case.sizes, case.poses
    places = (S,) if case.kind == "places" else ()
    weight: Tensor | None = None
    if case.kind in ("weight", "shared"):
        u, weight = torch.randn(B, I, P * K), torch.randn(1 if case.kind == "shared" else I, J, D // P, K)
    else:
        u = torch.randn(B, I, 1 if case.kind == "one" else J, D, *places)
    wide = f64 if case.dtype == f64 else f32
    activation, mask, out_mask = torch.rand(B, I, *places), torch.rand(B, I, *places), torch.rand(B, J, *places)
    if mask.numel():
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
    poses, activations, state = ops.em_routing(*given.values(), *options)
    gradients = ops.em_routing_backward(*upstream, *given.values(), state, *options, list(needed))
    return [poses, activations, *gradients]


def by_passes(case: Case, given: dict[str, Any], upstream: Any) -> list[Tensor | None]:
    leaves = {name: None if given[name] is None else given[name].clone().requires_grad_() for name in NAMES}
    u, weight, activation, beta_a, beta_u = leaves.values()
    if weight is None:
        made = (u, GIVEN)
    elif case.poses > 1:
        made = (u.unflatten(2, (case.poses, -1)), weight.transpose(2, 3))
    else:
        made = (u, weight)
    masks = {name: given[name] for name in ("mask", "out_mask")}
    votes = PassVotes("test", *made, J=case.sizes[2], **masks, backend="cpp")
    activation = votes.samples("activation", activation)
    with torch.no_grad():
        found = votes._some(case.stride, activation)
        center = found.first * inverse(found.mass)[..., None]
    J, temperatures, *update, leaky, stride, tf32 = arguments(case)
    last = torch.zeros_like(center) if case.momentum else None
    precision = found = None
    for t, temperature in enumerate(temperatures):
        mass, first, second, *_ = votes.moments(
            center=center, precision=precision, prior=found, activation=activation, second=True, leaky=leaky
        )
        options = EMOptions(*update, temperature, t + 1 == case.r)
        center, precision, found = em_update.call(
            mass, first, second, center, beta_a, beta_u, last, votes.out_mask, options, "cpp"
        )
        last = center if case.momentum else None
    results = [votes.restore(center), votes.restore(found)]
    some = [(result, gradient) for result, gradient in zip(results, upstream, strict=True) if gradient is not None]
    needing = [leaf for leaf in leaves.values() if leaf is not None]
    used, given_of = zip(*some, strict=True)
    gradients = iter(torch.autograd.grad(used, needing, given_of, materialize_grads=True))
    return [*(r.detach() for r in results), *(None if v is None else next(gradients) for v in leaves.values())]


def gradients_of_results(case: Case, which: str = "both") -> list[Tensor | None]:
    torch.manual_seed(1)
    B, _, J, D, _ = case.sizes
    places, dtype = (S,) if case.kind == "places" else (), f64 if case.dtype == f64 else f32
    dposes, dactivations = torch.randn(B, J, D, *places, dtype=dtype), torch.randn(B, J, *places, dtype=dtype)
    return [None if which == "activations" else dposes, None if which == "poses" else dactivations]


def keeps_votes(case: Case) -> bool:
    """Whether the op may sum gradients of votes over iterations, where passes sum those of u and weight."""
    return case.kind in ("weight", "shared")


def check(case: Case, which: str = "both") -> None:
    given, upstream = problem(case), gradients_of_results(case, which)
    found, wanted = by_op(case, given, upstream), by_passes(case, given, upstream)
    for name, got, want in zip(("poses", "activations", *NAMES), found, wanted, strict=True):
        if want is None:
            assert got is not None and got.shape == (0,)
        elif name in ("u", "weight") and keeps_votes(case):
            tolerance = {f32: 1e-5, f64: 1e-13, bf16: 2e-2}[case.dtype]
            size = float(want.abs().max()) if want.numel() else 0.0
            torch.testing.assert_close(got, want, rtol=0, atol=tolerance * size, msg=f"d{name}: {case}")
        else:
            assert got.dtype == want.dtype and torch.equal(got, want), f"{name}: {case}"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", OPTIONS + KINDS + OTHERS + EMPTY, ids=str)
def test_is_its_passes(case: Case, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(case)
    finally:
        torch.set_num_threads(before)
