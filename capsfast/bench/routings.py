"""A routing of capsfast.nn as a function of tensors: over votes made in kernels, or over stored votes."""

from typing import Any

from torch import Tensor
from torch.func import functional_call

from ..arguments import PassParameters, RoutingParameters, unchecked
from ..nn.routing import ROUTINGS, Capsules, Routing, Votes
from ..nn.routing.names import make_routing, options_of
from ..options import Options, PassOptions
from ..passes import Moments
from ..reference.dynamic_routing import dynamic_routing
from ..reference.routing_pass import routing_pass
from ..reference.votes import product


def takes_iterations(name: str) -> bool:
    """Whether the routing has a number of iterations.

    Raises:
        ValueError: no routing with this name.
    """
    if name not in ROUTINGS:
        raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}, got {name!r}")
    return "num_iterations" in options_of(ROUTINGS[name])


def make(name: str, I: int, J: int, K: int, D: int, r: int, **made: Any) -> Routing:
    """The routing for these sizes; r is the number of iterations, 0 for a routing without iterations."""
    options: dict[str, Any] = {"num_iterations": r} if r else {}
    if "batch_norm" in options_of(ROUTINGS[name]):
        options["batch_norm"] = False  # it can't train on one sample, which the tables have
    return make_routing("capsfast bench", name, I, J, K, D, **options, **made)


class EinsumVotes(Votes):
    """Votes that einsum makes once and stores, ``[B, I, J, D]``; a pass is einsum, without checks of arguments."""

    def __init__(self, u: Tensor, weight: Tensor) -> None:
        self.u = u
        self.votes = product(u, weight)
        self.B, self.I, self.J, self.D = self.votes.shape
        self.dtype, self.device = u.dtype, u.device

    def moments(
        self,
        *,
        normalize: str = "out",
        leaky: bool = False,
        second: bool = False,
        return_weights: bool = False,
        return_lse: bool = False,
        **given: Tensor | None,
    ) -> Moments:
        options = PassOptions(normalize, leaky, second)
        call = unchecked(self.votes, None, PassParameters(**given), options)
        mass, first, squares, r, lse = routing_pass(call)
        return Moments(
            mass, first, squares if second else None, r if return_weights else None, lse if return_lse else None
        )

    def _some(self, step: int, activation: Tensor | None) -> Moments:
        given = PassParameters(activation=None if activation is None else activation[:, ::step])
        call = unchecked(self.votes[:, ::step], None, given, PassOptions("out", False, False))
        mass, first, *_ = routing_pass(call)
        return Moments(mass, first)

    def agree(
        self, num_iterations: int, *, logits: Tensor | None = None, bias: Tensor | None = None, **options: Any
    ) -> Tensor:
        parameters = RoutingParameters(logits, bias)
        return dynamic_routing(unchecked(self.votes, None, parameters, Options(num_iterations, **options)))[0]


class Routed:
    """A routing as a function of u, weight, the activation if it uses one, and its parameters. Returns Capsules.

    backend: the backend whose kernels make the votes; None for :class:`EinsumVotes`.
    """

    def __init__(self, name: str, I: int, J: int, K: int, D: int, r: int, backend: str | None) -> None:
        self.module = make(name, I, J, K, D, r, backend=backend)
        self.names = [each for each, _ in self.module.named_parameters()]
        self.fused = backend is not None

    def __call__(self, u: Tensor, weight: Tensor, *others: Tensor) -> Capsules:
        votes = (u, weight) if self.fused else EinsumVotes(u, weight)
        activation = others[0] if self.module.uses_activation else None
        own = dict(zip(self.names, others[self.module.uses_activation :], strict=True))
        own |= {each: value.to(u.device) for each, value in self.module.named_buffers()}
        if not own:
            return self.module(votes, activation)  # type: ignore[no-any-return]
        return functional_call(self.module, own, (votes, activation))  # type: ignore[no-any-return]
