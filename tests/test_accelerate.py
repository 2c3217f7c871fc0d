"""capsfast.accelerate: the same model, the same numbers, and what it leaves alone."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import capsfast
from capsfast.adopt import Acceleration, undo
from capsfast.adopt.verification import Speed, relative

from .support import published_layers as layers
from .support import published_variants as variants
from .support.published import PUBLISHED, Published

pytestmark = pytest.mark.filterwarnings("ignore:.* accuracy falls at small batches:UserWarning")

KINDS = {row.name: row for row in PUBLISHED}


def accelerate(model: nn.Module, example: Any, **options: Any) -> Acceleration:
    """In short, and whatever is faster on a machine that does other things beside."""
    return capsfast.accelerate(model, example, **{"only_faster": False, "seconds": 0, **options})


class Net(nn.Module):
    """A convolution and two layers of capsules, the second of which holds its routing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Dropout(0.5))
        self.first = layers.DigitCapsules(16, 6, 5, 7)
        self.second = layers.CapsLayer(5, 7, 3, 4, layers.AgreementRouting(5, 3, 2))

    def forward(self, images: Tensor) -> Tensor:
        u = self.conv(images).flatten(2).transpose(1, 2)  # [B, 16, 6]
        return self.second(self.first(u))


IMAGES = (4, 1, 6, 6)


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


def outcome(model: nn.Module, example: Any) -> list[Tensor]:
    """Output and gradients, that of the input first."""
    first, *others = example if isinstance(example, tuple) else (example,)
    leaf = first.clone().requires_grad_()
    v = model(leaf, *others)
    inputs = [leaf, *model.parameters()]
    return [v.detach(), *torch.autograd.grad(v, inputs, torch.linspace(-1, 1, v.numel()).view(v.shape))]


def assert_same(one: nn.Module, other: nn.Module, x: Any) -> None:
    pairs = list(zip(outcome(one, x), outcome(other, x), strict=True))
    assert max(relative(a, b) for a, b in pairs) < 1e-4


def calls_own_forward(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Gives the number of calls of the forward that the layer's author wrote."""
    count = [0]
    own = undone_class(layer).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return own(self, *args, **kwargs)

    monkeypatch.setattr(undone_class(layer), "forward", forward)
    return lambda: count[0]


def undone_class(layer: nn.Module) -> type:
    made = type(layer)
    return made.__mro__[2] if made.__name__.startswith("Fused") else made


# One for each way of being called, of giving results, and of holding what is read.
REPRODUCED = (
    *("DynamicRouting of votes", "DynamicRoutingLayer, shared", "CapsuleLayer", "DenseCapsule", "CapsLayer"),
    *("CapsuleLinear, own weights", "batch mean, transposed", "transposed", "merged rows", "leaky", "lazy"),
    *("one matrix, drawn logits", "mask before the softmax over inputs"),
)


@pytest.mark.parametrize("name", REPRODUCED)
def test_a_published_layer_is_fused_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = KINDS[name]
    layer, example = row.make(), row.example()
    if row.lazy:
        layer(*example)
    plain = copy.deepcopy(layer)
    before, names = dict(layer.named_parameters()), list(layer.state_dict())
    report = accelerate(layer, example)
    assert report.fused == ("",) and report[""].difference < 1e-4, report
    own = calls_own_forward(layer, monkeypatch)
    v = layer(*example)
    assert own() == 0
    torch.testing.assert_close(v, plain(*example), rtol=1e-4, atol=1e-6)
    assert_same(layer, plain, example)
    assert isinstance(layer, type(plain)) and list(layer.state_dict()) == names
    assert all(p is before[key] for key, p in layer.named_parameters()) and len(before) == len(names) - (
        row.logits == "B_matrix"
    )


@pytest.mark.parametrize("row", [row for row in PUBLISHED if not row.reproducible], ids=lambda row: row.name)
def test_what_no_option_computes_is_left_alone_and_named(row: Published) -> None:
    model = nn.Sequential(row.make())
    report = accelerate(model, row.example())
    assert report.fused == () and list(report.left_alone) == ["0"]
    assert "is not reproduced" in report.left_alone["0"] and "left alone" in str(report)
    assert type(model[0]) is type(row.make())


def test_a_lazy_layer_is_built_by_the_example() -> None:
    model = variants.Lazy(4, 5)
    assert accelerate(model, torch.randn(3, 7, 6)).fused == ("",)
    assert model.W.shape == (4, 7, 5, 6)


def test_the_report_says_what_was_found(images: Tensor) -> None:
    model = Net()
    model.head = variants.CosineAgreement(3, 2, 4, 4)
    model.forward = None  # type: ignore[assignment]
    del model.forward
    whole = nn.Sequential(model, model.head)
    report = accelerate(whole, images)
    assert report.fused == ("0.first", "0.second")
    first = report["0.first"]
    assert first.identification is not None and first.identification.weight == "W"
    assert first.forward.own > 0 and first.both.fused > 0 and 0 < first.difference < 1e-4
    text = str(report)
    assert "forward+backward" in text and "DigitCapsules" in text and "weight `W`" in text
    assert "0.head" in report.left_alone and "0.head" in text
    # The routing inside of a layer that was fused is no layer of its own.
    assert "second.routing_module" not in text
    with pytest.raises(KeyError, match="no layer 'conv'"):
        report["conv"]


def test_a_model_without_routing(images: Tensor) -> None:
    report = accelerate(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(2), nn.Linear(16, 3)), images)
    assert report.layers == () and "No layer" in str(report)


