"""The table of published layers is true: the options of its row reproduce a layer, or no options do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import capsfast

from .support import plain
from .support.published import PUBLISHED, SIZES, Published, arranged, float64, named

OPTIONS = ("num_iterations", "softmax", "gradient", "leaky", "squash", "eps", "squash_last")
REPRODUCIBLE = [row for row in PUBLISHED if row.reproducible]


def fused(row: Published, layer: nn.Module, given: tuple[Any, ...]) -> Tensor:
    """``[B, J, D]`` from the options that the row names."""
    options = {name: getattr(row, name) for name in OPTIONS}
    if row.logits is not None:
        options["logits"] = arranged(named(layer, row.logits), row.logits_order, "IJ", SIZES)
    if row.bias is not None:
        options["bias"] = named(layer, row.bias).reshape(SIZES.J, SIZES.D)
    if row.mask:
        options["mask"] = given[-1].bool()
    u = given[0].transpose(1, 2) if row.transposed else given[0]
    if row.weight is None and not row.averaged:
        return capsfast.route_votes(u, **options)
    weight = None if row.weight is None else row.weight_of(layer)
    route = capsfast.compat.averaged_routing if row.averaged else capsfast.dynamic_routing
    return route(u, weight, **options)


def grown(row: Published) -> tuple[nn.Module, tuple[Any, ...]]:
    """A layer whose parameters all matter, and a call of it."""
    layer, given = row.make(), row.example()
    layer(*given)
    for parameter in layer.parameters():
        with torch.no_grad():
            parameter.copy_(0.4 * torch.randn_like(parameter))
    return layer, (given[0].requires_grad_(), *given[1:])


@pytest.mark.parametrize("row", REPRODUCIBLE, ids=lambda row: row.name)
def test_the_options_of_a_row_reproduce_its_layer(row: Published) -> None:
    torch.manual_seed(0)
    with float64():
        layer, given = grown(row)
        wanted = row.result_of(layer(*given))
        got = fused(row, layer, given)
    tensors = [given[0], *layer.parameters()]
    seed = torch.randn_like(wanted)
    plain.assert_same(got, wanted, 1e-11)
    plain.assert_same(torch.autograd.grad(got, tensors, seed), torch.autograd.grad(wanted, tensors, seed), 1e-11)


@pytest.mark.parametrize("row", REPRODUCIBLE, ids=lambda row: row.name)
def test_other_options_do_not(row: Published) -> None:
    """Otherwise any options would pass: one more iteration, or the other softmax, must make a visible difference."""
    torch.manual_seed(0)
    with float64():
        layer, given = grown(row)
        wanted = row.result_of(layer(*given))
        others = [
            row._replace(num_iterations=row.num_iterations + 1),
            row._replace(softmax="in" if row.softmax == "out" else "out"),
        ]
        for other in others:
            assert (fused(other, layer, given) - wanted).abs().max() > 1e-5


def test_the_table_covers_what_it_should() -> None:
    assert len(PUBLISHED) >= 25 and len({row.name for row in PUBLISHED}) == len(PUBLISHED)
    assert [row.name for row in PUBLISHED if not row.reproducible] == [
        "element-wise squash",
        "squash over the output capsules",
        "cosine agreement",
    ]


@pytest.mark.parametrize("row", [row for row in PUBLISHED if not row.reproducible], ids=lambda row: row.name)
def test_what_is_not_reproducible_is_far_from_the_options_next_to_it(row: Published) -> None:
    torch.manual_seed(0)
    with float64():
        layer, given = grown(row)
        wanted = row.result_of(layer(*given))
        for softmax in ("out", "in"):
            for averaged in (False, True):
                near = row._replace(softmax=softmax, averaged=averaged, eps=1e-20)
                assert (fused(near, layer, given) - wanted).abs().max() > 1e-3
