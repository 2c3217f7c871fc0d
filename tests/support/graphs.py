"""What capsfast.graphed captures in tests, and the comparison with eager calls."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import capsfast


class Result(NamedTuple):
    v: Tensor
    label: Tensor
    nothing: None


def own_routing(u: Tensor, weight: Tensor) -> Result:
    """A loop of passes, as a user writes one: a named tuple with a result without gradient, and None."""
    v = None
    for _ in range(3):
        v = capsfast.squash(capsfast.routing_pass(u, weight, query=v).first)
    assert v is not None
    return Result(v, v.norm(dim=2).argmax(1), None)


def layers(device: str) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    """A module or function by name, with example arguments."""
    torch.manual_seed(0)
    B, I, J, D, K = 8, 24, 5, 8, 4
    u, weight = torch.randn(B, I, K, device=device), torch.randn(I, J, D, K, device=device) / 4
    return {
        "passes": (own_routing, (u.clone().requires_grad_(), weight.clone().requires_grad_())),
        "layer": (capsfast.DynamicRouting(I, J, K, D, learned_logits=True).to(device), (u.clone().requires_grad_(),)),
        "em": (capsfast.nn.RoutedCaps(I, J, K, D, routing="em", num_iterations=2).to(device), (u,)),
    }


def assert_graphed_like_eager(layer: Callable[..., Any], example: tuple[Tensor, ...]) -> None:
    """Compares results and gradients of a graph with eager calls, for new arguments each time."""
    graph = capsfast.graphed(layer, example)
    parameters = [*layer.parameters()] if isinstance(layer, nn.Module) else []
    for _ in range(3):
        args = [torch.randn_like(value).requires_grad_(value.requires_grad) for value in example]
        leaves = [value for value in (*args, *parameters) if value.requires_grad]
        found = []
        for function in (layer, graph):
            results = function(*args)
            values = [results] if isinstance(results, Tensor) else [value for value in results if value is not None]
            outputs = [value for value in values if value.requires_grad]
            gradients = torch.autograd.grad(sum(value.square().sum() for value in outputs), leaves)
            found.append((type(results), [value.detach() for value in values], gradients))
        (kind, wanted, wanted_gradients), (got_kind, got, got_gradients) = found
        assert kind is got_kind and len(wanted) == len(got)
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(got_gradients, wanted_gradients)