def test_nothing_of_the_model_is_disturbed(images: Tensor) -> None:
    model = Net()
    model.conv[1].eval()
    model(images).sum().backward()
    grads = [p.grad for p in model.parameters()]
    copies = [grad.clone() for grad in grads]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    seen = []
    model.first.register_forward_hook(lambda *_: seen.append("forward"))
    model.first.W.register_hook(lambda grad: seen.append("backward"))
    assert accelerate(model, images).fused == ("first", "second")
    assert seen == ["forward"]  # of the model's run on the example
    assert torch.equal(random, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(grad, kept) for grad, kept in zip(grads, copies, strict=True))
    model(images)
    assert seen == ["forward", "forward"]


def test_a_dry_run_changes_nothing(images: Tensor) -> None:
    model = Net()
    report = accelerate(model, images, dry_run=True)
    assert report.fused == ("first", "second") and report["first"].status == "to be fused"
    assert type(model.first) is layers.DigitCapsules and type(model.second) is layers.CapsLayer
    report.undo()


def test_a_second_call_finds_it_done_and_undo_takes_it_back(images: Tensor) -> None:
    model = Net()
    report = accelerate(model, images)
    again = accelerate(model, images)
    assert again.fused == () and {each.status for each in again.layers} == {"already fused"}
    again.undo()
    assert accelerate(model, images).fused == ()
    report.undo()
    assert type(model.first) is layers.DigitCapsules and "_capsfast_fused" not in vars(model.first)
    report.undo()
    assert accelerate(model, images).fused == ("first", "second")
    assert undo(model) == ("first", "second") and undo(model) == ()
    assert type(model.second) is layers.CapsLayer


def test_the_outermost_layer_is_fused_and_one_that_only_hands_on_is_not() -> None:
    class HandsOn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.caps = layers.Router(7, 4, 6, 5, 2)

        def forward(self, u: Tensor) -> Tensor:
            return self.caps(u)

    assert accelerate(HandsOn(), torch.randn(3, 7, 6)).fused == ("caps",)


def test_a_layer_that_is_used_twice(images: Tensor) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList([layers.DigitCaps(5, 5, 6, 6)] * 2)

        def forward(self, u: Tensor) -> Tensor:
            return self.steps[1](self.steps[0](u))

    model = Twice()
    plain, u = copy.deepcopy(model), torch.randn(3, 5, 6)
    assert accelerate(model, u).fused == ("steps.0",)
    assert_same(model, plain, u)


