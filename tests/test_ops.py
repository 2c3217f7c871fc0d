"""The registered ops below the functions: opcheck, fakes, and shapes that do not fit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from .support.accuracy import assert_close
from .support.backends import Backend, Shape
from .support.passes import EACH_WAY, EVERYTHING, LINEAR, LINEAR_WAYS
from .support.problems import (
    LOADED,
    LOADED_OUT,
    PLAIN,
    Case,
    Op,
    PassCase,
    Problem,
    laid_out,
    registered,
    registered_backward,
)

pytestmark = [pytest.mark.fused, pytest.mark.kernels, pytest.mark.every_op]

CASES = (
    PLAIN,
    LOADED,
    LOADED_OUT,
    Case(softmax="in", logits="IJ"),
    Case(gradient="last", squash_last=False, coupling=False),
    Case(squash="unit", last_squash="half", sharpness=2.0, accumulate=False, wide=True),
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


def small(backend: Backend, case: Case | PassCase) -> Shape:
    return Shape(3, 3 if backend.emulated else 9, 4, 3 if case.spatial else 5, 6)


@pytest.mark.parametrize("case", [Case(logits=axes, accumulate=False) for axes in ("IJ", "BIJ")], ids=str)
def test_logits_of_the_first_iteration_alone_are_refused(backend: Backend, op: Op, case: Case) -> None:
    problem = op.make(small(backend, case), case, torch.float32, backend.device)
    with pytest.raises(RuntimeError, match="logits must accumulate"):
        backend.op(op.name)(*registered(problem))


@pytest.mark.rows((3, 6), triton=(1, 2))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", OPCHECKED, ids=str)
def test_opcheck(backend: Backend, op: Op, case: Case | PassCase, dtype: torch.dtype) -> None:
    problem = op.make(small(backend, case), case, dtype, backend.device)
    problem = problem if dtype == torch.float32 else laid_out(problem, "transposed")
    torch.library.opcheck(backend.op(op.name), registered(problem))
    torch.library.opcheck(backend.op(op.name, backward=True), backward_arguments(problem, backend))
    problem.inputs = {name: value.requires_grad_() for name, value in problem.inputs.items()}
    torch.library.opcheck(backend.op(op.name), registered(problem))


def strides(value: Tensor) -> list[int]:
    """The strides of axes longer than 1; other strides, and the strides of empty tensors, mean nothing."""
    return (
        []
        if value.numel() == 0
        else [step for step, size in zip(value.stride(), value.shape, strict=True) if size != 1]
    )


@pytest.mark.parametrize("case", OPCHECKED, ids=str)
def test_fakes_promise_what_the_kernels_return(backend: Backend, op: Op, case: Case | PassCase) -> None:
    for empty in (None, "I") if backend.emulated else (None, *Shape._fields):
        shape = small(backend, case)._replace(**({empty: 0} if empty else {}))
        problem = op.make(shape, case, torch.bfloat16, backend.device)
        for backward, values in enumerate((registered(problem), backward_arguments(problem, backend))):
            called = backend.op(op.name, bool(backward))
            meta = [arg.to("meta") if isinstance(arg, Tensor) else arg for arg in values]
            for real, fake in zip(called(*values), called(*meta), strict=True):
                assert (real.shape, real.dtype, strides(real)) == (fake.shape, fake.dtype, strides(fake)), called


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
                backend.op(op.name)(*(tensor.to(device) if isinstance(tensor, Tensor) else tensor for tensor in wrong))
