"""capsfast.identify refuses when in doubt: tensors, arguments, and inputs that differ from the example."""

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import capsfast
from capsfast.adopt import NotReproduced
from capsfast.compat import masked_after_routing

from ..support.adopted import D, I, J, K, Plain, accelerate, example, masked_after, squash, variant

B = 5


def held(mask: Callable[[Any], Tensor], *kept: Any) -> nn.Module:
    """A layer that multiplies votes by a mask of the input capsules, which it makes from a kept tensor."""
    return variant(*kept, votes=lambda self, u: Plain.votes(self, u * mask(self.kept).view(-1, 1)))


ONES, OUTSIDE = torch.ones(I), "depends on a tensor in a list, a mapping, an array or outside of it"


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (held(lambda kept: kept != 0, ONES.long()), "its output depends on `kept`, which the call does not read"),
        (held(lambda kept: (kept < 100) * torch.ones(1), torch.tensor(0.0)), "applies lt"),
        (held(lambda kept: kept > 0, None, ONES.bool()), "its output depends on `kept`, which the call does not read"),
        (held(lambda kept: kept["m"][0], None, {"m": [ONES]}), OUTSIDE),
        (held(lambda kept: kept.m > 0, None, types.SimpleNamespace(m=ONES.long())), OUTSIDE),
        (held(torch.from_numpy, None, np.ones(I, dtype=np.float32)), OUTSIDE),
    ],
)
def test_a_tensor_that_would_matter_with_other_numbers(layer: nn.Module, said: str) -> None:
    with pytest.raises(NotReproduced) as caught:
        capsfast.identify(layer, example())
    assert said in caught.value.reason
    assert said in accelerate(layer, example()).left_alone[""]


def test_tensors_that_have_no_effect() -> None:
    """A counter, an unused index, a list of earlier inputs."""

    def forward(self: Any, u: Tensor) -> Any:
        self.kept += 1
        return Plain.forward(self, u)

    layer = variant(torch.tensor(0), forward=forward)
    layer.register_buffer("index", torch.arange(3))
    layer.seen = [torch.ones(2), torch.ones(2, dtype=torch.bool)]
    found = capsfast.identify(layer, example())
    assert not found.options and found.notes == ("its forward changes kept, the call does not",)
    assert int(layer.kept) == 0 and torch.equal(layer.seen[0], torch.ones(2))


def given(read: Callable[[Tensor], Tensor]) -> nn.Module:
    """A layer with an argument that ``read`` reads."""

    def forward(self: Plain, u: Tensor, other: Any = None, last: Any = None) -> Any:
        return Plain.forward(self, u * read(other)[..., None])

    return variant(forward=forward)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (lambda ids: ids != -1, torch.zeros(B, I, dtype=torch.long)),
        (lambda lengths: torch.arange(I) < lengths[:, None], torch.full((B,), I + 5)),
        (lambda mask: mask > -50, torch.zeros(B, I)),
        (lambda ids: ids == torch.arange(I), torch.arange(I).repeat(B, 1)),
    ],
    ids=["ids", "lengths", "additive mask", "order"],
)
def test_an_argument_that_would_matter_with_other_numbers(read: Callable[[Tensor], Tensor], value: Tensor) -> None:
    with pytest.raises(NotReproduced, match="argument 2 of the forward"):
        capsfast.identify(given(read), example(), value)


def test_arguments_that_have_no_effect() -> None:
    layer = given(lambda _: torch.ones(1))
    for value in (torch.zeros(B, I), torch.ones(B, dtype=torch.long), None):
        found = capsfast.identify(layer, example(), value, torch.ones(B))
        assert found.arguments == ("constant" if value is None else "unused", "unused") and not found.notes


@pytest.mark.parametrize(
    ("read", "dtype", "noted"),
    [
        (lambda mask: mask, torch.float32, True),
        (lambda mask: mask > 0.5, torch.float32, True),
        (lambda mask: mask != 0, torch.float32, False),
        (lambda mask: mask, torch.bool, False),
    ],
)
def test_a_mask_of_ones_is_one_and_says_what_it_takes(read: Any, dtype: torch.dtype, noted: bool) -> None:
    layer, ones = given(read), torch.ones(B, I, dtype=dtype)
    found = capsfast.identify(layer, example(), ones)
    assert (found.arguments, found.argument_orders) == (("mask",), ("BI",))
    assert "argument 2 is the mask [B, I]" in found.describe()
    assert [note.startswith("argument 2 is a mask of 0 and 1 alone") for note in found.notes] == [True] * noted
    # A fused layer would compute something else for other numbers, so a note is not enough.
    assert accelerate(layer, (example(), ones)).fused == (() if noted else ("",))


