"""capsfast.DynamicRouting: replaces a hand-written layer, and is a well-behaved module."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import capsfast
from capsfast.nn import Groups, LowRank, RoutedCaps, SharedWeight

from .support import plain
from .support.backends import Backend

I, J, K, D = 20, 5, 8, 16


class HandWritten(nn.Module):
    """A layer as people write it. The module takes over its signature, parameter and arithmetic."""

    def __init__(self, in_caps: int, out_caps: int, in_dim: int, out_dim: int, num_iterations: int = 3) -> None:
        super().__init__()
        self.num_iterations = num_iterations
        self.W = nn.Parameter(0.1 * torch.randn(in_caps, out_caps, out_dim, in_dim))

    def forward(self, u: Tensor) -> Tensor:
        return plain.route(torch.einsum("ijdk,bik->bijd", self.W, u), self.num_iterations)[0]


def layer_of(**more: Any) -> capsfast.DynamicRouting:
    return capsfast.DynamicRouting(I, J, K, D, **more)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"shared_weight": True},
    "learned": {"learned_logits": True, "bias": True},
    "options": {"softmax": "in", "gradient": "last", "leaky": True, "squash": "half", "eps": 1e-4},
    "sums": {"squash_last": False},
}


@pytest.mark.rows(emulated=(1, 1))
@pytest.mark.parametrize("num_iterations", [1, 3])
@pytest.mark.parametrize("B", [33, 2])
def test_replaces_a_hand_written_layer(backend: Backend, B: int, num_iterations: int) -> None:
    old = HandWritten(I, J, K, D, num_iterations).to(backend.device)
    new = capsfast.DynamicRouting(I, J, K, D, num_iterations, backend=backend.name, device=backend.device)
    saved = io.BytesIO()
    torch.save(old.state_dict(), saved)
    saved.seek(0)
    assert str(new.load_state_dict(torch.load(saved))) == "<All keys matched successfully>"
    assert torch.equal(new.W, old.W)

    u = torch.randn(B, I, K, device=backend.device, requires_grad=True)
    dv = torch.randn(B, J, D, device=backend.device)
    results = [(v := layer(u), *torch.autograd.grad(v, [u, layer.W], dv)) for layer in (old, new)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=2e-6)


class Doubled(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * value


def test_parametrize() -> None:
    layer, u = layer_of(), torch.randn(3, I, K)
    wanted = capsfast.dynamic_routing(u, 2 * layer.W.detach())
    parametrize.register_parametrization(layer, "W", Doubled())
    torch.testing.assert_close(layer(u), wanted)
    layer(u).sum().backward()
    assert layer.parametrizations.W.original.grad is not None
    repr(layer)
    parametrize.remove_parametrizations(layer, "W")
    torch.testing.assert_close(layer(u), wanted)


def test_repr_shows_what_is_not_default() -> None:
    assert "(20, 5, 8, 16, num_iterations=3)" in repr(layer_of())
    options = VARIANTS["options"] | VARIANTS["sums"]
    text = repr(layer_of(num_iterations=2, shared_weight=True, learned_logits=True, bias=True, **options))
    shown = {"num_iterations": 2, "weight": SharedWeight(), "learned_logits": True, "bias": True, **options}
    assert all(f"{name}={value!r}" in text for name, value in shown.items() if name != "eps")


def test_initial_values() -> None:
    layer = capsfast.DynamicRouting(1152, 10, 8, 16, learned_logits=True, bias=True)
    assert layer.W.abs().max() <= 0.2
    assert 0.08 < layer.W.std() < 0.1  # a normal distribution cut at two deviations
    assert layer.logits is not None
    assert not layer.logits.any()
    assert layer.bias is not None
    assert torch.equal(layer.bias, torch.full((10, 16), 0.1))
    assert 0.008 < capsfast.DynamicRouting(100, 10, 8, 16, init_std=0.01).W.std() < 0.01
    torch.manual_seed(0)
    authors = nn.init.trunc_normal_(torch.empty(1152, 10, 16, 8), std=0.1, a=-0.2, b=0.2)
    torch.manual_seed(0)
    assert torch.equal(capsfast.DynamicRouting(1152, 10, 8, 16).W, authors)  # also from the same seed


# I, J, K, D and options, and what the deviation of W is divided by compared with the same layer at the authors' sizes.
STARTS: list[tuple[tuple[int, int, int, int], dict[str, Any], float]] = [
    ((1152, 10, 8, 16), {}, 1),
    ((1152, 10, 3, 16), {}, 1),
    ((2048, 3, 8, 16), {}, 10 / 3 * 4 / 3),  # the square root of 2048 / 1152
    ((288, 10, 8, 16), {}, 0.5),
    ((1152, 10, 8, 64), {}, 2),
    ((1152, 40, 8, 16), {}, 1 / 4 * 2),  # iterations lengthen many sums, which start with half the length
    ((1152, 40, 8, 16), {"num_iterations": 1}, 1 / 4),
    ((1152, 10, 8, 4), {}, 0.5 * 2),
    ((1152, 10, 8, 16), {"positions": 36}, 6),
    ((1152, 10, 8, 16), {"shared_weight": True}, 1152**0.5),
    ((2304, 20, 8, 16), {"weight": Groups(2)}, 1),
    ((2304, 20, 8, 16), {"weight": Groups(2, SharedWeight())}, 1152**0.5),
    ((1152, 10, 8, 16), {"weight": LowRank(4)}, 1),
    ((1000, 7, 8, 10), {"softmax": "in"}, 10 / 1000 * (1000 * 10 / 18432) ** 0.5 * (1.6 * 1000 / 10) ** 0.5),
]


@pytest.mark.parametrize(("sizes", "options", "divisor"), STARTS, ids=str)
def test_sums_start_as_long_as_at_the_authors_sizes(sizes: Any, options: dict[str, Any], divisor: float) -> None:
    for routing in ("dynamic", "cosine", "k-means"):
        if routing == "cosine" and "softmax" in options:
            continue
        layer = RoutedCaps(*sizes, routing=routing, **options)
        assert layer._std == pytest.approx(0.1 / divisor), routing
    assert capsfast.DynamicRouting(*sizes, **options)._std == pytest.approx(0.1 / divisor)


# A shared weight has 1152 times fewer entries, and softmax "in" makes sums 1152 times smaller.
@pytest.mark.parametrize(
    ("variant", "rate"), [("plain", 0.001), ("learned", 0.001), ("shared", 0.01), ("options", 0.01)]
)
def test_the_initial_values_train(variant: str, rate: float) -> None:
    # As many input capsules as in the paper's network, where randn weights do not learn.
    layer, label = capsfast.DynamicRouting(1152, 4, 8, 8, **VARIANTS[variant]), torch.arange(16) % 4
    u = capsfast.squash(torch.randn(4, 1152, 8)[label] + 0.3 * torch.randn(16, 1152, 8))
    optimizer = torch.optim.Adam(layer.parameters(), lr=rate)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = capsfast.nn.MarginLoss()(layer(u), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses


def test_learned_logits_accept_given_logits_of_either_rank() -> None:
    layer, u, logits = layer_of(learned_logits=True), torch.randn(3, I, K), torch.randn(I, J)
    torch.testing.assert_close(layer(u, logits=logits), layer(u, logits=logits.expand(3, -1, -1)))
