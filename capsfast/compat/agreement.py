"""The pair of layers called AgreementRouting and CapsLayer."""

import math

import torch
from torch import Tensor, nn

from ..functional import dynamic_routing, route_votes
from ..nn import _arguments
from ._layer import NO_EPS, CompatLayer


class AgreementRouting(CompatLayer):
    """Dynamic routing of votes with learned logits and, by default, no eps.

    It forms one weighted sum more than it counts iterations.

    Parameters: ``b [I, J]``, the log prior of the coupling, starting at 0.

    Args:
        input_caps, output_caps: numbers of capsules, I and J.
        n_iterations: weighted sums after the first one, at least 0.
        eps: of the squash.

    Shapes: ``u_predict [B, I, J, D]`` to ``[B, J, D]``.

    Raises:
        ValueError, TypeError: sizes too small, inputs that do not fit.
    """

    _op = "capsfast.compat.AgreementRouting"
    input_caps: int
    output_caps: int

    def __init__(self, input_caps: int, output_caps: int, n_iterations: int, *, eps: float = NO_EPS) -> None:
        super().__init__(eps, input_caps=input_caps, output_caps=output_caps)
        _arguments.integer(self._op, "n_iterations", n_iterations, least=0)
        self.n_iterations = n_iterations
        self.b = nn.Parameter(torch.zeros(input_caps, output_caps))

    def forward(self, u_predict: Tensor) -> Tensor:
        return route_votes(u_predict, self.n_iterations + 1, logits=self.b, eps=self.eps)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, n_iterations={self.n_iterations}"


def _hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


class CapsLayer(CompatLayer):
    """Makes votes and has them routed by another module.

    Where that is an :class:`AgreementRouting` of this package, without hooks and with its own forward, the votes are
    not in memory.

    Parameters: ``weights [I, K, J*D]``, which starts uniform between plus and minus ``1 / sqrt(I)``; those of
    ``routing_module``.

    Args:
        input_caps, output_caps: numbers of capsules, I and J.
        input_dim, output_dim: sizes of a capsule, K and D.
        routing_module: takes votes ``[B, I, J, D]``.

    Shapes: ``caps_output [B, I, K]`` to ``[B, J, D]``.

    Raises:
        ValueError, TypeError: sizes below 1, a routing module of other sizes, inputs that do not fit.
    """

    _op = "capsfast.compat.CapsLayer"
    input_caps: int
    input_dim: int
    output_caps: int
    output_dim: int

    def __init__(
        self, input_caps: int, input_dim: int, output_caps: int, output_dim: int, routing_module: nn.Module
    ) -> None:
        super().__init__(
            NO_EPS, input_caps=input_caps, input_dim=input_dim, output_caps=output_caps, output_dim=output_dim
        )
        if not isinstance(routing_module, nn.Module):
            raise TypeError(f"{self._op}: routing_module must be a module, got {type(routing_module).__name__}")
        if isinstance(routing_module, AgreementRouting):
            theirs = (routing_module.input_caps, routing_module.output_caps)
            if theirs != (input_caps, output_caps):
                raise ValueError(
                    f"{self._op}: routing_module must be for input_caps={input_caps} and output_caps={output_caps}, "
                    f"got one for {theirs[0]} and {theirs[1]}"
                )
        self.weights = nn.Parameter(torch.empty(input_caps, input_dim, output_caps * output_dim))
        self.routing_module = routing_module
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights anew."""
        bound = 1 / math.sqrt(self.input_caps)
        nn.init.uniform_(self.weights, -bound, bound)

    def forward(self, caps_output: Tensor) -> Tensor:
        self._check_capsules("caps_output", caps_output, "input_caps", "input_dim")
        weight = self.weights.unflatten(2, (self.output_caps, self.output_dim)).permute(0, 2, 3, 1)
        routing = self.routing_module
        if type(routing) is AgreementRouting and "forward" not in vars(routing) and not _hooked(routing):
            return dynamic_routing(  # type: ignore[no-any-return]
                caps_output, weight, routing.n_iterations + 1, logits=routing.b, eps=routing.eps
            )
        return routing(torch.einsum("ijdk,bik->bijd", weight, caps_output))  # type: ignore[no-any-return]
