"""Layers called DynamicRouting and DynamicRoutingLayer."""

from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..functional import dynamic_routing, route_votes
from ..nn import _arguments
from ._forms import Forms
from ._layer import CompatLayer


class DynamicRouting(Forms, CompatLayer):
    """Two layers of this name, told apart by their arguments (Sabour, Frosst, Hinton 2017, procedure 1).

    * ``DynamicRouting(in_capsules, out_capsules, in_dim, out_dim, num_iterations=3)`` has ``W [1, I, J, D, K]``, or ``W
      [I, J, D, K]`` from a checkpoint that has it so, and takes ``x [B, I, K]``.
    * ``DynamicRouting(num_iterations=3)`` has no parameters and takes ``u_hat [B, I, J, D]`` and, if wanted, the batch
      size.

    A subclass is of the form in which it calls this constructor.

    Args:
        in_capsules, out_capsules: numbers of capsules, I and J.
        in_dim, out_dim: sizes of a capsule, K and D.
        num_iterations: weighted sums formed, at least 1.
        eps: of the squash, by keyword.

    Shapes: to ``v [B, J, D]``. W starts as ``torch.randn``.

    Raises:
        ValueError, TypeError: arguments of neither form, sizes below 1, inputs that do not fit.
    """

    _op = "capsfast.compat.DynamicRouting"
    num_iterations: int

    # In either form W may be there or not.
    _either = ("W",)

    @staticmethod
    def _form_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> type[Forms]:
        of_votes = len(args) < 2 and set(kwargs) <= {"num_iterations", "eps"}
        return _OfVotes if of_votes else _OfCapsules


class _OfCapsules(DynamicRouting):
    """``DynamicRouting(in_capsules, out_capsules, in_dim, out_dim, num_iterations)``."""

    def __init__(
        self,
        in_capsules: int,
        out_capsules: int,
        in_dim: int,
        out_dim: int,
        num_iterations: int = 3,
        *,
        eps: float = 1e-8,
    ) -> None:
        # By name: a subclass of DynamicRouting is none of this class, and its constructor chose this one.
        CompatLayer.__init__(
            self,
            eps,
            in_capsules=in_capsules,
            out_capsules=out_capsules,
            in_dim=in_dim,
            out_dim=out_dim,
            num_iterations=num_iterations,
        )
        self.W = nn.Parameter(torch.randn(1, in_capsules, out_capsules, out_dim, in_dim))

    def forward(self, x: Tensor) -> Tensor:
        self._check_capsules("x", x, "in_capsules", "in_dim")
        return dynamic_routing(x, self.W.flatten(0, -4), self.num_iterations, eps=self.eps)  # type: ignore[no-any-return]


class _OfVotes(DynamicRouting):
    """``DynamicRouting(num_iterations)(u_hat, batch_size)``."""

    def __init__(self, num_iterations: int = 3, *, eps: float = 1e-8) -> None:
        CompatLayer.__init__(self, eps, num_iterations=num_iterations)

    def forward(self, u_hat: Tensor, batch_size: int | None = None) -> Tensor:
        _arguments.floats(self._op, "u_hat", u_hat, "[B, I, J, D]")
        _arguments.batch_size(self._op, batch_size, u_hat)
        return route_votes(u_hat, self.num_iterations, eps=self.eps)  # type: ignore[no-any-return]


class DynamicRoutingLayer(CompatLayer):
    """Dynamic routing whose gradient goes through the last iteration alone.

    Parameters: ``W [I, J, D, K]``, with ``share_weights`` ``[1, J, D, K]``; it starts as ``0.1 * torch.randn``.

    Args:
        in_capsules, out_capsules: numbers of capsules, I and J.
        in_dim, out_dim: sizes of a capsule, K and D.
        num_iterations: weighted sums formed, at least 1.
        share_weights: one matrix per output capsule, for all input capsules.
        eps: of the squash.

    Shapes: ``u [B, I, K]`` to ``[B, J, D]``.

    Raises:
        ValueError, TypeError: sizes below 1, inputs that do not fit.
    """

    _op = "capsfast.compat.DynamicRoutingLayer"
    _either = ("W",)
    num_iterations: int

    def __init__(
        self,
        in_capsules: int,
        out_capsules: int,
        in_dim: int,
        out_dim: int,
        num_iterations: int = 3,
        share_weights: bool = False,
        *,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(
            eps,
            in_capsules=in_capsules,
            out_capsules=out_capsules,
            in_dim=in_dim,
            out_dim=out_dim,
            num_iterations=num_iterations,
        )
        checks.boolean(self._op, "share_weights", share_weights)
        self.share_weights = share_weights
        self.W = nn.Parameter(0.1 * torch.randn(1 if share_weights else in_capsules, out_capsules, out_dim, in_dim))

    def forward(self, u: Tensor) -> Tensor:
        self._check_capsules("u", u, "in_capsules", "in_dim")
        return dynamic_routing(  # type: ignore[no-any-return]
            u, self.W.flatten(0, -4), self.num_iterations, gradient="last", eps=self.eps
        )
