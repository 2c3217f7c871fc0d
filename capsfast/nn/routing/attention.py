"""Routings by attention without iterations: with a learned query, or with the votes as queries."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...functional import squash as _squash
from .base import Capsules, Routing, lengths
from .votes import Votes


class AttentionRouting(Routing):
    """Attention over the input capsules with a learned query, after Choi, Seo, Im, Kang (2019).

    ``c_ij = softmax_i(vote_ij . query_j / sqrt(D))``, ``s_j = sum_i c_ij vote_ij``, then the capsule activation of the
    paper, ``v_j = A_j s_j + bias_j``. As there, the softmax is over the input capsules, there is one pass, and the
    activation of an output capsule is ``|v_j| / sqrt(D)``.

    Unlike in the paper, the logit of a vote depends only on this vote, with one query for each output capsule. The
    authors' code computes it from the votes of all input capsules, with ``I I D`` weights for each output capsule.

    Parameters: ``query [out_caps, out_dim]``, starting at 0; ``A [out_caps, out_dim, out_dim]``, starting as
    Glorot's uniform distribution; ``bias [out_caps, out_dim]``, starting at 0.

    Args:
        in_caps, out_caps, in_dim, out_dim, backend, device, dtype: as for :class:`Routing`.
    """

    independent = True
    softmax = "in"

    def __init__(self, in_caps: int, out_caps: int, in_dim: int, out_dim: int, **made: Any) -> None:
        super().__init__(in_caps, out_caps, in_dim, out_dim, **made)
        self.query = nn.Parameter(torch.zeros(out_caps, out_dim, **self._made))
        self.A = nn.Parameter(torch.empty(out_caps, out_dim, out_dim, **self._made))
        self.bias = nn.Parameter(torch.zeros(out_caps, out_dim, **self._made))
        limit = (3 / out_dim) ** 0.5
        nn.init.uniform_(self.A, -limit, limit)

    def route(self, votes: Votes, activation: Tensor | None) -> Capsules:
        scale = math.sqrt(self.out_dim)
        query = (self.query / scale).expand(votes.B, -1, -1)
        s = votes.moments(query=query, normalize=self.softmax).first
        v = torch.einsum("jde,bje->bjd", self.A.to(s.dtype), s) + self.bias
        return Capsules(v, lengths(v) / scale)


class SelfAttentionRouting(Routing):
    """Self-attention routing of Efficient-CapsNet (Mazzia, Salvetti, Chiaberge 2021, equations 5 to 7).

    ``c_ij = softmax_j(sum_k vote_ij . vote_kj / sqrt(D))`` and ``v_j = squash(sum_i (c_ij + bias_ij) vote_ij)``. The
    sum over k is formed first, so scores between input capsules are never formed: three passes, whose work grows with
    I and not with I squared. The activation of an output capsule is its length.

    Parameters: ``bias [in_caps, out_caps]``, the log prior of the paper, starting at 0.

    Args:
        squash, eps: see :func:`capsfast.squash`; the paper's is ``"exp"``.
        all others: as for :class:`Routing`.
    """

    independent = True

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        *,
        squash: str = "exp",
        eps: float = 1e-8,
        **made: Any,
    ) -> None:
        super().__init__(in_caps, out_caps, in_dim, out_dim, **made)
        self.squash, self.eps = squash, eps
        self.bias = nn.Parameter(torch.zeros(in_caps, out_caps, **self._made))

    def weight_std(self, summed: int) -> float:
        # He's initialisation as in the authors' code, where a weight [J, I, K, D] counts I J K inputs.
        return float((2 / (self.in_caps * self.out_caps * summed)) ** 0.5)

    def route(self, votes: Votes, activation: Tensor | None) -> Capsules:
        ones = torch.ones(votes.B, votes.J, dtype=votes.dtype, device=votes.device)
        total = votes.moments(prior=ones, normalize="none").first
        attended = votes.moments(query=total / math.sqrt(self.out_dim)).first
        biased = votes.moments(logits=self.bias, normalize="none").first
        v = _squash(attended + biased, kind=self.squash, eps=self.eps)
        return Capsules(v, lengths(v))
