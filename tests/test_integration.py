"""With the rest of torch: compile, export, func, autocast, second derivatives, DDP."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import capsfast

from .support import interpreter
from .support.accuracy import assert_close, relative_l2
from .support.backends import Backend, Shape, assert_path, recorded_ops
from .support.problems import LOADED, LOADED_OUT, PLAIN, Case, call, make, run
from .support.ranks import on_two_ranks

OPS = ("dynamic_routing", "route_votes")
# Between them all tensors, both gradients and both softmaxes; a compilation costs seconds.
COMPILED = (LOADED, Case(gradient="last", leaky=True, logits="IJ", squash_last=False, coupling=False))
CASES = (PLAIN, LOADED, LOADED_OUT, Case(gradient="last", coupling=False))


def small(backend: Backend, B: int = 3) -> Shape:
    return Shape(B, 3 if backend.emulated else 7, 4, 5, 6)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def gradients(function: Callable[..., Any], tensors: dict[str, Tensor]) -> list[Tensor]:
    """Outputs, then the gradients of their sum of squares."""
    leaves = {name: value.clone().requires_grad_() for name, value in tensors.items()}
    found = function(**leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    loss = torch.stack([out.square().sum() for out in outputs]).sum()
    return [*outputs, *torch.autograd.grad(loss, list(leaves.values()))]


@pytest.mark.rows(2, triton=0, reference=0)
@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
@pytest.mark.parametrize("case", COMPILED, ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.emulated(case=COMPILED[:1], dynamic=[None])
def test_compiles_to_one_graph_for_all_batches(backend: Backend, op: str, case: Case, dynamic: bool | None) -> None:
    problems = [make(small(backend, B), case, op, torch.float32, backend.device) for B in (3, 18, 5)]
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def function(masks: dict[str, Tensor], **tensors: Tensor) -> Any:
        options = {**case.options._asdict(), **masks}
        return getattr(capsfast, op)(**tensors, **options, return_coupling=case.coupling, backend=backend.name)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter)
    counts = []
    for problem in problems:
        got = gradients(lambda problem=problem, **t: compiled(problem.masks, **t), problem.inputs)
        wanted = gradients(lambda problem=problem, **t: function(problem.masks, **t), problem.inputs)
        for value, want in zip(got, wanted, strict=True):
            torch.testing.assert_close(value, want, rtol=1e-4, atol=1e-5)
        counts.append(counter.frame_count)
    # dynamic=True: the first graph serves all. Else the second batch size makes one graph for all others.
    assert len(set(counts[0 if dynamic else 1 :])) == 1, counts


@pytest.mark.parametrize("op", OPS)
def test_the_compiled_graph_holds_the_fused_op(backend: Backend, op: str) -> None:
    problem = make(Shape(3, 7, 4, 5, 6), PLAIN, op, torch.float32, backend.device)
    targets: list[str] = []

    def remember(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        targets.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    torch.compile(lambda tensors: call(problem, tensors, backend.name), fullgraph=True, backend=remember)(
        problem.inputs
    )
    assert any(f"capsfast.{backend.prefix}dynamic_routing" in target for target in targets) == backend.fused
    assert any("einsum" in target for target in targets) != backend.fused


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


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_any_batch_size(backend: Backend, strict: bool) -> None:
    layer = capsfast.DynamicRouting(7, 4, 6, 5, learned_logits=True, bias=True, backend=backend.name)
    layer.to(backend.device)
    shapes = {"u": {0: torch.export.Dim("B")}}
    example = torch.randn(3, 7, 6, device=backend.device)
    program = torch.export.export(layer, (example,), dynamic_shapes=shapes, strict=strict)
    for B in (2, 3, 17):
        u = torch.randn(B, 7, 6, device=backend.device)
        torch.testing.assert_close(program.module()(u), layer(u))
    targets = {str(node.target) for node in program.graph.nodes}
    assert (f"capsfast.{backend.prefix}dynamic_routing.default" in targets) == backend.fused


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.emulated(case=[LOADED, LOADED_OUT])
def test_func_grad(backend: Backend, op: str, case: Case) -> None:
    problem = make(small(backend), case, op, backend.widest, backend.device)

    def loss(tensors: dict[str, Tensor]) -> Tensor:
        result = call(problem, tensors, backend.name)
        outputs, weights = (result, (problem.dv, problem.dc)) if case.coupling else ((result,), (problem.dv,))
        return sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True))  # type: ignore[return-value]

    got = torch.func.grad(loss)(problem.inputs)
    wanted = run(problem, "reference")
    for name, value in got.items():
        assert_close(value, wanted[f"d{name}"])


@pytest.mark.rows(triton=0)
@pytest.mark.parametrize("case", [PLAIN, LOADED], ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.emulated(case=[LOADED])
def test_func_vmap(backend: Backend, op: str, case: Case) -> None:
    # An ensemble: the first tensor is common to all, the others have one for each.
    problems = [make(small(backend), case, op, backend.widest, backend.device, seed) for seed in range(3)]
    common = next(iter(problems[0].inputs))
    for problem in problems[1:]:
        problem.inputs[common] = problems[0].inputs[common]
        problem.masks = problems[0].masks
    stacked = {name: torch.stack([problem.inputs[name] for problem in problems], dim=1) for name in problems[0].inputs}
    dims = {name: None if name == common and len(stacked) > 1 else 1 for name in stacked}
    if dims[common] is None:
        stacked[common] = problems[0].inputs[common]
    got = torch.func.vmap(lambda tensors: call(problems[0], tensors, backend.name), in_dims=(dims,))(stacked)
    wanted = [call(problem, problem.inputs, backend.name) for problem in problems]
    for value, want in zip(got, (torch.stack(parts) for parts in zip(*wanted, strict=True)), strict=True):
        assert_close(value, want, double=1e-11)


@pytest.mark.rows(triton=0)
@pytest.mark.parametrize("op", OPS)
def test_func_vmap_of_grad(backend: Backend, op: str) -> None:
    problem = make(small(backend, 4), Case(logits="BIJ"), op, backend.widest, backend.device)
    name = next(iter(problem.inputs))
    rest = {key: value for key, value in problem.inputs.items() if key not in (name, "logits")}

    def loss(sample: Tensor, logits: Tensor) -> Tensor:
        v, _ = call(problem, {name: sample[None], **rest, "logits": logits}, backend.name)
        return v.square().sum()

    got = torch.func.vmap(torch.func.grad(loss))(problem.inputs[name], problem.inputs["logits"])
    leaf = problem.inputs[name].clone().requires_grad_()
    v, _ = call(problem, problem.inputs | {name: leaf}, backend.name)
    (wanted,) = torch.autograd.grad(v.square().sum(), leaf)
    assert_close(got, wanted, double=1e-11)


@pytest.mark.parametrize("op", OPS)
def test_second_derivatives(backend: Backend, op: str) -> None:
    problem = make(Shape(2, 3, 4, 5, 6), Case(coupling=False), op, backend.widest, backend.device)
    name = next(iter(problem.inputs))
    leaf = problem.inputs[name].requires_grad_()
    v = call(problem, problem.inputs, backend.name)
    (first,) = torch.autograd.grad(v.square().sum(), leaf, create_graph=True)
    if not backend.fused:
        (second,) = torch.autograd.grad(first.sum(), leaf)
        assert second.abs().max() > 0
        return
    with pytest.raises(RuntimeError, match=rf'capsfast\.{op}: .* no second derivative; .* use backend="reference"'):
        torch.autograd.grad(first.sum(), leaf)


def test_forward_mode_is_refused_and_not_ignored(backend: Backend) -> None:
    u, weight = torch.randn(2, 3, 4, device=backend.device), torch.randn(3, 2, 5, 4, device=backend.device)
    # Of a pass, and over its backward.
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


def test_func_grad_under_autocast(backend: Backend) -> None:
    u, weight = torch.randn(2, 3, 4, device=backend.device), torch.randn(3, 2, 5, 4, device=backend.device)

    def loss(u: Tensor) -> Tensor:
        return capsfast.dynamic_routing(u, weight, backend=backend.name).float().square().sum()

    with torch.autocast(backend.device, torch.bfloat16):
        got = torch.func.grad(loss)(u)
        leaf = u.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)


MIXES = ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))


@pytest.mark.parametrize(("of_u", "of_weight"), MIXES)
@pytest.mark.parametrize("case", [PLAIN, LOADED], ids=str)
@pytest.mark.parametrize("B", [3, 17])
@pytest.mark.emulated(B=[3], case=[LOADED])
def test_autocast(backend: Backend, B: int, case: Case, of_u: torch.dtype, of_weight: torch.dtype) -> None:
    problem = make(Shape(B, 7, 4, 16, 8), case, dtype=torch.float32, device=backend.device)
    problem.inputs["u"] = problem.inputs["u"].to(of_u)
    problem.inputs["weight"] = problem.inputs["weight"].to(of_weight)
    leaves = {name: value.requires_grad_() for name, value in problem.inputs.items()}
    with torch.autocast(backend.device, torch.bfloat16), recorded_ops() as ops:
        v = call(problem, leaves, backend.name, return_coupling=False)
    assert_path(backend, "dynamic_routing", ops, backward=False)
    assert v.dtype == torch.bfloat16
    v.backward(problem.dv.to(torch.bfloat16))
    problem.dc.zero_()
    wanted = run(problem.to(torch.float64), "reference")
    assert relative_l2(v.double().cpu(), wanted["v"]) < 0.03
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype, name
        cosine = torch.cosine_similarity(leaf.grad.double().cpu().flatten(), wanted[f"d{name}"].flatten(), dim=0)
        assert cosine > 0.99, name


def test_autocast_casts_votes_too(backend: Backend) -> None:
    votes = torch.randn(3, 7, 4, 5, device=backend.device)
    with torch.autocast(backend.device, torch.bfloat16):
        v = capsfast.route_votes(votes, backend=backend.name)
    assert v.dtype == torch.bfloat16
    assert relative_l2(v.float(), capsfast.route_votes(votes, backend="reference")) < 0.03


@pytest.mark.needs(torch.float64)
def test_autocast_leaves_float64_alone(backend: Backend) -> None:
    problem = make(Shape(3, 7, 4, 5, 6), Case(coupling=False), device=backend.device)
    with torch.autocast(backend.device, torch.bfloat16):
        v = call(problem, problem.inputs, backend.name)
    assert v.dtype == torch.float64


def test_autocast_of_a_network(backend: Backend) -> None:
    layer = capsfast.DynamicRouting(7, 4, 6, 5, learned_logits=True, bias=True, backend=backend.name)
    network = nn.Sequential(nn.Linear(6, 6), layer).to(backend.device)
    with torch.autocast(backend.device, torch.bfloat16):
        v = network(torch.randn(3, 7, 6, device=backend.device))  # u arrives in bfloat16, W is float32
    assert v.dtype == torch.bfloat16
    v.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in network.parameters())


def test_inference_mode_and_no_grad(backend: Backend) -> None:
    problem = make(Shape(3, 7, 4, 5, 6), Case(coupling=False), dtype=backend.widest, device=backend.device)
    problem.inputs["u"].requires_grad_()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert not call(problem, problem.inputs, backend.name).requires_grad


def test_checkpointing_gives_the_same_gradients(backend: Backend) -> None:
    layer = capsfast.DynamicRouting(7, 4, 6, 5, backend=backend.name).to(backend.device)
    u = torch.randn(3, 7, 6, device=backend.device)
    found = []
    for function in (layer, lambda u: torch.utils.checkpoint.checkpoint(layer, u, use_reentrant=False)):
        leaf = u.clone().requires_grad_()
        layer.zero_grad()
        function(leaf).square().sum().backward()
        found.append((leaf.grad, layer.W.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def _gradients_of_half(name: str, device: str, folder: Path, rank: int) -> None:
    interpreter.prepare()
    torch.manual_seed(0)
    layer = capsfast.DynamicRouting(7, 4, 6, 5, learned_logits=True, backend=name).to(device)
    u = torch.randn(6, 7, 6).to(device)
    parallel = nn.parallel.DistributedDataParallel(layer)
    parallel(u[3 * rank : 3 * rank + 3]).square().sum().backward()
    torch.save({key: value.grad.cpu() for key, value in layer.named_parameters()}, folder / f"gradients{rank}.pt")


@pytest.mark.slow
def test_distributed_data_parallel(backend: Backend, tmp_path: Path) -> None:
    on_two_ranks(partial(_gradients_of_half, backend.name, backend.device, tmp_path), tmp_path)
    torch.manual_seed(0)
    layer = capsfast.DynamicRouting(7, 4, 6, 5, learned_logits=True, backend=backend.name).to(backend.device)
    layer(torch.randn(6, 7, 6).to(backend.device)).square().sum().backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"gradients{rank}.pt")
        for key, value in layer.named_parameters():
            assert value.grad is not None
            torch.testing.assert_close(2 * found[key], value.grad.cpu(), rtol=1e-4, atol=1e-6)


def test_autocast_does_not_mix_float64(backend: Backend) -> None:
    u, weight = torch.randn(2, 5, 4, dtype=torch.float64), torch.randn(5, 3, 6, 4)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(TypeError, match=r"u and weight must have one dtype, got float64 and float32; convert one$"),
    ):
        capsfast.dynamic_routing(u, weight, backend=backend.name)
