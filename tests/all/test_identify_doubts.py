"""capsfast.identify refuses what it cannot be sure of: tensors, arguments, inputs other than those of the example."""

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import capsfast
from capsfast.adopt import NotReproduced

from ..test_identify import I, Plain, example, squash


class Held(Plain):
    """Its votes times a mask of the input capsules, made of what the layer holds."""

    def __init__(self, hold: Callable[[nn.Module], Any], mask: Callable[[Any], Tensor]) -> None:
        super().__init__()
        hold(self)
        self.mask_of = mask

    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        return super().forward(u * self.mask_of(self).view(-1, 1), num_iterations)


def buffer(value: Tensor) -> Callable[[nn.Module], Any]:
    return lambda layer: layer.register_buffer("kept", value)


def attribute(value: Any) -> Callable[[nn.Module], Any]:
    return lambda layer: setattr(layer, "kept", value)


ONES = torch.ones(I, dtype=torch.long)
HELD: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any], Tensor], str]] = {
    "int buffer": (buffer(ONES), lambda layer: layer.kept != 0, "kept"),
    "int attribute": (attribute(ONES), lambda layer: layer.kept > 0, "kept"),
    "bool buffer": (buffer(ONES.bool()), lambda layer: layer.kept, "kept"),
    "step of ints": (buffer(torch.tensor(0)), lambda layer: (layer.kept < 100) * torch.ones(1), "kept"),
    "step of floats": (buffer(torch.tensor(0.0)), lambda layer: (layer.kept < 100) * torch.ones(1), "kept"),
    "threshold": (buffer(torch.ones(I)), lambda layer: layer.kept > -50, "kept"),
    "indices": (buffer(torch.arange(I)), lambda layer: 1.0 * (layer.kept == torch.arange(I)), "kept"),
    "expanded": (buffer(torch.tensor([1]).expand(I)), lambda layer: layer.kept > 0, "kept"),
    "in a list": (attribute([torch.ones(I)]), lambda layer: layer.kept[0], "kept[0]"),
    "in a mapping": (attribute({"m": torch.ones(I)}), lambda layer: layer.kept["m"], "kept['m']"),
    "in a namespace": (attribute(types.SimpleNamespace(m=ONES)), lambda layer: layer.kept.m > 0, "kept.m"),
    "an array": (attribute(np.ones(I, dtype=np.float32)), lambda layer: torch.from_numpy(layer.kept), "kept"),
}


@pytest.mark.parametrize("name", HELD)
def test_a_tensor_that_would_matter_with_other_numbers(name: str) -> None:
    hold, mask, said = HELD[name]
    layer = Held(hold, mask)
    with pytest.raises(NotReproduced) as caught:
        capsfast.identify(layer, example())
    assert f"with other numbers in `{said}`" in caught.value.reason
    assert caught.value.nearest is not None


class Counting(Plain):
    """Numbers that have no effect: a counter, an index that nobody reads, a list of what was seen."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("index", torch.arange(3))
        self.seen = [torch.ones(2), torch.ones(2, dtype=torch.bool)]

    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        self.calls += 1
        return super().forward(u, num_iterations)


def test_tensors_that_have_no_effect() -> None:
    layer = Counting()
    found = capsfast.identify(layer, example())
    assert not found.options and found.notes == ("its forward changes calls, the call does not",)
    assert int(layer.calls) == 0 and torch.equal(layer.seen[0], torch.ones(2))


class Given(Plain):
    """Takes an argument that is read in some way."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read

    def forward(self, u: Tensor, other: Any = None, last: Any = None) -> Any:
        return super().forward(u * self.read(other)[..., None])


