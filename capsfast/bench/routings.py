"""A routing of capsfast.nn as a function of tensors: over votes made in kernels, or over stored votes."""

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from ..nn import ROUTINGS, Capsules, Routing, Votes
from ..nn.routing.names import make_routing, options_of
from ..nn.routing.votes import votes_of


def takes_iterations(name: str) -> bool:
    return "num_iterations" in options_of(ROUTINGS[name])


def make(name: str, I: int, J: int, K: int, D: int, r: int, **factory_kwargs: Any) -> Routing:
    """The routing for these sizes; r is the number of iterations, 0 for a routing without iterations."""
    options: dict[str, Any] = {"num_iterations": r} if r else {}
    if "batch_norm" in options_of(ROUTINGS[name]):
        options["batch_norm"] = False  # it can't train on one sample, which the tables have
    return make_routing("capsfast bench", name, I, J, K, D, **options, **factory_kwargs)


def stored(u: Tensor, weight: Tensor) -> Votes:
    """Votes that einsum makes once; a pass over them is the definition."""
    votes = votes_of("capsfast bench", torch.einsum("ijdk,bik->bijd", weight, u), backend="reference")
    votes.u = u  # for routings that use the input capsules
    return votes


class Routed:
    """A routing as a function of u, weight, the activation if it uses one, and its parameters. Returns Capsules.

    The kernels of a fused backend make the votes; for "reference" einsum makes them once and stores them.
    """

    def __init__(self, name: str, I: int, J: int, K: int, D: int, r: int, backend: str) -> None:
        self.module = make(name, I, J, K, D, r, backend=backend)
        self.names = [name for name, _ in self.module.named_parameters()]
        self.fused = backend != "reference"

    def __call__(self, u: Tensor, weight: Tensor, *others: Tensor) -> Capsules:
        votes = (u, weight) if self.fused else stored(u, weight)
        activation = others[0] if self.module.uses_activation else None
        parameters = dict(zip(self.names, others[self.module.uses_activation :], strict=True))
        parameters |= {name: value.to(u.device) for name, value in self.module.named_buffers()}
        if not parameters:
            return self.module(votes, activation)
        return functional_call(self.module, parameters, (votes, activation))  # type: ignore[no-any-return]
