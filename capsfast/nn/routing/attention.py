"""Routings by attention: with a learned query, with the votes as queries, or with the poses of the last iteration."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...calls.options import Softmax, Squash
from ...calls.precision import wide_dtype
from ...functional import squash as _squash
from .base import Capsules, IterativeRouting, Routing, lengths
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
    softmax: Softmax = "in"

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **factory_kwargs: Any,
    ) -> None:
        super().__init__(in_caps, out_caps, in_dim, out_dim, **factory_kwargs)
        self.query = nn.Parameter(torch.empty(out_caps, out_dim, device=device, dtype=dtype))
        self.A = nn.Parameter(torch.empty(out_caps, out_dim, out_dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_caps, out_dim, device=device, dtype=dtype))
        self._initialise()

    def _initialise(self) -> None:
        limit = (3 / self.out_dim) ** 0.5
        nn.init.zeros_(self.query)
        nn.init.uniform_(self.A, -limit, limit)
        nn.init.zeros_(self.bias)

    def route(self, votes: Votes, activation: Tensor | None) -> Capsules:
        scale = math.sqrt(self.out_dim)
        # In float32, because the gradient is a sum over the batch, which an op would round sample by sample.
        query = self.query.to(wide_dtype(self.query.dtype)) / scale
        query = query.expand(votes.B, -1, -1)
        s = votes.moments(query=query, normalize=self.softmax).first
        v = torch.einsum("jde,bje->bjd", self.A.to(s.dtype), s) + self.bias
        return Capsules(v, lengths(v) / scale)


class SelfAttentionRouting(Routing):
    """Self-attention routing of Efficient-CapsNet (Mazzia, Salvetti, Chiaberge 2021, equations 5 to 7).

    ``c_ij = softmax_j(sum_k vote_ij . vote_kj / sqrt(D))`` and ``v_j = squash(sum_i (c_ij + bias_ij) vote_ij)``. The
    sum over k is formed first, so scores between input capsules are never formed: two iterations of the fused op and a
    pass, whose work grows with I and not with I squared. The activation of an output capsule is its length.

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
        squash: Squash = "exp",
        eps: float = 1e-8,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **factory_kwargs: Any,
    ) -> None:
        super().__init__(in_caps, out_caps, in_dim, out_dim, **factory_kwargs)
        self.squash, self.eps = squash, eps
        self.bias = nn.Parameter(torch.empty(in_caps, out_caps, device=device, dtype=dtype))
        self._initialise()

    def _initialise(self) -> None:
        nn.init.zeros_(self.bias)

    def weight_std(self, products: int, **_: Any) -> float:
        # He's initialisation as in the authors' code, where a weight [J, I, K, D] counts I J K inputs.
        return float((2 / (self.in_caps * self.out_caps * products)) ** 0.5)

    def route(self, votes: Votes, activation: Tensor | None) -> Capsules:
        attended = votes._attended(self.out_dim**-0.5)
        biased = votes.moments(logits=self.bias, normalize="none").first
        v = _squash(attended + biased, kind=self.squash, eps=self.eps)
        return Capsules(v, lengths(v))


class InvertedAttentionRouting(IterativeRouting):
    """Inverted dot-product attention (Tsai, Srivastava, Goh, Salakhutdinov 2020, procedure 1).

    ``pose_j = LayerNorm(sum_i softmax_j(vote_ij . pose_j) vote_ij)``, starting with poses 0. Nothing accumulates. After
    the LayerNorm all poses are about equally long. The activation is the sigmoid of the paper's classifier, a linear
    map of the pose that all output capsules share.

    :class:`capsfast.models.InvertedAttentionCapsNet` updates several layers at once.

    Parameters: ``gain [out_dim]`` and ``shift [out_dim]`` of the LayerNorm, starting at 1 and 0; ``readout [out_dim]``
    and ``offset []``, the classifier.

    Args:
        out_dim: D, at least 2: a LayerNorm of one number is a constant.
        num_iterations: number of passes, each of which forms new poses. The first has equal coupling.
        scaled: divide the agreement by ``sqrt(out_dim)``, as in the authors' code but not in the paper's equation 2.
        learned_readout: False omits the classifier, and activations are 1: for a layer whose activations are not used.
        all others: as for :class:`Routing`.
    """

    independent = True
    readout: nn.Parameter | None
    offset: nn.Parameter | None

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        *,
        num_iterations: int = 2,
        scaled: bool = False,
        learned_readout: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **factory_kwargs: Any,
    ) -> None:
        super().__init__(in_caps, out_caps, in_dim, out_dim, num_iterations=num_iterations, **factory_kwargs)
        if out_dim < 2:
            raise ValueError(f"{self._op}: out_dim must be at least 2, got 1; a LayerNorm of one number is a constant")
        self.scaled = scaled
        self.gain = nn.Parameter(torch.empty(out_dim, device=device, dtype=dtype))
        self.shift = nn.Parameter(torch.empty(out_dim, device=device, dtype=dtype))
        for name, size in (("readout", (out_dim,)), ("offset", ())):
            parameter = nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if learned_readout else None
            self.register_parameter(name, parameter)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.shift)
        if self.readout is not None and self.offset is not None:
            limit = self.out_dim**-0.5
            nn.init.uniform_(self.readout, -limit, limit)
            nn.init.zeros_(self.offset)

    def weight_std(self, products: int, **_: Any) -> float:
        # As in the authors' code: with equal coupling the first sum does not grow with the number of input capsules.
        return float((self.out_caps / (self.in_caps * products)) ** 0.5)

    def query(self, pose: Tensor) -> Tensor:
        """The query of a pass for poses ``[B, J, D]``."""
        return pose / math.sqrt(self.out_dim) if self.scaled else pose

    def update(self, votes: Votes, pose: Tensor | None) -> Tensor:
        """The next poses ``[B, J, D]`` from the last poses (None for 0), by one pass."""
        s = votes.moments(query=None if pose is None else self.query(pose)).first
        return F.layer_norm(s, (self.out_dim,), self.gain.to(s.dtype), self.shift.to(s.dtype))

    def logit(self, pose: Tensor) -> Tensor:
        """``[B, J, D]`` to ``[B, J]``, the logits of the activations."""
        if self.readout is None or self.offset is None:
            raise RuntimeError(f"{self._op}: there is no classifier; build the routing with learned_readout=True")
        return (pose * self.readout).sum(-1) + self.offset

    def route(self, votes: Votes, activation: Tensor | None, pose: Tensor | None = None) -> Capsules:
        """``pose [B, J, D]``: the poses that the routing starts with, None for 0."""
        for _ in range(self.num_iterations):
            pose = self.update(votes, pose)
        assert pose is not None
        return Capsules(pose, self.logit(pose).sigmoid() if self.readout is not None else torch.ones_like(pose[..., 0]))
