"""The op of what EM routing does between two passes, against its definition."""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import capsfast
from capsfast import toolchain
from capsfast.nn import EMRouting, Votes
from capsfast.nn.couplings import RecordedVotes
from capsfast.nn.routing.votes import ProductVotes
from capsfast.ops import em_update
from capsfast.options import EMOptions
from capsfast.reference.em_update import em_update as definition

pytestmark = pytest.mark.skipif(em_update.native.extension is None, reason=em_update.native.why_absent)
f64 = torch.float64
NAMES = ("mass", "first", "second", "center", "beta_a", "beta_u", "last")
PLAIN = EMOptions(0.5, 0.0, False, "variance", 0.0, "sigmoid", 1.5, False)


def problem(B: int, J: int, D: int, component: bool = False, dtype: torch.dtype = f64) -> dict[str, Tensor]:
    """Moments as of votes: no second moment is below what the first one demands."""
    torch.manual_seed(0)
    mass, mean = torch.rand(B, J, dtype=dtype), torch.randn(B, J, D, dtype=dtype)
    second = mass[..., None] * (mean.square() + torch.rand(B, J, D, dtype=dtype))
    center, last = torch.randn(2, B, J, D, dtype=dtype).unbind()
    betas = torch.randn(J, dtype=dtype), torch.randn(*((J, D) if component else (J,)), dtype=dtype)
    return dict(zip(NAMES, (mass, mass[..., None] * mean, second, center, *betas, last), strict=True))


