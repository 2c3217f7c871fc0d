"""The coupling coefficients of a routing, pass by pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from .routed_caps import RoutedCaps
from .routing.votes import RecordedVotes


@torch.no_grad()
def couplings(
    layer: nn.Module, u: Tensor, activation: Tensor | None = None, *, shares: bool = False, **given: Tensor
) -> list[Tensor]:
    """The coupling coefficients ``[B, I, J]`` of every pass over the votes in which the layer computes them.

    Args:
        layer: a :class:`capsfast.nn.RoutedCaps`, such as :class:`capsfast.DynamicRouting` (with groups:
            ``[B, I, J / groups]``), or a :class:`capsfast.nn.RoutingByAgreement`.
        u: the first argument of the layer's forward.
        activation: activations of the input capsules ``[B, I]``, for RoutedCaps. Default: the lengths of u, if the
            routing uses activations.
        shares: divide the coefficients by their sum over the output capsules. This removes the activation of the input
            capsule, which is a factor in some routings.
        given: mask and so on, as in the layer's forward.

    Raises:
        TypeError: any other layer.
    """
    checks.boolean("capsfast.nn.couplings", "shares", shares)
    if not hasattr(layer, "recorded"):
        raise TypeError(f"capsfast.nn.couplings: layer must be a routing layer, got {type(layer).__name__}")
    weights: list[Tensor] = layer.recorded(u, activation, **given).weights  # type: ignore[operator]
    return [shares_of(c) for c in weights] if shares else weights


def shares_of(c: Tensor) -> Tensor:
    return c / c.sum(2, keepdim=True).clamp_min(torch.finfo(c.dtype).tiny)


@contextmanager
def recorded(layer: nn.Module, *, shares: bool = False) -> Iterator[list[Tensor]]:
    """Records the coupling coefficients ``[B, I, J]`` of the last pass in every forward call inside the block.

    They have a gradient, so that a loss can use them, for example with :class:`capsfast.nn.CouplingEntropy`.

    Args:
        layer: a :class:`capsfast.nn.RoutedCaps`, such as :class:`capsfast.DynamicRouting` (with groups:
            ``[B, I, J / groups]``).
        shares: as for :func:`couplings`.

    Raises:
        TypeError: any other layer.
    """
    checks.boolean("capsfast.nn.recorded", "shares", shares)
    if not isinstance(layer, RoutedCaps):
        raise TypeError(f"capsfast.nn.recorded: layer must be a RoutedCaps, got {type(layer).__name__}")
    found: list[Tensor] = []
    votes: list[RecordedVotes] = []

    def record(module: nn.Module, args: Any) -> Any:
        votes.append(RecordedVotes(args[0], last=True))
        return votes[-1], *args[1:]

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        weights = votes.pop().weights
        if not weights:
            name = type(module).__name__
            raise RuntimeError(f"capsfast.nn.recorded: {name} decides nothing: all its coupling is given")
        found.append(shares_of(weights[-1]) if shares else weights[-1])

    handles = [layer.routing.register_forward_pre_hook(record), layer.routing.register_forward_hook(keep)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
