"""The op of what EM routing does between two passes, against its definition in float64."""

import itertools
from collections.abc import Sequence
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

pytestmark = pytest.mark.skipif(em_update.native.extension is None, reason=em_update.native.why_absent)
f32, f64 = torch.float32, torch.float64
ARGUMENTS = ("mass", "first", "second", "center", "beta_a", "beta_u", "last")
RESULTS = ("poses", "precision", "score")
PLAIN = EMOptions(0.5, 0.0, False, "variance", 0.0, "sigmoid", 1.5, False)
HELD = PLAIN._replace(momentum=0.1)
EVERY = [
    EMOptions(0.5, momentum, isotropic, cost, scale, nonlinearity, 1.5, final)
    for isotropic, cost, nonlinearity, final, momentum, scale in itertools.product(
        (False, True), ("variance", "mass"), ("sigmoid", "softmax"), (False, True), (0.0, 0.1), (0.0, 0.7)
    )
]
By = tuple[str, str, torch.dtype]
Given = list[Tensor | None]
CPP = ("cpp", "cpu", f64), ("cpp", "cpu", f32)
skip = pytest.mark.skipif(bool(toolchain.why_no_triton()), reason=toolchain.why_no_triton())
triton = pytest.param(("triton", "cpu" if toolchain.interpreting() else "cuda", f32), marks=skip)
on_every_backend = pytest.mark.parametrize("by", [*CPP, triton], ids=lambda by: f"{by[0]}-{by[2]}")
u, weight = torch.randn(2, 6, 4, dtype=f64), torch.randn(6, 3, 5, 4, dtype=f64)


def problem(by: By, sizes: Sequence[int], last: float = 0, masked: bool = False) -> tuple[Given, Any]:
    """The tensors and out_mask. Where there is room a capsule has no mass, and rounding made a variance negative.

    masked: some capsules are absent, and in the last sample all of them.
    """
    torch.manual_seed(0)
    (B, J, D), (_, device, dtype) = sizes, by
    mass, first, center, before = torch.rand(B, J, dtype=f64), *torch.randn(3, B, J, D, dtype=f64)
    second = mass[..., None] * (first.square() + torch.rand(B, J, D, dtype=f64))
    out_mask = torch.rand(B, J) < 0.7 if masked else torch.ones(B, J, dtype=torch.bool)
    if B > 1 and J > 1:
        out_mask[:2, :2] = True
        mass[1, 0] = second[1, 0] = 0
        second[0, 1, 0] = -100
        out_mask[-1] &= not masked
    mass, second = mass * out_mask, second * out_mask[..., None]
    tensors = (mass, mass[..., None] * first, second, center, *torch.randn(2, J, dtype=f64), before if last else None)
    given = [None if value is None else value.to(device, dtype) for value in tensors]
    return given, out_mask.to(device) if masked else None


def turned(value: Tensor) -> Tensor:
    """The same numbers in another order in memory."""
    return value.transpose(0, value.dim() - 1).contiguous().transpose(0, value.dim() - 1)


def run(
    backend: str, given: Given, out_mask: Any, options: EMOptions, wanted: Any = ARGUMENTS + RESULTS, laid: Any = None
) -> dict[str, Tensor]:
    """The results, and the gradients of the wanted arguments from random gradients of the wanted results."""
    laid = laid or Tensor.clone
    inputs = {n: v if v is None else laid(v).requires_grad_(n in wanted) for n, v in zip(ARGUMENTS, given, strict=True)}
    mask = None if out_mask is None else laid(out_mask)
    found = em_update.call(*inputs.values(), mask, options, backend=backend)
    assert (found[1] is None) == options.final
    results = {name: value for name, value in zip(RESULTS, found, strict=True) if value is not None}
    torch.manual_seed(1)
    upstream = {name: laid(torch.randn(value.shape, dtype=f64).to(value)) for name, value in results.items()}
    some = [name for name in results if name in wanted]
    needing = {name: value for name, value in inputs.items() if value is not None and name in wanted}
    gradients = torch.autograd.grad(
        [results[n] for n in some], list(needing.values()), [upstream[n] for n in some], materialize_grads=True
    )
    return {n: v.detach() for n, v in results.items()} | dict(zip((f"d{n}" for n in needing), gradients, strict=True))


