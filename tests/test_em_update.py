"""The op for the step of EM routing between two passes, against its definition in float64."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import capsfast
from capsfast.calls.options import EMOptions
from capsfast.environment import native, toolchain
from capsfast.nn import EMRouting
from capsfast.nn.couplings import RecordedVotes
from capsfast.nn.routing.votes import PassVotes
from capsfast.ops import em_update

pytestmark = pytest.mark.skipif(native.extension is None, reason=native.why_absent)
f32, f64 = torch.float32, torch.float64
NAMES = ("mass", "first", "second", "center", "beta_a", "beta_u", "last", "poses", "precision", "score")
PLAIN = EMOptions(0.5, 0.0, False, "variance", 0.0, "sigmoid", 1.5, False)
HELD = PLAIN._replace(momentum=0.1)
MORE = {"momentum": 0.1, "isotropic": True, "cost": "mass", "cost_scale": 0.7, "nonlinearity": "softmax", "final": True}
EVERY = [PLAIN._replace(**dict(some)) for n in range(7) for some in itertools.combinations(MORE.items(), n)]
By = tuple[str, str, torch.dtype]
Given = list[Tensor | None]
CPP = ("cpp", "cpu", f64), ("cpp", "cpu", f32)
skip = pytest.mark.skipif(bool(toolchain.why_no_triton()), reason=toolchain.why_no_triton())
triton = pytest.param(("triton", "cpu" if toolchain.interpreting() else "cuda", f32), marks=skip)
on_every_backend = pytest.mark.parametrize("by", [*CPP, triton], ids=lambda by: f"{by[0]}-{by[2]}")
u, weight = torch.randn(2, 6, 4, dtype=f64), torch.randn(6, 3, 5, 4, dtype=f64)


def problem(by: By, sizes: tuple[int, ...], last: float = 0, masked: bool = False) -> tuple[Given, Any]:
    """The tensors and out_mask. In large enough problems one capsule has no mass, and one variance is negative, as by
    rounding.

    masked: some capsules are absent, in the last sample all.
    """
    torch.manual_seed(0)
    mask, mass = torch.rand(2, *sizes[:2], dtype=f64)
    first, second, center, before = torch.randn(4, *sizes, dtype=f64)
    second = mass[..., None] * (first.square() + second.square())
    if mass.numel() > 2:
        mask[:2, :2], mask[-1] = 0, 1
        mass[1, 0] = second[1, 0] = 0
        second[0, 1, 0] = -100
    out_mask = mask < 0.7 if masked else torch.ones_like(mask, dtype=torch.bool)
    mass, second, betas = mass * out_mask, second * out_mask[..., None], torch.randn(2, sizes[1], dtype=f64)
    betas[1] /= max(sizes[2], 1)  # the cost has it for each component
    tensors = (mass, mass[..., None] * first, second, center, *betas, before if last else None)
    given = [None if value is None else value.to(*by[1:]) for value in tensors]
    return given, out_mask.to(by[1]) if masked else None


def turned(value: Tensor) -> Tensor:
    """The same numbers in another order in memory."""
    return value.transpose(0, -1).contiguous().transpose(0, -1)


def run(
    backend: str, given: Given, out_mask: Any, options: EMOptions, wanted: Any = NAMES, laid: Any = Tensor.clone
) -> dict[str, Tensor]:
    """The results, and the gradients of the wanted arguments from random gradients of the wanted results."""
    inputs = [v if v is None else laid(v).requires_grad_(n in wanted) for n, v in zip(NAMES, given, strict=False)]
    found = em_update.call(*inputs, None if out_mask is None else laid(out_mask), options, backend=backend)
    assert (found[1] is None) == options.final
    results = {name: value for name, value in zip(NAMES[7:], found, strict=True) if value is not None}
    torch.manual_seed(1)
    upstream = {name: laid(torch.randn(value.shape, dtype=f64).to(value)) for name, value in results.items()}
    some = [name for name in results if name in wanted]
    needing = {f"d{n}": v for n, v in zip(NAMES, inputs, strict=False) if v is not None and n in wanted}
    of_some = [[each[name] for name in some] for each in (results, upstream)]
    gradients = torch.autograd.grad(of_some[0], list(needing.values()), of_some[1], materialize_grads=True)
    return {name: v.detach() for name, v in results.items()} | dict(zip(needing, gradients, strict=True))


def check(by: By, given: Given, out_mask: Any, options: EMOptions, *wanted: Any) -> dict[str, Tensor]:
    """Compares a backend with the definition in float64. Returns the results of the backend."""
    assert not given[1].numel() or em_update._chosen(given[:4], out_mask, by[0]) == by[0]
    found = run(by[0], given, out_mask, options, *wanted)
    exact = run("reference", [None if v is None else v.double() for v in given], out_mask, options, *wanted)
    assert found.keys() == exact.keys() and all(value.dtype == by[2] for value in found.values())
    for name, want in exact.items():
        got, told = found[name].double(), want.abs() < 1e30  # a masked score holds the lowest number of its dtype
        size = float(want.abs().max()) if want.numel() else 0.0
        bounds = [(1e-12, 1e-12), (2e-5, 2e-5), (1e-10, 1e-11), (0.0, 2e-5 * size)]
        rtol, atol = bounds[2 * name.startswith("d") + (by[2] == f32)]
        assert torch.equal(got.abs() < 1e30, told)
        torch.testing.assert_close(got[told], want[told], rtol=rtol, atol=atol, msg=f"{name} {options}")
    return found


@on_every_backend
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_values_and_gradients_of_every_option(by: By, masked: bool) -> None:
    # Triton is interpreted, so only no option, one option, all but one, all.
    for options in EVERY if by in CPP else EVERY[:7] + EVERY[-7:]:
        found = check(by, *problem(by, (5, 4, 9), options.momentum, masked), options)
        # The moments have no gradient without mass, but they have one if the variance was cut at 0.
        assert not found["dfirst"][1, 0].any() and (masked or options.cost == "mass" or found["dsecond"][0, 1, 0])


@on_every_backend
@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (1, 1, 1), (40, 11, 17)], ids=str)
def test_sizes_and_some_gradients(by: By, sizes: tuple[int, int, int]) -> None:
    """The last problem is shared among threads. Any results may have gradients for any arguments."""
    check(by, *problem(by, sizes, last=1), HELD)
    for seed in range(10 if by in CPP else 2):
        torch.manual_seed(seed)
        wanted = [name for name in NAMES if torch.rand(()) < 0.5] + ["mass", NAMES[7 + seed % 3]]
        check(by, *problem(by, sizes, last=1), HELD, wanted)


@on_every_backend
def test_repeats_and_strides_give_the_same_bits(by: By) -> None:
    case = problem(by, (70, 9, 16) if by in CPP else (5, 4, 9), last=1, masked=True)
    # The second call of a signature runs the plan of the first one.
    found = [run(by[0], *case, HELD, laid=laid) for laid in (Tensor.clone, Tensor.clone, turned, turned)]
    assert all(torch.equal(other[name], value) for other in found for name, value in found[0].items())


@pytest.mark.parametrize("variance", [1e-44, 1e-37, 1e37])
def test_logarithms_of_extreme_variances(variance: float) -> None:
    """In float32 several variances are multiplied before one logarithm."""
    given, _ = problem(CPP[1], (3, 2, 21))
    given[:3] = torch.ones(3, 2), torch.zeros(3, 2, 21), torch.full((3, 2, 21), variance)
    got, want = (em_update.call(*given, None, PLAIN._replace(floor=variance), name) for name in ("cpp", "reference"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


@on_every_backend
@pytest.mark.parametrize("nonlinearity", ["sigmoid", "softmax"])
def test_what_is_no_number_stays_none(by: By, nonlinearity: str) -> None:
    for n in range(4):
        given, _ = problem(by, (3, 2, 4))
        given[n][1, 1].fill_(float("nan"))
        options = PLAIN._replace(nonlinearity=nonlinearity)
        found, exact = (em_update.call(*given, None, options, name) for name in (by[0], "reference"))
        for got, want in zip(found, exact, strict=True):
            assert torch.equal(got.isnan(), want.isnan()) and not got[[0, 2]].isnan().any()


@pytest.mark.slow
def test_who_has_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager calls have the op, between single passes. Programs, transforms and the reference run the definition."""
    calls: list[None] = []
    real = em_update.OP.kernels["cpp"]
    monkeypatch.setitem(em_update.OP.kernels, "cpp", lambda *args: calls.append(None) or real(*args))
    routing, by_definition = (EMRouting(6, 3, 4, 5, dtype=f64, backend=name) for name in (None, "reference"))
    compiled = torch.compile(routing, fullgraph=True, backend="aot_eager")

    def by_single_passes() -> None:
        routing(RecordedVotes(PassVotes("test", u, weight)))

    def by_choice() -> None:
        with capsfast.use_backend("reference"):
            routing((u, weight))

    for count, function in (
        (3, by_single_passes),
        (3, torch.autocast("cpu")(by_single_passes)),
        (0, lambda: routing((u, weight))),
        (0, by_choice),
        (0, lambda: by_definition((u, weight))),
        (0, lambda: compiled((u, weight))),
        (0, lambda: torch.func.vmap(lambda x: routing((x, weight)).poses)(u[None])),
        (0, lambda: torch.func.grad(lambda x: routing((x, weight)).poses.sum())(u)),
    ):
        calls.clear()
        function()
        assert len(calls) == count
    torch.testing.assert_close(compiled((u, weight)), routing((u, weight)))


