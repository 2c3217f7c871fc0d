"""The coupling coefficients of a routing, pass by pass, and their entropy."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..calls import checks
from ..calls.options import Softmax
from ..calls.precision import wide_dtype
from . import _arguments
from ._layer import Layer
from .routed_caps import RoutedCaps
from .routing.agreement import RoutingByAgreement
from .routing.votes import RecordedVotes, votes_of


@torch.no_grad()
def couplings(
    layer: nn.Module, u: Tensor, activation: Tensor | None = None, *, shares: bool = False, **given: Tensor
) -> list[Tensor]:
    """The coupling coefficients ``[B, I, J]`` of every pass over the votes in which the layer computes them.

    Args:
        layer: a :class:`capsfast.nn.RoutedCaps`, such as :class:`capsfast.DynamicRouting` (with groups:
            ``[B, I, J / groups]``), a :class:`capsfast.nn.RoutingByAgreement`, or a layer that
            :func:`capsfast.accelerate` replaced.
        u: the first argument of the layer's forward.
        activation: activations of the input capsules ``[B, I]``, for RoutedCaps. Default: the lengths of u, if the
            routing uses activations.
        shares: divide the coefficients by their sum over the output capsules. This removes the activation of the input
            capsule, which is a factor in some routings.
        given: mask and so on, as in the layer's forward.

    Raises:
        TypeError: any other layer.
        ValueError: a replaced layer that averages logits over the batch, or masks after the softmax.
    """
    checks.boolean("capsfast.nn.couplings", "shares", shares)
    layer, u = as_capsfast(layer, u)
    if not isinstance(layer, RoutedCaps | RoutingByAgreement):
        raise TypeError(f"capsfast.nn.couplings: layer must be a routing layer, got {type(layer).__name__}")
    weights = routed_by_passes(layer, u, activation, **given).weights
    return [shares_of(c) for c in weights] if shares else weights


def as_capsfast(layer: nn.Module, u: Tensor) -> tuple[Any, Tensor]:
    """``layer`` and u. For a layer that :func:`capsfast.accelerate` replaced: a layer of capsfast, and its input."""
    make: Any = getattr(layer, "as_capsfast", None)
    return (layer, u) if make is None else make(u)


def routed_by_passes(
    layer: RoutedCaps | RoutingByAgreement,
    u: Tensor,
    activation: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    out_mask: Tensor | None = None,
    **given: Any,
) -> RecordedVotes:
    """Runs a layer in single passes and returns the votes with the coupling of each pass."""
    if isinstance(layer, RoutingByAgreement):
        votes = RecordedVotes(votes_of(layer._op, u, mask=mask, out_mask=out_mask, backend=layer.backend))
        votes.agree(**layer.options(), **given)
    else:
        u, activation = layer.activated(u, activation, mask)
        votes = RecordedVotes(layer.votes(u, mask, out_mask))
        layer.routing(votes, activation, **given)
    return votes


def shares_of(c: Tensor) -> Tensor:
    return c / c.sum(2, keepdim=True).clamp_min(torch.finfo(c.dtype).tiny)


@contextmanager
def recorded(layer: nn.Module, *, shares: bool = False) -> Iterator[list[Tensor]]:
    """Records the coupling coefficients ``[B, I, J]`` of the last pass in every forward call inside the block.

    They have a gradient, so that a loss can use them, for example with :class:`capsfast.nn.CouplingEntropy`.

    Args:
        layer: a :class:`capsfast.nn.RoutedCaps`, such as :class:`capsfast.DynamicRouting`. :func:`couplings`
            measures a layer that :func:`capsfast.accelerate` replaced, without gradients.
        shares: as for :func:`couplings`.

    Raises:
        TypeError: any other layer.
    """
    checks.boolean("capsfast.nn.recorded", "shares", shares)
    if not isinstance(layer, RoutedCaps):
        raise TypeError(f"capsfast.nn.recorded: layer must be a RoutedCaps, got {type(layer).__name__}")
    coefficients: list[Tensor] = []
    votes: list[RecordedVotes] = []

    def record(module: nn.Module, args: Any) -> Any:
        votes.append(RecordedVotes(args[0], last=True))
        return votes[-1], *args[1:]

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        weights = votes.pop().weights
        if not weights:
            name = type(module).__name__
            raise RuntimeError(f"capsfast.nn.recorded: {name} decides nothing: all its coupling is given")
        coefficients.append(shares_of(weights[-1]) if shares else weights[-1])

    handles = [layer.routing.register_forward_pre_hook(record), layer.routing.register_forward_hook(keep)]
    try:
        yield coefficients
    finally:
        for handle in handles:
            handle.remove()


class CouplingEntropy(Layer):
    """Mean entropy ``-sum c log c`` of the coupling coefficients: 0 if every softmax is one-hot.

    As a term of a loss, it makes each capsule vote for fewer outputs (compare Renzulli, Tartaglione, Grangetto 2022).
    Empty softmaxes (masked capsules) count neither in the sum nor in the mean.

    Args:
        softmax: ``"out"`` or ``"in"``, as in the routing that made the coupling.
        normalize: divide by the entropy of equal coupling, ``log J`` or ``log I``, so that the largest value is 1.

    Shapes: ``coupling [B, I, J]`` to ``[]``; formed in float32 for 16-bit inputs.

    Raises:
        ValueError, TypeError: an option or an input that does not fit.
    """

    def __init__(self, softmax: Softmax = "out", normalize: bool = True) -> None:
        super().__init__()
        self.softmax, self.normalize = softmax, normalize

    def forward(self, coupling: Tensor) -> Tensor:
        _arguments.floats(self._op, "coupling", coupling, "[B, I, J]")
        dim = 2 if self.softmax == "out" else 1
        c = coupling.to(wide_dtype(coupling.dtype))
        # log 1 instead of log 0: c log c is 0 there, and its derivative must be finite.
        entropy = -(c * torch.where(c > 0, c, 1).log()).sum(dim)
        filled = (coupling.detach() > 0).any(dim)
        size = c.shape[dim]
        most = math.log(size) if self.normalize and size > 1 else 1.0
        return entropy.sum() / filled.sum().clamp(min=1) / most
