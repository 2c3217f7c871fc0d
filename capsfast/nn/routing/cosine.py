"""Routings that score votes by their angle to the output capsule: queries of length 1."""

from typing import Any

import torch
from torch import Tensor, nn

from ...calls.options import Softmax, Squash
from ...functional import squash as _squash
from .base import Capsules, SummingRouting, lengths
from .votes import Votes


class KMeansRouting(SummingRouting):
    """Soft k-means: a vote is scored by its dot product with the center at length 1 (Ren, Lu 2018).

    The centers start as the mean votes. An iteration forms ``c_ij = softmax(sharpness vote_ij . center_j /
    |center_j|)`` and ``center_j = sum_i c_ij vote_ij``; the last centers are squashed. The activation of an output
    capsule is its length. The length of a vote stays in the vote's score, as in the authors' code.

    Args:
        num_iterations: assignments of the votes. There is one pass more, for the mean.
        sharpness: inverse temperature; a larger number makes the assignments nearer to one-hot.
        softmax: ``"out"``: every input capsule chooses among the output capsules, as points among clusters (the
            authors' last code). ``"in"``: every output capsule weighs the input capsules (their code before).
        squash, eps: see :func:`capsfast.squash`.
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
        num_iterations: int = 3,
        sharpness: float = 1.0,
        softmax: Softmax = "out",
        squash: Squash = "paper",
        eps: float = 1e-8,
        **factory_kwargs: Any,
    ) -> None:
        super().__init__(in_caps, out_caps, in_dim, out_dim, num_iterations=num_iterations, **factory_kwargs)
        self.sharpness, self.softmax = float(sharpness), softmax
        self.squash, self.eps = squash, eps

    def route(self, votes: Votes, activation: Tensor | None) -> Capsules:
        v = votes.agree(
            1 + self.num_iterations,
            softmax=self.softmax,
            squash="unit",
            last_squash=self.squash,
            eps=self.eps,
            sharpness=self.sharpness,
            accumulate=False,
            wide=True,
        )
        return Capsules(v, lengths(v))


class CosineRouting(SummingRouting):
    """Agreement by angle with the squash at the end, after 3D-UCaps (Nguyen, Hua, Le 2021).

    ``s_j = sum_i softmax_j(b_ij) vote_ij + bias_j``. After each sum but the last, the agreement with ``s_j``, without a
    squash, is added to the logits b. The last sum is squashed. The activation of an output capsule is its length.

    A pass is linear in a vote. By default the agreement is ``vote_ij . s_j / |s_j|``, the cosine times the length of
    the vote. With ``exact=True`` the agreement is the cosine itself, as in the paper. This needs the votes in memory,
    as a convolution leaves them, and ``[B, I, J]`` numbers for the logits. For votes that a layer makes it is an error.

    Parameters: ``bias [out_caps, out_dim]``, starting at 0.1 as in the authors' code.

    Args:
        num_iterations: weighted sums formed, at least 1.
        exact: the cosine without the length of the vote, for given votes only.
        bias: whether there is one.
        squash, eps: see :func:`capsfast.squash`.
        all others: as for :class:`Routing`.

    Raises:
        ValueError: also ``exact=True`` with votes that are not given.
    """

    independent = True
    bias: nn.Parameter | None

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        *,
        num_iterations: int = 3,
        exact: bool = False,
        bias: bool = True,
        squash: Squash = "paper",
        eps: float = 1e-8,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **factory_kwargs: Any,
    ) -> None:
        super().__init__(in_caps, out_caps, in_dim, out_dim, num_iterations=num_iterations, **factory_kwargs)
        self.exact = self.needs_votes = exact
        self.squash, self.eps = squash, eps
        of_sum = torch.empty(out_caps, out_dim, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if of_sum is None else nn.Parameter(of_sum))
        self._initialise()

    def _initialise(self) -> None:
        if self.bias is not None:
            nn.init.constant_(self.bias, 0.1)

    def route(self, votes: Votes, activation: Tensor | None) -> Capsules:
        if self.exact:
            v = self._by_cosines(votes)
        else:
            v = votes.agree(
                self.num_iterations, bias=self.bias, squash="unit", last_squash=self.squash, eps=self.eps, wide=True
            )
        return Capsules(v, lengths(v))

    def _by_cosines(self, votes: Votes) -> Tensor:
        logits: Tensor | None = None
        for t in range(self.num_iterations):
            s = votes.moments(logits=logits).first
            s = s if self.bias is None else s + self.bias
            if t + 1 < self.num_iterations:
                cosines = votes.cosines(_squash(s, kind="unit", eps=self.eps))
                logits = cosines if logits is None else logits + cosines
        return _squash(s, kind=self.squash, eps=self.eps)