def run(
    by: Any, given: dict[str, Tensor | None], out_mask: Tensor | None, options: EMOptions
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Results, and the gradients of what was given, from random gradients of the results."""
    needing = {name: None if value is None else value.clone().requires_grad_() for name, value in given.items()}
    found = by(*(needing.get(name) for name in NAMES), out_mask, options)
    assert (found[1] is None) == options.final
    found = [value for value in found if value is not None]
    torch.manual_seed(1)
    upstream = [torch.randn(value.shape, dtype=f64).to(value) for value in found]
    if out_mask is not None:  # as a pass has it
        upstream = [each * _like(out_mask, each) for each in upstream]
    inputs = {name: value for name, value in needing.items() if value is not None}
    gradients = torch.autograd.grad(found, list(inputs.values()), upstream, materialize_grads=True)
    return found, dict(zip(inputs, gradients, strict=True))


def _like(out_mask: Tensor, value: Tensor) -> Tensor:
    return out_mask if value.dim() == 2 else out_mask[..., None]


OPTIONS = [
    PLAIN._replace(**dict(zip(("isotropic", "nonlinearity", "cost", "final"), each, strict=True)))
    for each in itertools.product((False, True), ("sigmoid", "softmax"), ("variance", "mass"), (False, True))
]


def special(component: bool, masked: bool, dtype: torch.dtype = f64) -> tuple[dict[str, Tensor], Tensor | None]:
    """A problem with a capsule without mass, and if masked with a sample without capsules."""
    given = problem(5, 4, 9, component, dtype)
    out_mask = torch.tensor([[1, 1, 0, 1]] * 4 + [[0, 0, 0, 0]], dtype=torch.bool) if masked else None
    if out_mask is not None:
        for name in ("mass", "first", "second"):
            given[name] = given[name] * _like(out_mask, given[name])
    given["mass"][1, 0] = given["first"][1, 0] = given["second"][1, 0] = 0
    return given, out_mask


@pytest.mark.parametrize("component", [False, True], ids=["beta", "component_beta"])
@pytest.mark.parametrize("momentum", [0.0, 0.1])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_values_and_gradients_of_every_option(masked: bool, momentum: float, component: bool) -> None:
    given, out_mask = special(component, masked)
    for chosen, scale in itertools.product(OPTIONS, (0.0, 0.7)):
        options = chosen._replace(momentum=momentum, cost_scale=scale)
        for last in (given["last"], None) if momentum else (None,):
            case = given | {"last": last}
            found, wanted = run(em_update.call, case, out_mask, options), run(definition, case, out_mask, options)
            for got, want in zip(found[0], wanted[0], strict=True):
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
            assert found[1].keys() == wanted[1].keys()
            for name, gradient in found[1].items():
                torch.testing.assert_close(gradient, wanted[1][name], rtol=1e-10, atol=1e-11, msg=f"{name} {options}")


# Every option both ways, and beside each other where one has a part in the other.
OF_TRITON = [
    (PLAIN, False, False),
    (PLAIN._replace(final=True), True, True),
    (PLAIN._replace(nonlinearity="softmax"), False, True),
    (PLAIN._replace(nonlinearity="softmax", final=True, momentum=0.1), True, True),
    (PLAIN._replace(isotropic=True, momentum=0.1, cost_scale=0.7), False, False),
    (PLAIN._replace(cost="mass", isotropic=True), True, True),
    (PLAIN._replace(cost="mass", cost_scale=0.7, momentum=0.1, final=True), False, True),
]


@pytest.mark.skipif(bool(toolchain.why_no_triton()), reason=toolchain.why_no_triton())
@pytest.mark.parametrize(("options", "component", "masked"), OF_TRITON)
def test_values_and_gradients_by_triton(options: EMOptions, component: bool, masked: bool) -> None:
    exact, out_mask = special(component, masked)
    from capsfast.triton import em_update as kernels
    from capsfast.triton import replay

    device = "cpu" if toolchain.interpreting() else "cuda"
    by_triton = functools.partial(em_update.call, backend="triton")
    for last in (exact["last"], None) if options.momentum else (None,):
        case = exact | {"last": last}
        given = {name: None if value is None else value.float().to(device) for name, value in case.items()}
        for _ in range(2):  # the second call repeats the launches of the first
            found = run(by_triton, given, None if out_mask is None else out_mask.to(device), options)
        wanted = run(definition, case, out_mask, options)
        for got, want in zip(found[0], wanted[0], strict=True):
            # The logits of masked capsules are the lowest number of their dtype.
            told = want.abs() < 1e30
            assert torch.equal(got.cpu().abs() < 1e30, told)
            torch.testing.assert_close(got.cpu().double()[told], want[told], rtol=2e-5, atol=2e-5)
        for name, gradient in found[1].items():
            bound = 2e-5 * float(wanted[1][name].abs().max())
            torch.testing.assert_close(gradient.cpu().double(), wanted[1][name], rtol=0, atol=bound, msg=name)
    if not replay.why_not():
        own = {function.__wrapped__ for function in (kernels.forward, kernels.backward)}
        recordings = [recording for key, recording in replay._recordings.items() if key[0] in own]
        assert len(recordings) >= 2 and not any(isinstance(recording, str) for recording in recordings)


def test_a_variance_below_zero_is_cut() -> None:
    """Rounding may leave one. It has no gradient, with the floor alone in its place."""
    given = problem(2, 3, 4)
    given["second"][0, 1, 2] = -0.1
    for momentum in (0.0, 0.1):
        options = PLAIN._replace(momentum=momentum)
        case = given | ({} if momentum else {"last": None})
        found, wanted = run(em_update.call, case, None, options), run(definition, case, None, options)
        assert found[0][1].max() == 1 / options.floor
        assert not found[1]["second"][0, 1, 2]
        for name, gradient in found[1].items():
            torch.testing.assert_close(gradient, wanted[1][name], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (1, 1, 1), (40, 11, 17)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, f64], ids=str)
def test_sizes(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The last is shared among threads."""
    given = problem(*sizes, dtype=dtype)
    options = PLAIN._replace(momentum=0.1)
    (poses, precision, score), found = run(em_update.call, given, None, options)
    exact = run(definition, {name: value.double() for name, value in given.items()}, None, options)
    assert poses.dtype == precision.dtype == score.dtype == dtype
    tolerance = 1e-10 if dtype == f64 else 2e-5
    for got, want in zip((poses, precision, score), exact[0], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    for name, gradient in found.items():
        want = exact[1][name]
        bound = tolerance * float(want.abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(gradient.double(), want, rtol=0, atol=10 * bound)


def turned(value: Tensor) -> Tensor:
    """The same numbers in another order in memory."""
    return value.transpose(0, value.dim() - 1).contiguous().transpose(0, value.dim() - 1)


def test_any_strides() -> None:
    given, out_mask = problem(6, 4, 5), torch.rand(6, 4) < 0.7
    options = PLAIN._replace(momentum=0.1)
    strided = {name: turned(value) for name, value in given.items()}
    assert not strided["first"].is_contiguous() and not turned(out_mask).is_contiguous()
    wanted, got = run(em_update.call, given, out_mask, options), run(em_update.call, strided, turned(out_mask), options)
    assert all(torch.equal(*pair) for pair in zip(got[0], wanted[0], strict=True))
    assert all(torch.equal(got[1][name], wanted[1][name]) for name in NAMES)
    inputs = [value.requires_grad_() for value in given.values()]
    poses, *_ = em_update.call(*inputs, out_mask, options)
    upstream = torch.randn(5, 4, 6, dtype=f64).transpose(0, 2)
    pairs = (
        torch.autograd.grad(poses, inputs[:4], each, retain_graph=True) for each in (upstream, upstream.contiguous())
    )
    assert all(torch.equal(*pair) for pair in zip(*pairs, strict=True))


def test_some_gradients() -> None:
    """Of some results, with respect to some arguments: the same as with all the others."""
    given, options = problem(5, 4, 6), PLAIN._replace(momentum=0.1)
    torch.manual_seed(2)
    for _ in range(40):
        needing = [name for name in NAMES if torch.rand(()) < 0.5] or ["mass"]
        results = [n for n in range(3) if torch.rand(()) < 0.6] or [2]
        found = []
        for by in (em_update.call, definition):
            inputs = {name: value.clone().requires_grad_(name in needing) for name, value in given.items()}
            outputs = by(*inputs.values(), None, options)
            total = sum((outputs[n] * (n + 1)).square().sum() for n in results)
            found.append(torch.autograd.grad(total, [inputs[name] for name in needing], materialize_grads=True))
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_repeats_are_bitwise_equal() -> None:
    given = problem(70, 9, 16, dtype=torch.float32)
    options = PLAIN._replace(momentum=0.1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, *others = (run(em_update.call, given, None, options) for _ in range(4))
    finally:
        torch.set_num_threads(before)
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(first[0], other[0], strict=True))
        assert all(torch.equal(first[1][name], other[1][name]) for name in NAMES)


@pytest.mark.parametrize("variance", [1e-44, 1e-37, 1e37])
def test_logarithms_of_extreme_variances(variance: float) -> None:
    """Of float32 several are multiplied before there is one logarithm."""
    given = problem(3, 2, 21, dtype=torch.float32) | {"last": None}
    given["mass"].fill_(1), given["first"].zero_(), given["second"].fill_(variance)  # type: ignore[func-returns-value]
    options = PLAIN._replace(floor=variance)
    for got, want in zip(
        run(em_update.call, given, None, options)[0], definition(*given.values(), None, options), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("nonlinearity", ["sigmoid", "softmax"])
def test_what_is_no_number_stays_none(nonlinearity: str) -> None:
    for name in ("mass", "first", "second", "center"):
        given = problem(3, 2, 4) | {"last": None}
        given[name][1, 0].fill_(float("nan"))
        options = PLAIN._replace(nonlinearity=nonlinearity)
        with torch.no_grad():
            found = em_update.call(*given.values(), None, options)
            wanted = definition(*given.values(), None, options)
        for got, want in zip(found, wanted, strict=True):
            assert got is not None and want is not None
            # Without mass that is a number there is none, and the capsule has its center.
            assert torch.equal(got[[0, 2]].isnan(), want[[0, 2]].isnan()) and not got[[0, 2]].isnan().any()
            assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.slow
def test_who_has_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager calls of the CPU. Programs, transforms, forward mode and the reference have the definition."""
    calls: list[None] = []
    real = em_update._ops["cpp"]
    monkeypatch.setitem(em_update._ops, "cpp", lambda *args: calls.append(None) or real(*args))
    torch.manual_seed(0)
    routing = EMRouting(6, 3, 4, 5, dtype=f64)
    u, weight = torch.randn(2, 6, 4, dtype=f64), torch.randn(6, 3, 5, 4, dtype=f64)

    def count(function: Any) -> int:
        calls.clear()
        function()
        return len(calls)

    assert count(lambda: routing((u, weight))) == 3
    with torch.autocast("cpu"):
        assert count(lambda: routing((u, weight))) == 3
    with capsfast.use_backend("reference"):
        assert count(lambda: routing((u, weight))) == 0
    compiled = torch.compile(routing, fullgraph=True, backend="aot_eager")
    assert count(lambda: compiled((u, weight))) == 0
    torch.testing.assert_close(compiled((u, weight)), routing((u, weight)))
    assert count(lambda: torch.func.vmap(lambda x: routing((x, weight)).poses)(u[None])) == 0
    assert count(lambda: torch.func.grad(lambda x: routing((x, weight)).poses.sum())(u)) == 0
    by_definition = EMRouting(6, 3, 4, 5, dtype=f64, backend="reference")
    assert count(lambda: by_definition((u, weight))) == 0
    assert torch.autograd.gradgradcheck(
        lambda x: by_definition((x, weight)).poses, u[:1, :2].repeat(1, 3, 1).requires_grad_()
    )


class OwnVotes(Votes):
    """A user's own, whose moments are bfloat16, and whose samples share a mask."""

    B, I, J, D, dtype, device = 2, 6, 3, 5, torch.bfloat16, torch.device("cpu")
    out_mask = torch.tensor([[True, True, False]])

    def moments(self, **arguments: Any) -> capsfast.Moments:
        torch.manual_seed(0)
        mass = torch.rand(2, 3, dtype=torch.bfloat16)
        return capsfast.Moments(mass, torch.randn(2, 3, 5).bfloat16(), 9 + torch.rand(2, 3, 5).bfloat16())


def test_votes_say_who_serves_what_lies_between_their_passes() -> None:
    torch.manual_seed(0)
    routing = EMRouting(6, 3, 4, 5, dtype=f64)
    u, weight = torch.randn(2, 6, 4, dtype=f64), torch.randn(6, 3, 5, 4, dtype=f64)
    votes = ProductVotes("test", u, weight, backend="reference")
    assert ProductVotes("test", u, weight).backend is None and RecordedVotes(votes).backend == "reference"
    leaf = torch.randn(3, dtype=f64, requires_grad=True)

    def poses(beta: Tensor, votes: Votes) -> Tensor:
        return torch.func.functional_call(routing, {"beta_a": beta}, (votes,)).activations

    assert torch.autograd.gradgradcheck(lambda beta: poses(beta, votes), leaf)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf.detach(), torch.ones(3, dtype=f64))
        assert forward_ad.unpack_dual(poses(dual, votes)).tangent.any()
    found = EMRouting(6, 3, 4, 5)(OwnVotes())
    assert found.poses.dtype == torch.bfloat16 and found.poses.isfinite().all() and not found.activations[:, 2].any()


def test_moments_of_a_users_own_have_the_definition() -> None:
    """What the kernels do not take."""
    given = problem(2, 3, 5)
    shared = torch.tensor([[True, True, False]])
    low = {name: value.bfloat16() for name, value in given.items()}
    for case, out_mask in ((low, None), (given | {"center": given["center"].float()}, None), (given, shared)):
        options = PLAIN._replace(nonlinearity="softmax")
        for got, want in zip(
            em_update.call(*case.values(), out_mask, options),
            definition(*case.values(), out_mask, options),
            strict=True,
        ):
            assert got is not None and want is not None and torch.equal(got, want)


def test_an_autocast_leaves_it_its_dtype() -> None:
    given = problem(4, 3, 5, dtype=torch.float32) | {"last": None}
    with torch.no_grad():
        plain = em_update.call(*given.values(), None, PLAIN)
        with torch.autocast("cpu"):
            cast = em_update.call(*given.values(), None, PLAIN)
    assert all(torch.equal(got, want) for got, want in zip(cast, plain, strict=True))


def test_a_parameter_of_another_dtype() -> None:
    """Under .half() of what is around it, moments are float32."""
    given = problem(4, 3, 5, dtype=torch.float32) | {"last": None}
    given["beta_a"], given["beta_u"] = given["beta_a"].bfloat16(), given["beta_u"].bfloat16()
    found, gradients = run(em_update.call, given, None, PLAIN)
    assert all(each.dtype == torch.float32 for each in found)
    assert gradients["beta_a"].dtype == gradients["beta_u"].dtype == torch.bfloat16


def test_schema_and_opcheck() -> None:
    contract = em_update.CONTRACT
    for name, schema in zip((contract.name, f"{contract.name}_backward"), contract.schemas(""), strict=True):
        op = getattr(torch.ops.capsfast, name).default
        assert str(op._schema) == str(torch._C.parse_schema(f"capsfast::{schema}"))
        assert not op._defined_in_python
    given = problem(3, 4, 5)
    out_mask = torch.rand(3, 4) < 0.7
    for options, last in itertools.product((PLAIN._replace(momentum=0.1), PLAIN._replace(final=True)), (True, False)):
        tensors = [given[name] if name != "last" or last else None for name in NAMES]
        rest = (None, out_mask, *options)
        torch.library.opcheck(torch.ops.capsfast.em_update.default, (*tensors, *rest))
        needing = [None if each is None else each.clone().requires_grad_() for each in tensors]
        torch.library.opcheck(torch.ops.capsfast.em_update.default, (*needing, *rest))
        upstream = (torch.randn(3, 4, 5, dtype=f64), None if options.final else torch.randn(3, 4, 5, dtype=f64), None)
        for needed in (True, False):
            torch.library.opcheck(
                torch.ops.capsfast.em_update_backward.default, (*upstream, *tensors, *rest, *(needed,) * 7)
            )


def test_arguments_that_do_not_fit_are_refused() -> None:
    given = list(problem(3, 4, 5).values())
    op = torch.ops.capsfast.em_update
    for n, wrong in (
        (0, given[0][:2]),
        (1, given[1][:, :3]),
        (4, given[4][:3]),
        (5, given[5][:2]),
        (2, given[2].float()),
    ):
        arguments = [*given[:n], wrong, *given[n + 1 :]]
        with pytest.raises(RuntimeError, match="capsfast: "):
            op(*arguments, None, None, *PLAIN)
    with pytest.raises(RuntimeError, match="cost must be"):
        op(*given, None, None, *PLAIN._replace(cost="none"))
    x = given[0].clone().requires_grad_()
    score = em_update.call(x, *given[1:], None, PLAIN)[2]
    (first,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="EMRouting: the fused backends have no second derivative"):
        first.sum().backward()