@pytest.mark.parametrize("fill", [-1e9, float("-inf")])
def test_a_sample_without_any_input(fill: float) -> None:
    """There a large negative number makes the coupling equal; minus infinity makes it NaN."""

    def forward(self: Plain, u: Tensor, mask: Tensor) -> Any:
        votes = self.votes(u)
        b = torch.zeros(votes.shape[:3])
        for _ in range(3):
            v = squash((b.masked_fill(~mask[..., None], fill).softmax(1)[..., None] * votes).sum(1))
            b = b + (votes * v[:, None]).sum(-1)
        return v

    layer, u, mask = variant(forward=forward), example(), torch.rand(B, I) < 0.5
    mask[0] = False
    found = capsfast.identify(layer, u, mask | (torch.arange(I) == 0))
    said = [note.startswith("for a sample whose mask, argument 2, is 0 everywhere") for note in found.notes]
    assert said == [True] * (fill == -1e9)
    assert not torch.allclose(found(found.tensors(layer), u, mask)[0], layer(u, mask)[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("part", [0.5, 0.0])
def test_a_gradient_that_depends_on_the_mode(training: bool, part: float) -> None:
    """Values alone do not show it."""

    def votes(self: Plain, u: Tensor) -> Tensor:
        found = Plain.votes(self, u)
        return found + 0 if not self.training else part * found + (1 - part) * found.detach()

    with pytest.raises(NotReproduced, match=r"something else in training mode|its output has no gradient"):
        capsfast.identify(variant(votes=votes).train(training), example())


LOOKS: dict[str, tuple[Any, str]] = {
    "no_grad": (
        {"forward": lambda self, u: Plain.forward(self, u, 3 if torch.is_grad_enabled() else 1)},
        "under torch.no_grad",
    ),
    "twelve": ({"forward": lambda self, u: Plain.forward(self, u, 12)}, "or there are more than 10 iterations"),
    "len": ({"forward": lambda self, u: Plain.forward(self, u, 1 if len(u) > 16 else 3)}, "the number B of samples"),
    "large": (
        {"forward": lambda self, u: Plain.forward(self, u, 1 if u.shape[0] > 700 else 3)},
        "the number B of samples: B <= 700",
    ),
    "range": (
        {"forward": lambda self, u: Plain.forward(self, u, len(range(min(3, 20 - min(19, u.shape[0])))))},
        "the number B of samples",
    ),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_forward_that_looks_at_something_else(name: str) -> None:
    methods, said = LOOKS[name]
    with pytest.raises(NotReproduced, match=said):
        capsfast.identify(variant(**methods), example())


@pytest.mark.parametrize("name", ["V", "W"])
def test_of_two_names_of_a_weight_the_one_that_is_read(name: str) -> None:
    layer, u = variant(votes=lambda self, u: torch.einsum("ijdk,bik->bijd", getattr(self, name), u)), example()
    layer.V = layer.W
    report = accelerate(layer, u)
    assert report.fused == ("",) and layer.V is layer.W
    found = report[""].identification
    assert found is not None and (found.weight, found.options) == (name, {})


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_a_weight_that_a_hook_of_torch_computes() -> None:
    layer, u = Plain(), example()
    torch.nn.utils.weight_norm(layer, "W")
    wanted = layer(u)
    report = accelerate(layer, u)
    assert report.fused == ("",) and report[""].identification.weight == "W"  # type: ignore[union-attr]
    torch.testing.assert_close(layer(u), wanted)
    with torch.no_grad():
        layer.W_g.mul_(2)  # type: ignore[operator, union-attr]
    assert not torch.allclose(layer(u), wanted)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_a_detached_weight_that_a_hook_of_torch_computes() -> None:
    layer = variant(votes=lambda self, u: torch.einsum("ijdk,bik->bijd", self.W.detach(), u))
    torch.nn.utils.weight_norm(layer, "W")
    with pytest.raises(NotReproduced, match="its gradient goes neither through all iterations"):
        capsfast.identify(layer, example())


def test_a_frozen_weight() -> None:
    layer = Plain().requires_grad_(False)
    assert accelerate(layer, example()).fused == ("",) and not layer.W.requires_grad


def test_code_with_a_mask_behind_the_softmax() -> None:
    layer, u, mask = variant(forward=masked_after), example(), torch.rand(B, I)
    found = capsfast.identify(layer, u, torch.ones(B, I))
    names = {"layer": layer, "u": u, "mask": mask, "capsfast": capsfast}
    exec(found.code(), names)
    torch.testing.assert_close(names["v"], layer(u, mask))


def test_masked_after_routing_checks_its_arguments() -> None:
    u, weight, mask = example(), torch.randn(I, J, D, K), torch.rand(B, I)
    v, c = masked_after_routing(u, weight, mask=mask, softmax="in", return_coupling=True)
    torch.testing.assert_close(v, masked_after_routing(u, weight, mask=mask, softmax="in"))
    assert c.shape == (B, I, J) and bool((c.sum(1) < 1).all())
    with pytest.raises(TypeError, match=r"masked_after_routing: mask must be a torch\.Tensor \[B, I\], got None"):
        masked_after_routing(u, weight, mask=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="with more axes"):
        masked_after_routing(torch.randn(B, I, J, D, 2, 2), None, mask=mask)
