"""Dynamic routing of the votes that a convolution made, with the parameters of a layer."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..functional import route_votes, squash
from ..options import Options
from ..passes import votes_pass
from ._dynamic import RoutingLayer

EVERYWHERE = "everywhere"


class TypeRouting(RoutingLayer):
    """Dynamic routing from capsule types to capsule types, at every position of an image.

    Parameters, on request: ``logits [I, J]`` and ``bias [J, D]``, the same at all positions.

    Args:
        op: in whose name errors are raised.
        in_types, out_types, out_dim: I, J and D.
        num_iterations: weighted sums formed, at least 1.
        learned_logits: a parameter for the log prior of the coupling, starting at 0.
        bias: a parameter added to the weighted sum, starting at 0.1 as in the code of LaLonde, Bagci (2018).
        softmax: ``"out"``, ``"in"`` as for :func:`capsfast.route_votes`, or ``"everywhere"``: over the output types of
            all positions (Rajasegaran et al. 2019), by two passes an iteration.
        gradient, leaky, squash, eps, backend: see :func:`capsfast.route_votes`. ``softmax="everywhere"`` has no leaky
            and no other gradient than ``"full"``.

    Shapes: ``votes [B, I, J, D, *spatial]`` to ``v [B, J, D, *spatial]``.
    """

    logits: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        op: str,
        in_types: int,
        out_types: int,
        out_dim: int,
        *,
        num_iterations: int = 3,
        learned_logits: bool = False,
        bias: bool = False,
        softmax: str = "out",
        gradient: str = "full",
        leaky: bool = False,
        squash: str = "paper",
        eps: float = 1e-8,
        squash_last: bool = True,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._op = op
        everywhere = softmax == EVERYWHERE
        options = Options(num_iterations, "out" if everywhere else softmax, gradient, leaky, squash, eps, squash_last)
        super().__init__(options, False, None, backend)
        checks.boolean(op, "learned_logits", learned_logits)
        checks.boolean(op, "bias", bias)
        if everywhere and (leaky or gradient != "full"):
            raise ValueError(
                f"{op}: softmax='everywhere' needs leaky=False and gradient='full', "
                f"got leaky={leaky} and gradient={gradient!r}"
            )
        self.softmax = softmax
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.register_parameter(
            "logits", nn.Parameter(torch.zeros(in_types, out_types, **made)) if learned_logits else None
        )
        self.register_parameter("bias", nn.Parameter(torch.full((out_types, out_dim), 0.1, **made)) if bias else None)

    def forward(self, votes: Tensor, *, return_coupling: bool = False) -> Any:
        """With ``return_coupling`` also the last ``c [B, I, J, *spatial]``."""
        if self.softmax == EVERYWHERE:
            v, c = self._everywhere(votes, return_coupling)
            return (v, c) if return_coupling else v
        return self._route(route_votes, votes, logits=self.logits, bias=self.bias, return_coupling=return_coupling)

    def _everywhere(self, votes: Tensor, return_coupling: bool) -> tuple[Tensor, Tensor | None]:
        B, I, J, D, *spatial = votes.shape
        given: dict[str, Any] = {"logits": self.logits, "backend": self.backend}
        if J == 1:  # a pass takes an axis J of size 1 for a shared one, unless a mask says that J is 1
            given["out_mask"] = torch.ones(B, 1, dtype=torch.bool, device=votes.device)
        bias = None if self.bias is None else self.bias.view(J, D, *(1,) * len(spatial))
        sum_of_v: Tensor | None = None
        v = c = None
        for t in range(self.num_iterations):
            lse = votes_pass(votes, query=sum_of_v, return_lse=True, **given).lse  # [B, I, *spatial]
            assert lse is not None
            lse = lse.flatten(2).logsumexp(2) if spatial else lse
            last = t + 1 == self.num_iterations
            wanted = return_coupling and last
            found = votes_pass(votes, query=sum_of_v, normalize="lse", lse=lse, return_weights=wanted, **given)
            c = found.weights
            s = found.first if bias is None else found.first + bias
            v = squash(s, 2, self.eps, self.squash) if self.squash_last or not last else s
            sum_of_v = v if sum_of_v is None else sum_of_v + v
        assert v is not None
        return v.to(votes.dtype), c

    def extra_repr(self) -> str:
        text = super().extra_repr()
        for name in ("logits", "bias"):
            if getattr(self, name) is not None:
                text += ", learned_logits=True" if name == "logits" else ", bias=True"
        return text


def equal_share(softmax: str, in_types: int, out_types: int) -> float:
    """The number by which equal coupling divides the sum of the votes of a position."""
    return float(in_types if softmax == "in" else out_types)


def starting_std(options: dict[str, Any], in_types: int, out_types: int, out_dim: int, reached: float) -> float:
    """The deviation of a kernel that makes the first weighted sum about as long as the input capsules.

    With one iteration twice as long: further iterations lengthen it.

    Args:
        options: of the routing.
        in_types, out_types, out_dim: I, J and D.
        reached: positions whose capsules meet in a vote.
    """
    share = equal_share(options.get("softmax", "out"), in_types, out_types)
    longer = 2 if options.get("num_iterations") == 1 else 1
    return longer * share / math.sqrt(in_types * reached * out_dim)
