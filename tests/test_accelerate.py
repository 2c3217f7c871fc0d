"""capsfast.accelerate: what it replaces, what it leaves alone, and what it reports."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

import capsfast
from capsfast.adopt import undo
from capsfast.adopt.beside import Speed

from .support import published_layers as layers
from .support import published_variants as variants
from .support.adopted import IMAGES, K, Net, Plain, accelerate, assert_same, example, masked_after, variant
from .support.published import PUBLISHED, Published

pytestmark = pytest.mark.filterwarnings("ignore:.* accuracy falls at small batches:UserWarning")

# One row for each kind of call, result and state. test_identify.py runs the call that is found for every other row.
KINDS = ("DynamicRouting of votes", "CapsuleLayer", "CapsLayer", "mask before the softmax over inputs")


@pytest.mark.parametrize("row", [row for row in PUBLISHED if row.name in KINDS], ids=lambda row: row.name)
def test_a_published_layer_is_fused_as_it_is(row: Published) -> None:
    layer, inputs = row.make(), row.example()
    if row.lazy:
        layer(*inputs)
    plain = copy.deepcopy(layer)
    before, names = dict(layer.named_parameters()), list(layer.state_dict())
    report = accelerate(layer, inputs)
    assert report.fused == ("",) and report[""].difference < 1e-4, report
    v = layer(*inputs)
    assert (report.calls()[""].fused, report.calls()[""].own) == (1, 0)
    torch.testing.assert_close(v, plain(*inputs), rtol=1e-4, atol=1e-6)
    assert_same(layer, plain, inputs)
    assert isinstance(layer, type(plain)) and list(layer.state_dict()) == names
    assert all(p is before[key] for key, p in layer.named_parameters())


@pytest.fixture
def images() -> Tensor:
    return torch.randn(IMAGES)


def test_the_report_says_what_was_found(images: Tensor) -> None:
    model = nn.Sequential(Net(), variants.CosineAgreement(3, 2, 4, 4))
    report = accelerate(model, images)
    assert report.fused == ("0.first", "0.second") and list(report.left_alone) == ["1"]
    assert "is not reproduced" in report.left_alone["1"] and type(model[1]) is variants.CosineAgreement
    first = report["0.first"]
    assert first.identification is not None and first.identification.weight == "W"
    assert first.speed.own > 0 and first.speed.fused > 0 and 0 < first.difference < 1e-4
    text = str(report)
    for each in ("forward+backward", "DigitCapsules", "weight `W`", "CosineAgreement", "left alone", "ms, B=4)"):
        assert each in text
    # The routing inside a fused layer is not listed as a layer.
    assert "routing_module  " not in text
    with pytest.raises(KeyError, match=r"no layer '0\.conv'"):
        report["0.conv"]


def test_couplings_and_a_diagnosis_of_fused_layers(images: Tensor) -> None:
    model = Net()
    inputs: dict[str, Tensor] = {}
    for name in ("first", "second"):
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: inputs.setdefault(name, *args))
    accelerate(model, images)
    for name, u in inputs.items():
        layer: Any = model.get_submodule(name)
        found = capsfast.nn.couplings(layer, u)
        own, its_u = layer.as_capsfast(u)
        torch.testing.assert_close(found, capsfast.nn.couplings(own, its_u), rtol=0, atol=0)
        assert all(len(c) == len(u) and c.dim() == 3 for c in found)
        assert capsfast.diagnose(layer, u).coupling_entropy
    with pytest.raises(TypeError, match="layer must be a routing layer, got Conv2d"):
        capsfast.nn.couplings(model.conv[0], images)


def test_around_a_layer_of_capsfast_there_is_nothing_to_fuse() -> None:
    for own, u in ((capsfast.DynamicRouting(7, 4, 6, 5), example()), (capsfast.nn.RoutingByAgreement(), VOTES)):
        report = accelerate(nn.Sequential(Around(own, lambda self, u: self.caps(u))), u)
        assert [(layer.name, layer.status) for layer in report.layers] == [("0.caps", "already fused")]


def test_a_model_without_routing(images: Tensor) -> None:
    report = accelerate(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(2), nn.Linear(16, 3)), images)
    assert report.layers == () and "no layer" in str(report) and "a module of its own" in str(report)


def test_nothing_of_the_model_is_disturbed(images: Tensor) -> None:
    model = Net()
    model.conv[1].eval()
    model(images).sum().backward()
    grads = [p.grad for p in model.parameters()]
    copies = [grad.clone() for grad in grads]
    state = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    seen = []
    model.first.register_forward_hook(lambda *_: seen.append("forward"))
    model.first.W.register_hook(lambda grad: seen.append("backward"))
    assert accelerate(model, images).fused == ("first", "second")
    assert seen == ["forward"]  # when the model runs on the example
    assert torch.equal(random, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(grad, kept) for grad, kept in zip(grads, copies, strict=True))
    model(images)
    assert seen == ["forward", "forward"]


def test_a_dry_run_a_second_call_and_undo(images: Tensor) -> None:
    model = Net()
    report = accelerate(model, images, dry_run=True)
    assert report.fused == ("first", "second") and report["first"].status == "to be fused" and not report.calls()
    report.undo()
    assert type(model.first) is layers.DigitCapsules and type(model.second) is layers.CapsLayer
    with torch.inference_mode():  # gradients are compared nevertheless
        report = accelerate(model, images + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = accelerate(model, images)
    assert again.fused == () and {layer.status for layer in again.layers} == {"already fused"}
    again.undo()
    assert accelerate(model, images).fused == ()
    for _ in range(2):
        report.undo()
        assert type(model.first) is layers.DigitCapsules and not [var for var in vars(model.first) if "capsf" in var]
    accelerate(model, images)
    assert undo(model) == ("first", "second") and undo(model) == ()
    assert type(model.second) is layers.CapsLayer


class Around(nn.Module):
    """A model with one or two layers and a given forward."""

    def __init__(self, caps: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.caps, self.run = caps, forward
        self.register_buffer("seen", torch.ones(K))

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.run(self, *given, **named)


def running(self: Any, u: Tensor) -> Tensor:
    self.seen = 0.9 * self.seen + 0.1 * u.mean((0, 1))
    return self.caps(u)  # type: ignore[no-any-return]


# Models in which only the layer is fused, and examples.
AROUND: dict[str, tuple[Callable[..., Any], Callable[[Tensor], Any]]] = {
    "hands on": (lambda self, u: self.caps(u), lambda u: u),
    "used twice": (lambda self, u: self.caps(u) + self.caps(2 * u), lambda u: u),
    "a tuple": (lambda self, u, scale: scale * self.caps(u), lambda u: (u, 2.0)),
    "a mapping": (lambda self, u, scale: scale * self.caps(u), lambda u: {"u": u, "scale": 2.0}),
    "a buffer written": (running, lambda u: u),
}


@pytest.mark.parametrize(
    "name", [*list(AROUND)[:1], *(pytest.param(each, marks=pytest.mark.slow) for each in [*AROUND][1:])]
)
def test_models_around_a_layer(name: str) -> None:
    """The report does not mention a module around a fused layer, whatever it does."""
    forward, made = AROUND[name]
    model = Around(Plain(), forward)
    plain, u, seen = copy.deepcopy(model), example(), model.seen
    report = accelerate(model, made(u))
    # The outermost of nested layers that compute the same is fused.
    assert report.fused == ("" if name == "hands on" else "caps",) and not report.left_alone
    assert model.seen is seen and torch.equal(seen, torch.ones(K))
    if not isinstance(made(u), dict):
        assert_same(model, plain, made(u))


VOTES = torch.randn(3, 7, 4, 5)
MASK = torch.ones(5, 7, dtype=torch.bool)
MASK[1, 4:] = False


def filling(self: Plain, u: Tensor, mask: Tensor) -> Tensor:
    """Fills masked logits with a large negative number: if all inputs of a sample are masked, all logits are equal."""
    votes = self.votes(u)
    b = torch.zeros(votes.shape[:3])
    for _ in range(3):
        c = b.masked_fill(~mask[:, :, None], -1e9).softmax(1)
        v = layers.squash((c[..., None] * votes).sum(1), 1e-8)
        b = b + (votes * v[:, None]).sum(3)
    return v


def counting(self: Any, u: Tensor) -> Any:
    self.kept += 1
    return Plain.forward(self, u)


def appending(self: Any, u: Tensor) -> Any:
    self.kept.append(len(u))
    return Plain.forward(self, u)


def hooked_inside() -> nn.Module:
    layer = variant(votes=lambda self, u: self.to_votes(u).unflatten(2, (4, 5)))
    del layer.W
    layer.to_votes = nn.Linear(6, 20, bias=False)
    layer.to_votes.register_forward_hook(lambda *_: None)
    return layer  # type: ignore[no-any-return]


def parametrized() -> nn.Module:
    return parametrize.register_parametrization(Plain(), "W", nn.Identity())


def patched() -> nn.Module:
    layer = Plain()
    layer.forward = lambda u, own=layer.forward: own(u)  # type: ignore[method-assign]
    return layer


class Pretends(Plain):
    @property
    def __class__(self) -> Any:
        return nn.Module


class Named(Plain):
    """A layer whose subclasses need a keyword."""

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()


def result(make: Callable[[Tensor, Tensor], Any]) -> Callable[[], nn.Module]:
    """A layer whose result is computed from its output and its input."""
    return lambda: variant(forward=lambda self, u: make(Plain.forward(self, u), u))


def padded() -> nn.Module:
    return variant(forward=lambda self, u, padding: masked_after(self, u, ~padding))  # type: ignore[no-any-return]


LEFT_ALONE: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "no option": (lambda: variant(couple=lambda self, b: b.softmax(0)), example(), "it is not reproduced: its outp"),
    "clamp": (lambda: variant(votes=lambda self, u: Plain.votes(self, u.clamp(max=99))), example(), "applies clamp"),
    "buffer": (lambda: variant(torch.zeros(()), forward=counting), example(), "its forward keeps kept in the layer"),
    "number": (lambda: variant(None, 1, forward=counting), example(), "its forward changes `kept` in the layer"),
    "list": (lambda: variant(None, [1], forward=appending), example(), "its forward changes `kept` in the layer"),
    "held": (lambda: variant(None, [torch.ones(2)]), example(), "its `kept` holds a Tensor, and a change of that"),
    "another entry": (result(lambda v, u: (v, u)), example(), "a tuple of 2, of which entry 1 is neither the output"),
    "no input": (lambda: variant(forward=filling), (example(), MASK), "for a sample whose mask, argument 2, is 0 ev"),
    "padding": (
        padded,
        (example(), ~MASK),
        "argument 2 of the forward (`padding`) is 1 (True) for input capsules that",
    ),
    "parametrized": (parametrized, example(), "are parametrized"),
    "patched": (patched, example(), "replaced by other code"),
    "hooks": (hooked_inside, example(), "hooks of to_votes"),
    "one sample": (Plain, example(1), "one sample"),
    "no subclass": (lambda: Named(), example(), "no class can be derived"),
    "pretends": (Pretends, example(), "no class can be derived"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name: str) -> None:
    make, inputs, reason = LEFT_ALONE[name]
    layer = make()
    kind, state = type(layer), copy.deepcopy(layer.state_dict())
    report = accelerate(layer, inputs)
    assert reason in report.left_alone[""] and "" not in report.fused
    assert type(layer) is kind and all(torch.equal(tensor, state[name]) for name, tensor in layer.state_dict().items())


def test_an_attribute_that_is_written_and_not_read_does_no_harm() -> None:
    def forward(self: Any, u: Tensor) -> Any:
        self.logits = self.votes(u).sum(-1)
        return Plain.forward(self, u)

    layer = variant(forward=forward)
    report = accelerate(layer, example())
    assert report.fused == ("",) and "its own forward writes `logits`, which a fused one leaves as it is" in str(report)
    layer(example())
    assert "logits" not in vars(layer) and report.calls()[""].own == 0


ENTRIES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "the coupling": lambda v, c: (v, c),
    "the coupling transposed, None": lambda v, c: (v, c.transpose(1, 2), None),
    "lengths": lambda v, c: (v.norm(dim=-1), v),
    "None, lengths, the coupling": lambda v, c: (None, v, v.norm(dim=-1), c),
}


def with_coupling(make: Callable[[Tensor, Tensor], Any], iterations: int = 3) -> Any:
    """A layer whose result is computed from its output and its last coupling."""

    def forward(self: Plain, u: Tensor) -> Any:
        votes = self.votes(u)
        b = torch.zeros(votes.shape[:3])
        for _ in range(iterations):
            c = b.softmax(2)
            v = layers.squash((c[..., None] * votes).sum(1), 1e-8)
            b = b + (votes * v[:, None]).sum(-1)
        return make(v, c)

    return variant(forward=forward)


@pytest.mark.parametrize(("entries", "iterations"), [*zip(ENTRIES, (1, 3, 1, 3), strict=True)])
def test_a_tuple_of_output_coupling_and_lengths(entries: str, iterations: int) -> None:
    layer, u = with_coupling(ENTRIES[entries], iterations), example()
    plain, report = copy.deepcopy(layer), accelerate(layer, u)
    assert report.fused == ("",) and "of the tuple is the" in str(report)
    ours, theirs = layer(u), plain(u)
    assert type(ours) is tuple and len(ours) == len(theirs) and report.calls()[""].own == 0
    results = []
    for found, model in ((ours, layer), (theirs, plain)):
        parts = [part for part in found if part is not None]
        total = sum((part * torch.linspace(-1, 2, part.numel()).view(part.shape)).sum() for part in parts)
        results.append([*parts, *torch.autograd.grad(total, [model.W])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_an_entry_without_a_gradient_is_none_that_capsfast_gives() -> None:
    for make in (lambda v, c: (v, c.detach()), lambda v, c: (v, v.detach().norm(dim=-1))):
        layer = with_coupling(make)
        assert "entry 1 is neither the output" in accelerate(layer, example()).left_alone[""]
        assert capsfast.identify(layer, example()).entries == ("output", "other")


def test_a_mask_behind_a_softmax_over_the_inputs_is_fused() -> None:
    layer, u = variant(forward=masked_after), example()
    plain = copy.deepcopy(layer)
    report = accelerate(layer, (u, MASK.float()))
    assert report.fused == ("",)
    for given in (MASK.float(), torch.rand(5, 7)):
        assert_same(layer, plain, (u, given))
    assert report.calls()[""].own == 0


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_a_layer_that_would_be_slower_stays(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = Speed(1e-3 * ratio, 1e-3, 5)
    monkeypatch.setattr("capsfast.adopt.beside.speed", lambda *_: speed)
    report = accelerate(Plain(), example(), only_faster=True)
    assert report.fused == (("",) if ratio > 1 else ())
    assert ratio > 1 or ("takes longer" in report.left_alone[""] and report[""].speed == speed)
    assert f"{ratio:.1f}x ({ratio:.3g} to 1 ms, B=5)" in str(report)


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")
def test_under_ddp_the_first_rank_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """If ranks decided from their own times, they could reduce different gradients."""
    monkeypatch.setattr("capsfast.adopt.beside.speed", lambda *_: Speed(2e-3, 1e-3, 5))

    def heard(objects: list[Any], source: int, group: Any) -> None:
        assert source == 0 and objects == [[]]
        objects[0] = ["module"]  # the first rank's times differ from those here

    monkeypatch.setattr(dist, "broadcast_object_list", heard)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Plain())
        assert capsfast.identify(model, example()).tensors(model)["W"] is model.module.W
        assert accelerate(model, example(), only_faster=True).fused == ()
    finally:
        dist.destroy_process_group()


def test_votes_in_memory_are_mentioned() -> None:
    report = accelerate(layers.DynamicRouting(3), (VOTES, 3))
    assert report.fused == ("",) and "one capsfast.DynamicRouting instead of both" in str(report)


def test_bad_arguments() -> None:
    layer, u = Plain(), example()
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got Tensor"):
        capsfast.accelerate(u, u)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="accelerate it before"):
        capsfast.accelerate(torch.jit.trace(nn.Linear(2, 2), torch.randn(2, 2)), u)
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"dry_run": 1}, TypeError),
        ({"seconds": "few"}, TypeError),
        ({"seconds": -1}, ValueError),
    ]
    for options, error in wrong:
        with pytest.raises(error, match=next(iter(options))):
            capsfast.accelerate(layer, u, **options)
    with pytest.raises(RuntimeError):  # from the model, which gets an example of a wrong shape
        capsfast.accelerate(layer, torch.randn(3, 8, 6))
    assert type(layer) is Plain and not layer._forward_hooks
