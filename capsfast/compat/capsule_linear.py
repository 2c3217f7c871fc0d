"""The layer called CapsuleLinear."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import checks
from ..functional import dynamic_routing
from ..functional import squash as squashed
from ..nn import _arguments
from ..passes import routing_pass
from ._layer import NO_EPS, CompatLayer

ROUTING_TYPE = ("dynamic", "k_means")


class CapsuleLinear(CompatLayer):
    """Dynamic routing or k-means (Ren, Lu 2018) whose result is, by default, not squashed.

    Parameters: ``weight [J, D, K]``, without ``share_weight`` ``[J, I, D, K]``; on request ``bias [J, D]``. Both start
    as ``xavier_uniform_``.

    Args:
        out_capsules: J.
        in_length, out_length: sizes of a capsule, K and D.
        in_capsules: I; None with ``share_weight``.
        share_weight: one matrix per output capsule, for all input capsules.
        routing_type: ``"dynamic"``, or ``"k_means"`` with dot products, whose iterations come after a plain mean.
        num_iterations: weighted sums formed, at least 1.
        squash: whether the result is squashed. Iterations before it always are.
        bias: a parameter added to the weighted sums.
        return_prob: also return the coupling ``[B, J, I]``.
        eps: of the squash.

    Shapes: ``input [B, I, K]`` to ``[B, J, D]``.

    Raises:
        ValueError, TypeError: sizes below 1, another routing type, inputs that do not fit.
    """

    _op = "capsfast.compat.CapsuleLinear"
    in_length: int
    num_iterations: int

    def __init__(
        self,
        out_capsules: int,
        in_length: int,
        out_length: int,
        in_capsules: int | None = None,
        share_weight: bool = True,
        routing_type: str = "dynamic",
        num_iterations: int = 3,
        squash: bool = False,
        bias: bool = False,
        return_prob: bool = False,
        *,
        eps: float = NO_EPS,
    ) -> None:
        super().__init__(
            eps, out_capsules=out_capsules, in_length=in_length, out_length=out_length, num_iterations=num_iterations
        )
        op = self._op
        for name, value in (
            ("share_weight", share_weight),
            ("squash", squash),
            ("bias", bias),
            ("return_prob", return_prob),
        ):
            checks.boolean(op, name, value)
        checks.choice(op, "routing_type", routing_type, ROUTING_TYPE)
        if share_weight and in_capsules is not None:
            got = checks.shown(in_capsules)
            raise ValueError(f"{op}: share_weight=True is for any number of input capsules, got in_capsules={got}")
        if not share_weight:
            _arguments.integers(op, in_capsules=in_capsules)
        self.in_capsules = in_capsules
        self.share_weight = share_weight
        self.routing_type = routing_type
        self.squash = squash
        self.return_prob = return_prob
        rows = (out_capsules,) if in_capsules is None else (out_capsules, in_capsules)
        self.weight = nn.Parameter(torch.empty(*rows, out_length, in_length))
        nn.init.xavier_uniform_(self.weight)
        self.bias = nn.Parameter(torch.empty(out_capsules, out_length)) if bias else None
        if self.bias is not None:
            nn.init.xavier_uniform_(self.bias)

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self.share_weight:
            _arguments.floats(self._op, "input", input, "[B, I, K]")
        else:
            self._check_capsules("input", input, "in_capsules", "in_length")
        weight = self.weight[None] if self.share_weight else self.weight.transpose(0, 1)
        if self.routing_type == "k_means":
            found, coupling = self._k_means(input, weight)
            return (found, coupling.transpose(1, 2)) if self.return_prob else found
        options: dict[str, Any] = {"bias": self.bias, "squash_last": self.squash, "eps": self.eps}
        if not self.return_prob:
            return dynamic_routing(input, weight, self.num_iterations, **options)  # type: ignore[no-any-return]
        found, coupling = dynamic_routing(input, weight, self.num_iterations, return_coupling=True, **options)
        return found, coupling.transpose(1, 2)

    def _k_means(self, u: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        moments = routing_pass(u, weight)
        center = moments.first
        for _ in range(self.num_iterations):
            moments = routing_pass(u, weight, query=F.normalize(center, dim=-1), return_weights=True)
            center = moments.first if self.bias is None else moments.first + self.bias
        assert moments.weights is not None
        return (squashed(center, eps=self.eps) if self.squash else center).to(u.dtype), moments.weights

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, in_capsules={self.in_capsules}, share_weight={self.share_weight}"
        return f"{text}, routing_type={self.routing_type!r}, squash={self.squash}, bias={self.bias is not None}"
