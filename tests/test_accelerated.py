"""Models that capsfast.accelerate changed: everything else that one does with models still works."""

import copy
import importlib
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

import capsfast
from capsfast.adopt import undo
from capsfast.adopt.beside import TOLERANCE
from capsfast.adopt.trial import relative

from .support import published_layers as layers
from .support.adopted import IMAGES, Net, Plain, accelerate, assert_same, example, undone_copy, variant


@pytest.fixture
def images() -> Tensor:
    return torch.randn(IMAGES)


@pytest.fixture(scope="module")
def both() -> tuple[Net, Net]:
    """An accelerated model, and its copy that is not accelerated, in evaluation mode. Tests must not change them."""
    torch.manual_seed(0)
    plain = Net().eval()
    fast = copy.deepcopy(plain)
    accelerate(fast, torch.randn(IMAGES))
    return fast, plain


def choosy(self: Plain, u: Tensor, mask: Tensor | None = None, iterations: int = 3) -> Any:
    """A forward with further arguments."""
    return Plain.forward(self, u if mask is None else u * mask[:, :, None], iterations)


def test_calls_that_were_not_compared_run_the_own_forward_and_it_warns_once() -> None:
    layer, u = variant(forward=choosy), example()
    plain, report = copy.deepcopy(layer), accelerate(layer, u)
    mask = (torch.arange(7) < 4) * torch.ones(5, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The same call written differently: by name, with an explicit default, on other samples.
        for v in (
            layer(u),
            layer(u=u),
            layer(u, None),
            layer(u, mask=None, iterations=3),
            layer(torch.cat([u, u]))[:5],
        ):
            torch.testing.assert_close(v, plain(u), rtol=1e-4, atol=1e-5)
    assert vars(report.calls()[""]) == {"fused": 5, "own": 0, "why": ""}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for n, call in enumerate((lambda each: each(u, mask), lambda each: each(u, iterations=1)), 1):
            torch.testing.assert_close(call(layer), call(plain), rtol=0, atol=0)
            assert report.calls()[""].own == n
    (one,) = said
    assert "runs its own forward, because it was called with arguments or sizes that differ" in str(one.message)
    layer.kept = 1
    torch.testing.assert_close(layer(u), plain(u), rtol=0, atol=0)
    assert vars(report.calls()[""]) == {"fused": 5, "own": 3, "why": "its `kept` is not what it was"}
    with pytest.raises(RuntimeError):
        layer(torch.randn(4, 8, 6))


def test_methods_of_the_layer_are_its_own() -> None:
    layer = variant(extra_repr=lambda self: "own", reset_parameters=lambda self: nn.init.zeros_(self.W))
    for each in (layer, variant()):
        accelerate(each, example())
    assert layer.extra_repr() == "own" and not hasattr(each, "reset_parameters")
    layer.reset_parameters()
    assert not layer.W.any()


def test_one_sample_of_a_layer_that_squeezes() -> None:
    layer, u = variant(forward=lambda self, u: Plain.forward(self, u).squeeze()), example()
    plain, report = copy.deepcopy(layer), accelerate(layer, u)
    with pytest.warns(UserWarning, match="with one sample, where its output has another shape"):
        v = layer(u[:1])
    torch.testing.assert_close(v, plain(u[:1]), rtol=0, atol=0)
    assert v.shape == (4, 5) and layer(u[:2]).shape == (2, 4, 5)
    assert (report.calls()[""].fused, report.calls()[""].own) == (1, 1)


def test_an_argument_that_is_the_batch_size_and_one_that_is_not() -> None:
    routing, votes = layers.DynamicRouting(3), torch.randn(3, 7, 4, 5)
    plain, report = copy.deepcopy(routing), accelerate(routing, (votes, 3))
    torch.testing.assert_close(routing(votes[:2], 2), plain(votes[:2], 2))
    assert report.calls()[""].own == 0
    layer, u = variant(forward=choosy), example()
    plain, _ = copy.deepcopy(layer), accelerate(layer, (u[:2], None, 2))
    for B, n in ((2, 2), (3, 3), (3, 2)):
        torch.testing.assert_close(layer(u[:B], None, n), plain(u[:B], None, n), rtol=1e-4, atol=1e-5)


def test_a_setting_or_a_hook_that_comes_later_is_followed(both: tuple[Net, Net], images: Tensor) -> None:
    fast = copy.deepcopy(both[0])
    fast.second.routing_module.n_iterations = 0
    assert_same(fast, undone_copy(fast), images)
    fast, seen = copy.deepcopy(both[0]), []
    fast.second.routing_module.register_forward_hook(lambda module, args, v: seen.append(v))
    torch.testing.assert_close(fast(images), both[1](images))
    assert len(seen) == 1


def test_a_copy_is_fused_and_has_its_own_parameters(both: tuple[Net, Net], images: Tensor) -> None:
    fast, plain = copy.deepcopy(both[0]), copy.deepcopy(both[1])
    assert type(fast.first) is type(both[0].first) and fast.first.W is not both[0].first.W
    with torch.no_grad():
        for model in (fast, plain):
            model.first.W *= 0.5
    assert_same(fast, plain, images)
    assert_same(*both, images)


def test_pickle_and_state_dict(both: tuple[Net, Net], images: Tensor, tmp_path: Path) -> None:
    fast, plain = both
    read = pickle.loads(pickle.dumps(fast))
    assert type(read.first) is type(fast.first)
    assert_same(read, plain, images)
    torch.save(fast, tmp_path / "model.pt")
    read = torch.load(tmp_path / "model.pt", weights_only=False)
    assert undo(read) == ("first", "second") and type(read.first) is layers.DigitCapsules
    other = Net().eval()
    other.load_state_dict(fast.state_dict())
    assert_same(other, plain, images)
    fast = copy.deepcopy(fast)
    fast.load_state_dict(Net().state_dict())
    assert_same(fast, undone_copy(fast), images)


def test_parameters_from_elsewhere(both: tuple[Net, Net], images: Tensor) -> None:
    fast, plain = both
    half = {name: 0.5 * p for name, p in fast.named_parameters()}
    torch.testing.assert_close(
        torch.func.functional_call(fast, half, (images,)), torch.func.functional_call(plain, half, (images,))
    )
    # As in nn.DataParallel: a shallow copy with other tensors as parameters.
    u = torch.randn(2, 16, 6)
    results = []
    for model in both:
        replica = model.first._replicate_for_data_parallel()
        replica.W = 0.5 * model.first.W.detach()
        results.append(replica(u))
    torch.testing.assert_close(*results)


def test_a_parametrization_is_followed(both: tuple[Net, Net], images: Tensor) -> None:
    class Half(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w / 2

    fast, plain = copy.deepcopy(both[0]), copy.deepcopy(both[1])
    for model in (fast, plain):
        parametrize.register_parametrization(model.first, "W", Half())
    assert_same(fast, plain, images)
    with pytest.raises(RuntimeError, match="undo that change first"):
        undo(fast)
    assert type(fast.second).__name__ == "FusedCapsLayer"
    for model in (fast, plain):
        parametrize.remove_parametrizations(model.first, "W")
    assert undo(fast) == ("first", "second")
    assert_same(fast, plain, images)


def test_it_compiles_in_one_graph(both: tuple[Net, Net], images: Tensor) -> None:
    fast, plain = both
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(fast, fullgraph=True, backend=keep)
    torch.testing.assert_close(compiled(images), plain(images), rtol=1e-4, atol=1e-5)
    assert len([node for node in graphs[0].graph.nodes if "capsfast" in str(node.target)]) == 2


def test_a_fused_layer_that_is_compiled_itself_stays_fused(both: tuple[Net, Net]) -> None:
    # Lightning replaces torch.compile by its own, which writes an attribute into the layer.
    importlib.import_module("lightning.fabric")
    layer, u = copy.deepcopy(both[0].first), torch.randn(3, 16, 6)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(u), both[0].first(u), rtol=0, atol=0)
    assert not layer._capsfast_fused.state.changed(layer)


def test_it_exports(both: tuple[Net, Net], images: Tensor) -> None:
    program = torch.export.export(both[0], (images,))
    assert len([node for node in program.graph.nodes if "capsfast" in str(node.target)]) == 2
    torch.testing.assert_close(program.module()(images), both[1](images), rtol=1e-4, atol=1e-5)


def test_derivatives_that_fused_layers_lack_say_how_to_get_them(both: tuple[Net, Net], images: Tensor) -> None:
    x = images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(both[0](x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative; .* report\.undo\(\) of a model that capsfast\.acc"):
        gradient.sum().backward()
    with pytest.raises(NotImplementedError, match=r"no forward-mode derivative .* report\.undo\(\) of a model"):
        torch.func.jvp(both[0], (images,), (images,))


def test_it_exports_for_any_batch_where_that_is_an_argument() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.routing = layers.VotesRouting(3)

        def forward(self, votes: Tensor) -> Tensor:
            return self.routing(votes, votes.size(0))

    model, votes = Model().eval(), torch.randn(3, 7, 4, 5)
    plain = copy.deepcopy(model)
    accelerate(model, votes)
    program = torch.export.export(model, (votes,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    assert len([node for node in program.graph.nodes if "capsfast" in str(node.target)]) == 1
    more = torch.randn(5, 7, 4, 5)
    torch.testing.assert_close(program.module()(more), plain(more), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # Python reads sizes, here and in the ops
def test_torch_fx_and_torchscript(both: tuple[Net, Net], images: Tensor) -> None:
    graph = torch.fx.symbolic_trace(both[0])
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"][-2:] == ["first", "second"]
    torch.testing.assert_close(graph(images), both[0](images))
    traced = torch.jit.trace(both[0], (images,))
    torch.testing.assert_close(traced(images[:2]), both[0](images[:2]))
    with pytest.raises(TypeError, match=r"FusedDigitCapsules; call capsfast\.adopt\.undo"):
        torch.jit.script(both[0])


def test_a_compiled_model_is_accelerated_inside() -> None:
    model, u = nn.Sequential(Plain()), example()
    compiled = torch.compile(model, backend="eager")
    v = compiled(u)
    assert accelerate(compiled, u).fused == ("_orig_mod.0",)
    assert not torch.equal(compiled(u), v)  # not the graph from before: sums have another order
    torch.testing.assert_close(compiled(u), v)
    undo(model)
    torch.testing.assert_close(compiled(u), v, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("inside", "dtype"),
    [(True, torch.bfloat16), (False, torch.float16)],
)
def test_mixed_precision_of_a_whole_network(inside: bool, dtype: torch.dtype, images: Tensor) -> None:
    """Convolutions in front return bfloat16 and the weights are float32, as in the training of a usual CapsNet."""
    model = Net().eval()
    with torch.no_grad():
        model.first.W *= 100  # capsules of untrained layers are too small for float16
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", dtype, enabled=inside):
        report = accelerate(model, images)
    assert report.fused == ("first", "second"), report
    with torch.autocast("cpu", dtype):
        v, own = model(images), plain(images)
        assert v.dtype == own.dtype and relative(v, own) < TOLERANCE[dtype]
        assert_close_gradients(model, plain, images)
    torch.testing.assert_close(model(images), plain(images), rtol=1e-4, atol=1e-5)
    assert {name: (call.fused, call.own) for name, call in report.calls().items()} == {
        "first": (3, 0), "second": (3, 0)
    }  # fmt: skip


def assert_close_gradients(model: nn.Module, plain: nn.Module, images: Tensor) -> None:
    """Compares whole tensors, because single numbers are inexact in bfloat16."""
    grads = [torch.autograd.grad(each(images).float().sum(), list(each.parameters())) for each in (model, plain)]
    one, other = (torch.cat([grad.flatten().float() for grad in each]) for each in grads)
    assert (one - other).norm() < 0.05 * other.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_a_model_that_is_cast_later(dtype: torch.dtype) -> None:
    layer = layers.CapsuleLinear(4, 6, 5, 7, False, "dynamic", bias=False)
    u = torch.randn(3, 7, 6)
    report = accelerate(layer, u)
    plain = undone_copy(layer).to(dtype)
    v = layer.to(dtype)(u.to(dtype))
    assert v.dtype == dtype and relative(v, plain(u.to(dtype))) < TOLERANCE[dtype]
    assert vars(report.calls()[""]) == {"fused": 1, "own": 0, "why": ""}


def test_dtypes_that_the_own_forward_does_not_take_stay_its_matter() -> None:
    """The layer's torch.zeros is float32; einsum mixes no dtypes. A result that is cast to float32 stays float32."""

    def forward(self: Any, u: Tensor) -> Any:
        votes = self.votes(u)
        b = torch.zeros(votes.shape[:3])
        for _ in range(2):
            v = layers.squash(torch.einsum("bij,bijd->bjd", b.softmax(2), votes), 1e-8)
            b = b + torch.einsum("bijd,bjd->bij", votes, v)
        return v.float()

    layer, u = variant(forward=forward), example()
    report = accelerate(layer, u)
    assert report.fused == ("",)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(u).dtype == torch.float32
    with (
        pytest.warns(UserWarning, match="does not run on bfloat16"),
        pytest.raises(RuntimeError, match="expected scalar"),
    ):
        layer.bfloat16()(u.bfloat16())
    assert (report.calls()[""].fused, report.calls()[""].own) == (1, 1)


def test_a_model_that_was_low_before() -> None:
    layer = layers.CapsuleLinear(4, 6, 5, 7, False, "dynamic", bias=False).bfloat16()
    u = example().bfloat16()
    plain, report = copy.deepcopy(layer), accelerate(layer, u)
    assert report.fused == ("",), report
    assert layer(u).dtype == plain(u).dtype and relative(layer(u), plain(u)) < TOLERANCE[torch.bfloat16]
    assert capsfast.identify(layer, u) == report[""].identification


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")
def test_ddp_around_an_accelerated_model(both: tuple[Net, Net], images: Tensor, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(copy.deepcopy(both[0]))
        assert_same(model, both[1], images)
    finally:
        dist.destroy_process_group()
