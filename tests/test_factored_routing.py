"""Routing with weights that input capsules share, without votes, against the reference, which forms votes.

test_routing.py and test_routing_edges.py take this op too, where a case shares its weight and that is less work.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import capsfast
from capsfast.calls.arguments import RoutingParameters, unchecked
from capsfast.calls.options import Options
from capsfast.ops import factored_routing

from .support import plain
from .support.accuracy import assert_accurate, check
from .support.backends import named, recorded_ops
from .support.problems import CASES, LAYOUTS, LOADED, LOADED_OUT, STEPPED, Case, Problem, call, laid_out, make, run

pytestmark = pytest.mark.skipif(not capsfast.backends()["cpp"].available, reason="the extension is not built")

CPP = named("cpp")
# Sizes that fill no vector, some vectors, sizes of 1, and more samples than a block has.
SIZES = ((3, 21, 3, 5, 7), (2, 64, 4, 16, 16), (1, 1, 1, 1, 1), (11, 50, 6, 9, 33), (70, 13, 2, 8, 8))
PLAIN = Options().checked("")
LOGITS = Case(logits="IJ", shared=True)
FUSED = "capsfast::factored_routing"


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op serves every call with a shared weight, even if it is more work than votes."""
    monkeypatch.setattr(factored_routing, "_pays", lambda call: True)


def problem(
    shape: tuple[int, ...], case: Case = LOGITS, dtype: torch.dtype = torch.float64, own: bool = False
) -> Problem:
    """own: the weight has a matrix of each output; otherwise one matrix."""
    made = make(shape, replace(case, shared=True), dtype=dtype)
    if not own:
        made.inputs["weight"] = made.inputs["weight"][:, :1]
    return made


def checked(given: Problem) -> None:
    with recorded_ops() as ops:
        check(given, CPP)
    assert FUSED in ops


EVERY_CASE = list(dict.fromkeys(replace(case, shared=True) for case in (*CASES, *STEPPED)))


@pytest.mark.rows(4)
@pytest.mark.parametrize("own", [False, True], ids=["one matrix", "a matrix of each output"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients(size: tuple[int, ...], own: bool, always: None) -> None:
    for case in EVERY_CASE:
        # One matrix says nothing of J.
        case = case if own or case.logits else replace(case, logits="IJ")
        checked(problem(size, case, torch.float64, own))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(9, 50, 4, 16, 16), (6, 40, 3, 10, 20)], ids=str)
def test_other_dtypes(size: tuple[int, ...], dtype: torch.dtype, own: bool, always: None) -> None:
    for case in (LOADED, LOADED_OUT, Case(gradient="last", logits="IJ")):
        checked(problem(size, case, dtype, own))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("gradient", ["full", "last"])
def test_logits_that_do_not_add_up(size: tuple[int, ...], gradient: str) -> None:
    """Logits of the first iteration alone, which dynamic_routing does not serve."""
    case = Case(gradient=gradient, logits="BIJ", bias=True)

    def fused(given: Problem, inputs: dict[str, Tensor], _: str | None, accumulate: bool) -> Any:
        parameters = RoutingParameters(inputs["logits"], inputs["bias"])
        options = case.options._replace(accumulate=accumulate)
        return factored_routing.run(unchecked(inputs["u"], inputs["weight"], parameters, options, size[2]), True)

    def definition(given: Problem, inputs: dict[str, Tensor], _: str | None, accumulate: bool) -> Any:
        votes, start = plain.votes(inputs["u"], inputs["weight"]), inputs["logits"]
        total = torch.zeros_like(start)
        for t in range(3):
            c = plain.couple(start + total if accumulate or t == 0 else total)
            v = plain.squash((c[..., None] * votes).sum(1) + inputs["bias"])
            found = (votes * v[:, None]).sum(-1)
            found = found.detach() if gradient == "last" else found
            total = total + found if accumulate else found
        return v, c

    given = problem(size, case)
    for accumulate in (False, True):
        got, wanted = (run(given, None, function=partial(each, accumulate=accumulate)) for each in (fused, definition))
        for name, value in got.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("ratio", [0, 10, 100])
@pytest.mark.parametrize("kind", ["paper", "unit"])
def test_what_the_matrix_maps_to_nothing_is_not_squared(ratio: float, kind: str, always: None) -> None:
    """An offset of u in the null space of W changes no vote, but W^T W would square its rounding error.

    The error may grow with the offset times the sum of the coupling: W z has this error, a mean of votes has not.
    """
    given = problem((6, 50, 4, 8, 16), replace(LOGITS, squash=kind))
    given.inputs["u"] += ratio * torch.linalg.svd(given.inputs["weight"][0, 0]).Vh[8]
    rounded = given.to(torch.float32)  # the rounding of the offset itself is not an error of the routing
    truth, loose = (run(each, "reference") for each in (rounded.to(torch.float64), rounded))
    for name, value in run(rounded, "cpp").items():
        assert_accurate(name, value, truth[name], loose[name], slack=20)


