"""Self-routing: every input capsule chooses its output capsules by itself."""

from typing import Any

import torch
from torch import Tensor, nn

from ...calls import checks
from ...reference.em_update import inverse
from .base import Capsules, Routing
from .votes import Votes


class SelfRouting(Routing):
    """Logits from a learned linear map of each input pose, and one pass (Hahn, Pyeon, Kim 2019).

    The coupling is ``c_ij = a_i softmax_j(W_route_i u_i)``. Poses are the means of the votes with these weights.
    The activation of an output capsule is its share of the coupling, ``sum_i c_ij / sum_i a_i``; the activations of a
    sample sum to 1. They do not depend on W, so W gets gradients only through the poses.

    The logits take ``[B, I, J]`` numbers of memory. They are computed from the input capsules, so given votes are not
    enough.

    Parameters: ``W_route [in_caps, out_caps, in_dim]``, or ``[1, ...]`` if shared, starting at 0; ``logits
    [in_caps, out_caps]`` on request.

    Args:
        shared_route: one map for all input capsules.
        learned_logits: add a learned parameter to the logits, starting at 0.
        all others: as for :class:`Routing`.

    Raises:
        ValueError: also for given votes instead of input capsules and a weight.
    """

    independent = True
    uses_activation = True
    # It needs the input capsules, not only their votes.
    needs_inputs = True
    logits: nn.Parameter | None

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        *,
        shared_route: bool = False,
        learned_logits: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **factory_kwargs: Any,
    ) -> None:
        super().__init__(in_caps, out_caps, in_dim, out_dim, **factory_kwargs)
        self.shared_route = shared_route
        rows = 1 if shared_route else in_caps
        self.W_route = nn.Parameter(torch.empty(rows, out_caps, in_dim, device=device, dtype=dtype))
        logits = torch.empty(in_caps, out_caps, device=device, dtype=dtype) if learned_logits else None
        self.register_parameter("logits", None if logits is None else nn.Parameter(logits))
        self._initialise()

    def _initialise(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def route(self, votes: Votes, activation: Tensor | None) -> Capsules:
        checks.not_negative(self._op, "activation", activation)
        if votes.u is None:
            raise ValueError(
                f"{self._op}: the logits are made from the input capsules, got votes without them; give (u, weight)"
            )
        u = votes.u.flatten(2)
        if u.shape[2] != self.in_dim:
            raise ValueError(
                f"{self._op}: u must have capsules of in_dim={self.in_dim}, got {checks.shape_of(votes.u)}"
            )
        if votes.mask is not None:
            u = u.masked_fill(~votes.mask[..., None], 0.0)
        shared = self.W_route.shape[0] == 1
        logits = torch.einsum("jk,bik->bij" if shared else "ijk,bik->bij", self.W_route[0 if shared else ...], u)
        if self.logits is not None:
            # A layer with groups holds J / groups columns: the output capsules of the group of the input capsule.
            logits = logits + self.logits.repeat(1, votes.groups)
        m = votes.moments(logits=logits, activation=activation)
        total = m.mass.sum(1, keepdim=True)
        return Capsules(m.first * inverse(m.mass)[..., None], m.mass * inverse(total))
