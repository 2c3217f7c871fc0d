"""The ops with the rest of torch: compile, export, func, autocast, second derivatives."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import capsfast

from .support.accuracy import assert_close, relative_l2
from .support.backends import OP_OF, Backend, Shape, assert_path, recorded_ops
from .support.passes import EVERYTHING, LINEAR, QUADRATIC, SHARED, normalized
from .support.passes import LOADED as LOADED_PASS
from .support.problems import LOADED, LOADED_OUT, PLAIN, AnyCase, Case, Op, PassCase, call, make, run

pytestmark = pytest.mark.every_op


def small(backend: Backend, B: int = 3) -> Shape:
    return Shape(B, 3 if backend.emulated else 7, 4, 6, 5)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


# Together all tensors, both gradients and both softmaxes; a compilation costs seconds. No batch has the size of another
# axis: torch.compile would treat the two sizes as one. opcheck compiles the ops of Triton.
@pytest.mark.rows((2, 3), triton=(0, 0), reference=(0, 1))
@pytest.mark.parametrize(
    "case",
    [
        LOADED,
        Case(gradient="last", leaky=True, logits="IJ", squash_last=False, coupling=False),
        SHARED,
        normalized(EVERYTHING, "in"),
        replace(EVERYTHING, poses=2),
        *(replace(case, spatial=(3,)) for case in (LOADED, EVERYTHING)),
    ],
    ids=str,
)
def test_compiles_to_one_graph_for_all_batches(backend: Backend, op: Op, case: AnyCase) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    for dynamic in (None, True) if case in (LOADED, SHARED) else (True,):
        torch._dynamo.reset()
        counter, counts = CompileCounterWithBackend("aot_eager"), []
        problems = [op.make(small(backend, B), case, torch.float32, backend.device) for B in (9, 18, 8)]

        def function(tensors: dict[str, Tensor], masks: dict[str, Tensor]) -> list[Tensor]:
            found = getattr(capsfast, op.name)(**tensors, **masks, **case.arguments, backend=backend.name)
            return list(case.outputs(found).values())

        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter)
        for problem in problems:
            results = []
            for each in (compiled, function):
                leaves = {name: value.clone().requires_grad_() for name, value in problem.inputs.items()}
                found = each(leaves, problem.masks)
                loss = torch.stack([out.float().square().mean() for out in found]).sum()
                results.append([*found, *torch.autograd.grad(loss, list(leaves.values()))])
            for got, wanted in zip(*results, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
            counts.append(counter.frame_count)
        targets = {str(node.target) for graph in counter.graphs for node in graph.graph.nodes}
        held = any(f"capsfast.{backend.prefix}{OP_OF[op.name]}" in target for target in targets)
        assert held == backend.fused
        # dynamic=True: the first graph serves all. Else the second batch size makes one graph for all others.
        assert len(set(counts[0 if dynamic else 1 :])) == 1, counts


def test_a_size_that_only_the_run_knows() -> None:
    votes = torch.randn(2, 3, 4, 5, 6)
    torch._dynamo.decorators.mark_unbacked(votes, 4)
    compiled = torch.compile(capsfast.route_votes, fullgraph=True, backend="aot_eager")
    assert_close(compiled(votes), capsfast.route_votes(votes))


@pytest.mark.rows(triton=0, reference=0)
def test_compiled_by_inductor_within_a_network(backend: Backend) -> None:
    layer = capsfast.DynamicRouting(7, 4, 6, 5, backend=backend.name)
    network = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), layer).to(backend.device)
    compiled = torch.compile(network, fullgraph=True)
    for B in (3, 18):
        u = torch.randn(B, 7, 6, device=backend.device)
        results = []
        for model in (network, compiled):
            network.zero_grad()
            leaf = u.clone().requires_grad_()
            v = model(leaf)
            v.norm(dim=-1).sum().backward()
            results.append([v.detach(), leaf.grad, layer.W.grad, network[0].weight.grad])
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [PLAIN, LOADED, LOADED_OUT, LINEAR, LOADED_PASS, QUADRATIC], ids=str)
def test_func_grad_and_vmap(backend: Backend, op: Op, case: AnyCase) -> None:
    problem = op.make(small(backend), case, backend.widest, backend.device)

    def loss(tensors: dict[str, Tensor]) -> Tensor:
        found = case.outputs(call(problem, tensors, backend.name))
        return torch.stack([(out * problem.gradients[name]).sum() for name, out in found.items()]).sum()

    wanted = run(problem, "reference")
    for name, value in torch.func.grad(loss)(problem.inputs).items():
        assert_close(value, wanted[f"d{name}"])

    # An ensemble: all members share the poses; every member has its own other tensors.
    common = op.poses if len(problem.inputs) > 1 else ""
    stacked = {
        name: value if name == common else torch.stack([value * scale for scale in (1.0, 1.5, 0.5)], 1)
        for name, value in problem.inputs.items()
    }
    dims = {name: None if name == common else 1 for name in stacked}

    def each(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(case.outputs(call(problem, tensors, backend.name)).values())

    def gradients(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(torch.func.grad(lambda given: each(given)[0].square().sum())(tensors).values())

    members = [{name: value if name == common else value[:, n] for name, value in stacked.items()} for n in range(3)]
    for function in (each, gradients):
        got = torch.func.vmap(function, in_dims=(dims,))(stacked)
        for value, parts in zip(got, zip(*map(function, members), strict=True), strict=True):
            assert_close(value, torch.stack(parts), double=1e-11)


def test_second_derivatives(backend: Backend, op: Op) -> None:
    case = Case(coupling=False) if op.family is Case else PassCase()
    problem = op.make(Shape(2, 3, 4, 5, 6), case, backend.widest, backend.device)
    leaf = problem.inputs[op.poses].requires_grad_()
    found = case.outputs(call(problem, problem.inputs, backend.name))
    out = found["v"] if op.family is Case else found["first"]
    (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    if not backend.fused:
        (second,) = torch.autograd.grad(first.sum(), leaf)
        assert second.abs().max() > 0
        return
    message = rf'capsfast\.{op.name}: .* no second derivative; .* use backend="reference"'
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(first.sum(), leaf)


def test_forward_mode_is_refused_and_not_ignored(backend: Backend) -> None:
    u, weight = torch.randn(2, 3, 4, device=backend.device), torch.randn(3, 2, 5, 4, device=backend.device)
    # Forward mode through a pass, and over its backward.
    query = torch.randn(2, 2, 5, device=backend.device)

    def loss(u: Tensor) -> Tensor:
        return capsfast.routing_pass(u, weight, query=query, backend=backend.name).first.square().sum()

    if not backend.fused:
        assert torch.func.jvp(torch.func.grad(loss), (u,), (u,))[1].any()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(u, torch.ones_like(u))
        if not backend.fused:
            tangent = forward_ad.unpack_dual(capsfast.dynamic_routing(dual, weight, backend=backend.name)).tangent
            assert tangent is not None and tangent.any()
            return
        told = r'capsfast\.dynamic_routing: .* no forward-mode derivative .*; use backend="reference"'
        with pytest.raises(NotImplementedError, match=told):
            capsfast.dynamic_routing(dual, weight, backend=backend.name)
    with pytest.raises(NotImplementedError, match=r"capsfast\.routing_pass: .* no forward-mode derivative"):
        torch.func.jvp(torch.func.grad(loss), (u,), (u,))


BFLOAT16 = ((), ("u", "votes"), ("weight",))


@pytest.mark.parametrize(
    "case", [PLAIN, LOADED, LOADED_PASS, replace(QUADRATIC, query=True, weights=True), SHARED], ids=str
)
def test_autocast(backend: Backend, op: Op, case: AnyCase) -> None:
    most, least = (0.03, 0.99) if op.family is Case else (0.05, 0.98)
    for narrow in BFLOAT16:
        problem = op.make(small(backend, 17), case, torch.float32, backend.device)
        for name in op.tensors:
            problem.inputs[name] = problem.inputs[name].to(torch.bfloat16 if name in narrow else torch.float32)
        leaves = {name: value.requires_grad_() for name, value in problem.inputs.items()}
        with torch.autocast(backend.device, torch.bfloat16), recorded_ops() as ops:
            found = case.outputs(call(problem, leaves, backend.name))
        if case is not SHARED:
            assert_path(backend, op.name, ops, backward=False)
        wanted = run(problem.to(torch.float64), "reference")
        for name, value in found.items():
            wide = name in ("mass", "first", "second", "log_sum")
            assert value.dtype == (torch.float32 if wide else torch.bfloat16), name
            assert relative_l2(value.detach().double().cpu(), wanted[name]) < most, name
        gradients = [problem.gradients[name].to(value.dtype) for name, value in found.items()]
        torch.autograd.backward(list(found.values()), gradients)
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            assert leaf.grad.dtype == leaf.dtype, name
            cosine = torch.cosine_similarity(leaf.grad.double().cpu().flatten(), wanted[f"d{name}"].flatten(), dim=0)
            assert cosine > least, name


def test_autocast_keeps_float64(backend: Backend) -> None:
    with torch.autocast(backend.device, torch.bfloat16):
        if torch.float64 in backend.dtypes:
            problem = make(Shape(3, 7, 4, 5, 6), Case(coupling=False), device=backend.device)
            assert call(problem, problem.inputs, backend.name).dtype == torch.float64
        u, weight = torch.randn(2, 5, 4, dtype=torch.float64), torch.randn(5, 3, 6, 4)
        message = r"u and weight must have one dtype, got float64 and float32; convert one$"
        with pytest.raises(TypeError, match=message):
            capsfast.dynamic_routing(u.to(backend.device), weight.to(backend.device), backend=backend.name)


def test_checkpointing_gives_the_same_gradients(backend: Backend) -> None:
    layer = capsfast.DynamicRouting(7, 4, 6, 5, backend=backend.name).to(backend.device)
    u = torch.randn(3, 7, 6, device=backend.device, requires_grad=True)
    with torch.inference_mode():
        assert not layer(u).requires_grad
    leaves = (u, layer.W)
    plain = torch.autograd.grad(layer(u).square().sum(), leaves)
    again = torch.autograd.grad(torch.utils.checkpoint.checkpoint(layer, u, use_reentrant=False).square().sum(), leaves)
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