def test_votes_say_who_serves_what_lies_between_their_passes() -> None:
    routing, votes = EMRouting(6, 3, 4, 5, dtype=f64), PassVotes("test", u, weight, backend="reference")
    assert PassVotes("test", u, weight).backend is None and RecordedVotes(votes).backend == "reference"

    def activations(beta: Tensor) -> Tensor:
        return torch.func.functional_call(routing, {"beta_a": beta}, (votes,)).activations

    leaf = torch.randn(3, dtype=f64, requires_grad=True)
    assert torch.autograd.gradgradcheck(activations, leaf)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf.detach(), torch.ones(3, dtype=f64))
        assert forward_ad.unpack_dual(activations(dual)).tangent.any()


def test_dtypes() -> None:
    """Autocast keeps the dtype of the op. A parameter may have another dtype, after .half() on its module.

    Moments of 16 bits or of two dtypes, and a mask that the samples share, have the definition.
    """
    given, _ = problem(CPP[1], (2, 3, 5))
    by_autocast, plain = (call(*given, None, PLAIN) for call in (torch.autocast("cpu")(em_update.call), em_update.call))
    torch.testing.assert_close(by_autocast, plain, rtol=0, atol=0)
    found = run("cpp", [*given[:4], given[4].bfloat16(), given[5].bfloat16(), None], None, PLAIN)
    assert {name for name, value in found.items() if value.dtype != f32} == {"dbeta_a", "dbeta_u"}
    low = [value if value is None else value.bfloat16() for value in given]
    mixed = [*given[:3], given[3].double(), *given[4:]]
    for case, out_mask in ((low, None), (mixed, None), (given, torch.tensor([[True, True, False]]))):
        got, want = (run(name, case, out_mask, PLAIN._replace(nonlinearity="softmax")) for name in ("cpp", "reference"))
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_opcheck() -> None:
    ops = torch.ops.capsfast
    for options in (HELD, PLAIN._replace(final=True)):
        given, out_mask = problem(CPP[0], (3, 4, 5), options.momentum, masked=True)
        rest = (out_mask, *options)
        torch.library.opcheck(ops.em_update.default, (*given, *rest))
        needing = [None if tensor is None else tensor.clone().requires_grad_() for tensor in given]
        torch.library.opcheck(ops.em_update.default, (*needing, *rest))
        upstream = (given[1], None if options.final else given[1], None)
        for needed in (True, False):
            torch.library.opcheck(ops.em_update_backward.default, (*upstream, *given, *rest, [needed] * 7))


def test_arguments_that_do_not_fit_are_refused() -> None:
    given, _ = problem(CPP[0], (3, 4, 5))
    wrong = {0: given[0][:2], 1: given[1][:, :3], 2: given[2].float(), 4: given[4][:3], 5: given[5][:2]}
    for n, value in wrong.items():
        with pytest.raises(RuntimeError, match="capsfast: "):
            torch.ops.capsfast.em_update(*given[:n], value, *given[n + 1 :], None, *PLAIN)
    with pytest.raises(RuntimeError, match="cost must not be"):
        torch.ops.capsfast.em_update(*given, None, *PLAIN._replace(cost="none"))
    x = given[0].requires_grad_()
    score = em_update.call(*given, None, PLAIN)[2]
    (first,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="EMRouting: the fused backends have no second derivative"):
        first.sum().backward()