B = 5
GIVEN: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "ids": (lambda ids: ids != -1, torch.randint(0, 9, (B, I))),
    "ids of zeros": (lambda ids: ids != -1, torch.zeros(B, I, dtype=torch.long)),
    "lengths": (lambda lengths: torch.arange(I) < lengths[:, None], torch.full((B,), I + 5)),
    "large": (lambda ids: ids < 10**5, torch.randint(0, 9, (B, I))),
    "additive mask": (lambda mask: mask > -50, torch.zeros(B, I)),
    "minus infinity": (lambda mask: mask.isfinite(), torch.zeros(B, I)),
    "order": (lambda ids: ids == torch.arange(I), torch.arange(I).repeat(B, 1)),
}


@pytest.mark.parametrize("name", GIVEN)
def test_an_argument_that_would_matter_with_other_numbers(name: str) -> None:
    read, value = GIVEN[name]
    with pytest.raises(NotReproduced, match="argument 2 of the forward"):
        capsfast.identify(Given(read), example(), value)


def test_arguments_that_have_no_effect() -> None:
    layer = Given(lambda _: torch.ones(1))
    for value in (torch.zeros(B, I), torch.ones(B, dtype=torch.long), torch.zeros(B, I).bool(), torch.randn(3), None):
        found = capsfast.identify(layer, example(), value, torch.ones(B))
        assert found.arguments == ("constant" if value is None else "unused", "unused") and not found.notes


@pytest.mark.parametrize(
    ("read", "noted"),
    [
        (lambda mask: mask, True),
        (lambda mask: mask > 0.5, True),
        (lambda mask: mask > 0, True),
        (lambda mask: mask != 0, False),
    ],
)
def test_a_mask_of_numbers_says_what_it_takes(read: Callable[[Tensor], Tensor], noted: bool) -> None:
    found = capsfast.identify(Given(read), example(), torch.ones(B, I))
    assert found.arguments == ("mask",)
    assert [note.startswith("argument 2 is a mask of 0 and 1 alone") for note in found.notes] == [True] * noted


class Filled(Plain):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, u: Tensor, mask: Any = None) -> Any:
        votes = self.votes(u)
        b = torch.zeros(votes.shape[:3])
        for _ in range(3):
            c = b.masked_fill(~mask[..., None], self.fill).softmax(1)
            v = squash((c[..., None] * votes).sum(1))
            b = b + (votes * v[:, None]).sum(-1)
        return v


@pytest.mark.parametrize("fill", [-1e9, float("-inf")])
def test_a_sample_without_any_input(fill: float) -> None:
    """A large number in the place of minus infinity makes the coupling equal there; with minus infinity it is NaN."""
    layer, u, mask = Filled(fill), example(), torch.rand(B, I) < 0.5
    mask[0] = False
    found = capsfast.identify(layer, u, mask | (torch.arange(I) == 0))
    assert [note.startswith("for a sample whose mask, argument 2, is 0 ever") for note in found.notes] == [True] * (
        fill == -1e9
    )
    ours, theirs = found(found.tensors(layer), u, mask), layer(u, mask)
    assert not torch.allclose(ours[0], theirs[0])


class OtherGradient(Plain):
    """A part of its gradient alone in one of the modes; values do not tell."""

    part = 0.5

    def votes(self, u: Tensor) -> Tensor:
        votes = super().votes(u)
        return votes + 0 if not self.training else self.part * votes + (1 - self.part) * votes.detach()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("part", [0.5, 0.0])
def test_a_gradient_that_depends_on_the_mode(training: bool, part: float) -> None:
    layer = OtherGradient().train(training)
    layer.part = part
    with pytest.raises(
        NotReproduced,
        match=r"its gradient (in training mode is another one than|goes neither)|its output has no gradient",
    ):
        capsfast.identify(layer, example())


