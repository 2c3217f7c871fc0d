"""What the example run of capsfast.accelerate leaves behind: what it builds, whole; else the model is as before."""

import random
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from capsfast.adopt import replacement

from .support.adopted import D, I, J, K, Plain, accelerate, example

Start, Step = Callable[[Any], Any], Callable[[Any, Tensor], Any]


class Model(nn.Module):
    """``step`` builds or changes something; the module that it returns routes, or the part ``layer``."""

    def __init__(self, start: Start, step: Step) -> None:
        super().__init__()
        self.norm, self.layer, self.calls, self.step = nn.LayerNorm(K), Plain(), 0, step
        start(self)

    def forward(self, u: Tensor) -> Tensor:
        u = self.norm(u)
        return (self.step(self, u) or self.layer)(u)  # type: ignore[no-any-return]


def starts(**values: Any) -> Start:
    return lambda model: [setattr(model, name, make()) for name, make in values.items()]


def head(model: Any, u: Tensor) -> Any:
    model.calls += 1
    if model.head is None:
        model.head = nn.Sequential(nn.Dropout(0.0), Plain())
    return model.head


def by_flag(model: Any, u: Tensor) -> Any:
    if not model.built:
        model.built, model.head = True, Plain()
    return model.head


def into_a_list(model: Any, u: Tensor) -> Any:
    if not model.count:
        model.heads.append(Plain())
        model.count = 1
    return model.heads[0]


def into_a_mapping(model: Any, u: Tensor) -> Any:
    if "head" not in model.heads:
        model.heads["head"] = Plain()
        model.sizes.append(u.shape[1])
    return model.heads["head"]


def weight(model: Any, u: Tensor) -> None:
    """The flag of the model goes with the parameter of its part."""
    if not model.built:
        model.built, model.layer.W = True, nn.Parameter(0.3 * torch.randn(I, J, D, K))


def buffer(model: Any, u: Tensor) -> None:
    if not hasattr(model, "scale"):
        model.register_buffer("scale", torch.rand(3), persistent=False)
        model.calls += 1


def lazily(model: Any, u: Tensor) -> None:
    model.lazy(u)


def without_weight(model: Any) -> None:
    model.built = False
    del model.layer.W
    model.layer.W = None


def with_none_for_the_weight(model: Any) -> None:
    model.built = False
    model.layer.W = None


# What a model starts with, what its first call builds, and the name of the layer that routes.
BUILDS: dict[str, tuple[Start, Step, str]] = {
    "a module for None": (starts(head=lambda: None), head, "head.1"),
    "a module for a registered None": (lambda model: model.register_module("head", None), head, "head.1"),
    "a module and a flag": (starts(built=lambda: False), by_flag, "head"),
    "a module in a list": (starts(heads=nn.ModuleList, count=lambda: 0), into_a_list, "heads.0"),
    "a module in a mapping": (starts(heads=nn.ModuleDict, sizes=list), into_a_mapping, "heads.head"),
    "a parameter for None": (without_weight, weight, "layer"),
    "a parameter for a registered None": (with_none_for_the_weight, weight, "layer"),
    "a buffer": (starts(), buffer, "layer"),
    "a lazy layer": (starts(lazy=lambda: nn.LazyLinear(3)), lazily, "layer"),
}
each_build = pytest.mark.parametrize("name", BUILDS)


def made(name: str) -> Any:
    torch.manual_seed(0)
    return Model(*BUILDS[name][:2])


def picture(value: Any, objects: bool = True) -> Any:
    """All that a value holds, to compare. objects: with the identities of modules and tensors."""
    own = id(value) if objects else 0
    if isinstance(value, Tensor):
        return own, type(value), None if nn.parameter.is_lazy(value) else value.tolist()
    if isinstance(value, nn.Module):
        return own, type(value).__name__, picture(vars(value), objects)
    if isinstance(value, types.SimpleNamespace):
        return picture(vars(value), objects)
    if isinstance(value, dict):
        return [(name, picture(each, objects)) for name, each in value.items() if "capsfast" not in str(name)]
    if isinstance(value, (list, tuple, set, deque)):
        return [picture(each, objects) for each in value]
    return value if objects or isinstance(value, (int, str, type(None))) else ""


