"""The coupling coefficients of a routing, pass by pass."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..passes import Moments
from .dynamic_routing import DynamicRouting
from .routed_caps import RoutedCaps
from .routing.votes import Votes
from .routing_by_agreement import RoutingByAgreement


class RecordedVotes(Votes):
    """Votes that keep the coupling coefficients of every pass in ``weights``, a list of ``[B, I, J]``.

    Left out are passes whose coefficients are given (``normalize="none"``): nothing is decided there.

    detach: the coefficients have no gradient.
    """

    def __init__(self, votes: Votes, detach: bool = True) -> None:
        self.votes = votes
        self.detach = detach
        self.B, self.I, self.J, self.D = votes.B, votes.I, votes.J, votes.D
        self.dtype, self.device, self.u, self.out_mask = votes.dtype, votes.device, votes.u, votes.out_mask
        self.mask, self.backend = votes.mask, votes.backend
        self.weights: list[Tensor] = []

    def moments(self, **arguments: Any) -> Moments:
        if arguments.get("normalize") == "none":
            return self.votes.moments(**arguments)
        found = self.votes.moments(**{**arguments, "return_weights": True})
        assert found.weights is not None
        self.weights.append(found.weights.detach() if self.detach else found.weights)
        return found

    def cosines(self, query: Tensor) -> Tensor:
        return self.votes.cosines(query)

    def check_activation(self, op: str, activation: Tensor) -> None:
        self.votes.check_activation(op, activation)


@torch.no_grad()
def couplings(
    layer: nn.Module, u: Tensor, activation: Tensor | None = None, *, shares: bool = False, **given: Tensor
) -> list[Tensor]:
    """The coupling coefficients ``[B, I, J]`` of every pass over its votes in which a layer decides them.

    Args:
        layer: a :class:`capsfast.DynamicRouting` (with groups: ``[B, I, J / groups]``), a
            :class:`capsfast.nn.RoutingByAgreement` or a :class:`capsfast.nn.RoutedCaps`.
        u: what its forward takes first.
        activation: of the input capsules ``[B, I]``, for RoutedCaps; where the routing asks for them and there are
            none, the lengths of u.
        shares: those of RoutedCaps divided by their sum over the output capsules: what an input capsule has decided,
            without the factor of its activation.
        given: mask and so on, as in the layer's forward.

    Raises:
        TypeError: another layer.
    """
    if isinstance(layer, (DynamicRouting, RoutingByAgreement)):
        probe, found = copy.copy(layer), []
        for t in range(layer.num_iterations):
            probe.num_iterations = t + 1
            found.append(probe(u, return_coupling=True, **given)[1])
        return found
    if not isinstance(layer, RoutedCaps):
        raise TypeError(f"capsfast.nn.couplings: layer must be a routing layer, got {type(layer).__name__}")
    u, activation = layer.activated(u, activation, given.get("mask"))
    votes = RecordedVotes(layer.votes(u, **given))
    layer.routing(votes, activation)
    return [_shares(c) for c in votes.weights] if shares else votes.weights


def _shares(c: Tensor) -> Tensor:
    return c / c.sum(2, keepdim=True).clamp_min(torch.finfo(c.dtype).tiny)


@contextmanager
def recorded(layer: nn.Module, *, shares: bool = False) -> Iterator[list[Tensor]]:
    """The coupling coefficients ``[B, I, J]`` of the last pass of every forward call made inside, with their gradient.

    For a term of a loss, such as :class:`capsfast.nn.CouplingEntropy`. A RoutedCaps goes over its votes in single
    passes there, also where it has a fused op for all of them.

    Args:
        layer: a :class:`capsfast.DynamicRouting` (with groups: ``[B, I, J / groups]``) or a
            :class:`capsfast.nn.RoutedCaps`.
        shares: as for :func:`couplings`.

    Raises:
        TypeError: another layer.
    """
    found: list[Tensor] = []
    if isinstance(layer, DynamicRouting):

        def ask(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return args, {**kwargs, "return_coupling": True}

        def take(module: nn.Module, args: Any, output: Any) -> Any:
            found.append(output[1])
            return output[0]

        handles = [layer.register_forward_pre_hook(ask, with_kwargs=True), layer.register_forward_hook(take)]
    elif isinstance(layer, RoutedCaps):
        votes: list[RecordedVotes] = []

        def record(module: nn.Module, args: Any) -> Any:
            votes.append(RecordedVotes(args[0], detach=False))
            return votes[-1], *args[1:]

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            weights = votes.pop().weights
            if not weights:
                name = type(module).__name__
                raise RuntimeError(f"capsfast.nn.recorded: {name} decides nothing: all its coupling is given")
            found.append(_shares(weights[-1]) if shares else weights[-1])

        handles = [layer.routing.register_forward_pre_hook(record), layer.routing.register_forward_hook(keep)]
    else:
        raise TypeError(f"capsfast.nn.recorded: layer must be DynamicRouting or RoutedCaps, got {type(layer).__name__}")
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
