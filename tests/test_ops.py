"""The registered ops below the functions: the what only the backward sees, and opcheck."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from capsfast import native
from capsfast.ops.define import PREFIX

from .support.accuracy import assert_close, relative_l2
from .support.backends import ALL_DTYPES, TABLE, Backend, Shape, named
from .support.passes import EACH_WAY, EVERYTHING, LINEAR, LINEAR_WAYS
from .support.problems import (
    LOADED,
    LOADED_OUT,
    PLAIN,
    Case,
    Op,
    PassCase,
    Problem,
    make,
    registered,
    registered_backward,
    run,
)
from .test_reference import by_definition

pytestmark = [pytest.mark.fused, pytest.mark.kernels, pytest.mark.every_op]

CASES = (
    PLAIN,
    LOADED,
    LOADED_OUT,
    Case(softmax="in", logits="IJ"),
    Case(gradient="last", squash_last=False, coupling=False),
)
# The functions expand tensors without positions. A graph that was traced with many positions may run with one.
POSITIONS = (
    replace(LOADED, out_mask=False, spatial=(5,)),
    replace(EVERYTHING, out_mask=False, prior=False, spatial=(5,)),
    replace(EVERYTHING, out_mask=False, prior=False, spatial=(1,)),
)
OPCHECKED = (*CASES[1:], LINEAR, LINEAR_WAYS[1], *EACH_WAY, *POSITIONS)


def backward_arguments(problem: Problem, backend: Backend) -> list[Any]:
    return registered_backward(problem, backend.op(problem.op)(*registered(problem)))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_backward_gets(backend: Backend, op: Op, case: Case, dtype: torch.dtype) -> None:
    """The weighted sums of every iteration, and for a softmax over the input capsules what normalises it."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # 16-bit inputs are exact in float32, and sums and the steps before them are not rounded to 16 bits.
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    for B in (3,) if backend.emulated else (3, 17):
        problem = op.make(Shape(B, 9, 4, 16, 8), case, dtype, backend.device)
        v, c, s, norm = (out.cpu() for out in backend.op(op.name)(*registered(problem)))
        r = case.num_iterations
        assert (v.shape, v.dtype) == ((B, 4, 16), dtype)
        assert (c.shape, c.dtype) == ((B, 9, 4) if case.coupling else (0,), wide if case.softmax == "in" else dtype)
        assert (s.shape, s.dtype) == ((r, B, 4, 16), wide)
        assert (norm.shape, norm.dtype) == ((2, r, B, 4) if case.softmax == "in" else (0,), wide)
        assert all(out.is_contiguous() for out in (v, c, s, norm))
        alive = problem.masks.get("out_mask", torch.ones(B, 4, dtype=torch.bool)).cpu()
        steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        by_definition(problem.to(torch.float64), steps=steps)
        for t, (scores, wanted) in enumerate(steps):
            assert relative_l2(s[t].double()[alive], wanted[alive]) < tolerance, t
            if case.softmax == "in":
                leak = torch.full_like(scores[:, :1], 0 if case.leaky else -math.inf)
                log_sum = torch.cat([scores, leak], 1).logsumexp(1)
                known = alive & log_sum.isfinite()
                largest, inverse = norm[:, t].double()
                assert relative_l2((largest - inverse.log())[known], log_sum[known]) < tolerance, t


def small(backend: Backend, case: Case | PassCase) -> Shape:
    return Shape(3, 3 if backend.emulated else 9, 4, 3 if case.spatial else 5, 6)


@pytest.mark.parametrize("case", [LOADED, EVERYTHING, *LINEAR_WAYS], ids=str)
def test_backward_fills_only_what_is_needed(backend: Backend, op: Op, case: Case | PassCase) -> None:
    problem = op.make(small(backend, case), case, backend.widest, backend.device)
    all_arguments = backward_arguments(problem, backend)
    backward = backend.op(op.name, backward=True)
    wanted, there = backward(*all_arguments), all_arguments[-1]
    truth, names = run(problem, "reference"), iter(problem.inputs)
    for value, given in zip(wanted, there, strict=True):
        if given:
            assert_close(value, truth[f"d{next(names)}"])
    wishes = range(2 ** len(there)) if len(there) < 6 else [1 << n for n in range(len(there))]
    for wish in wishes:
        needed = [bool(wish >> n & 1) and given for n, given in enumerate(there)]
        got = backward(*all_arguments[:-1], needed)
        for value, want, need in zip(got, wanted, needed, strict=True):
            if need:
                assert_close(value, want, double=1e-11)
            else:
                assert value.shape == (0,)


