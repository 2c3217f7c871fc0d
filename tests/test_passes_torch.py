"""What torch does with both pass ops on every backend: opcheck, fakes, compile, export, vmap, autocast."""

import pytest
import torch
from torch import Tensor

import capsfast

from .support import passes
from .support.backends import Backend, Shape
from .support.passes import (
    EACH_WAY,
    EVERYTHING,
    LINEAR,
    SHARED,
    SMALL,
    PassCase,
    PassOp,
    normalized,
)
from .support.problems import call, registered, registered_backward

pytestmark = pytest.mark.passes


@pytest.mark.rows(3, triton=1)
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("case", [LINEAR, SHARED, *EACH_WAY[:3]], ids=str)
@pytest.mark.fused
@pytest.mark.linear
def test_opcheck_forward(backend: Backend, op: PassOp, case: PassCase, grad: bool) -> None:
    if op.name == "routing_pass" and case is SHARED:
        return  # the function makes the votes and calls the other op
    problem = op.make(SMALL, case, torch.float32, backend.device)
    problem.inputs = {name: value.requires_grad_(grad) for name, value in problem.inputs.items()}
    torch.library.opcheck(backend.op(op.name), registered(problem))


@pytest.mark.rows(3, triton=1)
@pytest.mark.parametrize("case", [LINEAR, *EACH_WAY], ids=str)
@pytest.mark.fused
@pytest.mark.linear
def test_opcheck_backward(backend: Backend, op: PassOp, case: PassCase) -> None:
    problem = op.make(SMALL, case, torch.float32, backend.device)
    outputs = backend.op(op.name)(*registered(problem))
    torch.library.opcheck(backend.op(op.name, backward=True), registered_backward(problem, outputs))


@pytest.mark.parametrize("case", EACH_WAY, ids=str)
@pytest.mark.fused
def test_fakes_promise_what_the_kernels_return(backend: Backend, op: PassOp, case: PassCase) -> None:
    for empty in (None, "I") if backend.emulated else (None, *Shape._fields):
        problem = op.make(SMALL._replace(**({empty: 0} if empty else {})), case, torch.bfloat16, backend.device)
        outputs = backend.op(op.name)(*registered(problem))
        for backward, values in enumerate((registered(problem), registered_backward(problem, outputs))):
            called = backend.op(op.name, bool(backward))
            meta = [value.to("meta") if isinstance(value, Tensor) else value for value in values]
            for promised, returned in zip(called(*meta), called(*values), strict=True):
                assert (promised.shape, promised.dtype, promised.stride()) == (
                    returned.shape,
                    returned.dtype,
                    returned.stride(),
                ), (empty, called)


@pytest.mark.rows(2, triton=0, reference=0)
@pytest.mark.parametrize("case", [SHARED, EVERYTHING, normalized(EVERYTHING, "in")], ids=str)
def test_compiles_to_one_graph_for_all_batches(backend: Backend, op: PassOp, case: PassCase) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()  # what the other cases compiled counts for its limit
    counter = CompileCounterWithBackend("aot_eager")
    problems = [op.make(SMALL._replace(B=B), case, torch.float32, backend.device) for B in (3, 18, 5)]

    def function(masks: dict[str, Tensor], tensors: dict[str, Tensor]) -> list[Tensor]:
        found = getattr(capsfast, op.name)(**tensors, **masks, **case.arguments, backend=backend.name)
        return list(case.outputs(found).values())

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for problem in problems:
        results = []
        for each in (compiled, function):
            leaves = {name: value.clone().requires_grad_() for name, value in problem.inputs.items()}
            outputs = each(problem.masks, leaves)
            gradients = torch.autograd.grad(sum(out.float().sum() for out in outputs), list(leaves.values()))
            results.append([*outputs, *gradients])
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.fused
@pytest.mark.linear
def test_export_with_any_batch_size(backend: Backend) -> None:
    class Routing(torch.nn.Module):
        def forward(self, u: Tensor, weight: Tensor) -> Tensor:
            first = capsfast.routing_pass(u, weight, backend=backend.name).first
            return capsfast.routing_pass(u, weight, query=capsfast.squash(first), backend=backend.name).first

    weight = torch.randn(7, 4, 5, 6, device=backend.device)
    example = (torch.randn(3, 7, 6, device=backend.device), weight)
    program = torch.export.export(Routing(), example, dynamic_shapes=({0: torch.export.Dim("B")}, None))
    for B in (2, 17):
        u = torch.randn(B, 7, 6, device=backend.device)
        torch.testing.assert_close(program.module()(u, weight), Routing()(u, weight))


def test_vmap_and_func_grad(backend: Backend, op: PassOp) -> None:
    problem = op.make(SMALL, PassCase(query=True, precision=True), torch.float32, backend.device)

    def total(tensors: dict[str, Tensor]) -> Tensor:
        found: Tensor = call(problem, tensors, backend.name).first
        return found.square().sum()

    wanted = (
        torch.func.grad(total)({name: value.double() for name, value in problem.inputs.items()})
        if backend.name != "triton"
        else None
    )
    got = torch.func.grad(total)(problem.inputs)
    for name, value in got.items():
        if wanted is not None:
            torch.testing.assert_close(value, wanted[name].float(), rtol=1e-3, atol=1e-4)
    stacked = {name: torch.stack([value, 2 * value]) for name, value in problem.inputs.items()}
    mapped = torch.vmap(lambda tensors: call(problem, tensors, backend.name).first)(stacked)
    for n in range(2):
        alone = call(problem, {name: value[n] for name, value in stacked.items()}, backend.name).first
        torch.testing.assert_close(mapped[n], alone)


@pytest.mark.parametrize("shared", ["", "J"])
def test_autocast(backend: Backend, shared: str) -> None:
    case = PassCase(query=True, precision=True, second=True, weights=True, shared=shared)
    problem = passes.make(SMALL, case, "routing_pass", torch.float32, backend.device)
    leaves = {name: value.requires_grad_() for name, value in problem.inputs.items()}
    with torch.autocast(backend.device, torch.bfloat16):
        found = call(problem, leaves, backend.name)
    assert found.weights.dtype == torch.bfloat16
    assert {found.mass.dtype, found.first.dtype, found.second.dtype} == {torch.float32}
    wanted = call(problem, leaves, "reference")
    torch.testing.assert_close(found.first, wanted.first, rtol=0.05, atol=0.05)
    gradients = torch.autograd.grad(found.first.sum(), list(leaves.values()))
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


@pytest.mark.fused
@pytest.mark.linear
def test_second_derivatives_are_refused(backend: Backend, op: PassOp) -> None:
    problem = op.make(SMALL, LINEAR, torch.float32, backend.device)
    leaves = {name: value.requires_grad_() for name, value in problem.inputs.items()}
    first = call(problem, leaves, backend.name).first
    (gradient,) = torch.autograd.grad(first.square().sum(), leaves["query"], create_graph=True)
    with pytest.raises(RuntimeError, match=rf"capsfast.{op.name}: the fused backends have no second derivative"):
        gradient.sum().backward()
