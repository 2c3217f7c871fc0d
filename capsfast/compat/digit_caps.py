"""Fully connected capsule layers with one weight, which differ in its order and in what the gradient goes through."""

import torch
from torch import Tensor, nn

from ..functional import dynamic_routing
from ._layer import CompatLayer


class DigitCaps(CompatLayer):
    """Dynamic routing (Sabour, Frosst, Hinton 2017, procedure 1), all options the paper's.

    Parameters: ``W [I, J, D, K]``, or ``[1, I, J, D, K]`` from a checkpoint that has it so; it starts as ``0.01 *
    torch.randn``.

    Args:
        num_lower, num_higher: numbers of capsules, I and J.
        lower_dim, higher_dim: sizes of a capsule, K and D.
        num_routing: weighted sums formed, at least 1.
        eps: of the squash.

    Shapes: ``u [B, I, K]`` to ``[B, J, D]``.

    Raises:
        ValueError, TypeError: sizes below 1, inputs that do not fit.
    """

    _op = "capsfast.compat.DigitCaps"
    _either = ("W",)
    num_routing: int

    def __init__(
        self,
        num_lower: int,
        num_higher: int,
        lower_dim: int,
        higher_dim: int,
        num_routing: int = 3,
        *,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(
            eps,
            num_lower=num_lower,
            num_higher=num_higher,
            lower_dim=lower_dim,
            higher_dim=higher_dim,
            num_routing=num_routing,
        )
        self.W = nn.Parameter(0.01 * torch.randn(num_lower, num_higher, higher_dim, lower_dim))

    def forward(self, u: Tensor) -> Tensor:
        self._check_capsules("u", u, "num_lower", "lower_dim")
        return dynamic_routing(u, self.W.flatten(0, -4), self.num_routing, eps=self.eps)  # type: ignore[no-any-return]


class DigitCapsules(CompatLayer):
    """Dynamic routing (Sabour, Frosst, Hinton 2017, procedure 1), all options the paper's.

    Parameters: ``W [1, I, J, D, K]``, or ``[I, J, D, K]`` from a checkpoint that has it so; it starts as ``0.01 *
    torch.randn``.

    Args:
        num_caps_in, num_caps_out: numbers of capsules, I and J.
        dim_caps_in, dim_caps_out: sizes of a capsule, K and D.
        routing_iters: weighted sums formed, at least 1.
        eps: of the squash.

    Shapes: ``x [B, I, K]`` to ``[B, J, D]``.

    Raises:
        ValueError, TypeError: sizes below 1, inputs that do not fit.
    """

    _op = "capsfast.compat.DigitCapsules"
    _either = ("W",)
    routing_iters: int

    def __init__(
        self,
        num_caps_in: int,
        dim_caps_in: int,
        num_caps_out: int,
        dim_caps_out: int,
        routing_iters: int = 3,
        *,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(
            eps,
            num_caps_in=num_caps_in,
            dim_caps_in=dim_caps_in,
            num_caps_out=num_caps_out,
            dim_caps_out=dim_caps_out,
            routing_iters=routing_iters,
        )
        self.W = nn.Parameter(0.01 * torch.randn(1, num_caps_in, num_caps_out, dim_caps_out, dim_caps_in))

    def forward(self, x: Tensor) -> Tensor:
        self._check_capsules("x", x, "num_caps_in", "dim_caps_in")
        return dynamic_routing(x, self.W.flatten(0, -4), self.routing_iters, eps=self.eps)  # type: ignore[no-any-return]


class Router(CompatLayer):
    """Dynamic routing with a softmax over the input capsules.

    Parameters: ``weight [I, J, K, D]``; it starts as ``torch.randn``.

    Args:
        in_caps, out_caps: numbers of capsules, I and J.
        in_d, out_d: sizes of a capsule, K and D.
        iterations: weighted sums formed, at least 1.
        eps: of the squash.

    Shapes: ``u [B, I, K]`` to ``[B, J, D]``.

    Raises:
        ValueError, TypeError: sizes below 1, inputs that do not fit.
    """

    _op = "capsfast.compat.Router"
    iterations: int

    def __init__(
        self, in_caps: int, out_caps: int, in_d: int, out_d: int, iterations: int, *, eps: float = 1e-8
    ) -> None:
        super().__init__(eps, in_caps=in_caps, out_caps=out_caps, in_d=in_d, out_d=out_d, iterations=iterations)
        self.weight = nn.Parameter(torch.randn(in_caps, out_caps, in_d, out_d))

    def forward(self, u: Tensor) -> Tensor:
        self._check_capsules("u", u, "in_caps", "in_d")
        return dynamic_routing(  # type: ignore[no-any-return]
            u, self.weight.transpose(-1, -2), self.iterations, softmax="in", eps=self.eps
        )


class DenseCapsule(CompatLayer):
    """Dynamic routing whose gradient goes through the last iteration alone, with eps added to the norm.

    Parameters: ``weight [J, I, D, K]``; it starts as ``0.01 * torch.randn``.

    Args:
        in_num_caps, out_num_caps: numbers of capsules, I and J.
        in_dim_caps, out_dim_caps: sizes of a capsule, K and D.
        routings: weighted sums formed, at least 1.
        eps: of the squash.

    Shapes: ``x [B, I, K]`` to ``[B, J, D]``.

    Raises:
        ValueError, TypeError: sizes below 1, inputs that do not fit.
    """

    _op = "capsfast.compat.DenseCapsule"
    routings: int

    def __init__(
        self,
        in_num_caps: int,
        in_dim_caps: int,
        out_num_caps: int,
        out_dim_caps: int,
        routings: int = 3,
        *,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(
            eps,
            in_num_caps=in_num_caps,
            in_dim_caps=in_dim_caps,
            out_num_caps=out_num_caps,
            out_dim_caps=out_dim_caps,
            routings=routings,
        )
        self.weight = nn.Parameter(0.01 * torch.randn(out_num_caps, in_num_caps, out_dim_caps, in_dim_caps))

    def forward(self, x: Tensor) -> Tensor:
        self._check_capsules("x", x, "in_num_caps", "in_dim_caps")
        return dynamic_routing(  # type: ignore[no-any-return]
            x, self.weight.transpose(0, 1), self.routings, gradient="last", squash="eps_outside", eps=self.eps
        )
