"""capsfast.accelerate: what it replaces, what it leaves alone, and what it says of both."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import capsfast
from capsfast.adopt import replacement, undo
from capsfast.adopt.snapshot import RECORD
from capsfast.adopt.verification import Speed

from .support import published_layers as layers
from .support import published_variants as variants
from .support.adopted import IMAGES, Net, accelerate, assert_same, calls_own_forward
from .support.published import PUBLISHED, Published

pytestmark = pytest.mark.filterwarnings("ignore:.* accuracy falls at small batches:UserWarning")

KINDS = {row.name: row for row in PUBLISHED}


@pytest.fixture
def images() -> Tensor:
    return torch.randn(IMAGES)


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
    model = nn.Sequential(Net(), variants.CosineAgreement(3, 2, 4, 4))
    report = accelerate(model, images)
    assert report.fused == ("0.first", "0.second") and list(report.left_alone) == ["1"]
    first = report["0.first"]
    assert first.identification is not None and first.identification.weight == "W"
    assert first.forward.own > 0 and first.both.fused > 0 and 0 < first.difference < 1e-4
    text = str(report)
    assert "forward+backward" in text and "DigitCapsules" in text and "weight `W`" in text and "CosineAgreement" in text
    # The routing inside of a layer that was fused is no layer of its own.
    assert "routing_module  " not in text
    with pytest.raises(KeyError, match=r"no layer '0\.conv'"):
        report["0.conv"]


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


def test_it_works_where_no_gradients_are_wanted(images: Tensor) -> None:
    with torch.inference_mode():
        model = Net()
        assert accelerate(model, images + 1).fused == ("first", "second")


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


def left_alone(layer: nn.Module, u: Tensor, **options: Any) -> str:
    """Why the layer, the whole model here, is not fused."""
    report = accelerate(layer, u, **options)
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


class Logs(layers.Router):
    """Keeps something in containers: a list, a dict, an object in one."""

    def __init__(self) -> None:
        super().__init__(7, 4, 6, 5, 2)
        self.log: list[float] = [1.0]
        self.cache: dict[str, Any] = {}
        self.state = SimpleNamespace(deep=[{"calls": set()}])

    def forward(self, u: Tensor) -> Tensor:
        self.keep(len(u))
        return super().forward(u)


class LogsAll(Logs):
    def keep(self, count: int) -> None:
        self.log.append(float(count))
        self.cache["last"] = torch.zeros(count)


class Remembers(Logs):
    """Seen over all calls only: the second one on as many samples adds nothing."""

    def keep(self, count: int) -> None:
        self.state.deep[0]["calls"].add(count)


class Fills(Logs):
    """What it keeps has another identity at each call, and the same length."""

    def keep(self, count: int) -> None:
        self.log[0] = torch.zeros(count)


@pytest.mark.parametrize(
    ("kind", "words"), [(LogsAll, "keeps cache, log in"), (Fills, "keeps log in"), (Remembers, "keeps state in")]
)
def test_what_a_layer_keeps_in_containers_is_seen_and_put_back(kind: type[Logs], words: str) -> None:
    layer = kind()
    assert words in left_alone(layer, torch.randn(3, 7, 6))
    assert layer.log == [1.0] and layer.cache == {} and layer.state.deep == [{"calls": set()}]
    layer(torch.randn(3, 7, 6))
    assert len(layer.log) == (2 if kind is LogsAll else 1) and len(layer.cache) == (kind is LogsAll)


def test_buffers_that_a_forward_replaces_are_put_back() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("run", torch.ones(6))
            self.caps = layers.Router(7, 4, 6, 5, 2)

        def forward(self, u: Tensor) -> Tensor:
            self.run = 0.9 * self.run + 0.1 * u.mean((0, 1))
            return self.caps(u)

    model = Running()
    run = model.run
    assert accelerate(model, torch.randn(3, 7, 6)).fused == ("caps",)
    assert model.run is run and torch.equal(run, torch.ones(6))


def test_a_parametrized_layer_is_named() -> None:
    class Half(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w / 2

    model, u = nn.Sequential(layers.Router(7, 4, 6, 5, 2)), torch.randn(3, 7, 6)
    parametrize.register_parametrization(model[0], "weight", Half())
    report = accelerate(model, u)
    assert report.fused == () and "are parametrized" in report.left_alone["0"]
    parametrize.remove_parametrizations(model[0], "weight")
    assert accelerate(model, u).fused == ("0",)


class Stubborn(layers.Router):
    """Minds what is assigned."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise AttributeError("no other class")
        super().__setattr__(name, value)