def check(by: By, given: Given, out_mask: Any, options: EMOptions, *wanted: Any) -> dict[str, Tensor]:
    """Compares a backend with the definition in float64. Returns what the backend gave."""
    found = run(by[0], given, out_mask, options, *wanted)
    exact = run("reference", [None if v is None else v.double() for v in given], out_mask, options, *wanted)
    assert found.keys() == exact.keys() and all(value.dtype == by[2] for value in found.values())
    for name, want in exact.items():
        got, told = found[name].double(), want.abs() < 1e30  # a masked score holds the lowest number of its dtype
        assert torch.equal(got.abs() < 1e30, told)
        size = float(want.abs().max()) if want.numel() else 0.0
        if name.startswith("d"):
            rtol, atol = (1e-10, 1e-11) if by[2] == f64 else (0.0, 2e-5 * size)
        else:
            rtol, atol = (1e-12, 1e-12) if by[2] == f64 else (2e-5, 2e-5)
        torch.testing.assert_close(got[told], want[told], rtol=rtol, atol=atol, msg=f"{name} {options}")
    return found


@on_every_backend
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_values_and_gradients_of_every_option(by: By, masked: bool) -> None:
    for options in EVERY if by in CPP else EVERY[::7]:  # any two options in all four ways
        found = check(by, *problem(by, (5, 4, 9), options.momentum, masked), options)
        # The moments have no gradient without mass, and none where the variance was cut at 0.
        assert not found["dfirst"][1, 0].any() and not found["dsecond"][0, 1, 0]


@on_every_backend
@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (1, 1, 1), (40, 11, 17)], ids=str)
def test_sizes(by: By, sizes: tuple[int, int, int]) -> None:
    """The last is shared among threads."""
    check(by, *problem(by, sizes, last=1), HELD)


@on_every_backend
def test_some_gradients(by: By) -> None:
    """Of some results, with respect to some arguments: the same as with all the others."""
    for seed in range(40 if by in CPP else 8):
        torch.manual_seed(seed)
        wanted = [name for name in ARGUMENTS + RESULTS if torch.rand(()) < 0.5] + ["mass", RESULTS[seed % 3]]
        check(by, *problem(by, (5, 4, 6), last=1), HELD, wanted)


@on_every_backend
def test_repeats_and_strides_give_the_same_bits(by: By) -> None:
    case = problem(by, (70, 9, 16) if by in CPP else (5, 4, 9), last=1, masked=True)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        # The second call of a signature repeats the launches of the first one.
        found = [run(by[0], *case, HELD, laid=laid) for laid in (Tensor.clone, Tensor.clone, turned, turned)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(other[name], value) for other in found for name, value in found[0].items())
    if by not in CPP:
        from capsfast.triton import em_update as kernels
        from capsfast.triton import replay

        own = {function.__wrapped__ for function in (kernels.forward, kernels.backward)}
        recordings = [recording for key, recording in replay._recordings.items() if key[0] in own]
        assert replay.why_not() or (recordings and not any(isinstance(each, str) for each in recordings))