@pytest.mark.parametrize("kind", ["tuple", "mapping"])
def test_examples_of_several_arguments(kind: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.caps = layers.Router(7, 4, 6, 5, 2)

        def forward(self, u: Tensor, scale: float) -> Tensor:
            return scale * self.caps(u)

    u = torch.randn(3, 7, 6)
    example = (u, 2.0) if kind == "tuple" else {"u": u, "scale": 2.0}
    assert accelerate(Model(), example).fused == ("caps",)


class Choosy(layers.Router):
    """A layer with further arguments."""

    def forward(self, u: Tensor, mask: Tensor | None = None, iterations: int = 3) -> Tensor:
        self_iterations, self.iterations = self.iterations, iterations
        try:
            v = super().forward(u if mask is None else u * mask[:, :, None])
        finally:
            self.iterations = self_iterations
        return v


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


def undone_copy(model: nn.Module) -> Any:
    found = copy.deepcopy(model)
    undo(found)
    return found


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


def left_alone(layer: nn.Module, *example: Any) -> str:
    report = accelerate(nn.ModuleList([layer]) if not example else layer, example)
    assert report.fused == ()
    return report.left_alone[""]


def test_layers_that_do_more_than_compute_are_left_alone() -> None:
    u = torch.randn(3, 7, 6)

    class Keeps(layers.Router):
        def forward(self, u: Tensor) -> Tensor:
            self.last = super().forward(u)
            return self.last

    class Counts(layers.Router):
        def __init__(self) -> None:
            super().__init__(7, 4, 6, 5, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, u: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(u)

    class Drops(layers.Router):
        def forward(self, u: Tensor) -> Tensor:
            return super().forward(F.dropout(u, 0.5, self.training))

    class Draws(layers.Router):
        def forward(self, u: Tensor) -> Tensor:
            return super().forward(u + torch.randn_like(u))

    class Scales(layers.Router):
        def __init__(self) -> None:
            super().__init__(7, 4, 6, 5, 2)
            self.scale = torch.ones(())

        def forward(self, u: Tensor) -> Tensor:
            return super().forward(u) * self.scale

    class Pairs(layers.Router):
        def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(u), u

    sizes = (7, 4, 6, 5, 2)
    keeps = Keeps(*sizes)
    assert "keeps last in the layer" in left_alone(keeps, u)
    counts = Counts()
    assert "keeps calls in the layer" in left_alone(counts, u) and counts.calls == 0
    assert "training and evaluation" in left_alone(Drops(*sizes), u)
    assert "from call to call" in left_alone(Draws(*sizes), u)
    assert "depends on `scale`" in left_alone(Scales(), u)
    assert "a tuple of 2" in left_alone(Pairs(*sizes), u)


def test_reasons_that_lie_in_the_model() -> None:
    u = torch.randn(3, 7, 6)
    patched = layers.Router(7, 4, 6, 5, 2)
    patched.forward = lambda u, own=patched.forward: own(u)  # type: ignore[method-assign]
    assert "replaced by somebody else's" in left_alone(patched, u)
    nested = layers.CapsLayer(7, 6, 4, 5, layers.AgreementRouting(7, 4, 1))
    handle = nested.routing_module.register_forward_hook(lambda *_: None)
    report = accelerate(nested, u)
    assert "hooks of routing_module" in report.left_alone[""] and report.fused == ("routing_module",)
    handle.remove()
    assert "one sample" in left_alone(layers.Router(7, 4, 6, 5, 2), u[:1])
    assert "tolerance is 1e-12" in left_alone_with(layers.Router(7, 4, 6, 5, 2), u, tolerance=1e-12)


def left_alone_with(layer: nn.Module, u: Tensor, **options: Any) -> str:
    return accelerate(layer, u, **options).left_alone[""]


def test_hooks_in_a_layer_that_come_later_run() -> None:
    layer, u = layers.CapsLayer(7, 6, 4, 5, layers.AgreementRouting(7, 4, 1)), torch.randn(3, 7, 6)
    accelerate(layer, u)
    seen = []
    layer.routing_module.register_forward_hook(lambda module, args, v: seen.append(v))
    plain = undone_copy(layer)(u)
    del seen[:]
    torch.testing.assert_close(layer(u), plain, rtol=0, atol=0)
    assert len(seen) == 1


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_a_layer_that_would_be_slower_stays(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = Speed(ratio, 1.0)
    monkeypatch.setattr("capsfast.adopt.verification.speeds", lambda *_: (speed, speed))
    layer, u = layers.Router(7, 4, 6, 5, 2), torch.randn(3, 7, 6)
    report = accelerate(layer, u, only_faster=True)
    assert report.fused == (("",) if ratio > 1 else ())
    assert ratio > 1 or ("takes longer" in report.left_alone[""] and report[""].both == speed)
    assert f"{ratio:.1f}x" in str(report)


def test_what_making_the_votes_in_the_kernels_would_gain() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Parameter(torch.randn(1, 7, 4, 5, 6))
            self.routing = layers.DynamicRouting(3)

        def forward(self, u: Tensor) -> Tensor:
            votes = (self.W @ u[:, :, None, :, None]).squeeze(-1)
            return self.routing(votes, len(u)).square().sum(2)

    report = accelerate(Apart(), torch.randn(3, 7, 6))
    assert report.fused == ("routing",)
    assert "`W` has the size of the weight" in report["routing"].reason
    assert "capsfast.DynamicRouting(7, 4, 6, 5)" in str(report)


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


def test_a_scripted_model_and_other_wrong_arguments() -> None:
    u = torch.randn(3, 7, 6)
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got Tensor"):
        capsfast.accelerate(u, u)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="accelerate it before"):
        capsfast.accelerate(torch.jit.trace(nn.Linear(2, 2), torch.randn(2, 2)), u)
    layer = layers.Router(7, 4, 6, 5, 2)
    for wrong, error in (
        ({"dry_run": 1}, TypeError),
        ({"tolerance": "small"}, TypeError),
        ({"tolerance": -1.0}, ValueError),
        ({"seconds": -1}, ValueError),
    ):
        with pytest.raises(error, match=next(iter(wrong))):
            capsfast.accelerate(layer, u, **wrong)
    with pytest.raises(RuntimeError):  # what the model says of an example that does not fit
        capsfast.accelerate(layer, torch.randn(3, 8, 6))
    assert type(layer) is layers.Router and not layer._forward_hooks


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


def test_training_on_digits_goes_on_as_it_would_have() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    data = datasets.load_digits()
    images = torch.tensor(data.images[:640] / 16, dtype=torch.float32).unsqueeze(1)
    batches = list(zip(images.split(32), torch.tensor(data.target[:640]).split(32), strict=True))
    curves = {}
    for fused in (False, True):
        torch.manual_seed(3)
        model = Digits()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        losses = descend(model, optimizer, batches[:10])
        moments = optimizer.state[model.digits.route_weights]["exp_avg"]
        if fused:
            assert accelerate(model, batches[0][0]).fused == ("digits",)
            assert optimizer.state[model.digits.route_weights]["exp_avg"] is moments
        curves[fused] = torch.tensor(losses + descend(model, optimizer, batches + batches))
    assert curves[False][-5:].mean() < 0.7 * curves[False][:5].mean()
    torch.testing.assert_close(curves[True], curves[False], rtol=2e-3, atol=2e-4)
    assert not torch.equal(curves[True][11:], curves[False][11:])  # other sums were formed


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")
def test_ddp_around_an_accelerated_model(both: tuple[Net, Net], images: Tensor, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(copy.deepcopy(both[0]))
        assert_same(model, both[1], images)
    finally:
        dist.destroy_process_group()