class Pretends(layers.Router):
    @property
    def __class__(self) -> Any:
        return nn.Module


def test_classes_that_are_hard_to_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    u = torch.randn(3, 7, 6)
    stubborn = Stubborn(7, 4, 6, 5, 2)
    report = accelerate(stubborn, u)
    assert report.fused == ("",)
    report.undo()
    assert type(stubborn) is Stubborn
    assert "its class cannot be replaced" in left_alone(Pretends(7, 4, 6, 5, 2), u)

    model = nn.Sequential(layers.Router(7, 4, 6, 5, 2), layers.Router(4, 3, 5, 5, 2))
    true = replacement.fuse

    def fails(layer: nn.Module, fused: Any) -> None:
        if layer is model[1]:
            raise MemoryError
        true(layer, fused)

    monkeypatch.setattr(replacement, "fuse", fails)
    with pytest.raises(MemoryError):
        accelerate(model, u)
    assert all(type(each) is layers.Router and RECORD not in vars(each) for each in model)


class Named(layers.Router):
    """Its subclasses need a keyword."""

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()


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
    assert "no class can be derived" in left_alone(Named(7, 4, 6, 5, 2), u)
    assert "tolerance is 1e-12" in left_alone(layers.Router(7, 4, 6, 5, 2), u, tolerance=1e-12)


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


class Masked(nn.Module):
    """Votes made outside of the routing, which is given a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(7, 4, 5, 6))
        self.routing = Masking()

    def forward(self, u: Tensor, mask: Tensor) -> Tensor:
        return self.routing(torch.einsum("ijdk,bik->bijd", self.W, u), mask).square().sum(2)


class Filling(nn.Module):
    """Logits of a large negative number are equal again where all inputs of a sample have them."""

    def forward(self, votes: Tensor, mask: Tensor) -> Tensor:
        b = votes.new_zeros(votes.shape[:3])
        for _ in range(3):
            c = b.masked_fill(~mask[:, :, None], -1e9).softmax(1)
            v = layers.squash((c.unsqueeze(3) * votes).sum(1), 1e-8)
            b = b + (votes * v.unsqueeze(1)).sum(3)
        return v


class Masking(nn.Module):
    def forward(self, votes: Tensor, mask: Tensor) -> Tensor:
        b = votes.new_zeros(votes.shape[:3])
        for _ in range(3):
            v = layers.squash(((b.softmax(2) * mask[:, :, None]).unsqueeze(3) * votes).sum(1), 1e-8)
            b = b + (votes * v.unsqueeze(1)).sum(3)
        return v


def test_routing_of_votes_with_a_mask_is_measured_with_it() -> None:
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 4:] = False
    report = accelerate(Masked(), (torch.randn(3, 7, 6), mask))
    assert report.fused == ("routing",) and "`W` has the size of the weight" in report["routing"].reason


def test_a_layer_that_gives_something_for_samples_without_inputs_is_left_alone() -> None:
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 4:] = False
    report = accelerate(Filling(), (torch.randn(3, 7, 4, 5), mask))
    assert "where its mask is False for a whole sample it gives something else than 0" in report.left_alone[""]


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


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_weights_outside_of_routing_modules_are_named() -> None:
    class Inline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 6, 3)
            self.W = nn.Parameter(torch.randn(1, 16, 4, 5, 6))
            self.past = layers.DigitCaps(4, 3, 5, 2)
            self.traced = torch.jit.trace(layers.Router(3, 4, 2, 5, 2), torch.randn(4, 3, 2))

        def forward(self, images: Tensor) -> Tensor:
            u = self.conv(images).flatten(2).transpose(1, 2)
            return self.traced(self.past.forward(torch.einsum("xijdk,bik->bjd", self.W, u)))

    report = accelerate(Inline(), torch.randn(3, 2, 6, 6))
    assert "`W` [1, 16, 4, 5, 6]" in report.left_alone[""] and "module of its own" in report.left_alone[""]
    assert "did not call it" in report.left_alone["past"] and report.fused == ()
    assert "it was scripted" in report.left_alone["traced"]