@pytest.mark.rows(4, triton=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", OPCHECKED, ids=str)
def test_opcheck(backend: Backend, op: Op, case: Case | PassCase, dtype: torch.dtype) -> None:
    problem = op.make(small(backend, case), case, dtype, backend.device)
    problem = problem if dtype == torch.float32 else problem.laid_out("transposed")
    torch.library.opcheck(backend.op(op.name), registered(problem))
    torch.library.opcheck(backend.op(op.name, backward=True), backward_arguments(problem, backend))
    problem.inputs = {name: value.requires_grad_() for name, value in problem.inputs.items()}
    torch.library.opcheck(backend.op(op.name), registered(problem))


def test_all_ops_are_checked_here() -> None:
    names = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "capsfast::" in name
    }
    stems = ("dynamic_routing", "routing_pass")
    found = {prefix + stem for prefix in PREFIX.values() for stem in stems}
    # Ops without CUDA kernels: see test_factored_routing.py and test_em_update.py.
    found |= {"factored_routing", "em_update", "triton_em_update"}
    assert names == {name for stem in found for name in (stem, f"{stem}_backward")}
    assert {backend.prefix for backend in TABLE if backend.fused} <= set(PREFIX.values())


@pytest.mark.parametrize("case", OPCHECKED, ids=str)
def test_fakes_promise_what_the_kernels_return(backend: Backend, op: Op, case: Case | PassCase) -> None:
    for empty in (None, "I") if backend.emulated else (None, *Shape._fields):
        shape = small(backend, case)._replace(**({empty: 0} if empty else {}))
        problem = op.make(shape, case, torch.bfloat16, backend.device)
        for backward, values in enumerate((registered(problem), backward_arguments(problem, backend))):
            called = backend.op(op.name, bool(backward))
            meta = [arg.to("meta") if isinstance(arg, Tensor) else arg for arg in values]
            for real, fake in zip(called(*values), called(*meta), strict=True):
                assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride()), called


@pytest.mark.only(weight=False, linear=False)
def test_a_single_position_is_one_of_many(backend: Backend, op: Op) -> None:
    """A graph that was traced with many positions calls this. The functions drop an axis of length 1."""
    case = Case(logits="BIJ") if op.family is Case else PassCase(query=True, logits="BIJ", second=True, lse=True)
    problem = op.make(Shape(2, 3, 3, 4, 1), replace(case, spatial=(6,)), backend.widest, backend.device)
    arguments, found = registered(problem), []
    for part in (slice(0, 1), slice(None)):
        given = [arg[..., part] if isinstance(arg, Tensor) else arg for arg in arguments]
        given[0] = given[0].clone().requires_grad_()
        outputs = backend.op(op.name)(*given)
        first = next(output for output in outputs if output.dim() == 4)
        found.append([*outputs, *torch.autograd.grad(first.square().sum(), given[0])])
    compared = [(got, wanted) for got, wanted in zip(*found, strict=True) if got.dim() > 1 and got.shape[-1] == 1]
    assert len(compared) >= 3  # results and dvotes
    for got, wanted in compared:
        assert_close(got, wanted[..., :1])


@pytest.mark.parametrize("case", [LOADED, *LINEAR_WAYS[:1]], ids=str)
def test_kernels_and_fakes_refuse_a_shape_that_does_not_fit(backend: Backend, op: Op, case: Case | PassCase) -> None:
    problem = op.make(small(backend, case), case, torch.float32, backend.device)
    arguments = registered(problem)
    for n, value in enumerate(arguments[:-1]):
        if n < len(op.tensors) or not isinstance(value, Tensor):
            continue
        # The launchers of Triton's kernels rely on the checks of the functions.
        for device in ("meta",) if backend.name == "triton" else (backend.device, "meta"):
            wrong = [*arguments[:n], torch.cat([value, value], -1), *arguments[n + 1 :]]
            with pytest.raises(RuntimeError, match="shape that does not fit"):
                backend.op(op.name)(*(each.to(device) if isinstance(each, Tensor) else each for each in wrong))


@pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")
@pytest.mark.parametrize("op", ["dynamic_routing", "route_votes"])
def test_the_number_of_needed_gradients_is_checked(op: str) -> None:
    problem = make(Shape(3, 9, 4, 5, 6), LOADED, op, torch.float32)
    cpp = named("cpp")
    arguments = backward_arguments(problem, cpp)
    for needed in ([], [True], [True] * 5):
        with pytest.raises(RuntimeError, match=f"needed must have 4 entries, got {len(needed)}"):
            cpp.op(op, backward=True)(*arguments[:-1], needed)
    wrong = [9 if n == 6 else value for n, value in enumerate(registered(problem))]
    with pytest.raises(RuntimeError, match=r"J must equal the J of weight|must have 1 or J outputs"):
        cpp.op(op)(*wrong)