@pytest.mark.parametrize("own", [False, True])
def test_dynamic_routing_takes_it_where_it_is_less_work(own: bool) -> None:
    def taken(backend: str | None = None, dtype: torch.dtype = torch.float64, **options: Any) -> bool:
        given = problem((4, 30, 3, 6, 6), replace(LOGITS, **options), dtype, own)
        with recorded_ops() as ops:
            call(given, given.inputs, backend)
        return FUSED in ops

    assert taken() and taken("cpp") and taken(dtype=torch.bfloat16)
    assert not taken("reference")
    assert own or not taken(num_iterations=11)  # 63 vectors against 30 input capsules
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert taken(dtype=torch.float32)


def test_what_is_masked_has_no_influence() -> None:
    """Nor has a pair whose logit is -inf."""
    given = problem((5, 30, 3, 6, 6), replace(LOGITS, mask=True), own=True)
    given.masks["mask"][2] = False
    given.inputs["logits"][4] = given.inputs["logits"][5, 1] = -torch.inf
    wanted = run(given, "reference")
    given.inputs["u"].masked_fill_(~given.masks["mask"][..., None], torch.nan)
    for name, value in run(given, "cpp").items():
        torch.testing.assert_close(value, wanted[name], msg=name)
    assert not wanted["v"][2].any()


@pytest.mark.parametrize(("dtype", "mask"), [(torch.float32, False), (torch.float64, True)])
def test_gradients_larger_than_the_cache_are_the_same(dtype: torch.dtype, mask: bool) -> None:
    """A gradient of u of 16 MiB or more is stored past the cache."""
    B, I = 2051, 32 if dtype == torch.float32 else 16
    given = problem((B, I, 2, 64, 64), replace(LOGITS, mask=mask), dtype)
    whole = run(given, "cpp")
    assert whole["du"].nbytes >= 2**24 > whole["du"].nbytes / 2 + 2**16
    cuts = (slice(0, B // 2), slice(B // 2, B))
    one, other = (
        run(given.map(lambda _, value, cut=cut: value[cut] if len(value) == B else value), "cpp") for cut in cuts
    )
    for name, got in whole.items():
        if len(got) == B:
            assert torch.equal(got, torch.cat([one[name], other[name]]))
        else:
            assert (got - one[name] - other[name]).norm() < 1e-5 * got.norm()


@pytest.mark.parametrize("layout", [*LAYOUTS[1:], "not aligned", "expanded"])
def test_poses_are_read_where_they_are(layout: str, always: None) -> None:
    given = problem((9, 20, 2, 8, 16), replace(LOGITS, mask=True))
    u = given.inputs["u"]
    if layout == "expanded":
        given.inputs["u"] = u[:1].expand(9, -1, -1)
    elif layout == "not aligned":
        given.inputs["u"] = torch.cat([u[..., :1], u], 2)[..., 1:]
    else:
        given = laid_out(given, layout)
    checked(given)


@pytest.mark.parametrize("columns", [1, 2])
def test_opcheck(columns: int) -> None:
    given = make((3, 12, 2, 4, 5), replace(LOADED_OUT, shared=True))
    given.inputs["weight"] = given.inputs["weight"][:, :columns]
    tensors = [*given.inputs.values(), *given.masks.values()]
    options = (2, *PLAIN, False)
    op = torch.ops.capsfast.factored_routing.default
    torch.library.opcheck(op, (*tensors, *options, True))
    needing = [tensor.clone().requires_grad_() for tensor in tensors[:4]]
    torch.library.opcheck(op, (*needing, *tensors[4:], *options, False))
    v, c, *saved = op(*tensors, *options, True)
    backward = (torch.ones_like(v), torch.ones_like(c), *tensors, c, *saved, *options, [True] * 4)
    torch.library.opcheck(torch.ops.capsfast.factored_routing_backward.default, backward)


@pytest.mark.parametrize("batch", ["dynamic", "unknown"])
def test_torch_func_and_compile(batch: str) -> None:
    """A compiled call serves batches of any size."""
    given = problem((6, 20, 2, 4, 5))

    def loss(u: Tensor, weight: Tensor) -> Tensor:
        return capsfast.dynamic_routing(u, weight, logits=given.inputs["logits"]).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for B in (6, 4):
        u, weight = (tensor.clone().requires_grad_() for tensor in (given.inputs["u"][:B], given.inputs["weight"]))
        if batch == "dynamic":
            torch._dynamo.mark_dynamic(u, 0)
        else:
            torch._dynamo.decorators.mark_unbacked(u, 0)
        v = capsfast.dynamic_routing(u, weight, logits=given.inputs["logits"], backend="reference")
        wanted = torch.autograd.grad(v.square().sum(), (u, weight))
        torch.testing.assert_close(torch.autograd.grad(compiled(u, weight), (u, weight)), wanted)
        torch.testing.assert_close(torch.func.grad(loss, (0, 1))(u.detach(), weight.detach()), wanted)