@pytest.mark.parametrize("variance", [1e-44, 1e-37, 1e37])
def test_logarithms_of_extreme_variances(variance: float) -> None:
    """For float32 several variances are multiplied before a logarithm is taken."""
    given, _ = problem(CPP[1], (3, 2, 21))
    given[:3] = torch.ones(3, 2), torch.zeros(3, 2, 21), torch.full((3, 2, 21), variance)
    pairs = (em_update.call(*given, None, PLAIN._replace(floor=variance), name) for name in ("cpp", "reference"))
    for got, want in zip(*pairs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


@on_every_backend
@pytest.mark.parametrize("nonlinearity", ["sigmoid", "softmax"])
def test_what_is_no_number_stays_none(by: By, nonlinearity: str) -> None:
    for n in range(4):
        given, _ = problem(by, (3, 2, 4))
        given[n][1, 1].fill_(float("nan"))
        options = PLAIN._replace(nonlinearity=nonlinearity)
        for got, want in zip(
            *(em_update.call(*given, None, options, name) for name in (by[0], "reference")), strict=True
        ):
            assert torch.equal(got.isnan(), want.isnan()) and not got[[0, 2]].isnan().any()


@pytest.mark.slow
def test_who_has_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager calls. Programs, transforms and the reference have the definition."""
    calls: list[None] = []
    real = em_update._ops["cpp"]
    monkeypatch.setitem(em_update._ops, "cpp", lambda *args: calls.append(None) or real(*args))
    routing, by_definition = (EMRouting(6, 3, 4, 5, dtype=f64, backend=name) for name in (None, "reference"))
    compiled = torch.compile(routing, fullgraph=True, backend="aot_eager")
    in_autocast = torch.autocast("cpu")(lambda: routing((u, weight)))
    for count, function in (
        (3, lambda: routing((u, weight))),
        (3, in_autocast),
        (0, lambda: by_definition((u, weight))),
        (0, lambda: compiled((u, weight))),
        (0, lambda: torch.func.vmap(lambda x: routing((x, weight)).poses)(u[None])),
        (0, lambda: torch.func.grad(lambda x: routing((x, weight)).poses.sum())(u)),
    ):
        calls.clear()
        function()
        assert len(calls) == count
    torch.testing.assert_close(compiled((u, weight)), routing((u, weight)))


class OwnVotes(Votes):
    """A user's own, whose moments are bfloat16, and whose samples share a mask."""

    B, I, J, D, dtype, device = 2, 6, 3, 5, torch.bfloat16, torch.device("cpu")
    out_mask = torch.tensor([[True, True, False]])

    def moments(self, **arguments: Any) -> capsfast.Moments:
        torch.manual_seed(0)
        mass = torch.rand(2, 3, dtype=torch.bfloat16)
        return capsfast.Moments(mass, torch.randn(2, 3, 5).bfloat16(), 9 + torch.rand(2, 3, 5).bfloat16())


def test_votes_say_who_serves_what_lies_between_their_passes() -> None:
    routing, votes = EMRouting(6, 3, 4, 5, dtype=f64), ProductVotes("test", u, weight, backend="reference")
    assert ProductVotes("test", u, weight).backend is None and RecordedVotes(votes).backend == "reference"

    def activations(beta: Tensor) -> Tensor:
        return torch.func.functional_call(routing, {"beta_a": beta}, (votes,)).activations

    leaf = torch.randn(3, dtype=f64, requires_grad=True)
    assert torch.autograd.gradgradcheck(activations, leaf)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf.detach(), torch.ones(3, dtype=f64))
        assert forward_ad.unpack_dual(activations(dual)).tangent.any()
    found = EMRouting(6, 3, 4, 5, momentum=0.1)(OwnVotes())
    assert found.poses.dtype == torch.bfloat16 and found.poses.isfinite().all() and not found.activations[:, 2].any()


def test_dtypes() -> None:
    """Autocast leaves the op its dtype. A parameter may have another dtype; moments of two have the definition."""
    given, _ = problem(CPP[1], (4, 3, 5))
    with torch.no_grad(), torch.autocast("cpu"):
        cast = em_update.call(*given, None, PLAIN)
    for got, want in zip(cast, em_update.call(*given, None, PLAIN), strict=True):
        assert torch.equal(got, want)
    low = [value.bfloat16() if n in (4, 5) else value for n, value in enumerate(given)]
    found = run("cpp", low, None, PLAIN)
    assert {name for name, value in found.items() if value.dtype != f32} == {"dbeta_a", "dbeta_u"}
    given[3] = given[3].double()
    assert em_update.call(*given, None, PLAIN)[0].dtype == f64


def test_schema_and_opcheck() -> None:
    contract, ops = em_update.CONTRACT, torch.ops.capsfast
    for name, schema in zip((contract.name, f"{contract.name}_backward"), contract.schemas(""), strict=True):
        op = getattr(ops, name).default
        assert str(op._schema) == str(torch._C.parse_schema(f"capsfast::{schema}"))
        assert not op._defined_in_python
    for options in (HELD, PLAIN._replace(final=True)):
        given, out_mask = problem(CPP[0], (3, 4, 5), options.momentum, masked=True)
        rest = (None, out_mask, *options)
        torch.library.opcheck(ops.em_update.default, (*given, *rest))
        needing = [None if each is None else each.clone().requires_grad_() for each in given]
        torch.library.opcheck(ops.em_update.default, (*needing, *rest))
        upstream = (given[1], None if options.final else given[1], None)
        for needed in (True, False):
            torch.library.opcheck(ops.em_update_backward.default, (*upstream, *given, *rest, *(needed,) * 7))


def test_arguments_that_do_not_fit_are_refused() -> None:
    given, _ = problem(CPP[0], (3, 4, 5))
    wrong = {0: given[0][:2], 1: given[1][:, :3], 2: given[2].float(), 4: given[4][:3], 5: given[5][:2]}
    for n, value in wrong.items():
        with pytest.raises(RuntimeError, match="capsfast: "):
            torch.ops.capsfast.em_update(*given[:n], value, *given[n + 1 :], None, None, *PLAIN)
    with pytest.raises(RuntimeError, match="cost must be"):
        torch.ops.capsfast.em_update(*given, None, None, *PLAIN._replace(cost="none"))
    x = given[0].requires_grad_()
    score = em_update.call(*given, None, PLAIN)[2]
    (first,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="EMRouting: the fused backends have no second derivative"):
        first.sum().backward()
