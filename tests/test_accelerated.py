"""Models that capsfast.accelerate changed: what else is done with models goes on as before."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from capsfast.adopt import undo
from capsfast.adopt.verification import relative

from .support import published_layers as layers
from .support.adopted import IMAGES, Choosy, Net, accelerate, assert_same, calls_own_forward, undone_copy


@pytest.fixture
def images() -> Tensor:
    return torch.randn(IMAGES)


@pytest.fixture(scope="module")
def both() -> tuple[Net, Net]:
    """A model that was accelerated, and its like that was not; in evaluation mode. Not to be changed."""
    torch.manual_seed(0)
    plain = Net().eval()
    fast = copy.deepcopy(plain)
    accelerate(fast, torch.randn(IMAGES))
    return fast, plain


def test_calls_that_were_not_verified_run_the_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, u = Choosy(7, 4, 6, 5, 3), torch.randn(4, 7, 6)
    plain = copy.deepcopy(layer)
    assert accelerate(layer, u).fused == ("",)
    own = calls_own_forward(layer, monkeypatch)
    torch.testing.assert_close(layer(u[:2]), plain(u[:2]))
    assert own() == 1  # of the plain one
    mask = torch.ones(4, 7)
    mask[:, 3:] = 0
    for call in (lambda each: each(u, mask), lambda each: each(u, iterations=1), lambda each: each(u, None, 2)):
        before = own()
        torch.testing.assert_close(call(layer), call(plain), rtol=0, atol=0)
        assert own() == before + 2
    with pytest.raises(RuntimeError):
        layer(torch.randn(4, 8, 6))


def test_a_setting_that_changes_is_followed(images: Tensor) -> None:
    layer, u = layers.DigitCaps(7, 4, 6, 5), torch.randn(4, 7, 6)
    accelerate(layer, u)
    plain = undone_copy(layer)
    for each in (layer, plain):
        each.num_routing = 1
    torch.testing.assert_close(layer(u), plain(u), rtol=0, atol=0)
    nested = Net()
    accelerate(nested, images)
    inner = undone_copy(nested)
    for each in (nested, inner):
        each.eval().second.routing_module.n_iterations = 0
    assert_same(nested, inner, images)


def test_an_argument_that_is_the_batch_size_and_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    routing, votes = layers.DynamicRouting(3), torch.randn(3, 7, 4, 5)
    accelerate(routing, (votes, 3))
    own = calls_own_forward(routing, monkeypatch)
    v = routing(votes[:2], 2)
    assert own() == 0
    torch.testing.assert_close(v, layers.DynamicRouting(3)(votes[:2], 2))

    layer, u = Choosy(7, 4, 6, 5, 3), torch.randn(2, 7, 6)
    accelerate(layer, (u, None, 2))
    plain = undone_copy(layer)
    torch.testing.assert_close(layer(u, None, 2), plain(u, None, 2))
    three = torch.randn(3, 7, 6)
    torch.testing.assert_close(layer(three, None, 3), plain(three, None, 3))
    torch.testing.assert_close(layer(three, None, 2), plain(three, None, 2))


def test_hooks_in_a_layer_that_come_later_run() -> None:
    layer, u = layers.CapsLayer(7, 6, 4, 5, layers.AgreementRouting(7, 4, 1)), torch.randn(3, 7, 6)
    accelerate(layer, u)
    seen = []
    layer.routing_module.register_forward_hook(lambda module, args, v: seen.append(v))
    plain = undone_copy(layer)(u)
    del seen[:]
    torch.testing.assert_close(layer(u), plain, rtol=0, atol=0)
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
    # What nn.DataParallel and others make: a shallow copy that is given other tensors.
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
    with pytest.raises(RuntimeError, match="take that off first"):
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


def test_it_exports(both: tuple[Net, Net], images: Tensor) -> None:
    program = torch.export.export(both[0], (images,))
    assert len([node for node in program.graph.nodes if "capsfast" in str(node.target)]) == 2
    torch.testing.assert_close(program.module()(images), both[1](images), rtol=1e-4, atol=1e-5)


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


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # sizes are looked at, here and in the ops
def test_torch_fx_and_torchscript(both: tuple[Net, Net], images: Tensor) -> None:
    graph = torch.fx.symbolic_trace(both[0])
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"][-2:] == ["first", "second"]
    torch.testing.assert_close(graph(images), both[0](images))
    traced = torch.jit.trace(both[0], (images,))
    torch.testing.assert_close(traced(images[:2]), both[0](images[:2]))
    with pytest.raises(TypeError, match=r"FusedDigitCapsules; call capsfast\.adopt\.undo"):
        torch.jit.script(both[0])


def test_a_compiled_model_is_accelerated_inside(images: Tensor) -> None:
    model = nn.Sequential(layers.Router(16, 4, 6, 5, 2)).eval()
    u = images.new_ones(3, 16, 6)
    compiled = torch.compile(model, backend="eager")
    v = compiled(u)
    assert accelerate(compiled, u).fused == ("_orig_mod.0",)
    assert not torch.equal(compiled(u), v)  # other sums are formed: not the graph from before
    torch.testing.assert_close(compiled(u), v)
    undo(model)
    torch.testing.assert_close(compiled(u), v, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_models_of_other_dtypes(dtype: torch.dtype) -> None:
    layer = layers.CapsuleLinear(4, 6, 5, 7, share_weight=False, squash=True).to(dtype)
    u = torch.randn(3, 7, 6, dtype=dtype)
    plain = copy.deepcopy(layer)
    assert accelerate(layer, u).fused == ("",)
    assert layer(u).dtype == dtype and relative(layer(u), plain(u)) < {torch.float64: 1e-12}.get(dtype, 5e-2)


def test_a_model_under_autocast() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.caps = layers.DenseCapsule(7, 6, 4, 5)

        def forward(self, u: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.caps(u).float()

    model, u = Cast(), torch.randn(3, 7, 6)
    plain = copy.deepcopy(model)
    report = accelerate(model, u)
    assert report.fused == ("caps",), report
    assert relative(model(u), plain(u)) < 2e-2


class Digits(nn.Module):
    """The network of the paper for images of 8 x 8, the popular way: each layer of capsules a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.primary = layers.CapsuleLayer(4, -1, 8, 4, kernel_size=3, stride=2)
        self.digits = layers.CapsuleLayer(10, 16, 4, 8)
        self.decoder = nn.Sequential(nn.Linear(80, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        v = self.digits(self.primary(F.relu(self.conv(images)))).squeeze().transpose(0, 1)
        lengths = v.norm(dim=-1)
        chosen = F.one_hot(lengths.argmax(1), 10)[:, :, None]
        return lengths, self.decoder((v * chosen).flatten(1))


def descend(model: Digits, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for images, labels in batches:
        lengths, made = model(images)
        present = F.one_hot(labels, 10)
        margin = present * F.relu(0.9 - lengths) ** 2 + 0.5 * (1 - present) * F.relu(lengths - 0.1) ** 2
        loss = margin.sum(1).mean() + 0.05 * (made - images.flatten(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_training_on_digits_goes_on_as_it_would_have() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    data = datasets.load_digits()
    images = torch.tensor(data.images[:768] / 16, dtype=torch.float32).unsqueeze(1)
    batches = list(zip(images.split(32), torch.tensor(data.target[:768]).split(32), strict=True))
    curves = {}
    for fused in (False, True):
        torch.manual_seed(3)
        model = Digits()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        losses = descend(model, optimizer, batches[:8])
        moments = optimizer.state[model.digits.route_weights]["exp_avg"]
        if fused:
            assert accelerate(model, batches[0][0]).fused == ("digits",)
            assert optimizer.state[model.digits.route_weights]["exp_avg"] is moments
        curves[fused] = torch.tensor(losses + descend(model, optimizer, batches))
    assert curves[False][-5:].mean() < 0.7 * curves[False][:5].mean()
    torch.testing.assert_close(curves[True], curves[False], rtol=2e-3, atol=2e-4)
    assert not torch.equal(curves[True][9:], curves[False][9:])  # other sums were formed


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")
def test_ddp_around_an_accelerated_model(both: tuple[Net, Net], images: Tensor, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(copy.deepcopy(both[0]))
        assert_same(model, both[1], images)
    finally:
        dist.destroy_process_group()