class LooksAt(Plain):
    def __init__(self, read: Callable[[Tensor], Tensor], softmax: int = 2) -> None:
        super().__init__()
        self.read, self.softmax = read, softmax

    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        votes = self.votes(self.read(u))
        b = torch.zeros(votes.shape[:3])
        if self.softmax == 1:
            b = b.masked_fill((u.abs().sum(-1) == 0)[..., None], float("-inf"))
        for _ in range(num_iterations):
            v = squash((b.softmax(self.softmax)[..., None] * votes).sum(1))
            b = b + (votes * v[:, None]).sum(-1)
        return v


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (LooksAt(lambda u: u, softmax=1), "with some input capsules 0"),
        (LooksAt(lambda u: u.clamp(-99, 99)), "with inputs 30 times as long"),
        (LooksAt(lambda u: -u if 1.5 < u.norm() < 5 else u), "with inputs 0.01 times as long"),
    ],
)
def test_a_forward_that_looks_at_its_input(layer: nn.Module, said: str) -> None:
    with pytest.raises(NotReproduced, match=said):
        capsfast.identify(layer, 20 * example())


class LooksAtGradient(Plain):
    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        return super().forward(u, num_iterations if torch.is_grad_enabled() else 1)


class Clamped(Plain):
    def votes(self, u: Tensor) -> Tensor:
        return torch.einsum("ijdk,bik->bijd", self.W.clamp(-2, 2), u)


@pytest.mark.parametrize(
    ("make", "said"), [(LooksAtGradient, "under torch.no_grad"), (Clamped, "with weights 30 times as large")]
)
def test_a_forward_that_looks_at_something_else(make: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(NotReproduced, match=said):
        capsfast.identify(make(), example())


class TwoNames(Plain):
    """Its weight has two names, of which the forward reads one."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.V = self.W
        self.reads = reads

    def votes(self, u: Tensor) -> Tensor:
        return torch.einsum("ijdk,bik->bijd", getattr(self, self.reads), u)


@pytest.mark.parametrize("name", ["V", "W"])
def test_of_two_names_of_a_weight_the_one_that_is_read(name: str) -> None:
    layer, u = TwoNames(name), example()
    found = capsfast.identify(layer, u)
    assert (found.weight, found.options) == (name, {})
    report = capsfast.accelerate(layer, u, only_faster=False, seconds=0)
    assert report.fused == ("",) and layer.V is layer.W
    assert report[""].identification == found


class TwelveIterations(Plain):
    def forward(self, u: Tensor, num_iterations: int = 12) -> Any:
        return super().forward(u, num_iterations)


def test_more_iterations_than_are_tried() -> None:
    with pytest.raises(NotReproduced, match="or there are more than 10 iterations"):
        capsfast.identify(TwelveIterations(), example())


class OfArguments(Plain):
    def forward(self, u: Tensor, mask: Any = None) -> Any:
        return super().forward(u * (mask > 0.5)[..., None])


def test_accelerate_leaves_alone_what_it_cannot_be_sure_of() -> None:
    u = example()

    def reason(layer: nn.Module, *others: Any) -> str:
        report = capsfast.accelerate(layer, (u, *others), only_faster=False, seconds=0)
        assert not report.fused
        return "; ".join(report.left_alone.values())

    for name in ("int buffer", "step of ints"):
        hold, mask, said = HELD[name]
        assert f"with other numbers in `{said}`" in reason(Held(hold, mask))
    assert "argument 2 of the forward" in reason(Given(GIVEN["ids"][0]), torch.zeros(B, I, dtype=torch.long))
    assert "a factor, or compared with a number" in reason(OfArguments(), torch.ones(B, I))
    assert "gradient" in reason(OtherGradient().eval())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_a_weight_that_a_hook_of_torch_computes() -> None:
    layer, u = Plain(), example()
    torch.nn.utils.weight_norm(layer, "W")
    wanted = layer(u)
    report = capsfast.accelerate(layer, u, only_faster=False, seconds=0)
    assert report.fused == ("",) and report[""].identification.weight == "W"
    torch.testing.assert_close(layer(u), wanted)
    with torch.no_grad():
        layer.W_g.mul_(2)  # type: ignore[operator, union-attr]
    assert not torch.allclose(layer(u), wanted)