@pytest.mark.rows(4)
@each_build
def test_what_the_run_builds_stays_whole_and_is_fused(name: str) -> None:
    model, called, u = made(name), made(name), example()
    torch.manual_seed(1)
    called.eval()(u)  # as after an own first call
    for module in called.modules():
        module.training = True
    torch.manual_seed(1)
    state = torch.get_rng_state()
    report, routing = accelerate(model, u), BUILDS[name][2]
    assert torch.equal(torch.get_rng_state(), state)
    assert report.fused == (routing,), report
    report.undo()
    assert picture(model, False) == picture(called, False) and str(model) == str(called)
    accelerate(model, u)
    # Nothing is built again, and what a state dict reaches is what computes and what gets a gradient.
    parameters = [*model.parameters()]
    with torch.no_grad():
        for value in called.state_dict().values():
            value.add_(0.1 * torch.randn_like(value))
    assert str(model.load_state_dict(called.state_dict())) == "<All keys matched successfully>"
    v = model(u)
    torch.testing.assert_close(v, called(u), rtol=1e-4, atol=1e-5)
    assert [*map(id, model.parameters())] == [*map(id, parameters)]
    v.square().sum().backward()
    assert any(parameter is model.get_submodule(routing).W and parameter.grad.any() for parameter in parameters)


def change(model: Any, u: Tensor) -> None:
    """Builds nothing."""
    model.calls += 1
    model.last = u
    model.tensor.add_(1)
    model.sizes.append(u.shape)
    model.seen["nested"].append(u)
    model.names.add("call")
    model.queue.append(1)
    model.space.count += 1
    vars(model).pop("spare", None)
    model.norm.weight.data.mul_(2)
    model.norm.bias = nn.Parameter(torch.rand(K))
    model.steps.add_(1)
    model.other = nn.Linear(2, 2)
    model.layers.append(Plain())
    model.layer.register_forward_hook(lambda *_: None)
    model.train()
    random.random(), np.random.rand(), torch.rand(1)


def changing(step: Step = change) -> Any:
    def start(model: Any) -> None:
        model.register_buffer("steps", torch.zeros(()))
        model.tensor, model.spare, model.other = torch.zeros(2), 3, nn.Linear(2, 2)
        model.sizes, model.seen, model.names, model.queue = [], {"nested": []}, set(), deque([0], 2)
        model.space, model.layers = types.SimpleNamespace(count=0), [Plain()]
        model.norm.eval()

    torch.manual_seed(0)
    return Model(start, step)


def drawn() -> Any:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_what_the_run_changes_is_undone() -> None:
    model, u = changing(), example()
    before, numbers = picture(model), drawn()
    report = accelerate(model, u)
    assert report.fused == ("layer",) and drawn() == numbers
    report.undo()
    assert picture(model) == before
    # A second call leaves the counts of the first, and a call that does not route is one of no fused layer.
    again = accelerate(model, u)
    model(u)
    calls = again.calls()
    accelerate(model, u, dry_run=True)
    assert again.calls() == calls and calls["layer"].own + calls["layer"].fused == 1


@pytest.mark.rows(10)
@pytest.mark.parametrize("name", [*BUILDS, "changes"])
def test_after_an_error_everything_is_as_before(name: str) -> None:
    model = changing() if name == "changes" else made(name)
    step, u = model.step, example()

    def failing(model: Any, u: Tensor) -> None:
        routing = step(model, u)
        if routing is not None:
            routing(u)
        raise KeyError("the model's own")

    model.step = failing
    before, numbers = picture(model), drawn()
    with pytest.raises(KeyError, match="the model's own"):
        accelerate(model, u)
    assert picture(model) == before and drawn() == numbers


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["a module for None", "a lazy layer"])
def test_a_dry_run_and_an_interruption_leave_nothing(name: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, u = made(name), example()
    before = picture(model)
    if late:

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(replacement, "fuse", interrupted)
        with pytest.raises(KeyboardInterrupt):
            accelerate(model, u)
    else:
        report = accelerate(model, u, dry_run=True)
        assert report.fused == (BUILDS[name][2],) and report.layers[0].status == "to be fused"
    assert picture(model) == before


def test_routing_that_has_no_name_is_named() -> None:
    """Modules that a list holds, that a forward makes each time, and what a fused layer makes inside."""

    class Inside(Plain):
        def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
            weighted = Weighted(self.W)
            return super().forward(weighted(u))

    class Weighted(Plain):
        def __init__(self, W: Tensor) -> None:
            super().__init__()

        def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
            return u

    class Listed(Plain):
        pass

    def step(model: Any, u: Tensor) -> None:
        for layer in (*model.layers, Plain(), Plain()):
            layer(u)

    torch.manual_seed(0)
    model = Model(starts(layers=lambda: [Listed()], layer=Inside), step)
    report = accelerate(model, example())
    assert report.left_alone.keys() == {"<Listed>", "<Plain>"} and report.fused == ("layer",)
    assert "has no such module under a name" in report.left_alone["<Plain>"] and "<Plain>" in str(report)
