"""The layer called CapsuleLayer, which is primary capsules or capsules that are routed to."""

from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..functional import dynamic_routing, squash
from ..nn import _arguments
from ._layer import NO_EPS, CompatLayer


class CapsuleLayer(CompatLayer):
    """Dynamic routing with a softmax over the input capsules and, by default, no eps; or primary capsules.

    Parameters: ``route_weights [J, I, K, D]``, which starts as ``torch.randn``. With ``num_route_nodes=-1`` instead a
    list ``capsules`` of K convolutions, one for each number of a primary capsule.

    Args:
        num_capsules: J, or K of the primary capsules.
        num_route_nodes: I, or -1 for primary capsules.
        in_channels, out_channels: K and D, or channels of each convolution.
        kernel_size, stride: of the convolutions.
        num_iterations: weighted sums formed, at least 1.
        eps: of the squash.

    Shapes: ``x [B, I, K]`` to ``[J, B, 1, 1, D]``; primary capsules ``[B, in_channels, H, W]`` to ``[B,
    out_channels·H'·W', K]``.

    Raises:
        ValueError, TypeError: sizes below 1, inputs that do not fit.
    """

    _op = "capsfast.compat.CapsuleLayer"
    num_route_nodes: int
    num_iterations: int

    def __init__(
        self,
        num_capsules: int,
        num_route_nodes: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = None,
        stride: Any = None,
        num_iterations: int = 3,
        *,
        eps: float = NO_EPS,
    ) -> None:
        super().__init__(
            eps,
            num_capsules=num_capsules,
            in_channels=in_channels,
            out_channels=out_channels,
            num_iterations=num_iterations,
        )
        self.num_route_nodes = num_route_nodes
        if not isinstance(num_route_nodes, int) or num_route_nodes != -1:
            _arguments.integer(self._op, "num_route_nodes", num_route_nodes)
            self.route_weights = nn.Parameter(torch.randn(num_capsules, num_route_nodes, in_channels, out_channels))
            return
        if kernel_size is None or stride is None:
            raise ValueError(
                f"{self._op}: num_route_nodes=-1 makes convolutions and needs kernel_size and stride, got "
                f"{checks.shown(kernel_size)} and {checks.shown(stride)}"
            )
        self.capsules = nn.ModuleList(
            nn.Conv2d(in_channels, out_channels, kernel_size, stride) for _ in range(num_capsules)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.num_route_nodes == -1:
            return squash(torch.stack([conv(x).flatten(1) for conv in self.capsules], dim=-1), eps=self.eps)
        self._check_capsules("x", x, "num_route_nodes", "in_channels")
        weight = self.route_weights.permute(1, 0, 3, 2)
        v = dynamic_routing(x, weight, self.num_iterations, softmax="in", eps=self.eps)
        return v.transpose(0, 1)[:, :, None, None]  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_route_nodes={self.num_route_nodes}"
